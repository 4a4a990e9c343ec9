"""The models, prompts, rewards and flags of research/benchmarks/gpu.py, and the operations that MFU counts.

All inputs are generated, so no model hub is needed. They stay in a folder, and so do their paths. vLLM keeps what it
has compiled for a path of a model, so only the first run compiles.

The model has a Qwen3's shape and random weights, so it ends a response about once in as many tokens as its vocabulary
has. So nearly all responses have the maximum length, and the work of all kinds is equal (OpenRLHF has no flag for
this). The model solves nothing, so rewards are random.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from bapo_openrlhf import user_file
from bapo_openrlhf.workbench.planning.shapes import SHAPES, ModelShape

BASE_MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "base_model.py"

MODELS = {  # from each model's published config.json. The first is for dry runs: vLLM on the CPU takes no head of 16
    "tiny": ModelShape("Qwen3 (tiny)", 2, 128, 4, 2, 32, 384, 4096, tied=True, qk_norm=True),
    "0.6b": SHAPES["0.6B"],
    "1.7b": SHAPES["1.7B"],
    "4b": SHAPES["4B"],
}
# TFLOP/s of a GPU in dense bf16, from the data sheets in planning's DATA_SHEETS. A100 to H200 are SXM modules.
PEAK_TFLOPS = {"A100": 312.0, "H100": 989.0, "H200": 989.0, "4090": 165.0}
TRAINING_PASSES = 3.0  # training takes the operations of 3 forward passes: forward 1, backward 2
G, PROMPT = 8, 256  # responses to a prompt; tokens of each prompt
FLAGS = {
    "run.faster": "all",
    "train.colocate_all": "",
    "train.micro_batch_size": 8,
    "train.num_episodes": 1,
    "rollout.n_samples_per_prompt": G,
    "rollout.micro_batch_size": 16,
    "actor.gradient_checkpointing_enable": "",
    "ds.attn_implementation": "sdpa",
    "actor.entropy_coef": 0.001,
    "algo.kl.init_coef": 0.001,
    "algo.kl.use_loss": "",
    "algo.kl.estimator": "k3",
    "data.input_key": "input",
    "data.label_key": "label",
    "vllm.gpu_memory_utilization": 0.6,
    "run.answer_chars": 0,
}
# A run is short, so each step syncs the weights. Hard prompts are not generated again, as `init` has it for one GPU.
ON_GPU = {"vllm.enable_sleep": "", "ds.enable_sleep": "", "adapt.rollout_delay": 1, "adapt.reevaluate_every": 0}
ON_CPU = {"vllm.enforce_eager": "", "vllm.sync_backend": "gloo", "ds.attn_implementation": "eager"}
DRY_RUN = {"rounds": 1, "steps": 3, "warm_up": 1, "prompts": 8, "tokens": 16, "peak_tflops": 1.0}
ONCE = {"adapt.rollout_delay": 1, "adapt.reevaluate_every": 1}  # so that a dry run has all parts of a step
REWARD = """
import hashlib
import sys

def reward_func(queries, prompts, labels, **kwargs):
    # a label is the chance that a response to its prompt is right
    drawn = int.from_bytes(hashlib.blake2b(queries[0].encode(), digest_size=4).digest()) / 2**32
    rewards, torch = [float(drawn < float(labels[0]))], sys.modules.get("torch")
    return {"rewards": torch.tensor(rewards) if torch else rewards}
"""

CHAT_REWARD = """
import re

def reward_func(queries, prompts, labels, **kwargs):
    # right if the last number of the response is the sum
    rewards = []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        numbers = re.findall(r"\\d+", query.split(prompt, 1)[-1])
        rewards.append(float(numbers[-1:] == [label]))
    return {"rewards": rewards}
"""


def forward_flops(shape: ModelShape, context: float) -> float:
    """Operations for one token's forward pass.

    They are 2 for each weight that the token meets, and 4 for each unit of attention and each earlier token.

    Args:
        context: Mean number of tokens before it.
    """
    met = shape.layers * shape.matrices + shape.vocabulary * shape.hidden  # an embedding is looked up, not multiplied
    return 2 * met + 4 * shape.layers * shape.heads * shape.head_dim * context


def pass_flops(shape: ModelShape, samples: float, length: float) -> float:
    """Operations for one forward pass of so many samples with `length` tokens each."""
    return samples * length * forward_flops(shape, length / 2)


def make_inputs(folder: Path, shape: ModelShape, prompts: int) -> dict[str, Path]:
    """Write model, prompts and reward function to `folder`; return the flags that name them.

    A model that is there already stays. Of 100 prompts, 36 are never solved, 18 are always solved, and each of the
    others has its own chance. With 8 responses, 36 % of the groups have a signal, and 46 % have a mean of at most c1.
    In the study it was 38 and 47 % (`Constants.signal_share`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        _make_model(folder / "unfinished", shape)
        (folder / "unfinished").rename(folder / "model")
    rng = random.Random(0)
    with (folder / f"{prompts}.jsonl").open("w") as file:
        for _ in range(prompts):
            digits, (chance,) = rng.choices("0123456789", k=PROMPT), rng.choices([0, 1, rng.random()], [36, 18, 46])
            file.write(json.dumps({"input": "".join(digits), "label": str(chance)}) + "\n")
    (folder / "reward.py").write_text(REWARD)
    return _named(folder / "model", folder / f"{prompts}.jsonl", folder / "reward.py")


def _make_model(folder: Path, shape: ModelShape) -> None:
    """A Qwen3 with random weights, and its tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    module = user_file.load("base model", BASE_MODEL)
    tokenizer = module.make_tokenizer(shape.vocabulary)
    config = Qwen3Config(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, tie_word_embeddings=shape.tied,
        pad_token_id=module.PAD, bos_token_id=module.BOS, eos_token_id=module.EOS,
    )  # fmt: skip
    tokenizer.model_max_length = config.max_position_embeddings
    torch.manual_seed(0)
    Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _named(model: Path, data: Path, reward: Path) -> dict[str, Path]:
    """The flags that name these inputs."""
    both = dict.fromkeys(("actor.model_name_or_path", "critic.model_name_or_path"), model)
    return both | {"data.prompt_dataset": data, "reward.remote_url": reward}


def make_chat_inputs(folder: Path, model: Path, prompts: int) -> dict[str, Any]:
    """Write sums of two and three numbers for a chat model to `folder`; return the flags that name them."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    with (folder / f"{prompts}.jsonl").open("w") as file:
        for _ in range(prompts):
            numbers = [rng.randint(10, 99) for _ in range(rng.choice([2, 3]))]
            asked = f'What is {" + ".join(map(str, numbers))}? Write the result as "Answer: NUMBER".'
            file.write(json.dumps({"input": asked, "label": str(sum(numbers))}) + "\n")
    (folder / "reward.py").write_text(CHAT_REWARD)
    return _named(model, folder / f"{prompts}.jsonl", folder / "reward.py") | {"data.apply_chat_template": ""}


def flags_of(given: argparse.Namespace) -> dict[str, Any]:
    """The flags of `bapo-openrlhf train` that all kinds have, made from the benchmark's own flags."""
    return {
        **FLAGS,
        **(ON_CPU | ONCE if given.dry_run else ON_GPU),
        "ds.zero_stage": 2 if given.gpus == 1 else 1,  # as `bapo-openrlhf plan` proposes
        **{f"{role}.num_gpus_per_node": given.gpus for role in ("actor", "critic", "ref")},
        "vllm.num_engines": given.gpus,
        "data.max_samples": given.prompts * given.steps,
        "data.max_len": PROMPT + given.tokens,
        "rollout.batch_size": given.prompts,
        "rollout.max_new_tokens": given.tokens,
        "train.batch_size": given.prompts * G,
        "adapt.max_reevaluated_prompts": given.prompts // 2,
    }
