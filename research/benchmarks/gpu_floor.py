"""The floor of the runs of research/benchmarks/gpu.py: the same work in one process, with floor_parts.py's bare loops.

    python research/benchmarks/gpu_floor.py SETTINGS.json OUT.jsonl

All responses of those runs have the same length, so a step is described by a few numbers and need not be recorded. The
engine sleeps while models train. Advantages, returns and old log-probs are made up, because no time depends on them.
Each part is written as soon as it is measured: {"run": NAME, PART: SECONDS, ...}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from floor_parts import Batch, Step, Trained, head

from bapo_openrlhf.cpu import stack as cpu


def step_of(work: dict[str, Any], device: str) -> Step:
    """A step that does this work.

    Args:
        work: `groups` of `size` responses, `prompt` tokens and `response` tokens; `samples` to train on, in
            micro-batches of `micro` and `forward_micro` samples; `trained` and `passed`, names of models; `syncs`.
        device: for the micro-batches.
    """
    prompt, response = work["prompt"], work["response"]
    requests = [([5 + (7 * group + place) % 10 for place in range(prompt)], [response] * work["size"])
                for group in range(work["groups"])]  # fmt: skip

    def batches(micro: int) -> list[Batch]:
        sizes = [min(micro, work["samples"] - start) for start in range(0, work["samples"], micro)]
        return [batch_of(size, prompt, response, device) for size in sizes]

    return Step(
        calls=[requests],
        forward={name: batches(work["forward_micro"]) for name in work["passed"]},
        train={name: batches(work["micro"]) for name in work["trained"]},
        syncs=work["syncs"],
    )


def batch_of(size: int, prompt: int, response: int, device: str) -> Batch:
    """A micro-batch of samples of the same length, without padding."""
    import torch

    ids = (torch.arange(size * (prompt + response), device=device) % 1000 + 4).reshape(size, -1)
    ones = torch.ones_like(ids)
    return {"sequences": ids, "attention_mask": ones, "action_mask": ones[:, prompt:]}


class GpuFloor:
    """The floor's models on a device. The engine is awake at first; the others are made when they are needed."""

    actor: Trained
    reference: Trained
    critic: Trained

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM

        self.settings, self.device = settings, settings["device"]
        self.asleep = self.device != "cpu"
        self.llm = LLM(
            model=settings["model"], dtype="bfloat16", enforce_eager=self.device == "cpu", seed=0,
            max_model_len=settings["max_len"], gpu_memory_utilization=settings["memory"], skip_tokenizer_init=True,
            enable_sleep_mode=self.asleep,
        )  # fmt: skip

    def make(self) -> None:
        """Let the engine sleep, and make the models that are trained, and the reference model."""
        if self.asleep:
            self.llm.sleep()
        for name in ("actor", "reference", *["critic"] * self.settings["critic"]):
            model = Trained(self.settings["model"], critic=name == "critic", device=self.device)
            model.model.set_attn_implementation(self.settings["attention"])
            setattr(self, name, model)

    def wake(self) -> None:
        """Let the engine have its weights again."""
        if self.asleep:
            self.llm.wake_up(tags=["weights"])

    def timed(self, part: Callable[[Step], None], step: Step) -> float:
        """Seconds of a part of a step, until the device has done all of it."""
        self.wait()
        start = time.perf_counter()
        part(step)
        self.wait()
        return time.perf_counter() - start

    def wait(self) -> None:
        """Until the device has done what it was told."""
        import torch

        if self.device != "cpu":
            torch.cuda.synchronize()

    def generate(self, step: Step) -> None:
        """Generate responses of these lengths.

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
        """Pass the micro-batches through the models: log-probs of actor and reference, values."""
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
        """Forward and backward passes of the micro-batches, and one optimizer step for each model."""
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


def first(step: Step) -> Step:
    """A little of a step. It is not timed: first calls allocate and choose kernels."""
    calls = [[(ids, lengths[:1]) for ids, lengths in step.calls[0][:8]]]
    parts = [{name: batches[:1] for name, batches in models.items()} for models in (step.forward, step.train)]
    return Step(calls=calls, forward=parts[0], train=parts[1], syncs=min(step.syncs, 1))


def measure(floor: GpuFloor, works: dict[str, dict[str, Any]], write: Callable[[dict[str, Any]], None]) -> None:
    """Time all runs' parts, and write each. Equal work is timed once."""
    known: dict[tuple[str, str], float] = {}
    steps = {name: step_of(work, floor.device) for name, work in works.items()}
    methods = {"generation": floor.generate, "forward": floor.forward, "training": floor.train, "weights": floor.copy}
    needs = {"generation": ("groups", "size", "response"), "forward": ("samples", "passed"),
             "training": ("samples", "trained"), "weights": ("syncs",)}  # fmt: skip
    before = {"forward": floor.make, "weights": floor.wake}
    for part, method in methods.items():
        before.get(part, lambda: None)()
        for name, step in steps.items():
            key = (part, json.dumps([works[name][what] for what in (*needs[part], "prompt")]))
            if key not in known:
                method(first(step))
                if part == "generation":
                    floor.llm.reset_prefix_cache()
                known[key] = floor.timed(method, step)
            write({"run": name, part: known[key]})


def main(settings: dict[str, Any], out: Path) -> None:
    """Measure, and write lines to `out`."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine in this process, so weights can be copied
    cpu.prepare_environment()
    cpu.install()
    with out.open("w", buffering=1) as file:
        measure(GpuFloor(settings), settings["works"], lambda row: file.write(json.dumps(row) + "\n") and None)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
