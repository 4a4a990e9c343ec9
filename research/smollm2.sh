#!/usr/bin/env bash
# A real chat model on two CPU cores: SmolLM2-135M-Instruct learns sums from worked solutions for some minutes, then from
# rewards: GRPO, BAPO-GRPO, PPO and BA-PPO. No model hub. research/study_results.md has what came out.
# The study takes hours. The same command continues it, because runs that are done stay. With --only-prepare, only the
# model and the data are made.
set -euo pipefail
cd "$(dirname "$0")/.." # presets name files by their paths in the project's folder

[ -f runs/smollm2/config.json ] || bapo-openrlhf model smollm2 runs/smollm2
bapo-openrlhf prepare reasoning_gym --config configs/smollm2/sums.yaml --prompt question \
    --size train=960,test=32,warmup=1600
[ -f runs/smollm2_warm/config.json ] || bapo-openrlhf warmup --config configs/smollm2/warmup.yaml
[ "${1:-}" = --only-prepare ] || bapo-openrlhf study --config research/studies/smollm2.yaml "$@"
