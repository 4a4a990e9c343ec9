"""Measures what it costs to send a tokenizer of 150,000 tokens with each prompt. docs/performance.md quotes it.

    python benchmarks/dispatch.py            # prints milliseconds a prompt

OpenRLHF sends the tokenizer with each request to a rollout engine. This project's engines keep it, and requests go
without it. An actor that only answers stands in for the engine.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import ray
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

VOCABULARY, ROUNDS = 150_000, 5
PROMPTS = {"with the tokenizer": 16, "without it": 2048}  # in a round
MEASURED = ("processor time of the sender", "processor time of the engine", "until all prompts are answered")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with random merges."""
    draw = random.Random(0)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens, merges = {letter: place for place, letter in enumerate(letters)}, []
    names = list(letters)
    while len(tokens) < VOCABULARY:
        pair = draw.choice(names), draw.choice(letters)
        name = "".join(pair)
        if name not in tokens and len(name) <= 8:
            tokens[name] = len(tokens)
            names.append(name)
            merges.append(pair)
    core = Tokenizer(models.BPE(vocab=tokens, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=letters[0], pad_token=letters[1])


@ray.remote
class Engine:
    """Answers requests as a rollout engine takes them."""

    async def generate_responses(self, prompt: str, hf_tokenizer: Any = None) -> str:
        """The prompt."""
        return prompt

    async def processor_seconds(self) -> float:
        """Processor seconds of this process so far."""
        return time.process_time()


def milliseconds(engine: Any, prompts: int, **more: Any) -> tuple[float, ...]:
    """Milliseconds a prompt, as in MEASURED."""

    def now() -> tuple[float, ...]:
        return time.process_time(), ray.get(engine.processor_seconds.remote()), time.perf_counter()

    before = now()
    ray.get([engine.generate_responses.remote(prompt=str(number), **more) for number in range(prompts)])
    return tuple((end - start) / prompts * 1e3 for start, end in zip(before, now(), strict=True))


def main() -> None:
    """Print the median of the rounds, and their range."""
    tokenizer = make_tokenizer()
    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False)
    engine = Engine.remote()
    more: dict[str, dict[str, Any]] = {"with the tokenizer": {"hf_tokenizer": tokenizer}, "without it": {}}
    for name, prompts in PROMPTS.items():
        milliseconds(engine, prompts, **more[name])  # the first one imports
        rounds = [milliseconds(engine, prompts, **more[name]) for _ in range(ROUNDS)]
        for what, values in zip(MEASURED, zip(*rounds, strict=True), strict=True):
            span = f"{min(values):.2f} to {max(values):.2f}"
            print(f"{name}: {statistics.median(values):.2f} ms a prompt, {what} ({span}, {ROUNDS} rounds)")


if __name__ == "__main__":
    main()
