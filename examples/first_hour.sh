#!/usr/bin/env bash
# What a new user does in the first hour, from end to end and on the CPU: installs, writes a task of their own, checks it,
# tries it, trains a small model on it, and looks at what came out.
#
#   examples/first_hour.sh FOLDER              clones this repository into FOLDER, and installs there
#   examples/first_hour.sh FOLDER --installed  takes this clone and the environment that is active, as the tests do
set -euo pipefail

folder=$(realpath -m "${1:?name a folder that does not exist yet}")
project=$(cd "$(dirname "$0")/.." && pwd)
if [ "${2:-}" != --installed ]; then
    git clone --quiet "$project" "$folder/project"
    project=$folder/project
    make -C "$project" .venv/.installed
    source "$project/.venv/bin/activate"
fi
mkdir -p "$folder"
cd "$folder"
task=$folder/my_task

echo "── a small model, and files to start from"
PYTHONPATH="$project/examples/quickstart:${PYTHONPATH:-}" python -c \
    'from base_model import *; build("base_model", BaseModelSettings(steps=50, batch_size=16, threads=1))'
bapo-openrlhf init "$task"
python -m pytest -q -p no:cacheprovider "$task"

echo "── problems and a reward function of one's own; one step has 8 of them"
for part in train eval; do head -n 32 "$project/examples/custom_task/problems.jsonl" >"$task/$part.jsonl"; done
cp "$project/examples/custom_task/reward.py" "$task/reward.py"
cat >"$task/small.yaml" <<YAML
# What a small model on two CPU cores needs instead.
actor: {model_name_or_path: $folder/base_model, adam: {lr: 5.0e-4}}
data: {apply_chat_template: false, max_len: 48}
rollout: {batch_size: 8, n_samples_per_prompt: 4, max_new_tokens: 24}
train: {batch_size: 16, micro_batch_size: 4, num_episodes: 2, colocate_all: false}
vllm: {enforce_eager: true, sync_backend: gloo, enable_sleep: false}
ds: {zero_stage: 2, enable_sleep: false, attn_implementation: eager}
eval: {steps: 4}
ckpt: {save_steps: 4}
YAML
settings=(--config "$task/config.yaml" "$task/small.yaml")

echo "── is it right, what would it take, does it run?"
bapo-openrlhf check "${settings[@]}"
bapo-openrlhf plan --config "$task/config.yaml" --gpu 4090 --gpus 1 >plan.md
head -n 1 plan.md # the verdict; the rest of the file has the numbers
bapo-openrlhf smoke "${settings[@]}"

echo "── train, look, evaluate"
bapo-openrlhf train "${settings[@]}"
bapo-openrlhf watch "$task/runs/first" --once
bapo-openrlhf report "$task/runs/first" --output "$folder/report.html"
bapo-openrlhf evaluate "${settings[@]}" --benchmarks "mine=$task/eval.jsonl" --runs 2 \
    --max-new-tokens 24 --gpu-memory-utilization 0.5 --out "$folder/evaluated"
