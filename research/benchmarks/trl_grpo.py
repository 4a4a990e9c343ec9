"""Trains GRPO with TRL for research/benchmarks/steps.py, and writes a line of JSON for each step.

    PYTHON research/benchmarks/trl_grpo.py SETTINGS.json     # PYTHON: that of the environment in examples/trl/README.md

SETTINGS has: model, data and held_out (JSON lines with input and label), out, steps, seed, the prompts and responses of
a step, the learning rate, micro (samples in a forward pass), the dtype of the weights, threads, evaluate_every (steps),
evaluate_responses (to a problem) and evaluate_temperature.
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
    """Writes step, seconds of training without evaluations, mean reward, and the accuracy after an evaluation."""

    def __init__(self, settings: SimpleNamespace, tokenizer: Any) -> None:
        self.rows: list[dict[str, Any]] = []
        self.settings, self.tokenizer = settings, tokenizer
        self.evaluated: dict[int, float] = {}

    def on_train_begin(self, *_args: Any, **_words: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_words: Any) -> None:
        if state.global_step % self.settings.evaluate_every == 0:
            start = time.perf_counter()
            self.evaluated[state.global_step] = self.accuracy(model)
            self.start += time.perf_counter() - start

    def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **_words: Any) -> None:
        if logs and "reward" in logs:
            row = {"step": state.global_step, "seconds": time.perf_counter() - self.start, "reward": logs["reward"]}
            row |= {"tokens": logs.get("completions/mean_length"), "accuracy": self.evaluated.get(state.global_step)}
            self.rows.append(row)

    @torch.no_grad()
    def accuracy(self, model: Any) -> float:
        """Mean reward of the responses to the held-out problems."""
        rows = read(self.settings.held_out)
        prompts, labels = ([row[name] for row in rows] for name in ("input", "label"))
        ids = self.tokenizer(prompts, return_tensors="pt", padding=True)
        training = model.training
        model.eval()
        scores: list[float] = []
        for _ in range(self.settings.evaluate_responses):
            tokens = model.generate(
                **ids,
                do_sample=True,
                temperature=self.settings.evaluate_temperature,
                top_k=0,
                max_new_tokens=self.settings.max_new_tokens,
                pad_token_id=self.tokenizer.pad_token_id,
            )
            responses = self.tokenizer.batch_decode(tokens[:, ids["input_ids"].shape[1] :], skip_special_tokens=True)
            scores += rewards(prompts, responses, labels)
        model.train(training)
        return sum(scores) / len(scores)


def read(path: str) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def main(settings: SimpleNamespace) -> None:
    """Train."""
    torch.set_num_threads(settings.threads)
    data = Dataset.from_list([{"prompt": row["input"], "label": row["label"]} for row in read(settings.data)])
    samples = settings.prompts * settings.responses
    config = GRPOConfig(
        output_dir=str(Path(settings.out).with_suffix("")),
        per_device_train_batch_size=settings.micro,
        gradient_accumulation_steps=samples // settings.micro,  # one optimizer step for each rollout
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
        loss_type="dapo",  # the mean over tokens, as in OpenRLHF
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
    lines = Lines(settings, tokenizer)
    trainer = GRPOTrainer(settings.model, rewards, config, data, processing_class=tokenizer, callbacks=[lines])
    trainer.train()
    Path(settings.out).write_text("".join(json.dumps(row) + "\n" for row in lines.rows), encoding="utf-8")


if __name__ == "__main__":
    main(SimpleNamespace(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
