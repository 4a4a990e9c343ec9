"""What the rollout engines are asked for in one step: prompts of some kinds, each with a seed, and their samples."""

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import ray
from openrlhf.trainer.ppo_utils.experience import Experience
from tqdm import tqdm

from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.training.trainer.engine_calls import EngineCalls
from bapo_openrlhf.training.trainer.samples import generated_sample
from bapo_openrlhf.training.wire.responses import Prefix

NOTHING: Mapping[str, Any] = {}


def prompt_seed(seed: int, step: int, kind: str, number: int) -> int:
    """Seed of the `number`-th prompt of a kind in a step. It is the same in every run and for every engine."""
    digest = hashlib.blake2b(f"{seed}/{step}/{kind}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


class Ask:
    """Asks the engines for responses of one step.

    Args:
        calls: Calls of the engines.
        step: The trainer step.
        generation: OpenRLHF's arguments of the generation.
    """

    def __init__(self, calls: EngineCalls, step: int, generation: Mapping[str, Any]) -> None:
        self.calls, self.step, self.generation = calls, step, generation
        train = calls.args.train
        # Without a seed, vLLM has one random stream for all requests, in the order in which they arrive. This is
        # faster, and such a run cannot be repeated.
        self._seed = train.seed if train.full_determinism_enable else None
        self._numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)

    def send(
        self,
        kind: str,
        prompts: Sequence[Prompt],
        *,
        numbers: Iterable[int] | None = None,
        size: int | None = None,
        extras: Iterable[Mapping[str, Any]] = itertools.repeat(NOTHING),
    ) -> list[Any]:
        """Send prompts to the engines. Returns Ray's reference to the responses of each.

        Args:
            kind: What the prompts are for, such as "fresh" or "evaluation". Each kind has seeds of its own.
            prompts: The prompts.
            numbers: The number of each prompt, of which its seed is made; those that follow if none are given.
            size: Number of responses to each; that of the generation if it is None.
            extras: What else the request of each has of its own.
        """
        requests = []
        for prompt, number, extra in zip(prompts, numbers or self._numbers[kind], extras, strict=False):
            seed = None if self._seed is None else prompt_seed(self._seed, self.step, kind, number)
            prefix = {"prefix": Prefix(np.array(prompt.prefix, dtype=np.int32))} if prompt.prefix else NOTHING
            own = {"prompt": prompt.text, "label": prompt.label, "images": prompt.images, "seed": seed}
            requests.append({**own, **extra, **prefix})
        generation = self.generation if size is None else {**self.generation, "n_samples_per_prompt": size}
        return self.calls.send(requests, **generation) if requests else []

    def groups(self, refs: Sequence[Any]) -> list[list[Experience]]:
        """The samples of each request, in order. Those that are there are made while others are generated."""
        places, pending = {ref: place for place, ref in enumerate(refs)}, list(refs)
        groups: list[list[Experience]] = [[] for _ in refs]
        with tqdm(total=len(refs), desc="Generate samples", disable=not refs) as bar:
            while pending:
                (ready,), pending = ray.wait(pending, num_returns=1)
                groups[places[ready]] = [generated_sample(one, **self.generation) for one in ray.get(ready)]
                bar.update()
        return groups
