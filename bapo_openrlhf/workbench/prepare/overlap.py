"""Overlap of training and test data: problems that are the same, and problems whose words nearly are."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SHINGLE = 8  # words in a row
NEAR = 0.5  # share of a test problem's shingles that one training problem must have
COMMON = 10  # a shingle in more test problems than this is a phrase of the prompt, not of a problem

_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Pair:
    """A training problem and the test problem that it gives away.

    Attributes:
        train, test: their row ids.
        share: of the test problem's shingles that the training problem has; 1 where the two are the same problem.
    """

    train: str
    test: str
    share: float

    @property
    def same(self) -> bool:
        """Whether the two are the same problem, not only near to it."""
        return self.share == 1.0


def shingles(text: str) -> set[int]:
    """Hashes of all runs of SHINGLE words and marks; of the whole text, where it is shorter."""
    words = _WORD.findall(text.lower())
    if len(words) < SHINGLE:
        return {hash(tuple(words))} if words else set()
    return {hash(tuple(words[i : i + SHINGLE])) for i in range(len(words) - SHINGLE + 1)}


class TestIndex:
    """Test problems, by key and (where texts are compared) by shingles."""

    __test__ = False  # pytest takes the name for a test class

    def __init__(self, rows: Iterable[Mapping[str, str]], *, texts: bool) -> None:
        """Args:
        rows: rows of the benchmarks' files.
        texts: whether the words tell problems apart; then near ones are looked for.
        """
        self.by_key: dict[str, list[str]] = defaultdict(list)
        self.sizes: dict[str, int] = {}
        self.by_shingle: dict[int, list[str]] = defaultdict(list)
        for row in rows:
            self.by_key[row["key"]].append(row["id"])
            if texts:
                for shingle in shingles(row["input"]):
                    self.by_shingle[shingle].append(row["id"])
        for shingle in [shingle for shingle, ids in self.by_shingle.items() if len(ids) > COMMON]:
            del self.by_shingle[shingle]
        for ids in self.by_shingle.values():
            for test in ids:
                self.sizes[test] = self.sizes.get(test, 0) + 1

    def matches(self, row: Mapping[str, str]) -> list[Pair]:
        """The test problems that a training row is the same as or near to."""
        same = self.by_key.get(row["key"], [])
        pairs = [Pair(row["id"], test, 1.0) for test in same]
        if self.by_shingle:
            counts = Counter(test for shingle in shingles(row["input"]) for test in self.by_shingle.get(shingle, ()))
            # Below 1: with other marks or case two texts can have the same shingles and be two problems.
            pairs += [
                Pair(row["id"], test, min(count / self.sizes[test], 0.999))
                for test, count in counts.items()
                if count >= NEAR * self.sizes[test] and test not in same
            ]
        return pairs
