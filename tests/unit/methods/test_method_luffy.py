"""LUFFY after arXiv 2504.14945: hand-worked groups, and a plain reference beside random steps."""

from __future__ import annotations

import math
from fractions import Fraction as F

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_openrlhf.adapt.advantage import group_relative_advantages
from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.methods.base import Method
from bapo_openrlhf.methods.luffy import LUFFY
from bapo_openrlhf.record.state_file import load_state, save_state

TRACE = np.array([41, 42, 43], dtype=np.int32)


def luffy(capacity: int = 8, traces=("a", "b", "c"), **options) -> LUFFY:
    method = LUFFY(capacity=capacity, **options)
    method.take_traces({prompt: TRACE for prompt in traces})
    return method


def run(method: LUFFY, step: int, fresh) -> Batch:
    """One step; each of its groups ends in exactly one list of the batch."""
    assert method.begin_step(step) == []
    batch = method.build_batch(step, list(fresh), [])
    Ledger().settle(fresh, batch)
    assert batch.reevaluated == batch.replayed == []
    return batch


def test_one_of_the_group_is_the_trace(make_group):
    group = make_group([0.0, 1.0, 0.0, 1.0], prompt="a", step=3, policy_step=2)
    (mixed,) = run(luffy(), 3, [group]).fresh
    assert (mixed.uid, mixed.prompt, mixed.step, mixed.policy_step) == (group.uid, group.prompt, 3, 2)
    assert mixed.responses[:3] == group.responses[:3]
    last = mixed.responses[3]
    assert last.external and last.reward == 1.0 and last.log_probs.tolist() == [0.0] * 3
    assert last.token_ids.tolist() == [*group.responses[3].token_ids[:3], 41, 42, 43]
    assert not any(response.external for response in group.responses)


def test_an_unsolved_prompt_becomes_one_right_of_g(make_group):
    """Eq. 2 of the mixed group by hand: p = 1/8, so sqrt(7) for the trace and -1/sqrt(7) for the others."""
    (mixed,) = run(luffy(), 0, [make_group(0, prompt="a")]).fresh
    assert mixed.mean == F(1, 8)
    advantages = group_relative_advantages(np.array([[float(reward) for reward in mixed.rewards]]), eps=0.0)[0]
    assert advantages == pytest.approx([-1 / math.sqrt(7)] * 7 + [math.sqrt(7)])


def test_what_has_no_signal_is_filtered(make_group):
    untraced = make_group(0, prompt="without a trace")
    right = make_group(8, prompt="b")  # 7 right responses and the right trace
    wrong = make_group([1.0] * 7 + [0.0], prompt="c")  # the wrong one leaves
    batch = run(luffy(), 0, [untraced, right, wrong, make_group(0, prompt="a")])
    assert [group.uid for group in batch.filtered] == [untraced.uid, right.uid, wrong.uid]
    assert batch.filtered[0] is untraced and len(batch.fresh) == 1
    assert len(run(luffy(filter="none"), 0, [untraced, right]).fresh) == 2


def test_reward_of_a_trace(make_group):
    (mixed,) = run(luffy(trace_reward=0.25), 0, [make_group(0, prompt="a")]).fresh
    assert mixed.rewards[-1] == F(1, 4)


def test_groups_beyond_the_capacity_are_cut(make_group):
    fresh = [make_group(right, prompt=prompt) for right, prompt in [(0, "a"), (3, "x"), (3, "b"), (1, "x"), (0, "c")]]
    batch = run(luffy(4), 0, fresh)  # means 1/8, 3/8, 4/8, 1/8, 1/8: those of most variance stay
    assert len(batch.fresh) == 4 and {fresh[1].uid, fresh[2].uid} <= {group.uid for group in batch.fresh}
    assert [group.uid for group in batch.cut] == [fresh[0].uid]


def test_metrics(make_group):
    method = luffy(7)
    run(method, 0, [make_group(1, prompt="a"), make_group(1, prompt="x"), make_group(8, prompt="b")])
    assert method.metrics() == {"groups/capacity": 7, "traces/prompts": 3, "traces/mixed": 2}


def test_state_goes_on_as_if_nothing_had_been(make_group, tmp_path):
    steps = [[make_group(n % 8, prompt="abcxyz"[n % 6], step=step) for n in range(12)] for step in range(4)]
    method, other = luffy(filter="gaussian", seed=5), luffy(filter="gaussian", seed=9)
    for step in (0, 1):
        run(method, step, steps[step])
    save_state(tmp_path, method.state_dict())
    other.load_state_dict(load_state(tmp_path))
    for step in (2, 3):
        found = [[g.uid for g in run(each, step, steps[step]).fresh] for each in (method, other)]
        assert found[0] == found[1]


def test_without_a_file_it_asks_for_one():
    method = LUFFY(capacity=4)
    assert isinstance(method, Method) and method.traces == "" and method.shaping == 0.1 and not method.trace_of
    assert Method.traces is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 0.0}, "gamma is 0.0; it must be above 0"),
        ({"gamma": math.nan}, "gamma is nan"),
        ({"trace_reward": math.inf}, "trace_reward is inf; it must be finite"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        LUFFY(capacity=4, **options)


@given(
    groups=st.lists(
        st.tuples(st.lists(st.sampled_from([0.0, 0.0, 1.0]), min_size=4, max_size=4), st.sampled_from("abcxy"))
    ),
    capacity=st.integers(1, 6),
    reward=st.sampled_from([1.0, 0.5, 0.0]),
)
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_beside_a_plain_reference(make_group, groups, capacity, reward):
    fresh = [make_group(rewards, prompt=prompt) for rewards, prompt in groups]
    batch = run(luffy(capacity, trace_reward=reward), 0, fresh)
    wanted = {}
    for group, (rewards, prompt) in zip(fresh, groups, strict=True):
        wanted[group.uid] = [*rewards[:3], reward] if prompt in "abc" else rewards
    signal = [uid for uid, rewards in wanted.items() if len(set(rewards)) > 1]
    size = min(len(signal), capacity)
    assert len(batch.fresh) == size and len(batch.cut) == len(signal) - size
    for group in batch.fresh + batch.cut + batch.filtered:
        assert [float(r) for r in group.rewards] == wanted[group.uid]
        traced = group.prompt.text in "abc"
        assert [response.external for response in group.responses] == [False, False, False, traced]

    def variance(uid):
        return float(np.var(wanted[uid]))

    kept = [variance(group.uid) for group in batch.fresh]
    assert not batch.cut or not kept or min(kept) >= max(variance(group.uid) for group in batch.cut) - 1e-12
