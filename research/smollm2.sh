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
[ -f runs/smollm2_warm/config.json ] || python examples/warmup.py --model.model_name_or_path runs/smollm2 \
    --data.dataset data/reasoning_gym/warmup.jsonl --data.output_key solution --data.apply_chat_template \
    --data.max_len 192 --train.batch_size 16 --train.micro_batch_size 16 --train.max_epochs 1 --train.seed 1 \
    --adam.lr 1e-4 --ds.zero_stage 2 --ds.attn_implementation eager --ckpt.output_dir runs/smollm2_warm
[ "${1:-}" = --only-prepare ] || bapo-openrlhf study --config research/studies/smollm2.yaml "$@"
