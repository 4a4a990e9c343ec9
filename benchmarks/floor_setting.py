"""The three sizes of floor.py: model, prompts, rewards and flags of each."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import steps

from bapo_openrlhf import user_file

HERE = Path(__file__).parent
BASE_MODEL = HERE.parent / "examples" / "quickstart" / "base_model.py"
SMOLLM2 = Path("runs/smollm2")
V, M = 2, 4  # --adapt.rollout_delay and --adapt.reevaluate_every
TOKENS = 64  # of a response, at the two larger sizes
SETTING = steps.SETTING | {
    "actor.entropy_coef": 0.001,
    "algo.kl.init_coef": 0.001,
    "algo.kl.use_loss": "",
    "algo.kl.estimator": "k3",
    "actor.num_gpus_per_node": 1,
    "critic.num_gpus_per_node": 1,
    "ref.num_gpus_per_node": 1,
    "vllm.num_engines": 1,
    "vllm.enforce_eager": "",
    "vllm.sync_backend": "gloo",
    "vllm.gpu_memory_utilization": 0.5,
    "ds.attn_implementation": "eager",
    "ds.zero_stage": 2,
    "data.input_key": "input",
    "data.label_key": "label",
    "rollout.max_new_tokens": TOKENS,
    "run.logs": "progress",
    "adapt.buffer_size": 64,
    "adapt.rollout_delay": V,
    "adapt.reevaluate_every": M,
}


@dataclass(frozen=True)
class Size:
    """A size of the model and of a step.

    Attributes:
        title: for the page.
        aim: the ratio that the project aims at.
        prompts, responses: of a step, and of a prompt.
        micro: samples of a training micro-batch; forward passes have twice as many.
    """

    title: str
    aim: float
    prompts: int
    responses: int
    micro: int

    @property
    def flags(self) -> dict[str, Any]:
        """Flags that follow from these numbers."""
        return {
            "rollout.batch_size": self.prompts,
            "rollout.n_samples_per_prompt": self.responses,
            "rollout.micro_batch_size": 2 * self.micro,
            "train.batch_size": self.prompts * self.responses,
            "train.micro_batch_size": self.micro,
            "adapt.max_reevaluated_prompts": self.prompts,
        }


SIZES = {
    "quickstart": Size("The quickstart's model, 0.8M parameters, responses of at most 24 tokens", 1.5, 32, 8, 128),
    "25m": Size(f"A Qwen3 of 25M parameters, random weights, responses of {TOKENS} tokens", 1.15, 16, 4, 32),
    "smollm2": Size(f"SmolLM2-135M-Instruct, responses of {TOKENS} tokens", 1.1, 8, 4, 8),
}


def make_inputs(size: str, folder: Path, count: int) -> tuple[dict[str, Any], list[str]]:
    """Make what the runs of a size read, in `folder`, for `count` steps.

    Returns:
        Flags of `bapo-openrlhf train`, and words of its command line after them. `actor.model_name_or_path` is the
        model's folder.
    """
    samples = {"data.max_samples": SIZES[size].prompts * count, "train.num_episodes": 1}
    if size == "quickstart":
        subprocess.run([sys.executable, "examples/quickstart", "--only-prepare"], check=True)
        model = {"actor.model_name_or_path": "runs/base_model"}
        return steps.SETTING | samples | model, ["--config", "configs/quickstart.yaml"]
    (_random_model if size == "25m" else _smollm2)(folder / "model")
    rows = [{"input": f"{number} + {number * 7 % 50} = ", "label": ""} for number in range(samples["data.max_samples"])]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    places = {
        "actor.model_name_or_path": folder / "model",
        "critic.model_name_or_path": folder / "model",
        "data.prompt_dataset": folder / "data.jsonl",
        "reward.remote_url": HERE / "floor_reward.py",
        "data.max_len": 128,
    }
    template = {"data.apply_chat_template": ""} if size == "smollm2" else {}
    return SETTING | SIZES[size].flags | samples | places | template, []


def _random_model(folder: Path) -> None:
    """A Qwen3 with random weights. It ends a response by chance, once in 8,192 tokens."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    module = user_file.load("base model", BASE_MODEL)
    tokenizer = module.make_tokenizer(8192)
    config = Qwen3Config(
        vocab_size=8192, hidden_size=384, intermediate_size=1664, num_hidden_layers=8, num_attention_heads=6,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=256, tie_word_embeddings=False,
        pad_token_id=module.PAD, bos_token_id=module.BOS, eos_token_id=module.EOS,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _smollm2(folder: Path) -> None:
    """SmolLM2 that never ends a response: the token that ends it is one that it does not write."""
    if not SMOLLM2.exists():
        subprocess.run([sys.executable, "-m", "bapo_openrlhf.cli", "model", "smollm2", str(SMOLLM2)], check=True)
    shutil.copytree(SMOLLM2, folder)
    end = ("<repo_name>", 3)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        settings = json.loads((folder / name).read_text()) | {"eos_token_id": end[1], "pad_token_id": 2}
        settings |= {"eos_token": end[0]} if name.startswith("tokenizer") else {}
        (folder / name).write_text(json.dumps(settings))
