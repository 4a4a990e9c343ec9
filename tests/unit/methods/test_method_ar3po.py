"""AR3PO: responses in stages and the reuse of a success, against the independent rules and by hand."""

from collections import Counter
from fractions import Fraction as F

import reference_rules as rules
from hypothesis import given, settings
from hypothesis import strategies as st
from one_step import names, run

from bapo_openrlhf.adapt.batch import drop
from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.methods.ar3po import AR3PO


def ar3po(capacity: int = 8, **options) -> AR3PO:
    return AR3PO(capacity=capacity, **{"group_size": 4} | options)


def generate(method: AR3PO, outcomes: dict[str, list]) -> dict[str, list]:
    """What the trainer generates: the first responses, then more for as long as the method asks."""
    responses = {prompt: list(all_of_it[: method.first_responses]) for prompt, all_of_it in outcomes.items()}
    while any(more := method.more_responses([[F(r) for r in rewards] for rewards in responses.values()])):
        for (prompt, rewards), count in zip(responses.items(), more, strict=True):
            assert len(rewards) + count <= method.group_size  # the trainer refuses more
            rewards += outcomes[prompt][len(rewards) : len(rewards) + count]
    return responses


def test_a_success_is_above_the_bound():
    assert ar3po().more_responses([[F(0), F(1, 2)], [F(0), F("0.51")], [F(-1), F(0)]]) == [2, 0, 2]
    assert ar3po(success_above=F(1, 10)).more_responses([[F(0), F("0.1")], [F(0), F("0.2")]]) == [2, 0]


class TestReuse:
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


def test_side_by_side_with_the_rules(make):
    """Whole random runs, stages and reuse; which success is drawn is the generator's choice, the first gives way."""
    met: Counter[str] = Counter()

    @settings(max_examples=3 * settings.default.max_examples, derandomize=True, database=None)
    @given(st.data())
    def check(data):
        each, stages = data.draw(st.sampled_from([(1, 2), (2, 2), (1, 3), (3, 2), (2, 3), (1, 4), (2, 1), (4, 1)]))
        size, train_reused = each * stages, data.draw(st.booleans())
        capacity = data.draw(st.integers(4, 7))
        options = {"group_size": size, "stages": stages, "successes": 99, "train_reused": train_reused}
        method, ledger = ar3po(capacity, **options), Ledger()
        theirs, uid_of = rules.ResponseReuse(k=each, stages=stages), {}
        for step in range(data.draw(st.integers(2, 7))):
            values = st.lists(st.sampled_from([0, 0, 0, 0, 0, 1]), min_size=size, max_size=size)
            outcomes = data.draw(st.dictionaries(st.sampled_from("abcd"), values))
            responses = generate(method, outcomes)
            fresh = [make(rewards, prompt, step=step) for prompt, rewards in responses.items()]
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
            stored = {(uid_of[prompt, born], i) for entries in theirs.stored.values() for prompt, born, i in entries}
            assert {name for group in method.cache for name in names(group)} == stored
            reused = sum(rule.place is not None for rule in expected.values())
            assert counts["dropped"] == method.metrics()["exchange/groups"] == reused
            assert counts["generated"] == sum(map(len, responses.values()))
            met.update(reused=reused, failed=method.metrics()["exchange/failed"] - reused)
            met.update(staged=sum(each < len(rewards) < size for rewards in responses.values()))
        ledger.check()

    check()
    assert min(met.values()) > 5 and len(met) == 3, met
