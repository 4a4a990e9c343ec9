"""ReLIFT after arXiv 2506.07527: hand-worked steps, and a plain reference beside random runs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.methods.base import Method
from bapo_openrlhf.methods.relift import ReLIFT
from bapo_openrlhf.record.state_file import load_state, save_state

PROMPTS = "abcdefg"
TRACES = {prompt: np.array([50 + n, 51, 2], dtype=np.int32) for n, prompt in enumerate(PROMPTS)}


def relift(finetune_batch: int = 2, capacity: int = 8, **options) -> ReLIFT:
    method = ReLIFT(capacity=capacity, finetune_batch=finetune_batch, **options)
    method.take_traces(TRACES)
    return method


def run(method: ReLIFT, step: int, fresh) -> tuple[Batch, list[str]]:
    """One step; each of its groups ends in exactly one list of the batch. Also the prompts that are fine-tuned on."""
    assert method.begin_step(step) == []
    batch = method.build_batch(step, list(fresh), [])
    Ledger().settle(fresh, batch)
    assert batch.reevaluated == batch.replayed == []
    shown = [group.prompt.text for group in method.demonstrations(step)]
    assert list(method.demonstrations(step)) == []  # once a step
    return batch, shown


def test_by_hand(make_group):
    method = relift(finetune_batch=2)
    batch, shown = run(method, 0, [make_group(0, prompt="a"), make_group(3, prompt="b"), make_group(8, prompt="c")])
    assert [group.prompt.text for group in batch.fresh] == ["b"] and len(batch.filtered) == 2
    assert shown == [] and method.metrics()["finetune/waiting"] == 1
    assert run(method, 1, [make_group(0, prompt="a"), make_group(0, prompt="no trace")])[1] == []
    assert method.metrics() == {
        "groups/capacity": 8, "traces/prompts": 7, "finetune/unsolved": 2, "finetune/waiting": 1,
    }  # fmt: skip
    # three new ones: the two that have waited longest go, the others stay
    assert run(method, 2, [make_group(0, prompt=prompt) for prompt in "dce"])[1] == ["a", "d"]
    assert method.metrics()["finetune/waiting"] == 2
    # what was fine-tuned on may wait again
    assert run(method, 3, [make_group(0, prompt="a")])[1] == ["c", "e"]
    assert method.metrics()["finetune/waiting"] == 1


def test_a_demonstration_is_prompt_and_trace(make_group):
    method = relift(finetune_batch=1)
    group = make_group(0, prompt="b", step=4, policy_step=3, extras={"info": {"reward": 0.0}})
    method.build_batch(4, [group], [])
    (shown,) = method.demonstrations(4)
    (response,) = shown.responses
    assert response.external and shown.prompt == group.prompt
    assert response.token_ids.tolist() == [*group.responses[0].token_ids[:3], 51, 51, 2]
    assert response.action_spans == ((3, 6),) and response.extras == {"info": {"reward": 0.0}}


@pytest.mark.parametrize(
    ("rewards", "unsolved"), [([0.0, 0.0], 1), ([0.0, -1.0], 1), ([-1.0, 1.0], 0), ([0.0, 0.1], 0), ([0.5, 0.5], 0)]
)
def test_unsolved_is_no_reward_above_0(make_group, rewards, unsolved):
    method = relift()
    run(method, 0, [make_group(rewards, prompt="a")])
    assert method.metrics()["finetune/unsolved"] == method.metrics()["finetune/waiting"] == unsolved


@pytest.mark.parametrize(("fresh", "expected"), [(7, (5, 2)), (5, (5, 0)), (3, (3, 0)), (0, (0, 0))])
def test_only_what_is_beyond_the_capacity_is_cut(make_group, fresh, expected):
    batch, _ = run(relift(capacity=5), 0, [make_group(4) for _ in range(fresh)])
    assert (len(batch.fresh), len(batch.cut)) == expected


def test_defaults_are_those_of_the_paper():
    method = ReLIFT(capacity=4)
    assert (method.finetune_batch, method.finetune_weight, method.traces) == (128, 1.0, "")
    assert isinstance(method, Method)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"finetune_batch": 0}, "finetune_batch is 0; it must be at least 1"),
        ({"finetune_weight": 0.0}, "finetune_weight is 0.0; it must be finite and above 0"),
        ({"finetune_weight": math.inf}, "finetune_weight is inf"),
        ({"finetune_weight": math.nan}, "finetune_weight is nan"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        ReLIFT(capacity=4, **options)


STEP = st.lists(st.tuples(st.sampled_from(PROMPTS + "xy"), st.sampled_from([0, 0, 0, 2, 4])), max_size=6)


@given(steps=st.lists(STEP, max_size=8), size=st.integers(1, 4), stop=st.integers(0, 8))
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_beside_a_plain_reference_with_a_resume(make_group, tmp_path_factory, steps, size, stop):
    """The reference is a list of prompts; in between, the method's state goes through a file into a new one."""
    method, waiting = relift(size), []
    for step, pairs in enumerate(steps):
        if step == stop:
            folder = tmp_path_factory.mktemp("state")
            save_state(folder, method.state_dict())
            method = relift(size, seed=99)
            method.load_state_dict(load_state(folder))
        fresh = [make_group(right, size=4, prompt=prompt, step=step) for prompt, right in pairs]
        batch, shown = run(method, step, fresh)
        for prompt, right in pairs:
            if right == 0 and prompt in PROMPTS and prompt not in waiting:
                waiting.append(prompt)
        wanted = waiting[:size] if len(waiting) >= size else []
        waiting = waiting[len(wanted) :]
        assert shown == wanted and method.metrics()["finetune/waiting"] == len(waiting)
        assert len(batch.fresh) == sum(right == 2 for _, right in pairs)
