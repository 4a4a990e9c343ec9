"""Groups, prompts and responses: exact statistics, compact storage, stable ids, and plain-data round trips (Eq. 4)."""

import copy
import math
import pickle
import warnings
from dataclasses import asdict, replace
from fractions import Fraction as F

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_openrlhf.adapt.group import Group, Prompt, Response, group_from_state, group_state, mean_reward


def response(prompt_tokens: int = 3, response_tokens: int = 2, reward: float = 0.0, **changes) -> Response:
    end = prompt_tokens + response_tokens
    fields = {"token_ids": np.arange(end), "action_spans": ((prompt_tokens, end),)}
    return Response(**fields | {"log_probs": np.full(response_tokens, -1.0), "reward": reward} | changes)


class TestPromptId:
    def test_is_the_same_in_every_run(self):
        # Stored buffers name prompts by it: a change makes old checkpoints forget which prompts they hold.
        assert Prompt("What is 1 + 1?", "2", ["a.png"]).id == "493a49d1f5b720f7"
        assert Prompt("What is 1 + 1?").id == "745e8ce71b6988ad"

    def test_tells_apart_what_differs_and_nothing_else(self):
        labels = ("1", 1, "a.png", {"numbers": [1, 2], "target": 3}, {"numbers": [1, 2], "target": 4})
        images = (["a.png"], ["b.png"])
        prompts = [*map(Prompt, ("x", "y", "x1", "\ud800 π\n", "\ud801 π\n")), *(Prompt("x", one) for one in labels)]
        prompts += [Prompt("x", None, one) for one in images]
        assert len({prompt.id for prompt in prompts}) == len(prompts)
        for prompt in prompts:
            assert Prompt(prompt.text, copy.deepcopy(prompt.label), copy.deepcopy(prompt.images)).id == prompt.id


class TestResponse:
    @pytest.mark.parametrize(("prompt_tokens", "response_tokens"), [(5, 7), (4, 0)])
    def test_a_generated_token_costs_8_bytes_and_a_prompt_token_4(self, prompt_tokens, response_tokens):
        stored = response(prompt_tokens, response_tokens)
        assert stored.nbytes == 4 * prompt_tokens + 8 * response_tokens

    def test_arrays_are_compact_whatever_came_in(self):
        tokens, log_probs = np.arange(10, dtype=np.int64)[::2] // 2, np.array([-2.0, 9.0, -1.0, 9.0])[::2]
        stored = response(token_ids=tokens, log_probs=log_probs)
        assert (stored.token_ids.dtype, stored.log_probs.dtype) == (np.int32, np.float32)
        assert stored.token_ids.flags["C_CONTIGUOUS"] and stored.log_probs.flags["C_CONTIGUOUS"]
        assert stored.token_ids.tolist() == [0, 1, 2, 3, 4] and stored.log_probs.tolist() == [-2.0, -1.0]

    @pytest.mark.parametrize("spans", [((3, 6),), ((-2, 1),), ((2, 4), (3, 4)), ((4, 4), (5, 8))])
    def test_spans_outside_the_tokens_are_an_error(self, spans):
        with pytest.raises(ValueError, match="not in order within 5 tokens"):
            response(action_spans=spans, log_probs=[-1.0] * sum(end - start for start, end in spans))

    @pytest.mark.parametrize(
        ("name", "value"),
        [("log_probs", [-1.0]), ("log_probs", [-1.0] * 3), ("segments", ((0, 1),)), ("segments", ((0, 1), (1, 2)))],
    )
    def test_another_number_of_tokens_is_an_error(self, name, value):
        assert response(segments=((0, 1), (1, 1))).segments == ((0, 1), (1, 1))
        with pytest.raises(ValueError, match=r"for 2 generated tokens$"):
            response(**{name: value})

    @pytest.mark.parametrize("spans", [(), ((0, 5),), ((0, 2), (2, 5)), ((5, 5),), ((1, 1), (4, 5))])
    def test_spans_may_touch_each_other_and_the_ends(self, spans):
        count = sum(end - start for start, end in spans)
        assert len(response(action_spans=spans, log_probs=[-1.0] * count).log_probs) == count


class TestGroup:
    @pytest.mark.parametrize("text", ["0.1", "0.7", "-0.2", "2", "1e-5", "-3.75"])
    def test_a_reward_is_the_decimal_it_was_written_as(self, make_group, text):
        # also after a trip through a float32 tensor, which is how OpenRLHF hands rewards over
        rewards = [float(text), float(np.float32(text))]
        assert make_group(rewards).rewards == (F(text), F(text))

    @pytest.mark.parametrize(("low", "high", "rewards", "mapped"), [
        (0, 2, [0, 1, 2, 2], [F(0), F(1, 2), F(1), F(1)]),
        (-1, 1, [-1, 0, 1, 0.5], [F(0), F(1, 2), F(1), F(3, 4)]),
        (0, 3, [1, 2, 3, 0], [F(1, 3), F(2, 3), F(1), F(0)]),
        (0, 2, [3, -1, 0, 2], [F(3, 2), F(-1, 2), F(0), F(1)]),  # outside the range
    ])  # fmt: skip
    def test_rewards_are_mapped_from_the_tasks_range(self, make_group, low, high, rewards, mapped):
        group = replace(make_group(rewards), reward_range=(F(low), F(high)))
        assert group.rewards == tuple(mapped) and group.mean == sum(mapped) / 4
        assert [response.reward for response in group.responses] == rewards  # of which advantages are made

    def test_a_huge_reward_is_quiet(self, make_group):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert make_group([1e300]).mean == 10**300

    def test_no_responses_is_an_error_that_names_the_prompt(self):
        with pytest.raises(ValueError, match="'where am I' has no responses"):
            Group(0, Prompt("where am I"), (), 0, 0)

    @pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
    def test_a_reward_that_is_not_finite_is_an_error_that_names_prompt_and_value(self, make_group, reward):
        with pytest.raises(ValueError, match=rf"'where am I' is {reward}; it must be finite"):
            make_group([1.0, 1.0, reward], prompt="where am I")

    def test_a_response_may_be_of_another_policy_than_its_group(self, make_group):
        past, group = make_group(2, size=2, step=3, weights_version=2), make_group(0, size=3, step=7, weights_version=7)
        stored = past.standalone(past.responses[1])
        assert stored.weights_version == 2 and past.responses[1].weights_version is None
        assert stored.log_probs is past.responses[1].log_probs
        mixed = group.exchange(1, stored)
        assert [mixed.weights_version_of(response) for response in mixed.responses] == [7, 2, 7]
        assert mixed.responses == (group.responses[0], stored, group.responses[2])
        assert (mixed.uid, mixed.step, mixed.weights_version, mixed.prompt) == (group.uid, 7, 7, group.prompt)
        assert (mixed.mean, group.mean) == (F(1, 3), 0) and mixed.generated == (0.0,) * 3
        assert [mixed.standalone(member).weights_version for member in mixed.responses] == [7, 2, 7]

    def test_a_response_of_an_unknown_policy_is_not_taken_in(self, make_group):
        group = make_group(0, prompt="3+4=")
        with pytest.raises(ValueError, match=r"response to prompt '3\+4=' has no weights_version"):
            group.exchange(0, make_group(1).responses[0])


@given(st.lists(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=5), min_size=1, max_size=4))
def test_moments_of_any_rewards_are_exact(make_group, rewards):
    groups = [make_group(one) for one in rewards]
    for group in groups:
        mean = sum(group.rewards, F(0)) / group.size
        assert group.mean == mean
        assert group.variance == sum(((reward - mean) ** 2 for reward in group.rewards), F(0)) / group.size
    flat = [reward for group in groups for reward in group.rewards]
    assert mean_reward(groups) == sum(flat, F(0)) / len(flat) and mean_reward([]) is None


def test_the_state_keeps_everything():
    group = Group(
        uid=17,
        prompt=Prompt("x", {"target": 3}, ["a.png"]),
        responses=tuple(
            response(
                token_ids=range(8),
                action_spans=((1, 3), (5, 8)),
                log_probs=[-0.1, -0.2, -0.3, -0.4, -0.5 - index],
                reward=index / 3,
                extras={"info": {"length": index}, "pixels": np.full((2, 2), index)},
                weights_version=(None, 3, 0)[index],
                segments=((), ((3, 1), (5, 4)), ())[index],
            )
            for index in range(3)
        ),
        step=9,
        weights_version=5,
        reward_range=(F(-1, 3), F(2)),
    )
    state = pickle.loads(pickle.dumps(group_state(group)))
    assert repr(asdict(group_from_state(state))) == repr(asdict(group))  # with the types of arrays


class TestKeep:
    @given(rewards=st.lists(st.sampled_from([0.0, 0.25, 1.0, -2.0]), min_size=1, max_size=8), data=st.data())
    @settings(max_examples=2 * settings.default.max_examples, derandomize=True, database=None)
    def test_mean_and_variance_are_of_what_it_is_related_to(self, make_group, rewards, data):
        group = make_group(rewards, step=3, weights_version=2)
        positions = sorted(data.draw(st.sets(st.sampled_from(range(len(rewards))), min_size=1)))
        relative_to = data.draw(st.sampled_from(["generated", "kept"]))
        part = group.keep(positions, relative_to=relative_to)
        kept = [rewards[position] for position in positions]
        related = kept if relative_to == "kept" else rewards
        assert part.size == len(kept) and [float(reward) for reward in part.rewards] == kept
        assert part.generated == tuple(rewards) and [float(reward) for reward in part.baseline] == related
        assert float(part.mean) == pytest.approx(np.mean(related))
        assert float(part.variance) == pytest.approx(np.var(related), abs=1e-12)
        assert (part.uid, part.prompt, part.step, part.weights_version) == (group.uid, group.prompt, 3, 2)
        assert all(response is group.responses[at] for response, at in zip(part.responses, positions, strict=True))
        again = group_from_state(group_state(part))
        assert (again.baseline, again.generated, again.relative_to) == (part.baseline, part.generated, relative_to)

    def test_a_range_of_rewards(self, make_group):
        group = replace(make_group([-1.0, 1.0, 3.0]), reward_range=(F(-1), F(3)))
        part = group.keep([2], relative_to="generated")
        assert part.rewards == (1,) and part.baseline == (0, F(1, 2), 1) and part.mean == F(1, 2)
