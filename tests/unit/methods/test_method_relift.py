"""ReLIFT: unsolved prompts wait, and are fine-tuned on together."""

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.methods.relift import ReLIFT


def relift(groups, **options) -> ReLIFT:
    method = ReLIFT(capacity=8, group_size=4, **{"finetune_batch": 2} | options)
    method.solutions = {group.prompt.id for group in groups}
    return method


def run(method: ReLIFT, step: int, groups) -> Batch:
    batch = method.build_batch(step, groups, [])
    Ledger().settle(groups, batch)
    return batch


def test_by_hand(make_group):
    first = [make_group(right, size=4, prompt=name) for right, name in ((0, "a"), (1, "b"), (4, "c"), (0, "d"))]
    method = relift(first[:3])
    batch = run(method, 0, first)
    assert batch == Batch(fresh=[first[1]], filtered=[first[2], first[3]], demonstration=[first[0]])  # d has none
    again = [make_group(0, size=4, prompt=name) for name in ("c", "a", "b")]
    batch = run(method, 1, again)
    assert batch.demonstration == again and [prompt.text for prompt in batch.fine_tuned] == ["a", "c"]
    assert method.metrics() == {"demonstrations/unsolved": 3, "demonstrations/waiting": 1}
    assert run(method, 2, []).fine_tuned == []


def test_a_group_with_a_part_of_a_reward_is_not_unsolved(make_group):
    group = make_group([0.0, 0.5, 0.0, 0.0])
    batch = run(relift([group]), 0, [group])
    assert (batch.fresh, batch.demonstration) == ([group], [])
