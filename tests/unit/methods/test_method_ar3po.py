"""AR3PO: responses in stages and the reuse of a success, against the independent rules and by hand."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from fractions import Fraction as F

import pytest
import reference_rules as rules
from hypothesis import given, settings
from hypothesis import strategies as st
from one_step import advantages, names, run

from bapo_openrlhf.adapt.batch import drop
from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.methods.ar3po import AR3PO


def ar3po(capacity: int = 8, **options) -> AR3PO:
    return AR3PO(capacity=capacity, **{"group_size": 4} | options)


def generate(method: AR3PO, outcomes: dict[str, list]) -> tuple[dict[str, list], int]:
    """What the trainer generates: the first responses, then more for as long as the method asks. And the stages."""
    responses, stages = {prompt: list(all_of_it[: method.first_responses]) for prompt, all_of_it in outcomes.items()}, 1
    while any(more := method.more_responses([[as_reward(r) for r in rewards] for rewards in responses.values()])):
        stages += 1
        for (prompt, rewards), count in zip(responses.items(), more, strict=True):
            assert len(rewards) + count <= method.group_size  # the trainer refuses more
            rewards += outcomes[prompt][len(rewards) : len(rewards) + count]
    return responses, stages


def as_reward(reward) -> F | None:
    return None if reward is None else F(str(reward))


class TestStages:
    @settings(max_examples=2 * settings.default.max_examples, derandomize=True, database=None)
    @given(st.data())
    def test_are_those_of_the_rules(self, data):
        stages, each = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
        size = stages * each
        rewards = st.lists(st.sampled_from([0, 0, 0, 0, 1]), min_size=size, max_size=size)
        outcomes = data.draw(st.dictionaries(st.sampled_from("abcdef"), rewards, min_size=1))
        method = ar3po(group_size=size, stages=stages)
        responses, used = generate(method, outcomes)
        assert responses == rules.ar3po_stages(outcomes, each, stages)
        assert used <= stages

    def test_a_success_is_above_the_bound(self):
        assert ar3po().more_responses([[F(0), F(1, 2)], [F(0), F("0.51")], [F(-1), F(0)]]) == [2, 0, 2]
        assert ar3po(success_above=F(1, 10)).more_responses([[F(0), F("0.1")], [F(0), F("0.2")]]) == [2, 0]


class TestReuse:
    def test_by_hand(self, make):
        """Step 3 (weights of step 2) stores two successes of a; in step 7 all its responses fail."""
        method = ar3po()
        run(method, 3, [make([0, 1, 0, 1], "a", step=3, weights_version=2, uid=10), make([1, 0], "b", uid=11)])
        failed = make([0, 0, 0, 0], "a", step=7, weights_version=6, uid=20)
        (group,) = run(method, 7, [failed]).fresh
        assert names(group) == [(20, 1), (20, 2), (20, 3)]  # the stored one is not trained on
        assert (group.uid, group.step, group.weights_version, group.prompt) == (20, 7, 6, failed.prompt)
        assert group.baseline == (1, 0, 0, 0) and (group.mean, group.variance) == (F(1, 4), F(3, 16))
        assert advantages(group) == pytest.approx([-1 / math.sqrt(3)] * 3, rel=1e-4)
        assert failed.mean == 0 and names(failed) == [(20, n) for n in range(4)]  # what was generated is untouched
        assert method.metrics() == {
            "exchange/failed": 1,
            "exchange/groups": 1,
            "exchange/age_mean": 5,
            "cache/prompts": 2,
            "cache/responses": 3,
            "cache/bytes": 3 * 28,
            "cache/added": 3,
            "cache/evicted": 0,
        }

    def test_trained_on(self, make):
        """The variant: the stored success stands in the first place, with the log-probs and the step of its policy."""
        method = ar3po(train_reused=True)
        run(method, 3, [make([0, 1, 0, 0], "a", step=3, weights_version=2, uid=10)])
        (group,) = run(method, 7, [make([0, 0, 0, 0], "a", step=7, weights_version=6, uid=20)]).fresh
        assert names(group) == [(10, 1), (20, 1), (20, 2), (20, 3)]
        assert [group.weights_version_of(response) for response in group.responses] == [2, 6, 6, 6]
        assert group.baseline == group.rewards == (1, 0, 0, 0)
        assert (method.metrics()["exchange/failed"], method.metrics()["exchange/groups"]) == (1, 1)
        assert advantages(group) == pytest.approx([math.sqrt(3)] + [-1 / math.sqrt(3)] * 3, rel=1e-4)

    @settings(derandomize=True, database=None)
    @given(st.lists(st.sampled_from([-1.0, 0.0, 0.25, 0.5]), min_size=4, max_size=4), st.sampled_from([0.75, 1.0, 2.0]))
    def test_both_variants_give_the_others_the_same_advantages(self, make, rewards, success):
        """Those of the group after the reuse; rewards need not be 0 and 1."""
        actual = []
        for train_reused in (False, True):
            method = ar3po(train_reused=train_reused)
            run(method, 0, [make([success, 0, 0, 0], "a")])
            (group,) = run(method, 1, [make(rewards, "a", step=1)]).fresh
            assert group.size == 3 + train_reused
            actual.append(advantages(group)[-3:])
        after = [success, *rewards[1:]]
        expected = rules.group_relative(after, eps=0, ddof=0)[1:]
        assert actual[0].tolist() == actual[1].tolist() and actual[0] == pytest.approx(expected, rel=1e-4, abs=1e-6)

    @pytest.mark.parametrize("train_reused", [False, True])
    def test_ledger_by_hand(self, make, train_reused):
        """Of the helped group, three of its own responses are trained on and one is dropped."""
        method, ledger = ar3po(train_reused=train_reused), Ledger()
        first = [make([1, 0], "a")]
        ledger.settle(first, method.build_batch(0, first, []))
        fresh = [make([0, 0, 0, 0], "a", step=1), make([1, 1], "b", step=1), make([0, 0, 0, 0], "c", step=1)]
        groups, responses = ledger.settle(fresh, method.build_batch(1, fresh, []), failed=[2])
        assert +Counter(groups) == Counter(fresh=1, filtered=2, failed=1, generated=4)
        assert +Counter(responses) == Counter(fresh=3, dropped=1, filtered=6, failed=2, generated=12)

    def test_a_helped_group_that_is_cut_or_unfit_counts_as_generated(self, make):
        method = ar3po(1)
        run(method, 0, [make([1, 0], "a")])
        fresh = [make([0, 0, 0, 0], "a", step=1), make([1, 1, 0, 0], "b", step=1)]
        batch = method.build_batch(1, fresh, [])
        assert batch.fresh == [fresh[1]] and [(g.uid, g.size) for g in batch.cut] == [(fresh[0].uid, 3)]
        _, responses = Ledger().settle(fresh, drop(batch, too_far={fresh[1].uid}))
        assert +Counter(responses) == Counter(cut=4, too_far=4, generated=8)

    def test_a_group_with_a_success_is_left_alone(self, make):
        """It is failed only if no response is a success. Its mean does not count."""
        method = ar3po()
        run(method, 0, [make([1, 0], "a")])
        right, mixed, low = make([1, 1], "a", step=1), make([0, 0, 0, 1], "a", step=1), make([-9, 1], "a", step=1)
        batch = run(method, 1, [right, mixed, low])
        assert batch.filtered == [right] and batch.fresh == [mixed, low]
        (group,) = run(method, 2, [make([0.5, 0, 0.5, 0], "a", step=2)]).fresh
        assert group.baseline == (1, 0, F(1, 2), 0)  # a half is no success

    @pytest.mark.parametrize("train_reused", [False, True])
    def test_what_is_stored(self, make, train_reused):
        """Successes of earlier steps, as generated, and none twice. A step's own are not used in it."""
        method = ar3po(train_reused=train_reused)
        batch = run(method, 0, [make([1, 0, 0.5, 0.6], "a", uid=1), make([0, 0, 0, 0], "a", uid=2)])
        assert len(batch.fresh) == len(batch.filtered) == 1
        assert [name for group in method.cache for name in names(group)] == [(1, 0), (1, 3)]
        for step in (1, 2):
            assert len(run(method, step, [make([0, 0, 0, 0], "a", step=step)]).fresh) == 1
        assert method.metrics()["cache/added"] == method.metrics()["cache/responses"] == 2

    def test_the_capacity_is_in_responses(self, make):
        """B x G = 8: two easy groups of 2 and one of 4 fit; of the helped one, three responses do not."""
        method = ar3po(2)
        run(method, 0, [make([1, 0], "a")])
        fresh = [make([0] * 4, "a", step=1), make([1, 0], "b", step=1), make([0, 1], "c", step=1),
                 make([0, 0, 1, 1], "d", step=1)]  # fmt: skip
        batch = run(method, 1, fresh)
        assert batch.fresh == fresh[1:] and batch.responses == 8
        assert [group.uid for group in batch.cut] == [fresh[0].uid]


def test_side_by_side_with_the_rules(make):
    """Whole random runs, stages and reuse; which success is drawn is the generator's choice, the first gives way."""
    met: Counter[str] = Counter()

    @settings(derandomize=True, database=None)
    @given(st.data())
    def check(data):
        each, stages = data.draw(st.sampled_from([(1, 2), (2, 2), (1, 3), (3, 2), (2, 3), (1, 4), (2, 1), (4, 1)]))
        size, train_reused = each * stages, data.draw(st.booleans())
        capacity = data.draw(st.integers(4, 7))
        options = {"group_size": size, "stages": stages, "successes": 99, "train_reused": train_reused}
        method, ledger = ar3po(capacity, **options), Ledger()
        theirs, uid_of = rules.ResponseReuse(k=each, stages=stages), {}
        for step in range(data.draw(st.integers(2, 7))):
            if data.draw(st.booleans()):
                state = pickle.loads(pickle.dumps(method.state_dict()))
                method = ar3po(capacity, seed=9, **options)
                method.load_state_dict(state)
            rewards = st.lists(st.sampled_from([0, 0, 0, 0, 0, 1]), min_size=size, max_size=size)
            outcomes = data.draw(st.dictionaries(st.sampled_from("abcd"), rewards))
            responses, _ = generate(method, outcomes)
            fresh = [make(names_of_rule, prompt, step=step) for prompt, names_of_rule in responses.items()]
            uid_of |= {(group.prompt.text, step): group.uid for group in fresh}
            batch = method.build_batch(step, fresh, [])
            _, counts = ledger.settle(fresh, batch)

            known = {prompt: set(entries) for prompt, entries in theirs.stored.items()}
            expected = theirs.step(step, outcomes, pick=lambda stored: stored[0], place=min)
            actual = {group.prompt.text: group for group in batch.fresh + batch.filtered}  # all fit
            assert actual.keys() == expected.keys()
            for prompt, group in actual.items():
                rule = expected[prompt]
                assert list(group.baseline) == rule.rewards
                trained = rule.trained(stop_gradient=not train_reused)
                assert list(group.rewards) == [r for r, has in zip(rule.rewards, trained, strict=True) if has]
                names_of_rule = [(uid_of[prompt, step], place) for place in range(len(rule.rewards))]
                if rule.place is not None:
                    origins = {(uid_of[prompt, born], i) for _, born, i in known[prompt]}
                    assert rule.place == 0 and set(names(group)) - set(names_of_rule) <= origins
                    assert names(group)[-len(names_of_rule) + 1 :] == names_of_rule[1:]
                else:
                    assert names(group) == names_of_rule
                assert (group in batch.filtered) == (len(set(rule.rewards)) == 1)
                if len(set(rule.rewards)) > 1:
                    shares = rules.group_relative(rule.rewards, eps=0, ddof=0)
                    kept = [share for share, has in zip(shares, trained, strict=True) if has]
                    assert advantages(group) == pytest.approx(kept, rel=1e-3)
            stored = {(uid_of[prompt, born], i) for entries in theirs.stored.values() for prompt, born, i in entries}
            assert {name for group in method.cache for name in names(group)} == stored
            reused = sum(rule.place is not None for rule in expected.values())
            assert counts["dropped"] == method.metrics()["exchange/groups"] == reused
            assert counts["generated"] == sum(map(len, responses.values()))
            met.update(
                reused=reused, staged=sum(each < len(names_of_rule) < size for names_of_rule in responses.values())
            )
            met["failed"] += method.metrics()["exchange/failed"] - reused
        ledger.check()

    check()
    assert min(met.values()) > 5 and len(met) == 3, met
