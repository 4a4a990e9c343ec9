"""The hard buffer B_bad and the replay buffer B_high (Sec. 3.2), and a cache of responses by prompt.

They only store. What is stored, what is drawn and when is the method's choice. Each buffer counts what enters and what
leaves, so that nothing is lost silently: entered == left + still here, at any time. Each one reports its METRICS.
"""

import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

from bapo_openrlhf.adapt.group import Group, Prompt
from bapo_openrlhf.adapt.metric import Metric, declare
from bapo_openrlhf.adapt.state import group_from_state, group_state, prompt_state


@dataclass(frozen=True)
class HardPrompt:
    """A prompt that was too hard, its last group mean reward and that group's step. Eq. 6 needs no old responses."""

    prompt: Prompt
    mean: Fraction
    step: int


class HardBuffer:
    """B_bad: at most `capacity` prompts with a failed group (mean <= c1), first in, first out, one entry a prompt.

    A newer failure of a stored prompt replaces its entry and goes to the back. A newer fresh group that does not fail
    changes nothing, because Algorithm 1 takes no prompt out for it: the next re-evaluation decides. A prompt that is
    generated again stays here, but is not named a second time while it is in flight: between `send` and `back`.

    Raises:
        ValueError: The capacity is below 1.
    """

    METRICS: ClassVar[tuple[Metric, ...]] = declare("""
        buffer/hard | prompts | Hard buffer | B_bad | Prompts stored because a group of theirs was at most c1.
        buffer/hard_age_mean | trainer steps | Age of the hard buffer | B_bad | Mean time since a stored prompt last \
            failed. Missing if none is stored.
    """)

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity {capacity} of the hard buffer must be at least 1")
        self.capacity = capacity
        self.counts: Counter[str] = Counter()  # added = replaced + evicted + removed + len(self)
        self._entries: OrderedDict[str, HardPrompt] = OrderedDict()
        self._in_flight: dict[str, None] = {}  # prompt ids, in the order in which they were sent

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, prompt: Prompt) -> bool:
        return prompt.id in self._entries

    def add(self, group: Group) -> None:
        """Store the prompt of a failed group."""
        if self._entries.pop(group.prompt.id, None) is not None:
            self.counts["replaced"] += 1
        elif len(self._entries) == self.capacity:
            self._entries.popitem(last=False)
            self.counts["evicted"] += 1
        self._entries[group.prompt.id] = HardPrompt(group.prompt, group.mean, group.step)
        self.counts["added"] += 1

    def remove(self, prompt: Prompt) -> bool:
        """Take a prompt out. False if the buffer does not hold it. One that is in flight stays so until `back`."""
        if self._entries.pop(prompt.id, None) is None:
            return False
        self.counts["removed"] += 1
        return True

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
        """Its METRICS at trainer step `step`."""
        age = {"buffer/hard_age_mean": float(np.mean(self.ages(step)))} if len(self) else {}
        return {"buffer/hard": len(self), **age}

    def check(self) -> None:
        """Raise RuntimeError unless everything that was added is still here or counted as gone."""
        departures = self.counts["replaced"] + self.counts["evicted"] + self.counts["removed"]
        if self.counts["added"] != departures + len(self):
            raise RuntimeError(f"hard buffer lost entries: {dict(self.counts)}, holds {len(self)}")

    def state_dict(self) -> dict[str, Any]:
        """Entries in order and counters, as plain data."""
        entries = [
            {"prompt": prompt_state(entry.prompt), "mean": str(entry.mean), "step": entry.step}
            for entry in self._entries.values()
        ]
        return {"entries": entries, "counts": dict(self.counts), "in_flight": list(self._in_flight)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`. If the capacity is smaller than before, the oldest entries are evicted."""
        self._entries.clear()
        self._in_flight = dict.fromkeys(state["in_flight"])
        self.counts = Counter(state["counts"])
        for item in state["entries"]:
            prompt = Prompt(**item["prompt"])
            self._entries[prompt.id] = HardPrompt(prompt, Fraction(item["mean"]), item["step"])
        while len(self._entries) > self.capacity:
            self._entries.popitem(last=False)
            self.counts["evicted"] += 1
        self.check()


class ReplayBuffer:
    """B_high: at most `capacity` informative groups with their behaviour log-probs, first in, first out.

    A group is kept for at most `max_age` trainer steps (3 in the paper). With None, groups never expire.

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

    def __init__(self, capacity: int, max_age: int | None = None) -> None:
        if capacity < 1:
            raise ValueError(f"capacity {capacity} of the replay buffer must be at least 1")
        if max_age is not None and max_age < 0:
            raise ValueError(f"max_age {max_age} of the replay buffer must not be negative")
        self.capacity = capacity
        self.max_age = max_age
        self.counts: Counter[str] = Counter()  # added = expired + evicted + len(self)
        self._groups: deque[Group] = deque()

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups)

    def add(self, group: Group) -> None:
        """Store a group."""
        if len(self._groups) == self.capacity:
            self._groups.popleft()
            self.counts["evicted"] += 1
        self._groups.append(group)
        self.counts["added"] += 1

    def remove(self, groups: Iterable[Group]) -> None:
        """Take groups out, if the buffer holds them. They count as evicted."""
        uids, size = {group.uid for group in groups}, len(self)
        self._groups = deque(group for group in self._groups if group.uid not in uids)
        self.counts["evicted"] += size - len(self)

    def expire(self, step: int) -> None:
        """Drop what is older than max_age at trainer step `step`."""
        while self.max_age is not None and self._groups and step - self._groups[0].step > self.max_age:
            self._groups.popleft()
            self.counts["expired"] += 1

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
        candidates, odds = [group for group in self._groups if accept(group)], None
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
        return [step - group.step for group in self._groups]

    @property
    def nbytes(self) -> int:
        """Bytes of stored tokens and log-probs."""
        return sum(group.nbytes for group in self._groups)

    def metrics(self, step: int) -> dict[str, float]:
        """Its METRICS at trainer step `step`. A buffer whose groups never expire has no count of them."""
        numbers = {"buffer/replay": len(self), "buffer/replay_bytes": self.nbytes}
        for end in ("added", "evicted") if self.max_age is None else ("added", "evicted", "expired"):
            numbers[f"buffer/replay_{end}"] = self.counts[end]
        return numbers | ({"buffer/replay_age_mean": float(np.mean(self.ages(step)))} if len(self) else {})

    def check(self) -> None:
        """Raise RuntimeError unless everything that was added is still here or counted as gone."""
        if self.counts["added"] != self.counts["expired"] + self.counts["evicted"] + len(self):
            raise RuntimeError(f"replay buffer lost groups: {dict(self.counts)}, holds {len(self)}")

    def state_dict(self) -> dict[str, Any]:
        """Groups in order and counters, as plain data and arrays."""
        return {"groups": [group_state(group) for group in self._groups], "counts": dict(self.counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`. If the capacity is smaller than before, the oldest groups are evicted."""
        self.counts = Counter(state["counts"])
        self._groups = deque(group_from_state(item) for item in state["groups"])
        while len(self._groups) > self.capacity:
            self._groups.popleft()
            self.counts["evicted"] += 1
        self.check()


class ResponseCache:
    """The last responses of each prompt, at most `capacity`, as the groups that they were generated in.

    The oldest group of a prompt may have lost its first responses. `counts` are numbers of responses: added = evicted +
    self.responses. `responses` and `nbytes`, of tokens and sampled log-probs, are updated with every change, because
    the cache may hold all prompts of the data.
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
        self.responses = self.nbytes = 0
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
        self._groups.setdefault(group.prompt.id, deque()).append(group)
        self.counts["added"] += group.size
        self._count(group)
        self._evict(group.prompt.id)

    def _count(self, group: Group, sign: int = 1) -> None:
        self.responses += sign * group.size
        self.nbytes += sign * group.sampled_nbytes

    def _evict(self, prompt_id: str) -> None:
        groups = self._groups[prompt_id]
        excess = sum(group.size for group in groups) - self.capacity
        while excess > 0:
            oldest = groups.popleft()
            self._count(oldest, -1)
            if oldest.size > excess:
                groups.appendleft(replace(oldest, responses=oldest.responses[excess:]))
                self._count(groups[0])
            evictions = min(oldest.size, excess)
            self.counts["evicted"] += evictions
            excess -= evictions

    def metrics(self) -> dict[str, float]:
        """Its METRICS."""
        counts = {f"cache/{end}": self.counts[end] for end in ("added", "evicted")}
        return {"cache/prompts": len(self), "cache/responses": self.responses, "cache/bytes": self.nbytes, **counts}

    def check(self) -> None:
        """Raise RuntimeError unless every response that was added is still here or counted as gone. Reads them all."""
        count = sum(group.size for group in self)
        if not self.counts["added"] - self.counts["evicted"] == self.responses == count:
            raise RuntimeError(f"response cache lost responses: {dict(self.counts)}, holds {count}")

    def state_dict(self) -> dict[str, Any]:
        """Groups and counters, as plain data and arrays. It raises RuntimeError if a response was lost (`check`)."""
        self.check()
        return {"groups": [group_state(group) for group in self], "counts": dict(self.counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`. If the capacity is smaller than before, the oldest responses are evicted."""
        self.counts = Counter(state["counts"])
        self.responses = self.nbytes = 0
        self._groups = {}
        for group in map(group_from_state, state["groups"]):
            self._groups.setdefault(group.prompt.id, deque()).append(group)
            self._count(group)
        for prompt_id in self._groups:
            self._evict(prompt_id)
        self.check()
