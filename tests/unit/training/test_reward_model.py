"""Runs whose rewards a reward model gives, on the fake stack: who is scored, when, and in which range."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from fake_stack import SCORED, answer, digest, in_groups, responses_to, rows_of

from bapo_openrlhf.record.run_record import read_evaluations, read_groups, read_warnings
from bapo_openrlhf.training.trainer.accounts import first_range

MODES = (
    {},
    {"reward.num_gpus_per_node": 3, "actor.num_gpus_per_node": 2, "algorithm": "ba_ppo"},
    {"adapt.rollout_delay": 2, "train.async_enable": True, "train.async_queue_size": 2},
)


@pytest.mark.parametrize("words", MODES)
def test_every_response_has_the_score_of_its_own_tokens(fitted, words):
    """Fresh ones, hard prompts that were generated again, those of an evaluation, and all that is trained on."""
    more = {"adapt.c1": "1/2", "adapt.batch_size": 8, "train.num_episodes": 3}
    more |= {"eval.steps": 2, "eval.n_samples_per_prompt": 4}
    run = fitted(**SCORED | more | words, evaluation=2)
    rows = run.metrics()
    assert len(rows) == 12 and sum(row["groups/failed"] for row in rows) == 0
    assert all(
        sum(row[name] for row in rows) for name in ("groups/reevaluated", "groups/replayed", "groups/unimproved")
    )
    low, high = rows[0]["reward/range_low"], rows[0]["reward/range_high"]
    scores = [
        [run.score(tokens) for tokens in responses_to(request)]
        for request in run.requests
        if request.prompt.startswith("prompt")
    ]
    means = [row["mean"] for row in read_groups(run.record)]
    assert sorted(means) == pytest.approx(sorted((np.mean(group) - low) / (high - low) for group in scores))
    for _, experiences in run.trained:
        for tokens, reward in rows_of(experiences):
            assert reward == run.score(tokens)
    evaluated = [request for request in run.requests if request.prompt.startswith("eval")]
    assert len(evaluated) == 12
    for number, row in enumerate(read_evaluations(run.record)):
        asked = evaluated[2 * number : 2 * number + 2]
        scores = [run.score(tokens) for request in asked for tokens in responses_to(request)]
        assert row["eval_data_pass1"] == pytest.approx(np.mean(scores))
    assert all(row["reward/model_seconds"] > 0 for row in rows)


def test_the_engines_rest_while_it_scores(fitted):
    words = {"vllm.enable_sleep": True, "train.colocate_all": True, "adapt.rollout_delay": 4, "eval.steps": 3}
    run = fitted(**SCORED, **words, evaluation=1)
    awake = run.noted("score")
    assert len(awake) > 8 and all("kv_cache" not in engine for engines in awake for engine in engines)


def test_equal_responses_are_scored_once(world):
    run = world(**SCORED | {"reward.num_gpus_per_node": 2})
    answers = in_groups([answer("p", None, [1] * length) for length in (3, 3, 2, 3, 5, 2)], 3)
    run.trainer.reward_model.score(answers)
    rows = [row for _, row in run.scored]
    assert sorted(map(len, set(map(tuple, rows)))) == [3, 4, 6]
    assert len(rows) <= 4  # the second rank may have a filler
    for response in (*answers[0].responses, *answers[1].responses):
        assert response.reward == run.score(response.token_ids.tolist()) == response.extras["info"]["reward"]


def test_a_score_that_is_no_number_fails_its_group(world):
    run = world(**SCORED, **{"adapt.max_failed_share": 1})
    plain = run.score
    run.score = lambda tokens: math.nan if tokens[-1] % 9 == 0 else plain(tokens)
    run.trainer.fit()
    failed = 0
    for step, row in enumerate(run.metrics()):
        asked = [request for request in run.requests if request.step == step]
        bad = [any(tokens[-1] % 9 == 0 for tokens in responses_to(request)) for request in asked]
        assert (row["groups/generated"], row["groups/failed"]) == (len(asked), sum(bad))
        failed += sum(bad)
    assert failed


MANY = {"rollout.batch_size": 64, "prompts": 128, "adapt.batch_size": 64, "adapt.buffer_size": 64}


class TestMeasuredRange:
    @pytest.mark.parametrize("source", [SCORED, {"adapt.reward_range": "measured"}])
    def test_is_of_the_first_step_and_stays(self, world, source):
        run = world(**MANY, **source)
        if source is not SCORED:
            run.reward = lambda *what: digest(*what) % 33 / 4 - 3
        run.trainer.fit()
        first = [request for request in run.requests if request.step == 0]
        if source is SCORED:
            rewards = [run.score(tokens) for request in first for tokens in responses_to(request)]
        else:
            rewards = [run.reward(request.prompt, request.weights, n) for request in first for n in range(4)]
        assert len(rewards) == 256
        low, high = np.percentile(rewards, [1, 99], method="inverted_cdf")
        assert min(rewards) <= low < high <= max(rewards)
        for row in run.metrics():
            assert (row["reward/range_low"], row["reward/range_high"]) == (low, high)
        assert {group.reward_range for group in run.trainer.method.replay} == {(low, high)}
        assert not [row for row in read_warnings(run.record) if row["kind"] == "reward range"]

    def test_is_not_measured_if_it_is_given(self, fitted):
        run = fitted(**SCORED, **{"adapt.reward_range": [-3, 5]})
        assert all(row["reward/outside_range"] == 0 and "reward/range_low" not in row for row in run.metrics())
        assert run.trainer.state.reward_range == (-3, 5)

    def test_rewards_that_have_left_it_are_said_once(self, world):
        run = world(**SCORED)
        plain = run.score
        run.score = lambda tokens: plain(tokens) + (20 if run.step else 0)
        run.trainer.fit()
        [said] = [row for row in read_warnings(run.record) if row["kind"] == "reward range"]
        low, high = (f"{run.metrics()[0][f'reward/range_{end}']:g}" for end in ("low", "high"))
        assert said["step"] == 2 and f"adapt.reward_range was measured as {low} {high}. Thresholds" in said["text"]

    def test_equal_rewards_have_none(self, world):
        run = world(**SCORED)
        run.score = lambda tokens: 0.25
        with pytest.raises(RuntimeError, match=r"99th percentile of 16 rewards are both 0.25; .* --adapt.reward_range"):
            run.trainer.fit()


def test_a_response_without_a_reward_does_not_count_for_the_measured_range():
    fresh = [SimpleNamespace(rewards=rewards) for rewards in ([math.nan, 0.0], [2.0, math.inf])]
    assert first_range(fresh) == (0, 2)
    assert first_range([SimpleNamespace(rewards=[math.nan])]) is None
