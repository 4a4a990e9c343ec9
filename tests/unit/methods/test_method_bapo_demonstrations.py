"""BAPO with demonstrations: when one is shown, and what becomes of its group."""

from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.methods.bapo_demonstrations import DemonstratingBAPO


def make_method(**options) -> DemonstratingBAPO:
    return DemonstratingBAPO(**{"capacity": 2, "group_size": 4, "reevaluate_every": 1, "failures": 2} | options)


def run(method: DemonstratingBAPO, step: int, make_group, outcomes: dict[str, int], fresh=()):
    """A step. `outcomes` has the number of right responses of each hard prompt that is generated again."""
    named = method.begin_step(step)
    assert {prompt.text for prompt in named} == set(outcomes)
    again = [make_group(outcomes[prompt.text], size=4, prompt=prompt, step=step) for prompt in named]
    batch = method.build_batch(step, list(fresh), again)
    Ledger().settle([*fresh, *again], batch)
    assert batch.samples <= method.max_responses == 8
    return batch


def test_the_second_failure_in_a_row_is_answered(make_group):
    method = make_method()
    first = [make_group(0, size=4, prompt=name) for name in ("a", "b", "c")]
    method.solutions = {group.prompt.id for group in first[:2]}  # c has none
    run(method, 0, make_group, {}, first)
    assert run(method, 1, make_group, {"a": 0, "b": 0, "c": 0}).demonstrations == []
    batch = run(method, 2, make_group, {"a": 0, "b": 2, "c": 0})
    assert [group.prompt.text for group in batch.demonstration] == ["a"]
    assert [(shown.prompt.text, shown.rewards) for shown in batch.demonstrations] == [("a", (0.0,) * 4 + (1.0,))]
    assert [group.prompt.text for group in batch.reevaluated] == ["b"]
    assert [group.prompt.text for group in batch.unimproved] == ["c"]
    assert run(method, 3, make_group, {"a": 0, "c": 0}).demonstrations == []  # counted from 0 again
    assert len(run(method, 4, make_group, {"a": 0, "c": 0}).demonstrations) == 1


def test_it_never_exceeds_the_batch(make_group):
    method = make_method(capacity=1, group_size=2, failures=1)
    hard = [make_group(0, size=2, prompt=name) for name in "abc"]
    method.solutions = {group.prompt.id for group in hard}
    method.build_batch(0, hard, [])
    again = [make_group(0, size=2, prompt=prompt, step=1) for prompt in method.begin_step(1)]
    batch = method.build_batch(1, [make_group(1, size=2, step=1)], again)
    assert (batch.samples, len(batch.demonstrations), len(batch.unimproved), len(batch.cut)) == (2, 2, 1, 1)


def test_a_prompt_that_is_solved_has_not_failed(make_group):
    method = make_method(capacity=1, failures=1)
    hard = make_group(0, size=4, prompt="a")
    method.solutions = {hard.prompt.id}
    method.build_batch(0, [hard], [])
    fresh = make_group(2, size=4, step=1)
    again = [make_group(4, size=4, prompt=prompt, step=1) for prompt in method.begin_step(1)]
    batch = method.build_batch(1, [fresh], again)
    assert (batch.fresh, batch.solved, batch.demonstrations, method.failed) == ([fresh], again, [], {})
