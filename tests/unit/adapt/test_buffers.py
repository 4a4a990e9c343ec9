"""The hard buffer B_bad, the replay buffer B_high and the cache: order, capacity, age, sampling, counters, state."""

from __future__ import annotations

import math
import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_openrlhf.adapt.buffers import HardBuffer, ReplayBuffer, ResponseCache
from bapo_openrlhf.adapt.group import Prompt


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def texts(buffer: HardBuffer) -> list[str]:
    return [entry.prompt.text for entry in buffer.oldest(len(buffer))]


def uids(groups) -> list[int]:
    return [group.uid for group in groups]


class TestHardBuffer:
    def test_a_prompt_in_flight_is_not_named_but_stays(self, make_group):
        buffer = HardBuffer(9)
        a, b, c = (make_group(0, prompt=name) for name in "abc")
        for group in (a, b, c):
            buffer.add(group)
        buffer.send([a.prompt, c.prompt])
        again = HardBuffer(9)
        again.load_state_dict(buffer.state_dict())
        for each in (buffer, again):
            assert [entry.prompt.text for entry in each.oldest(9)] == ["b"] and len(each) == 3 and a.prompt in each
            each.add(a)  # fails as a fresh prompt meanwhile
            assert [entry.prompt.text for entry in each.oldest(9)] == ["b"]
            each.back(c.prompt)
            each.back(a.prompt)
            assert [entry.prompt.text for entry in each.oldest(9)] == ["b", "c", "a"]
            each.check()

    @pytest.mark.parametrize("capacity", [0, -1])
    def test_a_capacity_of_nothing_is_an_error(self, capacity):
        with pytest.raises(ValueError, match=rf"capacity {capacity} of the hard buffer"):
            HardBuffer(capacity)

    @given(
        capacity=st.integers(1, 5),
        actions=st.lists(st.tuples(st.sampled_from(["add", "add", "remove"]), st.sampled_from("abcdefg")), max_size=40),
    )
    @settings(derandomize=True, database=None)
    def test_behaves_as_a_plain_list(self, make_group, capacity, actions):
        buffer, expected, gone = HardBuffer(capacity), [], Counter()
        for action, name in actions:
            there = name in expected
            if action == "remove":
                assert buffer.remove(Prompt(name)) is there
                gone["removed"] += there
            else:
                buffer.add(make_group(0, prompt=name))
                gone["added"] += 1
                gone["replaced"] += there
            expected = [other for other in expected if other != name] + [name] * (action == "add")
            if len(expected) > capacity:
                expected = expected[1:]
                gone["evicted"] += 1
            assert texts(buffer) == expected and len(buffer) == len(expected)
            buffer.check()
        assert +buffer.counts == +gone

    def test_state_round_trip(self, make_group):
        buffer = HardBuffer(3)
        prompts = [Prompt("a"), Prompt("b", {"target": 3}), Prompt("c", "1", ["a.png"]), Prompt("d")]
        for right, prompt in enumerate([*prompts, prompts[2]]):
            buffer.add(make_group(right, size=30, prompt=prompt, step=right))
        buffer.remove(prompts[1])
        state = pickle.loads(pickle.dumps(buffer.state_dict()))
        assert state["entries"] == [
            {"prompt": {"text": "d", "label": None, "images": None}, "mean": "1/10", "step": 3},
            {"prompt": {"text": "c", "label": "1", "images": ["a.png"]}, "mean": "2/15", "step": 4},
        ]
        again = HardBuffer(3)
        again.add(make_group(0, prompt="forgotten by the load"))
        again.load_state_dict(state)
        assert again.oldest(9) == buffer.oldest(9) and again.counts == buffer.counts
        for name in ("x", "d", "y", "z"):
            for each in (buffer, again):
                each.add(make_group(0, prompt=name, step=9))
            assert again.oldest(9) == buffer.oldest(9) and again.counts == buffer.counts


def everything(group) -> bool:
    return True


class TestReplayBuffer:
    @pytest.mark.parametrize(
        ("step", "kept"), [(2, [0, 1, 2]), (3, [0, 1, 2]), (4, [1, 2]), (5, [2]), (6, []), (99, [])]
    )
    def test_a_group_is_kept_through_max_age_and_no_longer(self, make_group, step, kept):
        buffer = ReplayBuffer(9, max_age=3)
        for uid in range(3):
            buffer.add(make_group(4, uid=uid, step=uid))
        buffer.expire(step)
        assert uids(buffer) == kept
        assert buffer.counts["expired"] == 3 - len(kept)
        buffer.check()

    def test_sample_size(self, make_group):
        buffer = ReplayBuffer(9, max_age=3)
        for uid in range(6):
            buffer.add(make_group(4, uid=uid))
        rng = generator()
        for count, size in ((-2, 0), (0, 0), (1, 1), (5, 5), (6, 6), (7, 6)):
            assert len(buffer.sample(count, rng, everything)) == size
        assert len(buffer) == 6
        assert len(buffer.sample(9, rng, lambda group: group.uid % 2 == 0)) == 3
        assert buffer.sample(9, rng, lambda group: False) == []
        assert ReplayBuffer(9, max_age=3).sample(4, rng, everything) == []

    def test_a_group_that_is_not_there_is_not_taken_out(self, make_group):
        buffer, group = ReplayBuffer(9), make_group(3)
        buffer.add(group)
        buffer.remove([make_group(4)])
        buffer.check()
        buffer.remove([group, make_group(4)])
        buffer.check()
        assert buffer.counts == {"added": 1, "evicted": 1}

    def test_a_group_without_weight_is_never_drawn(self, make_group):
        buffer, rng = ReplayBuffer(9), np.random.default_rng(1)
        for right in range(6):
            buffer.add(make_group(right))
        first, second, *_ = buffer
        weights = {first.uid: 5e-324, second.uid: 1e9}  # the first one's share of all weights underflows
        assert buffer.sample(9, rng, priority=lambda group: weights.get(group.uid, 0.0)) == [second]
        assert buffer.sample(9, rng, priority=lambda group: 0.0) == []
        for wrong in (-1.0, np.nan, np.inf):
            with pytest.raises(
                ValueError, match=f"the priority of group {first.uid} is {wrong}; it must be finite and"
            ):
                buffer.sample(9, rng, priority=lambda group: wrong)  # noqa: B023

    def test_every_subset_is_equally_likely(self, make_group):
        buffer = ReplayBuffer(9, max_age=3)
        for uid in range(9):
            buffer.add(make_group(4, uid=uid))
        rng, draws = generator(seed=4), 8_000
        seen = Counter(tuple(uids(buffer.sample(3, rng, lambda group: group.uid < 6))) for _ in range(draws))
        expected = draws / math.comb(6, 3)
        assert len(seen) == math.comb(6, 3)
        # chi-square with 19 degrees of freedom; 43.8 is its 99.9 % point
        assert sum((count - expected) ** 2 / expected for count in seen.values()) < 43.8

    @pytest.mark.parametrize(
        ("capacity", "max_age", "named"), [(0, 3, "capacity 0"), (-3, 3, "capacity -3"), (1, -1, "max_age -1")]
    )
    def test_impossible_settings_are_an_error(self, capacity, max_age, named):
        with pytest.raises(ValueError, match=rf"{named} of the replay buffer"):
            ReplayBuffer(capacity, max_age)

    def test_state_round_trip_draw_for_draw(self, make_group):
        buffer = ReplayBuffer(6, max_age=3)
        for uid in range(8):
            buffer.add(make_group(uid % 7 + 1, uid=uid, step=uid // 2, weights_version=0, extras={"score": uid}))
        buffer.expire(4)
        again = ReplayBuffer(6, max_age=3)
        again.add(make_group(4))  # forgotten by the load
        again.load_state_dict(pickle.loads(pickle.dumps(buffer.state_dict())))
        first, second = generator(7), generator(7)
        for step in (4, 5, 6):
            for each in (buffer, again):
                each.expire(step)
                each.add(make_group(4, uid=100 + step, step=step))
            assert uids(again) == uids(buffer) and again.nbytes == buffer.nbytes
            assert uids(again.sample(3, first, everything)) == uids(buffer.sample(3, second, everything))
            assert again.counts == buffer.counts
        for new, old in zip(again, buffer, strict=True):
            assert (new.step, new.weights_version, new.rewards) == (old.step, old.weights_version, old.rewards)
            assert new.responses[0].extras == old.responses[0].extras


def test_metrics_by_hand(make_group):
    """Groups of 8 responses of 3 + 2 tokens: 5 ids and 2 log-probs of 4 bytes each are 28 bytes."""
    hard, cache = HardBuffer(3), ResponseCache(10)
    bounded, unbounded = ReplayBuffer(3, max_age=3), ReplayBuffer(3)
    assert hard.metrics(0) == {"buffer/hard": 0} and "buffer/replay_age_mean" not in bounded.metrics(0)
    for step in range(4):
        for buffer in (hard, cache, bounded, unbounded):
            buffer.add(make_group(step, prompt="ab"[step % 2] if buffer is cache else None, step=step))
    bounded.expire(5)
    assert hard.metrics(5) == {"buffer/hard": 3, "buffer/hard_age_mean": 3}
    numbers = {"buffer/replay": 3, "buffer/replay_bytes": 3 * 8 * 28, "buffer/replay_added": 4}
    numbers |= {"buffer/replay_evicted": 1, "buffer/replay_age_mean": 3}
    assert unbounded.metrics(5) == numbers
    less = {"buffer/replay": 2, "buffer/replay_bytes": 2 * 8 * 28, "buffer/replay_age_mean": 2.5}
    assert bounded.metrics(5) == numbers | less | {"buffer/replay_expired": 1}
    kept = {"cache/prompts": 2, "cache/responses": 20, "cache/bytes": 20 * 28}
    assert cache.metrics() == kept | {"cache/added": 32, "cache/evicted": 12}


@pytest.mark.parametrize(
    ("kind", "items", "message"),
    [
        (HardBuffer, "entries", "hard buffer lost entries"),
        (ReplayBuffer, "groups", "replay buffer lost groups"),
        (ResponseCache, "groups", "response cache lost responses"),
    ],
)
class TestEveryBuffer:
    def filled(self, kind, make_group):
        """The last four of five. The cache has a limit for each prompt, and the hard buffer one entry a prompt."""
        buffer = kind(4)
        for uid in range(5):
            buffer.add(make_group([0.0], uid=uid, step=uid, prompt="a" if kind is ResponseCache else f"p{uid}"))
        buffer.check()
        return buffer

    def test_a_smaller_one_keeps_the_newest(self, make_group, kind, items, message):
        buffer, smaller = self.filled(kind, make_group), kind(2)
        smaller.load_state_dict(buffer.state_dict())
        steps = [[item["step"] for item in one.state_dict()[items]] for one in (buffer, smaller)]
        assert steps == [[1, 2, 3, 4], [3, 4]]
        assert (buffer.counts["evicted"], smaller.counts["evicted"]) == (1, 3)

    def test_what_is_lost_is_found(self, make_group, kind, items, message):
        buffer = self.filled(kind, make_group)
        state = buffer.state_dict()
        state[items].pop()
        with pytest.raises(RuntimeError, match=message):
            kind(4).load_state_dict(state)
        buffer.counts["evicted"] += 1
        with pytest.raises(RuntimeError, match=message):
            buffer.check()
