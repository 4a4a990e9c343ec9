"""OpenRLHF's supervised trainer on the CPU (examples/warmup.py), beside a plain loop in torch."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from bapo_openrlhf.cpu.prefork.serving import python

pytestmark = pytest.mark.stack

ROWS = [(f"{n} {n + 15} 3:{2 * n + 18}=", f"{n}+{n + 15}+3<eos>") for n in range(5, 13)]
EPOCHS, RATE = 3, 1e-3
EXAMPLE = Path(__file__).parents[2] / "examples" / "warmup.py"
MAX_LEN = 18  # OpenRLHF cuts longer rows, and puts <eos> at their end


def warm_up(workspace, out):
    data = workspace / f"{out}.jsonl"
    data.write_text("".join(json.dumps({"input": prompt, "solution": text}) + "\n" for prompt, text in ROWS))
    flags = {
        "model.model_name_or_path": "model", "data.dataset": data, "data.input_template": "{}",
        "data.output_key": "solution", "data.max_len": MAX_LEN, "train.batch_size": len(ROWS),
        "train.micro_batch_size": 4, "train.max_epochs": EPOCHS, "adam.lr": RATE, "lr_scheduler": "constant",
        "ds.attn_implementation": "eager", "ckpt.output_dir": out,
    }  # fmt: skip
    command = [python(), EXAMPLE, *(f"--{name}={value}" for name, value in flags.items())]
    environment = os.environ | {"BAPO_OPENRLHF_CPU": "1"}
    return subprocess.run(command, cwd=workspace, env=environment, capture_output=True, text=True)


def plain_loop(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0)
    for _ in range(EPOCHS):
        losses = []
        for prompt, text in ROWS:
            asked, told = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (prompt, text))
            row = (asked + told)[:MAX_LEN]
            row[-1] = tokenizer.eos_token_id
            told = row[len(asked) :]
            logits = model(torch.tensor([row])).logits[0, len(asked) - 1 : -1]
            losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(told), reduction="none"))
        optimizer.zero_grad()
        torch.cat(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.state_dict()


def test_the_weights_are_those_of_a_plain_loop(workspace):
    done = warm_up(workspace, "warm")
    assert done.returncode == 0, done.stderr[-4000:]
    before, after = (load_file(workspace / name / "model.safetensors") for name in ("model", "warm"))
    wanted = plain_loop(workspace / "model")
    moved = sum(float(((wanted[name] - before[name].float()) ** 2).sum()) for name in before)
    apart = sum(float(((wanted[name] - after[name].float()) ** 2).sum()) for name in before)
    assert apart < 0.05 * moved  # The stack computes in bfloat16.
    AutoTokenizer.from_pretrained(workspace / "warm")
