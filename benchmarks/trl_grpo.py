"""GRPO by TRL, for benchmarks/against_trl.py: a line of JSON a step.

    PYTHON benchmarks/trl_grpo.py SETTINGS.json        # in an environment that has TRL

SETTINGS: model, data (JSON lines with input and label), out, steps, seed, prompts and responses a step, learning rate,
micro (samples in a forward pass), dtype of the weights, threads.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bapo_openrlhf.tasks.countdown import reward_func


def rewards(prompts: list[str], completions: list[str], label: list[str], **_others: Any) -> list[float]:
    """The task's own reward."""
    queries = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    return [float(reward) for reward in reward_func(queries, prompts, label)["rewards"]]


class Lines(TrainerCallback):
    """Step, seconds since training began, mean reward of the step."""

    def __init__(self, out: Path) -> None:
        self.file = out.open("w", encoding="utf-8")

    def on_train_begin(self, *_args: Any, **_words: Any) -> None:
        self.start = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **_words: Any) -> None:
        if logs and "reward" in logs:
            row = {"step": state.global_step, "seconds": time.perf_counter() - self.start, "reward": logs["reward"]}
            self.file.write(json.dumps(row | {"tokens": logs.get("completions/mean_length")}) + "\n")
            self.file.flush()


def main(settings: SimpleNamespace) -> None:
    """Train."""
    torch.set_num_threads(settings.threads)
    rows = [json.loads(line) for line in Path(settings.data).read_text(encoding="utf-8").splitlines()]
    data = Dataset.from_list([{"prompt": row["input"], "label": row["label"]} for row in rows])
    samples = settings.prompts * settings.responses
    config = GRPOConfig(
        output_dir=str(Path(settings.out).with_suffix("")),
        per_device_train_batch_size=settings.micro,
        gradient_accumulation_steps=samples // settings.micro,  # one optimizer step a rollout
        num_generations=settings.responses,
        max_completion_length=settings.max_new_tokens,
        max_steps=settings.steps,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=round(0.03 * settings.steps),
        adam_beta2=0.95,
        max_grad_norm=1.0,
        beta=0.001,
        entropy_coef=0.001,
        loss_type="dapo",  # the mean over tokens, as OpenRLHF's
        temperature=1.0,
        bf16=True,
        model_init_kwargs={"dtype": settings.dtype, "attn_implementation": settings.attention},
        gradient_checkpointing=False,
        use_cpu=True,
        seed=settings.seed,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(settings.model, padding_side="left")
    trainer = GRPOTrainer(
        settings.model, rewards, config, data, processing_class=tokenizer, callbacks=[Lines(Path(settings.out))]
    )
    trainer.train()


if __name__ == "__main__":
    main(SimpleNamespace(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
