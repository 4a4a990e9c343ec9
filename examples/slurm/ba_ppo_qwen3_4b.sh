#!/usr/bin/env bash
#SBATCH --job-name=ba_ppo_qwen3_4b
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --output=%x-%j.log
# BA-PPO on mathematics, Qwen3-4B as actor and critic: 2 machines with 8 GPUs of 80 GB each, one Ray over both.
# In the project's folder, which all machines see: sbatch examples/slurm/ba_ppo_qwen3_4b.sh
# Flags of `bapo-openrlhf train` may follow. docs/several_machines.md says what must be there before, and what has run.
set -euo pipefail

source .venv-gpu/bin/activate
read -r head < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# Not the loopback address that some machines have for their own name.
address=$(getent ahostsv4 "$head" | awk '$1 !~ /^127\./ && !n++ {print $1}')
: "${address:?$head has no address that other machines reach}"

run=(
    --config configs/ba_ppo_qwen3_4b.yaml
    --actor.num_nodes "$SLURM_JOB_NUM_NODES" --actor.num_gpus_per_node "$SLURM_GPUS_ON_NODE"
    --critic.num_nodes "$SLURM_JOB_NUM_NODES" --critic.num_gpus_per_node "$SLURM_GPUS_ON_NODE"
    --ref.num_nodes "$SLURM_JOB_NUM_NODES" --ref.num_gpus_per_node "$SLURM_GPUS_ON_NODE"
    --vllm.num_engines $((SLURM_JOB_NUM_NODES * SLURM_GPUS_ON_NODE))
    --ckpt.load_enable "$@"
)
bapo-openrlhf check "${run[@]}"

export RAY_ADDRESS=$address:6379
export RAY_TMPDIR=/tmp/ray_$SLURM_JOB_ID               # another user's Ray may have left its files in /tmp/ray
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300      # seconds; Python starts slowly from a shared file system
srun --cpu-bind=none --kill-on-bad-exit=1 \
    ray symmetric-run --address "$RAY_ADDRESS" --min-nodes "$SLURM_JOB_NUM_NODES" --num-gpus "$SLURM_GPUS_ON_NODE" -- \
    bapo-openrlhf train "${run[@]}"
