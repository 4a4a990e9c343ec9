"""Rollout-level replay: draws against the enumerated chances, and whole runs against the independent rules."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from fractions import Fraction as F

import numpy as np
import pytest
import reference_rules as rules
from hypothesis import given, settings
from hypothesis import strategies as st
from one_step import run, uids

from bapo_openrlhf.adapt.advantage import group_relative_advantages
from bapo_openrlhf.adapt.batch import Batch, drop
from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.methods.base import Method
from bapo_openrlhf.methods.rollout_replay import RolloutReplay


def rollout_replay(capacity: int = 8, **options) -> RolloutReplay:
    return RolloutReplay(capacity=capacity, **{"group_size": 8, "warm_up": 0} | options)


def names(groups) -> list[tuple[int, int]]:
    """Each response as the number of its group and its place there."""
    return [(group.uid, int(response.token_ids[0]) // 100) for group in groups for response in group.responses]


def advantages(group) -> np.ndarray:
    return group_relative_advantages(np.array(group.rewards, float), np.array(group.baseline, float))


class TestOptions:
    def test_defaults_are_those_of_the_public_implementation(self):
        method = RolloutReplay(capacity=4, group_size=8)
        assert isinstance(method, Method) and method.related_to_generated
        assert (method.replay_share, method.exponent, method.oldest) == (F(1, 2), 0.5, 10)
        assert (method.warm_up, method.buffer_responses, method.eps) == (20, 30_000, 1e-6)

    @pytest.mark.parametrize(
        ("name", "value", "allowed"),
        [
            *(("replay_share", value, "at least 0") for value in (F(-1, 9), F(-3))),
            *(("exponent", value, "in [0, 10]") for value in (-0.1, 10.1, math.inf, math.nan)),
            *(("oldest", value, "at least 1") for value in (0, -1)),
            ("warm_up", -1, "at least 0"),
            *(("buffer_responses", value, "at least 8, the size of a group") for value in (7, 0, -8)),
        ],
    )
    def test_out_of_range(self, name, value, allowed):
        with pytest.raises(ValueError) as error:
            rollout_replay(**{name: value})
        assert str(error.value) == f"{name} is {value}; it must be {allowed}"

    def test_bounds_are_in_range(self):
        for name, value in (("replay_share", F(0)), ("replay_share", F(7)), ("exponent", 0), ("exponent", 10),
                            ("oldest", 1), ("warm_up", 0), ("buffer_responses", 8)):  # fmt: skip
            rollout_replay(**{name: value})
        assert rollout_replay(replay_share=0.3).replay_share == F(3, 10)


class TestDraw:
    STORED = ([1, 0, 0], [0, 1, 1], [0, 0.5, 1])  # the middle of the last has an advantage of 0

    @pytest.mark.parametrize(
        ("exponent", "count"),
        [
            (0.5, 2),
            (2.0, 3),
            *(
                pytest.param(*case, marks=pytest.mark.slow)
                for case in ((0.5, 1), (1.0, 2), (0.0, 2), (0.5, 7), (10.0, 1))
            ),
        ],
    )
    def test_frequencies(self, make_group, exponent, count):
        """Which responses, over many draws, against the enumerated chance of every set."""
        stored = [make_group(rewards) for rewards in self.STORED[: 3 if count < 4 else 2]]
        count = min(count, 3 * len(stored) - 1)
        method = rollout_replay(group_size=3, exponent=exponent, seed=5)
        run(method, 0, stored)
        magnitudes = [a for group in stored for a in rules.group_relative(group.generated, eps=0, ddof=0)]
        chances = rules.rollout_priorities(magnitudes, [1] * len(magnitudes), 10, alpha=exponent)
        numbers = {name: number for number, name in enumerate(names(stored))}
        draws, seen = 3_000, Counter()
        for _ in range(draws):
            groups, drawn = method.draw(count)
            chosen = [numbers[name] for name in names(groups)]
            assert chosen == sorted(set(chosen)) and len(chosen) == count  # in the order of the store, each once
            assert drawn == pytest.approx(np.abs([magnitudes[number] for number in chosen]), rel=1e-4, abs=1e-9)
            assert len(set(uids(groups))) == len(groups)  # those of one group are together
            seen[frozenset(chosen)] += 1
        expected = rules.draws_without_replacement(chances, count)
        assert sum(expected.values()) == pytest.approx(1)
        for chosen, chance in expected.items():
            spread = math.sqrt(draws * chance * (1 - chance)) + 1
            assert abs(seen[chosen] - draws * chance) < 4.5 * spread

    def test_all_can_be_drawn_however_small_their_chance(self, make_group):
        """(1e-6)^10 of a response without advantage is still above 0."""
        method = rollout_replay(group_size=3, exponent=10.0, replay_share=F(9))
        stored = [make_group([0, 0.5, 1]), make_group([0, 0.5, 1])]
        run(method, 0, stored)
        assert names(method.draw(6)[0]) == names(method.draw(99)[0]) == names(stored)

    def test_nothing_to_draw(self, make_group):
        method = rollout_replay()
        assert method.draw(3)[0] == []
        run(method, 0, [make_group(4)])
        for count in (0, -1):
            groups, drawn = method.draw(count)
            assert groups == [] and len(drawn) == 0


class TestAdvantages:
    @settings(derandomize=True, database=None)
    @given(st.lists(st.sampled_from([-1.0, 0.0, 0.25, 1.0, 3.0]), min_size=4, max_size=4), st.data())
    def test_a_replayed_response_has_that_of_its_own_group(self, make_group, rewards, data):
        """Also a response by itself, whose own mean would make it 0."""
        method = rollout_replay(group_size=4, filter="none", seed=data.draw(st.integers(0, 9)))
        stored = make_group(rewards)
        run(method, 0, [stored])
        (group,), drawn = method.draw(data.draw(st.integers(1, 4)))
        expected = advantages(stored)[[place for _, place in names([group])]]
        assert np.array_equal(advantages(group), expected) and np.array_equal(np.abs(expected), drawn)
        if len(set(rewards)) > 1:
            theirs = rules.group_relative(rewards, eps=0, ddof=0)
            assert advantages(stored) == pytest.approx(theirs, rel=1e-4)
        assert (group.mean, group.variance) == (stored.mean, stored.variance)

    def test_by_hand(self, make_group):
        """1 of 4 right: the success has sqrt(3), each failure -1/sqrt(3). The others of its batch change nothing."""
        method = rollout_replay(group_size=4)
        run(method, 0, [make_group([0, 0, 1, 0])])
        seen = set()
        for _ in range(40):
            ((group,), _) = method.draw(1)
            seen.add((group.size, names([group])[0][1] == 2, round(float(advantages(group)[0]), 3)))
        assert seen == {(1, True, 1.732), (1, False, -0.577)}


class TestBatch:
    def test_fresh_responses_first_and_a_step_s_own_are_not_replayed(self, make_group):
        method = rollout_replay(4, replay_share=F(1))
        first = [make_group(right) for right in (4, 8, 2)]
        assert run(method, 0, first) == Batch(fresh=[first[0], first[2]], filtered=[first[1]])
        second = [make_group(3, step=1)]
        batch = run(method, 1, second)
        assert batch.fresh == second and {uid for uid, _ in names(batch.replayed)} <= {first[0].uid, first[2].uid}
        assert len(names(batch.replayed)) == 8
        third = [make_group(right, step=2) for right in (4, 3, 2, 1, 5)]
        assert run(method, 2, third) == Batch(fresh=[*third[:3], third[4]], cut=[third[3]])

    def test_replayed_groups_are_as_they_were(self, make_group):
        method = rollout_replay()
        run(method, 2, [make_group([0, 0, 1, 0, 0, 0, 1, 0], prompt="a", step=2, weights_version=1, uid=7)])
        (stored,) = method.replay
        (group,) = run(method, 5, [make_group(4, step=5)]).replayed
        assert (group.uid, group.prompt, group.step, group.weights_version) == (7, stored.prompt, 2, 1)
        assert group.responses == tuple(stored.responses[place] for _, place in names([group]))
        assert group.generated == stored.generated and stored.size == 8  # drawing removes nothing

    @pytest.mark.parametrize("share", [F(0), F(1, 5), F(1, 2), F(3, 4), F(5, 4), F(9)])
    @pytest.mark.parametrize("fresh", [0, 1, 3, 6])
    def test_size_is_that_of_the_rules(self, make_group, share, fresh):
        """Of 6 x 5 responses of room and 20 stored; halves are rounded to even, as there."""
        method = rollout_replay(6, group_size=5, replay_share=share)
        run(method, 0, [make_group(2, size=5) for _ in range(4)])
        batch = run(method, 1, [make_group(2, size=5, step=1) for _ in range(fresh)])
        expected = rules.rollout_draw_size(5 * fresh, 20, ratio=share, step=1, warmup=0)
        assert len(names(batch.replayed)) == min(expected, 30 - 5 * fresh)
        assert batch.responses <= 30

    def test_the_share_is_of_fresh_responses_with_signal(self, make_group):
        """16 fresh ones of two groups with signal: 8 are replayed. What was filtered does not count."""
        method = rollout_replay(9)
        run(method, 0, [make_group(4) for _ in range(9)])
        batch = run(method, 1, [make_group(right, step=1) for right in (4, 0, 8, 3, 0)])
        assert (len(batch.fresh), len(names(batch.replayed))) == (2, 8)

    def test_warm_up(self, make_group):
        """Steps 0, 1 and 2 replay nothing, but store."""
        method, replayed = rollout_replay(4, warm_up=3), []
        for step in range(5):
            replayed.append(len(names(run(method, step, [make_group(4, step=step)]).replayed)))
        assert replayed == [0, 0, 0, 4, 4]
        assert uids(method.replay) == sorted(uids(method.replay)) and len(method.replay) == 5

    def test_responses_leave_when_they_are_too_old(self, make_group):
        """With `oldest` 2, those of step 0 are replayed in steps 1 and 2 and no more in step 3."""
        method = rollout_replay(oldest=2, replay_share=F(1))
        first = make_group(4)
        run(method, 0, [first])
        for step in (1, 2):
            assert first.uid in uids(run(method, step, [make_group(4, step=step), make_group(4, step=step)]).replayed)
        batch = run(method, 3, [make_group(4, step=3) for _ in range(4)])
        assert first.uid not in uids(batch.replayed) and len(names(batch.replayed)) == 32
        assert method.metrics()["buffer/replay_expired"] == 1

    @pytest.mark.parametrize(("responses", "groups"), [(8, 1), (15, 1), (16, 2), (25, 3)])
    def test_the_buffer_is_in_responses(self, make_group, responses, groups):
        """As many whole groups as fit. The oldest leave first."""
        method = rollout_replay(buffer_responses=responses)
        fresh = [make_group(4) for _ in range(4)]
        run(method, 0, fresh)
        assert uids(method.replay) == uids(fresh)[-groups:]

    def test_what_the_filter_dropped_is_not_stored_what_was_cut_is(self, make_group):
        method = rollout_replay(2)
        fresh = [make_group(right) for right in (4, 0, 2, 1, 8)]
        assert run(method, 0, fresh).cut == [fresh[3]]
        assert list(method.replay) == [fresh[0], fresh[2], fresh[3]]

    def test_without_a_filter_all_are_stored(self, make_group):
        method = rollout_replay(filter="none")
        fresh = [make_group(right) for right in (0, 4, 8)]
        assert run(method, 0, fresh) == Batch(fresh=fresh) and list(method.replay) == fresh

    def test_priorities_have_the_smoothing_of_the_run(self, make_group):
        """With a large --adapt.eps, advantages are smaller: 1/2 over the root of 1/4 + 2."""
        method = rollout_replay(eps=2.0)
        run(method, 0, [make_group(4)])
        assert method.draw(8)[1] == pytest.approx([0.5 / 1.5] * 8)


def test_metrics_by_hand(make_group):
    """8 responses of 3 + 2 tokens: 5 ids and 2 log-probs of 4 bytes each are 28 bytes, 224 a group."""
    method = rollout_replay(oldest=2, buffer_responses=24)
    assert method.metrics() == {}
    run(method, 0)
    assert not {"drawn/advantage", "buffer/replay_age_mean"} & set(method.metrics())
    run(method, 1, [make_group(4, step=1)])
    run(method, 3, [make_group(4, step=3), make_group(4, step=3)])
    run(method, 4, [make_group(4, step=4)])
    assert method.metrics() == pytest.approx({
        "buffer/replay": 3,
        "buffer/replay_bytes": 3 * 224,
        "buffer/replay_added": 4,
        "buffer/replay_evicted": 0,
        "buffer/replay_expired": 1,
        "buffer/replay_age_mean": 2 / 3,
        "drawn/advantage": 0.5 / math.sqrt(0.25 + 1e-6),
    })  # fmt: skip
    run(method, 5, [make_group(4, step=5)])
    assert method.metrics()["buffer/replay_evicted"] == 1


class TestLedger:
    def test_replayed_responses_were_counted_in_their_own_step(self, make_group):
        """Groups of one response and of several are X3. None of their responses counts again."""
        method, ledger = rollout_replay(9), Ledger()
        first = [make_group(4) for _ in range(6)]
        ledger.settle(first, method.build_batch(0, first, []))
        second = [make_group(4, step=1), make_group(8, step=1), make_group(2, step=1)]
        batch = method.build_batch(1, second, [])
        sizes = {group.size for group in batch.replayed}
        assert 1 in sizes and len(sizes) > 1 and len(names(batch.replayed)) == 8
        batch = drop(batch, too_far={batch.replayed[0].uid})
        groups, responses = ledger.settle(second, batch)
        assert +Counter(groups) == Counter(fresh=2, filtered=1, generated=3)
        assert +Counter(responses) == Counter(fresh=16, filtered=8, generated=24)
        assert ledger.responses["generated"] == 72

    def test_two_parts_of_a_group_are_refused(self, make_group):
        stored, fresh = make_group(4), make_group(4, step=1)
        parts = [stored.keep([place], relative_to="generated") for place in (0, 1)]
        with pytest.raises(RuntimeError, match=rf"group {stored.uid} was generated 0 time\(s\) .* 'replayed'\]"):
            Ledger().settle([fresh], Batch(fresh=[fresh], replayed=parts))


def test_side_by_side_with_the_rules(make_group):
    """Whole random runs: the rules hold the same responses and draw as many; which ones is the generator's choice."""
    met: Counter[str] = Counter()

    @settings(derandomize=True, database=None)
    @given(st.data())
    def check(data):
        size, capacity = data.draw(st.integers(2, 4)), data.draw(st.integers(7, 12))
        share = data.draw(st.sampled_from([F(1, 2), F(1, 3), F(1), F(3, 4), F(0)]))
        most = size * data.draw(st.integers(1, 9))
        options = {"group_size": size, "replay_share": share, "buffer_responses": most}
        options |= {"oldest": data.draw(st.integers(1, 3)), "warm_up": data.draw(st.integers(0, 3))}
        theirs = rules.RolloutReplay(max_age=options["oldest"], ratio=share, warmup=options["warm_up"], capacity=most)
        method, ledger, held = rollout_replay(capacity, **options), Ledger(), []
        values = st.integers(0, size).map(lambda right: [1.0] * right + [0.0] * (size - right))
        values |= st.lists(st.sampled_from([-1.0, 0.0, 0.5, 3.0]), min_size=size, max_size=size)
        for step in range(data.draw(st.integers(2, 9))):
            if data.draw(st.booleans()):
                state = pickle.loads(pickle.dumps(method.state_dict()))
                method = rollout_replay(capacity, seed=9, **options)
                method.load_state_dict(state)
            fresh = [make_group(rewards, step=step) for rewards in data.draw(st.lists(values, max_size=3))]
            method.begin_step(step)
            batch = method.build_batch(step, fresh, [])
            ledger.settle(fresh, batch)

            asked = []

            def draw(chances, count, asked=asked):
                asked.append(count)
                return range(count)

            mine, _ = theirs.step(step, {group.uid: group.generated for group in fresh}, draw)
            assert names(batch.fresh) == [(uid, place) for uid, _, place in mine]
            assert len(names(batch.replayed)) == (asked[0] if asked else 0)  # the room is never short here
            assert set(names(batch.replayed)) <= set(held)
            assert all(step - group.step <= options["oldest"] for group in batch.replayed)
            held = [(uid, place) for (uid, _, place), _, _ in theirs.stored]
            assert names(method.replay) == held
            signs = [np.sign(advantage) for _, advantage, _ in theirs.stored]
            assert [np.sign(round(a, 9)) for g in method.replay for a in advantages(g)] == signs
            met.update(replayed=len(names(batch.replayed)), lone=sum(g.size == 1 for g in batch.replayed))
            met.update(evicted=method.replay.counts["evicted"], expired=method.replay.counts["expired"])
        ledger.check()

    check()
    assert min(met.values()) > 5 and len(met) == 4, met
