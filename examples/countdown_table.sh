#!/usr/bin/env bash
# From nothing to a table, on Countdown at small scale and on the CPU: makes a base model, trains BAPO-GRPO and BA-PPO on
# generated problems, and evaluates all three models on CD-34 and CD-4. Before it: `make quickstart`, which installs,
# and `source .venv/bin/activate`. The second time: give --run.overwrite.
set -euo pipefail
cd "$(dirname "$0")/.." # presets name files by their paths in the project's folder

python examples/quickstart --size countdown --only-prepare # makes runs/base_model if it does not exist yet
bapo-openrlhf prepare countdown --generate small --prompt short --size train=1536
for algorithm in bapo_grpo ba_ppo; do
    bapo-openrlhf train --config configs/countdown/train.yaml --algorithm $algorithm --run.name countdown_$algorithm \
        --data.prompt_dataset data/countdown/train.jsonl --ckpt.output_dir runs/countdown_$algorithm/model "$@"
    rm -rf runs/eval/countdown_$algorithm # responses of an earlier model
done
for model in base_model countdown_bapo_grpo/model countdown_ba_ppo/model; do
    bapo-openrlhf evaluate --model runs/$model --benchmarks cd34,cd4 --name "${model%/model}" \
        --runs 32 --max-new-tokens 24 --gpu-memory-utilization 0.5
done
for run in countdown_bapo_grpo countdown_ba_ppo; do
    bapo-openrlhf compare runs/eval/base_model runs/eval/$run
done
