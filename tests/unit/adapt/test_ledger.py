"""The ledger: every generated group ends in exactly one counted state."""

import re
from collections import Counter
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.adapt.vocabulary import EARLIER, STATES


@pytest.fixture(scope="session")
def batch_of(make_group):
    """`batch_of(fresh=[1, 2], cut=[3])` is a batch with these groups, one object a uid."""

    def build(**lists: list[int]) -> tuple[dict, Batch]:
        groups = {uid: make_group(4, uid=uid) for numbers in lists.values() for uid in numbers}
        return groups, Batch(**{name: [groups[uid] for uid in numbers] for name, numbers in lists.items()})

    return build


def first_step(batch_of):
    groups, batch = batch_of(fresh=[100], cut=[101])
    return groups.values(), batch


def test_every_list_of_a_batch_is_a_state_or_of_earlier_steps_or_of_worked_solutions():
    assert {field.name for field in fields(Batch)} == {*STATES, *EARLIER, "demonstrations", "fine_tuned"}


def test_uses_are_the_steps_that_trained_on_a_group(batch_of):
    """Whatever the source; those that were only generated, cut or left out have none."""
    ledger = Ledger()
    for lists in (
        {"fresh": [1, 2], "cut": [3], "filtered": [4]},
        {"fresh": [5], "reevaluated": [6], "replayed": [1, 3], "unused": [2]},
        {"replayed": [1, 6], "too_far": [7]},
    ):
        groups, batch = batch_of(**lists)
        old = {group.uid for name in EARLIER for group in getattr(batch, name)}
        ledger.settle([group for group in groups.values() if group.uid not in old], batch)
    groups, _ = batch_of(fresh=list(range(1, 9)))
    wanted = {1: 3, 2: 1, 3: 1, 4: 0, 5: 1, 6: 2, 7: 0, 8: 0}
    assert dict(zip(groups, ledger.uses(groups.values()), strict=True)) == wanted
    again, state = Ledger(), ledger.state_dict()
    ledger.settle(*first_step(batch_of))  # the state is a snapshot, and not a view
    again.settle(*first_step(batch_of), failed=[8] * 9)  # forgotten by the load
    again.load_state_dict(state)
    assert dict(zip(groups, again.uses(groups.values()), strict=True)) == wanted
    assert +again.counts == {"generated": 7, "fresh": 3, "reevaluated": 1, "cut": 1, "filtered": 1, "too_far": 1}
    assert +again.responses == {name: 8 * count for name, count in again.counts.items() if count}


@pytest.mark.parametrize(("generated", "lists", "named", "states"), [
    ([1], {}, 1, []),  # lost
    ([1, 2], {"fresh": [1, 2], "cut": [2]}, 2, ["fresh", "cut"]),  # in two states
    ([], {"fresh": [5]}, 5, ["fresh"]),  # not of this step
    ([7, 8], {"filtered": [7], "too_far": [3]}, 3, ["too_far"]),  # one lost, another invented: the counts balance
    ([1, 2], {"cut": [1, 1]}, 1, ["cut", "cut"]),  # one lost, another twice: the counts balance
    ([1, 1], {"fresh": [1]}, 1, ["fresh"]),  # two groups of one number
    ([4], {"replayed": [4]}, 4, ["replayed"]),  # trained on as if it were of an earlier step
    ([4], {"fresh": [4], "replayed": [4]}, 4, ["fresh", "replayed"]),  # trained on twice
    ([4], {"nonfinite": [4], "unused": [4]}, 4, ["nonfinite", "unused"]),
    ([], {"replayed": [4, 4]}, 4, ["replayed", "replayed"]),
])  # fmt: skip
def test_what_does_not_add_up_is_an_error_and_enters_nothing(batch_of, generated, lists, named, states):
    groups, _ = batch_of(fresh=generated)
    _, batch = batch_of(**lists)
    ledger = Ledger()
    ledger.settle(*first_step(batch_of))
    before = ledger.state_dict()
    message = f"group {named} was generated {generated.count(named)} time(s) in this step and is in the states {states}"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        ledger.settle([groups[uid] for uid in generated], batch, failed=[8] * 3)
    assert ledger.state_dict() == before


def test_check_finds_counts_that_do_not_balance(batch_of):
    for name in (*STATES, "failed", "generated"):
        groups, batch = batch_of(fresh=[1, 2], solved=[3])
        ledger = Ledger()
        ledger.settle(groups.values(), batch, failed=[8])
        ledger.check()
        for counts, what in ((ledger.counts, "groups"), (ledger.responses, "responses")):
            counts[name] += 1
            for check in (ledger.check, lambda: Ledger().load_state_dict(ledger.state_dict())):  # noqa: B023
                with pytest.raises(RuntimeError, match=f"generated {what} do not add up"):
                    check()
            counts[name] -= 1


@given(data=st.data())
@settings(max_examples=2 * settings.default.max_examples, derandomize=True, database=None)
def test_every_response_ends_in_one_state(make_group, data):
    """Groups of any size. What is trained on may have lost responses, and have stored ones of earlier steps."""
    ledger, expected, groups = Ledger(), Counter(), Counter()
    for step in range(data.draw(st.integers(1, 3))):
        batch, generated = Batch(), []
        for _ in range(data.draw(st.integers(0, 5))):
            group = make_group(1, size=data.draw(st.integers(1, 6)), step=step)
            state = data.draw(st.sampled_from(STATES))
            kept = group
            if state in ("fresh", "reevaluated"):
                positions = data.draw(st.lists(st.integers(0, group.size - 1), unique=True, min_size=1))
                kept = group.keep(positions, relative_to="generated")
                if data.draw(st.booleans()):
                    old = make_group(1, prompt=group.prompt)
                    kept = kept.exchange(0, old.standalone(old.responses[0]))
                count = len(positions) - (kept.relative_to == "kept")
                expected += Counter({state: count, "dropped": group.size - count})
            else:
                expected[state] += group.size
            getattr(batch, state).append(kept)
            generated.append(group)
            groups[state] += 1
        failed = data.draw(st.lists(st.integers(1, 6), max_size=2))
        expected += Counter({"failed": sum(failed), "generated": sum(failed) + sum(group.size for group in generated)})
        groups.update(failed=len(failed), generated=len(failed) + len(generated))
        before = ledger.counts.copy(), ledger.responses.copy()
        of_step = ledger.settle(generated, batch, failed=failed)
        assert [+Counter(counts) for counts in of_step] == [ledger.counts - before[0], ledger.responses - before[1]]
    assert +ledger.responses == +expected and +ledger.counts == +groups
