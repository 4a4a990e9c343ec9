"""Replays recorded steps in one process, as fast as this machine can: the floor of floor.py.

    python benchmarks/floor_replay.py SETTINGS.json

It generates with vLLM's offline `LLM`, trains with a bare PyTorch loop, and copies weights within the process. Only
token ids and sizes are those of the recording. Advantages, returns and old log-probs are made up, because no time
depends on them.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PARTS = ("generation", "forward", "training", "weights")
Batch = dict[str, "torch.Tensor"]
"""A micro-batch: `sequences` and `attention_mask` of shape (B, S), `action_mask` of shape (B, A)."""


@dataclass
class Step:
    """What a step of the real stack did.

    Attributes:
        seconds: from the end of the step before to its own end.
        calls: a list of groups for each call of the engine: (token ids of the prompt, lengths of its responses).
        forward: micro-batches of the forward passes of actor, critic and reference, by model.
        train: micro-batches of training, by model. One optimizer step follows them.
        syncs: number of weight syncs.
    """

    seconds: float = math.nan
    calls: list[list[tuple[list[int], list[int]]]] = field(default_factory=list)
    forward: dict[str, list[Batch]] = field(default_factory=dict)
    train: dict[str, list[Batch]] = field(default_factory=dict)
    syncs: int = 0


def steps_of(noted: Sequence[dict[str, Any]], workers: dict[str, Sequence[tuple[float, str, Batch]]]) -> list[Step]:
    """The recorded steps.

    Args:
        noted: what the trainer wrote, `calls` and `end` of each step. Times are seconds of one clock.
        workers: what each model's worker wrote, by model: (time, "forward", "train" or "sync", the micro-batch).
    """
    steps, before = [], math.nan
    for one in noted:
        steps.append(Step(one["end"] - before, one["calls"]))
        before = one["end"]
    for model, events in workers.items():
        for when, what, batch in events:
            step = next(step for step, one in zip(steps, noted, strict=True) if when <= one["end"])
            if what == "sync":
                step.syncs += 1
            else:
                getattr(step, what).setdefault(model, []).append(batch)
    return steps


def recorded(folder: Path) -> list[Step]:
    """The steps that a run recorded in `folder`."""
    import torch

    workers = {path.name: torch.load(path) for path in folder.iterdir() if path.name != "steps"}
    return steps_of(torch.load(folder / "steps"), workers)


def head(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *, entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs of the labels and the entropies, shape (N,), of the hidden states (N, H) under the head (V, H)."""
    import torch

    log_probs = torch.nn.functional.linear(hidden, weight).float().log_softmax(-1)
    chosen = log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return chosen, -(log_probs.exp() * log_probs).sum(-1) if entropy else None


class Trained:
    """A model with AdamW as the stack has it: bfloat16 in the passes, float32 weights and moments in the optimizer."""

    def __init__(self, folder: str, *, critic: bool, device: str = "cpu") -> None:
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)
        self.model, self.weight = model, model.lm_head.weight
        trained = list((model.model if critic else model).parameters())
        if critic:
            zeros = torch.zeros(1, model.config.hidden_size, dtype=torch.bfloat16, device=device)
            self.weight = torch.nn.Parameter(zeros)
            trained.append(self.weight)
        self.parameters = trained
        self.masters = [parameter.detach().float() for parameter in trained]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-6, weight_decay=0.0, fused=True)

    def hidden(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states before the response tokens, (N, H), and these tokens, (N,)."""
        mask, count = batch["attention_mask"], batch["action_mask"].shape[1]
        places = (mask.long().cumsum(-1) - 1).masked_fill_(mask == 0, 1)
        output = self.model.model(batch["sequences"], attention_mask=mask, position_ids=places, use_cache=False)
        chosen = batch["action_mask"].bool()
        return output.last_hidden_state[:, -count - 1 : -1][chosen], batch["sequences"][:, -count:][chosen]

    def update(self) -> None:
        """Clip the gradients, step, and round the weights."""
        import torch

        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)


class Floor:
    """The models of the floor, all in this process, and the time that they took for each part."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM

        folder = settings["model"]
        self.llm = LLM(
            model=folder, dtype="bfloat16", enforce_eager=True, max_model_len=settings["max_len"], seed=0,
            gpu_memory_utilization=0.5, skip_tokenizer_init=True,
        )  # fmt: skip
        self.actor, self.reference = Trained(folder, critic=False), Trained(folder, critic=False)
        self.critic = Trained(folder, critic=True)
        self.seconds: Counter[str] = Counter()

    def replay(self, step: Step, parts: Sequence[str]) -> None:
        """Do these parts of what a step did, and add the seconds of each."""
        self.llm.reset_prefix_cache()
        work = dict(zip(PARTS, (self.generate, self.forward, self.train, self.copy), strict=True))
        for part in parts:
            start = time.perf_counter()
            work[part](step)
            self.seconds[part] += time.perf_counter() - start

    def generate(self, step: Step) -> None:
        """Generate responses of the recorded lengths.

        The end of a text is ignored, so a response ends at its `max_tokens`. Responses of a prompt that are equally
        long are one request with n. No text and no log-probs are asked for.
        """
        from vllm import SamplingParams

        for groups in step.calls:
            prompts, params = [], []
            for ids, lengths in groups:
                for length, count in Counter(lengths).items():
                    prompts.append({"prompt_token_ids": ids})
                    params.append(SamplingParams(n=count, max_tokens=length, ignore_eos=True, detokenize=False))
            self.llm.generate(prompts, params, use_tqdm=False)

    def forward(self, step: Step) -> None:
        """Pass the recorded micro-batches through the models: log-probs of actor and reference, values."""
        import torch

        with torch.no_grad():
            for name, batches in step.forward.items():
                model = getattr(self, name)
                for batch in batches:
                    hidden, labels = model.hidden(batch)
                    torch.nn.functional.linear(hidden, model.weight) if name == "critic" else head(
                        hidden, model.weight, labels
                    )

    def train(self, step: Step) -> None:
        """Forward and backward passes of the recorded micro-batches, and one optimizer step for each model."""
        import torch

        for name, batches in step.train.items():
            model = getattr(self, name)
            for batch in batches:
                hidden, labels = model.hidden(batch)
                if name == "critic":
                    values = torch.nn.functional.linear(hidden, model.weight).squeeze(-1).float()
                    old, returns = values.detach(), 1.0
                    clipped = old + (values - old).clamp(-0.2, 0.2)
                    loss = 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2).mean()
                else:
                    log_probs, entropy = head(hidden, model.weight, labels, entropy=True)
                    old, advantages = log_probs.detach(), torch.linspace(-1, 1, len(labels), device=labels.device)
                    ratio, difference = (log_probs - old).exp(), old - 0.1 - log_probs
                    policy = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
                    kl = difference.exp() - difference - 1
                    loss = (policy + 0.001 * kl - 0.001 * entropy).mean()
                (loss / len(batches)).backward()
            model.update()

    def copy(self, step: Step) -> None:
        """Copy the actor's weights into vLLM's model as often as they were synced."""
        for _ in range(step.syncs):
            weights = list(self.actor.model.named_parameters())
            self.llm.apply_model(lambda model, weights=weights: model.load_weights(weights) and None)


def every_variant(threads: Sequence[int]) -> dict[str, list[str]]:
    """The parts that are timed in each variant. vLLM has its own attention, so it is timed only with one kind."""
    parts = {"eager": list(PARTS), "sdpa": list(PARTS[1:3])}
    return {f"{count} {attention}": parts[attention] for attention in parts for count in threads}


def chosen_variants(fastest: Mapping[str, Any]) -> dict[str, list[str]]:
    """The parts that are timed in each variant, if each part has only the variant that was its fastest one before."""
    parts_of: dict[str, list[str]] = {}
    for part in PARTS:
        parts_of.setdefault(fastest[f"{part}_variant"], []).append(part)
    return parts_of


def timed(floor: Floor, steps: Sequence[Step], variants: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Seconds of each part per step, in the fastest of the variants: a number of threads, and a kind of attention."""
    import torch

    seconds = {}
    for variant, parts in variants.items():
        count, attention = variant.split()
        for model in (floor.actor, floor.reference, floor.critic):
            model.model.set_attn_implementation(attention)
        torch.set_num_threads(int(count))
        floor.replay(steps[0], parts)  # not timed: first calls allocate and choose kernels
        floor.seconds.clear()
        for step in steps:
            floor.replay(step, parts)
        seconds[variant] = dict(floor.seconds)
    return fastest(seconds, len(steps))


def fastest(by_variant: Mapping[str, Mapping[str, float]], steps: int) -> dict[str, Any]:
    """The least seconds of each part per step, and as `PART_variant` the variant that takes them.

    Args:
        by_variant: seconds of each part over all steps, by variant. A variant need not have all parts.
        steps: number of steps.
    """
    result: dict[str, Any] = {}
    for part in PARTS:
        seconds, variant = min((parts[part], variant) for variant, parts in by_variant.items() if part in parts)
        result |= {part: seconds / steps, f"{part}_variant": variant}
    return result


def main(settings: dict[str, Any]) -> None:
    """Replay the windows of the given recordings in turn, and write the seconds of each."""
    os.environ["OMP_NUM_THREADS"] = str(max(settings["threads"]))
    from bapo_openrlhf.cpu import stack as cpu

    cpu.prepare_environment()
    cpu.install()
    floor = Floor(settings)
    result = {}
    for kind, folder in settings["recordings"].items():
        first, last = settings["window"]
        result[kind] = timed(floor, recorded(Path(folder))[first:last], settings["variants"][kind])
    Path(settings["out"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
