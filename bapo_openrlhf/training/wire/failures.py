"""Failed calls of the user's reward function or agent: how many, what was wrong most often, when a run stops."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self


@dataclass
class Failures:
    """Failed calls by kind (see `RewardFailure`), and by place (FILE:LINE, or empty), with what the first one said."""

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
