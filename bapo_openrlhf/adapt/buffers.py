"""The hard buffer B_bad and the replay buffer B_high (Sec. 3.2), and a cache of responses by prompt.

They only store. What is stored, what is drawn and when is the method's choice. Each buffer counts what enters and what
leaves, so that nothing is lost silently: entered == left + still here, at any time. Each one reports its METRICS.
"""

import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from bapo_openrlhf.adapt.group import Group, Prompt, group_from_state, group_state, prompt_state
from bapo_openrlhf.adapt.metric import Metric, declare

Key = TypeVar("Key")
Entry = TypeVar("Entry")


class CountedStore(Generic[Key, Entry]):
    """At most `capacity` entries, first in, first out, one entry a key.

    A newer entry of a key replaces the older one and goes to the back. `counts` has what was `added` so far, and by
    reason what has left: `replaced`, `evicted` because the store was full, and the reasons of a subclass. `KIND` is
    what an error calls the store.

    Raises:
        ValueError: The capacity is below 1.
    """

    KIND: ClassVar[str]

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity {capacity} of the {self.KIND} must be at least 1")
        self.capacity = capacity
        self.counts: Counter[str] = Counter()
        self._entries: OrderedDict[Key, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def _put(self, key: Key, entry: Entry) -> None:
        if not self._drop(key, "replaced") and len(self) == self.capacity:
            self._drop_oldest()
        self._entries[key] = entry
        self.counts["added"] += 1

    def _drop(self, key: Key, reason: str) -> bool:
        if self._entries.pop(key, None) is None:
            return False
        self.counts[reason] += 1
        return True

    def _drop_oldest(self) -> None:
        self._drop(next(iter(self._entries)), "evicted")

    def _load(self, entries: Mapping[Key, Entry], counts: Mapping[str, int]) -> None:
        self._entries, self.counts = OrderedDict(entries), Counter(counts)
        while len(self) > self.capacity:
            self._drop_oldest()
        self.check()

    def check(self) -> None:
        """Raise RuntimeError unless everything that was added is still here or counted as gone."""
        gone = self.counts.total() - self.counts["added"]
        if self.counts["added"] != gone + len(self):
            raise RuntimeError(f"{self.KIND} lost entries: {dict(self.counts)}, holds {len(self)}")


@dataclass(frozen=True)
class HardPrompt:
    """A prompt that was too hard, its last group mean reward and that group's step. Eq. 6 needs no old responses."""

    prompt: Prompt
    mean: Fraction
    step: int


class HardBuffer(CountedStore[str, HardPrompt]):
    """B_bad: at most `capacity` prompts with a failed group (mean <= c1), first in, first out, one entry a prompt.

    A newer failure of a stored prompt replaces its entry and goes to the back. A newer fresh group that does not fail
    changes nothing, because Algorithm 1 takes no prompt out for it: the next re-evaluation decides. A prompt that is
    generated again stays here, but is not named a second time while it is in flight: between `send` and `back`. The
    `counts` are `added`, `replaced`, `evicted` and `removed`.

    Raises:
        ValueError: The capacity is below 1.
    """

    METRICS: ClassVar[tuple[Metric, ...]] = declare("""
        buffer/hard | prompts | Hard buffer | B_bad | Prompts stored because a group of theirs was at most c1.
        buffer/hard_age_mean | trainer steps | Age of the hard buffer | B_bad | Mean time since a stored prompt last \
            failed. Missing if none is stored.
    """)
    KIND = "hard buffer"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._in_flight: dict[str, None] = {}  # prompt ids, in the order in which they were sent

    def __contains__(self, prompt: Prompt) -> bool:
        return prompt.id in self._entries

    def add(self, group: Group) -> None:
        """Store the prompt of a failed group."""
        self._put(group.prompt.id, HardPrompt(group.prompt, group.mean, group.step))

    def remove(self, prompt: Prompt) -> bool:
        """Take a prompt out. False if the buffer does not hold it. One that is in flight stays so until `back`."""
        return self._drop(prompt.id, "removed")

    def postpone(self, prompt: Prompt) -> None:
        """Put a prompt last, if the buffer holds it."""
        if prompt in self:
            self._entries.move_to_end(prompt.id)

    def oldest(self, count: int) -> list[HardPrompt]:
        """Up to `count` entries that are not in flight, the oldest first. They stay in the buffer."""
        entries = (entry for prompt, entry in self._entries.items() if prompt not in self._in_flight)
        return list(itertools.islice(entries, count))

    def send(self, prompts: Iterable[Prompt]) -> None:
        """Mark prompts as in flight: they are generated again, and their groups have not come yet."""
        self._in_flight |= {prompt.id: None for prompt in prompts}

    def back(self, prompt: Prompt) -> None:
        """Note that a prompt has come back, with a group or without one."""
        self._in_flight.pop(prompt.id, None)

    def ages(self, step: int) -> list[int]:
        """Trainer steps since each entry was made."""
        return [step - entry.step for entry in self._entries.values()]

    def metrics(self, step: int) -> dict[str, float]:
        """Its METRICS at trainer step `step`, after a `check`."""
        self.check()
        age = {"buffer/hard_age_mean": float(np.mean(self.ages(step)))} if len(self) else {}
        return {"buffer/hard": len(self), **age}

    def state_dict(self) -> dict[str, Any]:
        """Entries in order and counters, as plain data."""
        entries = [
            {"prompt": prompt_state(entry.prompt), "mean": str(entry.mean), "step": entry.step}
            for entry in self._entries.values()
        ]
        return {"entries": entries, "counts": dict(self.counts), "in_flight": list(self._in_flight)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`. If the capacity is smaller than before, the oldest entries are evicted."""
        self._in_flight = dict.fromkeys(state["in_flight"])
        entries = (
            HardPrompt(Prompt(**item["prompt"]), Fraction(item["mean"]), item["step"]) for item in state["entries"]
        )
        self._load({entry.prompt.id: entry for entry in entries}, state["counts"])


class ReplayBuffer(CountedStore[int, Group]):
    """B_high: at most `capacity` informative groups with their behaviour log-probs, first in, first out.

    A group is kept for at most `max_age` trainer steps (3 in the paper). With None, groups never expire. The `counts`
    are `added`, `evicted` and `expired`.

    Raises:
        ValueError: The capacity is below 1, or max_age is negative.
    """

    METRICS: ClassVar[tuple[Metric, ...]] = declare("""
        buffer/replay | groups | Replay buffer | B_high | Groups stored for replay.
        buffer/replay_age_mean | trainer steps | Age of the replay buffer | B_high | Mean time since a stored group \
            was generated. Missing if none is stored.
        buffer/replay_added | groups | Groups added | | Groups that have entered the replay buffer so far.
        buffer/replay_evicted | groups | Groups evicted | | Groups that have left it so far, because it was full or \
            a newer group of their prompt came.
        buffer/replay_expired | groups | Groups expired | | Groups that have left it so far because of their age.
        buffer/replay_bytes | bytes | Size of the replay buffer | Eq. 4 | Size of its tokens and log-probs, with \
            those under the reference model once they are computed.
    """)

    KIND = "replay buffer"

    def __init__(self, capacity: int, max_age: int | None = None) -> None:
        super().__init__(capacity)
        if max_age is not None and max_age < 0:
            raise ValueError(f"max_age {max_age} of the replay buffer must not be negative")
        self.max_age = max_age

    def __iter__(self) -> Iterator[Group]:
        return iter(self._entries.values())

    def add(self, group: Group) -> None:
        """Store a group."""
        self._put(group.uid, group)

    def remove(self, groups: Iterable[Group]) -> None:
        """Take groups out, if the buffer holds them. They count as evicted."""
        for group in list(groups):  # they may come from this buffer
            self._drop(group.uid, "evicted")

    def expire(self, step: int) -> None:
        """Drop what is older than max_age at trainer step `step`."""
        old = [group for group in self if self.max_age is not None and step - group.step > self.max_age]
        for group in old:
            self._drop(group.uid, "expired")

    def sample(
        self,
        count: int,
        rng: np.random.Generator,
        accept: Callable[[Group], bool] = lambda group: True,
        priority: Callable[[Group], float] | None = None,
    ) -> list[Group]:
        """S(B_high, min(|B_high|, count)) of Eq. 7: a draw without replacement among the accepted groups.

        The groups stay in the buffer and come back in the order in which they were stored, the oldest first. So draw
        only as many as fit: `batch.fitting` of a larger draw would keep the oldest.

        Args:
            priority: Weight of a group, at least 0. Each draw takes one of the groups left with probability
                proportional to it, and never one whose share of all weights is 0. None means that all groups are
                equally likely.

        Raises:
            ValueError: A weight is negative or not finite.
        """
        candidates, odds = [group for group in self if accept(group)], None
        if priority is not None and candidates:
            weights = np.array([priority(group) for group in candidates], float)
            for group, weight in zip(candidates, weights, strict=True):
                if not 0 <= weight < np.inf:
                    raise ValueError(f"the priority of group {group.uid} is {weight}; it must be finite and at least 0")
            odds = weights / (weights.sum() or 1.0)
            candidates, odds = [group for group, share in zip(candidates, odds, strict=True) if share], odds[odds > 0]
        count = min(len(candidates), max(count, 0))
        places = sorted(rng.choice(len(candidates), size=count, replace=False, p=odds).tolist()) if count else []
        return [candidates[index] for index in places]

    def ages(self, step: int) -> list[int]:
        """Trainer steps since each group was generated."""
        return [step - group.step for group in self]

    @property
    def nbytes(self) -> int:
        """Bytes of stored tokens and log-probs."""
        return sum(group.nbytes for group in self)

    def metrics(self, step: int) -> dict[str, float]:
        """Its METRICS at trainer step `step`, after a `check`. If groups never expire, there is no count of them."""
        self.check()
        numbers = {"buffer/replay": len(self), "buffer/replay_bytes": self.nbytes}
        for end in ("added", "evicted") if self.max_age is None else ("added", "evicted", "expired"):
            numbers[f"buffer/replay_{end}"] = self.counts[end]
        return numbers | ({"buffer/replay_age_mean": float(np.mean(self.ages(step)))} if len(self) else {})

    def state_dict(self) -> dict[str, Any]:
        """Groups in order and counters, as plain data and arrays."""
        return {"groups": list(map(group_state, self)), "counts": dict(self.counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`. If the capacity is smaller than before, the oldest groups are evicted."""
        self._load({group.uid: group for group in map(group_from_state, state["groups"])}, state["counts"])


class ResponseCache:
    """The last responses of each prompt, at most `capacity`, as the groups that they were generated in.

    The oldest group of a prompt may have lost its first responses. `counts` are numbers of responses: those `added` and
    not `evicted` are here. `nbytes`, of tokens and sampled log-probs, is updated with every change, because the cache
    may hold all prompts of the data.
    """

    METRICS: ClassVar[tuple[Metric, ...]] = declare("""
        cache/prompts | prompts | Prompts in the cache | | Prompts with stored responses.
        cache/responses | responses | Responses in the cache | | Responses that are stored.
        cache/bytes | bytes | Size of the cache | | Size of the stored responses' tokens and sampled log-probs.
        cache/added | responses | Responses added | | Responses that have entered the cache so far.
        cache/evicted | responses | Responses evicted | | Responses that newer ones have replaced so far.
    """)

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.counts: Counter[str] = Counter()
        self.nbytes = 0
        self._groups: dict[str, deque[Group]] = {}  # by prompt id, oldest first

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return (group for groups in self._groups.values() for group in groups)

    def groups(self, prompt: Prompt) -> list[Group]:
        """What is cached of a prompt, oldest first."""
        return list(self._groups.get(prompt.id, ()))

    def add(self, group: Group) -> None:
        """Cache the responses of a group."""
        self.counts["added"] += group.size
        self._put(group)

    def _put(self, group: Group) -> None:
        groups = self._groups.setdefault(group.prompt.id, deque())
        groups.append(group)
        self.nbytes += group.sampled_nbytes
        excess = sum(group.size for group in groups) - self.capacity
        while excess > 0:
            oldest = groups.popleft()
            evictions = oldest.responses[:excess]
            if len(evictions) < oldest.size:
                groups.appendleft(replace(oldest, responses=oldest.responses[excess:]))
            self.nbytes -= sum(response.sampled_nbytes for response in evictions)
            self.counts["evicted"] += len(evictions)
            excess -= len(evictions)

    def metrics(self) -> dict[str, float]:
        """Its METRICS."""
        added, evicted = self.counts["added"], self.counts["evicted"]
        return {
            "cache/prompts": len(self),
            "cache/responses": added - evicted,
            "cache/bytes": self.nbytes,
            "cache/added": added,
            "cache/evicted": evicted,
        }

    def check(self) -> None:
        """Raise RuntimeError unless every response that was added is still here or counted as gone. Reads them all."""
        count = sum(group.size for group in self)
        if self.counts["added"] != self.counts["evicted"] + count:
            raise RuntimeError(f"response cache lost responses: {dict(self.counts)}, holds {count}")

    def state_dict(self) -> dict[str, Any]:
        """Groups and counters, as plain data and arrays. It raises RuntimeError if a response was lost (`check`)."""
        self.check()
        return {"groups": [group_state(group) for group in self], "counts": dict(self.counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`. If the capacity is smaller than before, the oldest responses are evicted."""
        self.counts = Counter(state["counts"])
        self.nbytes = 0
        self._groups = {}
        for group in map(group_from_state, state["groups"]):
            self._put(group)
        self.check()
