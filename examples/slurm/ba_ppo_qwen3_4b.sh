#!/usr/bin/env bash
#SBATCH --job-name=ba_ppo_qwen3_4b
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@600
# BA-PPO on mathematics, Qwen3-4B as actor and critic: 2 machines with 8 GPUs of 80 GB each, one Ray over both.
# In the project's folder, which all machines see: sbatch examples/slurm/ba_ppo_qwen3_4b.sh
# Flags of `bapo-openrlhf train` may follow. docs/several_machines.md says what must be there before, and what has run.
# With CONTAINER, an image that enroot has imported, pyxis runs all of it in this image and not in .venv-gpu.
set -euo pipefail

[[ ${CONTAINER-} ]] || source .venv-gpu/bin/activate
read -r head < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# Not the loopback address that some machines have for their own name.
address=$(getent ahostsv4 "$head" | awk '$1 !~ /^127\./ && !n++ {print $1}')
: "${address:?$head has no address that other machines reach}"
gpus=$((SLURM_JOB_NUM_NODES * SLURM_GPUS_ON_NODE))
image=() first=() # the words before a command: in the image, and there on the first machine
if [[ ${CONTAINER-} ]]; then
    # The training must find the sockets of the Ray that another container has started. enroot has a /tmp for each.
    image=(--container-image="$CONTAINER" --container-mounts="$PWD:$PWD,/tmp:/tmp" --container-workdir="$PWD")
    first=(srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" --cpu-bind=none "${image[@]}")
fi

run=(
    --config configs/ba_ppo_qwen3_4b.yaml
    --actor.num_nodes "$SLURM_JOB_NUM_NODES" --actor.num_gpus_per_node "$SLURM_GPUS_ON_NODE"
    --critic.num_nodes "$SLURM_JOB_NUM_NODES" --critic.num_gpus_per_node "$SLURM_GPUS_ON_NODE"
    --ref.num_nodes "$SLURM_JOB_NUM_NODES" --ref.num_gpus_per_node "$SLURM_GPUS_ON_NODE"
    --vllm.num_engines "$gpus" --ckpt.load_enable --run.stall_timeout 3600 "$@"
)
"${first[@]}" bapo-openrlhf check "${run[@]}"

export RAY_ADDRESS=$address:6379
export RAY_TMPDIR=/tmp/ray_$SLURM_JOB_ID # another user's Ray may have left its files in /tmp/ray
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n') # or whoever reaches the ports runs code in this job
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token
# One Ray on each machine: the first starts it, the others join it. It ends with the job.
# It blocks the signals that Slurm sends to all processes, and leaves them to the training.
# `ray symmetric-run` is not used: a job ended with status 0 although Ray had not started (Ray 2.55.0).
srun --cpu-bind=none "${image[@]}" env --block-signal=TERM,INT,HUP,USR1,USR2,XCPU bash -c '
    if ((SLURM_NODEID == 0)); then
        exec ray start --block --head --node-ip-address "${RAY_ADDRESS%:*}" --port "${RAY_ADDRESS#*:}" --num-gpus "$0"
    fi
    until ray health-check > /dev/null 2>&1; do sleep 5; done
    exec ray start --block --address "$RAY_ADDRESS" --num-gpus "$0"' "$SLURM_GPUS_ON_NODE" &
if ! timeout 10m "${first[@]}" bash -c 'until ray status 2> /dev/null | grep -F "/$0.0 GPU"; do sleep 5; done' "$gpus"; then
    echo "error: Ray has not found $gpus GPUs within 10 minutes" >&2
    exit 1
fi
train=
trap 'told=yes; kill -USR1 $train || true' USR1 # ten minutes before the time limit: the step ends and is saved
"${first[@]}" bapo-openrlhf train "${run[@]}" &
train=$!
while :; do # a signal ends `wait`, but not the training
    told= status=0
    wait "$train" || status=$?
    [[ $told ]] || break
done
if ((status == 128 + 10 || status == 75)); then # stopped by SIGUSR1, or stalled
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
