#!/usr/bin/env bash
# Countdown at small scale, from nothing to a table, on the CPU: a base model made on the spot, BAPO-GRPO and BA-PPO
# trained on generated problems, all three evaluated on CD-34 and CD-4. Run as a whole on 2 cores; see README.
# After `make quickstart`, which installs: source .venv/bin/activate
set -euo pipefail
cd "$(dirname "$0")/.." # presets name files by their path in the project's folder

python -m bapo_openrlhf.workbench.quickstart --only-prepare # runs/base_model, if it is not there yet
bapo-openrlhf prepare countdown --generate small --prompt short --limit train=1536
for algorithm in bapo_grpo ba_ppo; do
    bapo-openrlhf train --config configs/quickstart.yaml --algorithm $algorithm --run.name countdown_$algorithm \
        --data.prompt_dataset data/countdown/train.jsonl --ckpt.output_dir runs/countdown_$algorithm/model
done
for model in base_model countdown_bapo_grpo/model countdown_ba_ppo/model; do
    bapo-openrlhf evaluate --model runs/$model --benchmarks cd34,cd4 --name "${model%/model}" \
        --runs 32 --max-new-tokens 24 --gpu-memory-utilization 0.5
done
for run in countdown_bapo_grpo countdown_ba_ppo; do
    bapo-openrlhf compare runs/eval/base_model runs/eval/$run
done
