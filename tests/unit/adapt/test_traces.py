"""Responses that another model wrote: in their group, in checkpoints, in the monitors, and how their loss is shaped."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.group import Group, Response
from bapo_openrlhf.adapt.monitor import off_policy
from bapo_openrlhf.adapt.staleness import group_tv
from bapo_openrlhf.adapt.state import group_from_state, group_state
from bapo_openrlhf.adapt.traces import external_response, shaped
from bapo_openrlhf.record.state_file import load_state, save_state


class TestExternalResponse:
    def test_by_hand(self):
        place = Response([7, 8, 9, 1, 2], ((3, 5),), [-0.5, -0.25], 0.0, {"info": {"digits": 3}})
        found = external_response(np.array([4, 5, 6]), place, 0.75)
        assert found.token_ids.tolist() == [7, 8, 9, 4, 5, 6] and found.token_ids.dtype == np.int32
        assert found.action_spans == ((3, 6),)
        assert found.log_probs.tolist() == [0.0, 0.0, 0.0]
        assert (found.reward, found.external, found.extras) == (0.75, True, {"info": {"digits": 3}})
        assert not place.external and place.reward == 0.0 and len(place.token_ids) == 5

    def test_the_prompt_ends_where_the_first_turn_begins(self):
        place = Response(np.arange(9), ((2, 4), (6, 9)), np.zeros(5), 1.0)
        found = external_response(np.array([50]), place, 1.0)
        assert found.token_ids.tolist() == [0, 1, 50] and found.action_spans == ((2, 3),)

    def test_a_response_without_a_token_has_a_prompt_too(self):
        found = external_response(np.array([50, 51]), Response([3, 4], (), [], 0.0), 1.0)
        assert found.token_ids.tolist() == [3, 4, 50, 51] and found.action_spans == ((2, 4),)


class TestState:
    def test_the_mark_is_kept(self, make_group, tmp_path):
        group = make_group(1, size=3)
        *own, last = group.responses
        group = replace(group, responses=(*own, external_response(np.array([9, 9]), last, 1.0)))
        save_state(tmp_path, {"group": group_state(group)})
        found = group_from_state(load_state(tmp_path)["group"])
        assert [response.external for response in found.responses] == [False, False, True]
        assert found.responses[2].token_ids.tolist() == group.responses[2].token_ids.tolist()

    def test_states_from_before_there_was_a_mark(self, make_group):
        state = group_state(make_group(1, size=2))
        for response in state["responses"]:
            del response["external"]
        assert [response.external for response in group_from_state(state).responses] == [False, False]


class TestShaping:
    @pytest.mark.parametrize(
        ("x", "gamma", "value"),
        [(1.0, 0.1, 10 / 11), (0.1, 0.1, 0.5), (0.0, 0.1, 0.0), (0.3, 0.2, 0.6), (0.9, 0.9, 0.5)],
    )
    def test_by_hand(self, x, gamma, value):
        assert shaped(np.array([x]), gamma) == pytest.approx([value], rel=1e-15)

    @given(st.floats(0.01, 0.99), st.floats(0.01, 2.0))
    @settings(max_examples=100, deadline=None, derandomize=True, database=None)
    def test_gradient_in_the_log_probability(self, x, gamma):
        """d f(e^l) / dl = gamma x / (x + gamma)^2, by central differences."""
        h = 1e-5
        low, high = shaped(np.exp(math.log(x) + np.array([-h, h])), gamma)
        assert (high - low) / (2 * h) == pytest.approx(gamma * x / (x + gamma) ** 2, rel=1e-6)

    def test_unlikely_tokens_are_learned_faster_than_without_and_sure_ones_slower(self):
        x = np.array([0.001, 0.01, 0.5, 0.99])
        weight = 0.1 * x / (x + 0.1) ** 2
        assert (weight[:2] > x[:2]).all() and (weight[2:] < x[2:]).all()


def marked(group: Group, *places: int) -> Group:
    """The group with these responses written by another model, only for the monitors."""
    return replace(
        group,
        responses=tuple(replace(r, external=index in places) for index, r in enumerate(group.responses)),
    )


class TestMonitors:
    def test_distance_of_a_group_is_that_of_its_own_responses(self):
        ratios = np.array([1.0, 0.5, 0.001, 2.0, 0.25, 1.0])
        external = np.array([False, False, True, False, False, True])
        found = group_tv(np.log(ratios), 3, external)
        assert found == pytest.approx([(0 + 0.5) / 2, (0 + 0.75) / 2])
        assert group_tv(np.log(ratios), 3, np.ones(6, dtype=bool)).tolist() == [0.0, 0.0]
        assert group_tv(np.log(ratios), 3, np.zeros(6, dtype=bool)) == pytest.approx(group_tv(np.log(ratios), 3))

    def test_numbers_are_those_of_the_other_responses(self, make_group):
        groups = [
            marked(make_group([1.0, 0.0, 1.0]), 2),
            make_group([1.0, 0.0, 0.0]),
            marked(make_group([1.0, 0.0, 1.0]), 0),
        ]
        log_ratios = np.log([0.5, 2.0, 1e-9, 1.0, 1.0, 0.25, 1e-8, 0.125, 4.0])
        found = off_policy(Batch(fresh=groups[:2], replayed=groups[2:]), log_ratios, (1.0, 1.0, 1.0), eps=0.0)
        assert found["importance/fresh_mean"] == pytest.approx((0.5 + 2 + 1 + 1 + 0.25) / 5)
        assert found["importance/replayed_mean"] == pytest.approx((0.125 + 4) / 2)
        assert found["tv/fresh"] == pytest.approx((0.5 + 0.75) / 5) and found["tv/replayed"] == pytest.approx(0.875 / 2)
        # advantages are those of the whole group: 2 right of 3 are +-, 1 right of 3 likewise
        right, wrong = math.sqrt(1 / 2), -math.sqrt(2)
        surrogate = (0.125 * wrong + 4 * right) / 2
        assert found["theory/bound_replayed"] == pytest.approx(surrogate - 4 * found["tv/replayed"])

    def test_a_source_of_nothing_else_has_no_numbers(self, make_group):
        batch = Batch(fresh=[marked(make_group([1.0, 0.0]), 0, 1)], replayed=[make_group([1.0, 0.0])])
        found = off_policy(batch, np.zeros(4), (1.0, 1.0, 1.0), eps=1e-6)
        assert "tv/fresh" not in found and found["tv/replayed"] == 0.0 and math.isfinite(found["theory/bound"])
