"""What the rollout engines are asked for in one step: prompts of some kinds, each with a seed, and their responses."""

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import ray
from tqdm import tqdm

from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.training.trainer.engine_calls import EngineCalls
from bapo_openrlhf.training.trainer.samples import Answers, generated_response
from bapo_openrlhf.training.wire.responses import Prefix

NOTHING: Mapping[str, Any] = {}


def prompt_seed(seed: int, step: int, kind: str, number: int) -> int:
    """Seed of the `number`-th prompt of a kind in a step. It is the same in every run and for every engine."""
    digest = hashlib.blake2b(f"{seed}/{step}/{kind}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


class Sent(NamedTuple):
    """A prompt that was sent to an engine, and Ray's reference to the responses."""

    prompt: Prompt
    ref: Any


class Ask:
    """Asks the engines for responses of one step."""

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
    ) -> list[Sent]:
        """Send prompts to the engines.

        Args:
            kind: What the prompts are for, such as "fresh" or "evaluation". Each kind has seeds of its own.
            numbers: The number of each prompt, of which its seed is made; those that follow if none are given.
            size: Number of responses to each; that of the generation if it is None.
        """
        requests = []
        for prompt, number, extra in zip(prompts, numbers or self._numbers[kind], extras, strict=False):
            seed = None if self._seed is None else prompt_seed(self._seed, self.step, kind, number)
            prefix = {"prefix": Prefix(np.array(prompt.prefix, dtype=np.int32))} if prompt.prefix else NOTHING
            own = {"prompt": prompt.text, "label": prompt.label, "images": prompt.images, "seed": seed}
            requests.append({**own, **extra, **prefix})
        generation = self.generation if size is None else {**self.generation, "n_samples_per_prompt": size}
        refs = self.calls.send(requests, **generation) if requests else []
        return list(map(Sent, prompts, refs))

    def answers(self, sent: Sequence[Sent]) -> list[Answers]:
        """The responses to each prompt, in order. Those that are there are converted while others are generated."""
        answers, pending = {one.ref: Answers(one.prompt, []) for one in sent}, [one.ref for one in sent]
        with tqdm(total=len(sent), desc="Generate samples", disable=not sent) as bar:
            while pending:
                (ready,), pending = ray.wait(pending, num_returns=1)
                answers[ready].responses += [generated_response(one, **self.generation) for one in ray.get(ready)]
                bar.update()
        return list(answers.values())
