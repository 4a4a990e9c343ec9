"""The hard buffer B_bad, the replay buffer B_high and the cache: order, capacity, age, sampling, counters, state."""

import pickle
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from one_step import uids

from bapo_openrlhf.adapt.buffers import HardBuffer, HardPrompt, ReplayBuffer, ResponseCache
from bapo_openrlhf.adapt.group import Prompt


def loaded(buffer, again, forgotten):
    """The buffer after a trip through plain data, into one that held a group before."""
    again.add(forgotten)
    again.load_state_dict(pickle.loads(pickle.dumps(buffer.state_dict())))
    return again


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

    @given(
        capacity=st.integers(1, 5),
        actions=st.lists(
            st.tuples(st.sampled_from(["add", "add", "remove", "load"]), st.sampled_from("abcdefg")), max_size=40
        ),
    )
    def test_behaves_as_a_plain_list(self, make_group, capacity, actions):
        buffer, expected, gone = HardBuffer(capacity), [], Counter()
        for step, (action, name) in enumerate(actions):
            prompt = Prompt(name, {"target": 3}, ["a.png"])
            rest = [entry for entry in expected if entry.prompt != prompt]
            there = len(rest) < len(expected)
            if action == "load":
                buffer = loaded(buffer, HardBuffer(capacity), make_group(0))
            elif action == "remove":
                assert buffer.remove(prompt) is there
                gone["removed"] += there
                expected = rest
            else:
                buffer.add(make_group(step % 3, size=30, prompt=prompt, step=step))
                expected = [*rest, HardPrompt(prompt, Fraction(step % 3, 30), step)]
                gone.update(added=1, replaced=there, evicted=len(expected) > capacity)
                expected = expected[-capacity:]
            assert buffer.oldest(9) == expected and len(buffer) == len(expected)
            buffer.check()
        assert +buffer.counts == +gone

    def test_its_state_is_as_in_older_checkpoints(self, make_group):
        buffer = HardBuffer(3)
        buffer.add(make_group(4, size=30, prompt=Prompt("c", "1", ["a.png"]), step=3))
        prompt = {"text": "c", "label": "1", "images": ["a.png"]}
        assert buffer.state_dict()["entries"] == [{"prompt": prompt, "mean": "2/15", "step": 3}]


class TestReplayBuffer:
    @given(
        capacity=st.integers(1, 5),
        max_age=st.none() | st.integers(0, 3),
        actions=st.lists(st.sampled_from(["add", "add", "expire", "remove", "load"]), min_size=9, max_size=40),
    )
    def test_behaves_as_a_plain_list(self, make_group, capacity, max_age, actions):
        """A group is kept through max_age and no longer. One that is not there is not taken out."""
        buffer, expected, gone = ReplayBuffer(capacity, max_age), [], Counter()
        for step, action in enumerate(actions):
            if action == "add":
                expected.append(make_group(step % 8, step=step, weights_version=0))
                buffer.add(expected[-1])
                gone.update(added=1, evicted=len(expected) > capacity)
                expected = expected[-capacity:]
            elif action == "expire":
                buffer.expire(step)
                young = [group for group in expected if max_age is None or step - group.step <= max_age]
                gone["expired"] += len(expected) - len(young)
                expected = young
            elif action == "remove":
                buffer.remove([*expected[1:2], make_group(4)])
                gone["evicted"] += len(expected[1:2])
                expected = expected[:1] + expected[2:]
            else:
                buffer = loaded(buffer, ReplayBuffer(capacity, max_age), make_group(4))
            assert [(group.uid, group.step, group.rewards) for group in buffer] == [
                (group.uid, group.step, group.rewards) for group in expected
            ]
            buffer.check()
        assert +buffer.counts == +gone

    def test_sample_size(self, make_group):
        buffer, rng = ReplayBuffer(9, max_age=3), np.random.default_rng(1)
        assert buffer.sample(4, rng) == []
        for uid in range(6):
            buffer.add(make_group(4, uid=uid))
        for count, size in ((-2, 0), (0, 0), (1, 1), (6, 6), (7, 6)):
            assert len(buffer.sample(count, rng)) == size
        assert len(buffer) == 6
        assert uids(buffer.sample(9, rng, lambda group: group.uid % 2 == 0)) == [0, 2, 4]

    def test_a_group_without_weight_is_never_drawn(self, make_group):
        buffer, rng = ReplayBuffer(9), np.random.default_rng(1)
        for right in range(6):
            buffer.add(make_group(right))
        first, second, *_ = buffer
        weights = {first.uid: 5e-324, second.uid: 1e9}  # the first one's share of all weights underflows
        assert buffer.sample(9, rng, priority=lambda group: weights.get(group.uid, 0.0)) == [second]
        assert buffer.sample(9, rng, priority=lambda group: 0.0) == []
        for wrong in (-1.0, np.nan, np.inf):
            with pytest.raises(ValueError, match=f"the priority of group {first.uid} is {wrong}"):
                buffer.sample(9, rng, priority=lambda group: wrong)  # noqa: B023


def test_impossible_settings_are_an_error():
    for kind, values, named in ((HardBuffer, (0,), "capacity 0"), (ReplayBuffer, (0, 3), "capacity 0"),
                               (ReplayBuffer, (1, -1), "max_age -1")):  # fmt: skip
        with pytest.raises(ValueError, match=named):
            kind(*values)


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


@pytest.mark.parametrize(("kind", "items", "message"), [
    (HardBuffer, "entries", "hard buffer lost entries"),
    (ReplayBuffer, "groups", "replay buffer lost entries"),
    (ResponseCache, "groups", "response cache lost responses"),
])  # fmt: skip
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
