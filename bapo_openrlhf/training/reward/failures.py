"""Failed calls of the user's reward function or agent: how many, what was wrong most often, when a run stops."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Self


@dataclass
class Failures:
    """Failed calls.

    Attributes:
        kinds: Their number by kind, see `RewardFailure`.
        causes: Their number by kind and place (FILE:LINE, empty if unknown).
        first: What the first one of each kind and place said, on one line.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    causes: Counter[tuple[str, str]] = field(default_factory=Counter)
    first: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, kind: str, what: str, place: str) -> None:
        """Count a failed call. Of a text of several lines only the first one counts."""
        self.kinds[kind] += 1
        self.causes[kind, place] += 1
        self.first.setdefault((kind, place), " ".join((what.splitlines() or [""])[0].split())[:300])

    @classmethod
    def of(cls, parts: Iterable[Self]) -> Self:
        """Those of all parts together."""
        whole = cls()
        for part in parts:
            whole.kinds.update(part.kinds)
            whole.causes.update(part.causes)
            whole.first = part.first | whole.first
        return whole

    def __str__(self) -> str:
        """The numbers by kind, then the commonest cause with its place. It is empty if no call failed."""
        if not self.kinds:
            return ""
        calls = ", ".join(f"{count} x {kind}" for kind, count in self.kinds.items())
        ((cause, count),) = self.causes.most_common(1)
        where = f" ({cause[1]})" if cause[1] else ""
        return (
            f"Failed calls of the reward function or agent so far: {calls}. "
            f"The commonest cause, {count} of {self.kinds.total()}: {self.first[cause]}{where}"
        )


class UnusableGroups:
    """Warns of groups that cannot be used, and stops a run that has so many that something must be broken.

    Args:
        max_share: Largest share of such groups (`--adapt.max_failed_share`).
        warn: Writes down a warning: step, kind and text.
        failed_calls: What the rollout engines say of failed calls, to go on a sentence.
    """

    def __init__(
        self, *, max_share: float, warn: Callable[[int, str, str], None], failed_calls: Callable[[], str]
    ) -> None:
        self.max_share, self.warn, self.failed_calls = max_share, warn, failed_calls

    def check(self, step: int, kind: str, unusable: int, total: int, what: str) -> None:
        """Warn of the unusable groups of a step.

        Args:
            step: The step, counted from 1.
            kind: The state of such groups.
            unusable: Number of groups that cannot be used.
            total: Number of all groups.
            what: What is wrong with them.

        Raises:
            RuntimeError: Their share is larger than --adapt.max_failed_share.
        """
        if not unusable:
            return
        counted = f"{unusable} of {total} groups {what}"
        if unusable > self.max_share * total:
            raise RuntimeError(
                f"{counted}; adapt.max_failed_share is {self.max_share}. The log of the rollout engine has each error"
                f"{self.failed_calls()}"
            )
        self.warn(step, kind, f"{counted}, and are left out{self.failed_calls()}")
