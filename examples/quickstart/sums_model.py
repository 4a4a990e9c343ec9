"""The base model of the quickstart: it is taught sums with their steps (sums.py), at last with slips."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import sums
from base_model import ModelSettings


@dataclass(frozen=True)
class SumsModelSettings(ModelSettings):
    """What the model depends on.

    Attributes:
        slip: Probability of a slip in the second phase, for each step that crosses a multiple of ten.
    """

    steps: int = 300
    clean: float = 0.75
    mix: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(sums.TERMS, 1.0))
    slip: float = 0.7

    @property
    def levels(self) -> Collection[str]:
        """Those of sums.py."""
        return sums.TERMS

    def draw(self, rng: random.Random, level: str, clean: bool) -> tuple[str, str] | None:
        """A sum and its answer. None means that it is for evaluations only."""
        one = sums.draw(rng, sums.TERMS[level])
        if one.is_held_out:
            return None
        return one.prompt, one.worked(one.results() if clean else one.results(self.slip, rng))
