#!/usr/bin/env bash
# BAPO-GRPO on mathematics, DeepSeek-R1-Distill-Qwen-1.5B: 8 GPUs of 80 GB on one machine.
# Not run yet: it needs 8 GPUs. The preset passes `bapo-openrlhf check`. The script was run with a stand-in for Ray.
# Flags of `bapo-openrlhf train` may follow, for example --algorithm grpo --run.name grpo.
set -euo pipefail
cd "$(dirname "$0")/../.." # presets name files by their paths in the project's folder
CONFIG=configs/bapo_grpo_math_r1_distill_qwen_1.5b.yaml

bapo-openrlhf prepare math # reads the model hub; the second time it does nothing
bapo-openrlhf check --config "$CONFIG" "$@"
ray status > /dev/null 2>&1 || ray start --head --num-gpus 8
ray job submit --address "${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}" -- \
    env -C "$PWD" bapo-openrlhf train --config "$CONFIG" "$@"
