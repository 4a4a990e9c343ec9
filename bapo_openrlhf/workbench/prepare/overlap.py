"""Overlap of training and test data: problems that are the same, and problems with nearly the same words."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SHINGLE = 8  # Length of a shingle: so many words in a row.
NEAR = 0.5  # A training problem is near a test problem if it has this share of its shingles.
COMMON = 10  # A shingle in more test problems than this belongs to the prompt, not to a problem.

_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Pair:
    """A training problem and a test problem that overlap.

    Attributes:
        train, test: Their row ids.
        share: Share of the test problem's shingles that the training problem has. It is 1 if the problems are the same.
    """

    train: str
    test: str
    share: float

    @property
    def same(self) -> bool:
        """Whether the two are the same problem and not only near each other."""
        return self.share == 1.0


def shingles(text: str) -> set[int]:
    """Hashes of all sequences of SHINGLE words and marks, or the hash of the whole text if it is shorter."""
    words = _WORD.findall(text.lower())
    if len(words) < SHINGLE:
        return {hash(tuple(words))} if words else set()
    return {hash(tuple(words[i : i + SHINGLE])) for i in range(len(words) - SHINGLE + 1)}


class TestIndex:
    """Test problems by key, and by shingles if texts are compared."""

    __test__ = False  # Otherwise pytest takes it for a test class.

    def __init__(self, rows: Iterable[Mapping[str, str]], *, texts: bool) -> None:
        """Read the test problems.

        Args:
            rows: Rows of the benchmarks' files.
            texts: Whether texts are compared. That makes sense if different problems have different words.
        """
        self.by_key: dict[str, list[str]] = defaultdict(list)
        self.by_shingle: dict[int, list[str]] = defaultdict(list)
        for row in rows:
            self.by_key[row["key"]].append(row["id"])
            if texts:
                for shingle in shingles(row["input"]):
                    self.by_shingle[shingle].append(row["id"])
        for shingle in [shingle for shingle, ids in self.by_shingle.items() if len(ids) > COMMON]:
            del self.by_shingle[shingle]
        self.sizes = Counter(test for ids in self.by_shingle.values() for test in ids)

    def matches(self, row: Mapping[str, str]) -> list[Pair]:
        """The test problems that are the same as a training row or near it."""
        same = self.by_key.get(row["key"], [])
        pairs = [Pair(row["id"], test, 1.0) for test in same]
        if self.by_shingle:
            counts = Counter(test for shingle in shingles(row["input"]) for test in self.by_shingle.get(shingle, ()))
            # The share stays below 1 because two different problems can have the same shingles.
            pairs += [
                Pair(row["id"], test, min(count / self.sizes[test], 0.999))
                for test, count in counts.items()
                if count >= NEAR * self.sizes[test] and test not in same
            ]
        return pairs
