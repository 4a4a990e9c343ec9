"""What the rollout engines are asked for: prompts of one kind in one step, each with a number and a seed."""

import hashlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


def prompt_seed(seed: int, step: int, kind: str, number: int) -> int:
    """Seed of the `number`-th prompt that a step dispatches. It is the same in every run and for every engine."""
    digest = hashlib.blake2b(f"{seed}/{step}/{kind}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


@dataclass(frozen=True)
class Ask:
    """Prompts of one kind that a step sends to the engines. They may be sent in several rounds.

    Attributes:
        kind: What the prompts are for, such as "fresh" or "evaluation". Each kind has seeds of its own.
        step: The trainer step.
        numbers: The number of one request after the other. It comes back with the responses, because they arrive in the
            order in which they are finished.
        extras: What else one request after the other has of its own.
    """

    kind: str
    step: int
    numbers: Iterator[int] = field(default_factory=itertools.count)
    extras: Iterator[Mapping[str, Any]] = field(default_factory=lambda: itertools.repeat({}))

    def requests(self, seed: int | None) -> Iterator[dict[str, Any]]:
        """What one request after the other does not share with the others.

        Args:
            seed: The run's seed. None: vLLM has one random stream for all requests, in the order in which they arrive.
                This is faster, and such a run cannot be repeated.
        """
        for number, extra in zip(self.numbers, self.extras, strict=False):
            own = None if seed is None else prompt_seed(seed, self.step, self.kind, number)
            yield {"number": number, "seed": own, **extra}
