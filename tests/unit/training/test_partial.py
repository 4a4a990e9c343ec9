"""Partial rollouts in whole runs on the fake stack: each token's policy and log-prob, and each group counted once."""

import itertools
from collections import Counter

import pytest
from fake_stack import SCORED, STATES, groups_in_flight, watched

from bapo_openrlhf.flags.sizes import run_steps
from bapo_openrlhf.record import metrics

WORDS = {
    "adapt.partial_rollout_tokens": 1,
    "adapt.rollout_delay": 1,
    "adapt.reevaluate_every": 2,
    "train.full_determinism_enable": True,
}


def sampled(run, response) -> list[float]:
    """The log-prob of each token under the weights of its segment."""
    wanted, tokens = [], response.token_ids.tolist()
    for version, count in response.segments:
        start = 1 + len(wanted)
        wanted += run.log_probs(tokens, run.updates_before[version])[start : start + count]
    return wanted


@pytest.mark.parametrize(("budget", "queue", "delay", "prompts", "algorithm"), [
    (1, 0, 1, 16, "bapo_grpo"),
    (2, 0, 1, 14, "ba_ppo"),
    (2, 0, 2, 16, "bapo_grpo"),
    (2, 2, 1, 14, "bapo_grpo"),
    (2, 2, 2, 16, "bapo_grpo"),
])  # fmt: skip
class TestRun:
    """Also ahead of training. Then a response that has stopped goes on in the next rollout."""

    @pytest.fixture
    def run(self, world, budget, queue, delay, prompts, algorithm):
        words = {"adapt.partial_rollout_tokens": budget, "adapt.rollout_delay": delay}
        words |= {"train.async_enable": True, "train.async_queue_size": queue} if queue else {}
        made = world(prompts=prompts, algorithm=algorithm, **WORDS | words)
        steps, made.counts = watched(made), []
        generator, save = made.trainer.samples_generator, made.trainer.save_logs_and_checkpoints

        def save_logs_and_checkpoints(*args):
            made.trainer.rollout_weights.queue.wait()
            begun = sum(request.prefix is None for request in made.requests)
            made.counts.append((begun, groups_in_flight(made) if queue else len(generator.fresh.in_flight)))
            save(*args)

        made.trainer.save_logs_and_checkpoints = save_logs_and_checkpoints
        made.trainer.fit()
        made.updates_before = {step: count for step, *_, count in steps}  # of the actor
        made.seen = [
            (step, source, group)
            for step, *groups, _ in steps
            for source, of_source in zip(("fresh", "reevaluated"), groups, strict=True)
            for group in of_source
        ]
        return made

    def test_each_token_has_the_log_prob_of_the_weights_that_sampled_it(self, run, queue, delay):
        mixed = 0
        for step, source, group in run.seen:
            assert group.step == step
            if source == "reevaluated":
                assert all(response.segments == () for response in group.responses)
                assert queue or group.weights_version == step
                continue
            newest = max(0, step - queue) // delay * delay  # the rollout of step t is generated in step t - q
            parts = [[version for version, _ in response.segments] for response in group.responses]
            assert max(versions[-1] for versions in parts) == newest
            assert group.weights_version == min(versions[0] for versions in parts)
            for response, versions in zip(group.responses, parts, strict=True):
                assert versions == sorted(set(versions)) and group.weights_version_of(response) == versions[0]
                assert sum(tokens for _, tokens in response.segments) == len(response.log_probs)
                assert response.log_probs.tolist() == pytest.approx(sampled(run, response))
            mixed += sum(len(versions) > 1 for versions in parts)
        assert mixed > 3

    def test_every_prompt_is_settled_once_or_in_flight(self, run, queue, delay, prompts, algorithm):
        settled, rows = 0, run.metrics()
        for step, (row, (groups, in_flight)) in enumerate(zip(rows, run.counts, strict=True)):
            assert set(row) - {"step"} <= metrics.names(algorithm, optional=True)
            settled += sum(row[f"groups/{state}"] for state in STATES)
            assert groups == settled + in_flight
            assert (queue and delay > 1) or row["groups/in_flight"] == in_flight
            assert row["groups/failed"] == 0  # as a group would be with an unfinished response
            fresh = [group for at, source, group in run.seen if (at, source) == (step, "fresh")]
            parts = [len(response.segments) for group in fresh for response in group.responses]
            assert row["responses/mixed_share"] == sum(count > 1 for count in parts) / max(len(parts), 1)
        assert in_flight == 0 < max(flying for _, flying in run.counts)
        assert sum(row["responses/continued"] for row in rows) > 0
        assert len({request.seed for request in run.requests}) == len(run.requests)
        drawn = Counter(group.prompt.text for _, source, group in run.seen if source == "fresh")
        assert set(drawn.values()) == {run.args.train.num_episodes} and len(drawn) == prompts


def test_the_end_of_the_data_finishes_all_responses_in_a_step_of_its_own(world):
    """The last rollout of an epoch is a full one, so one step more has no new prompts. It may have hard ones."""
    run, begun = world(prompts=16, **WORDS | {"adapt.partial_rollout_tokens": 3, "adapt.reevaluate_every": 1}), []
    run.reward = lambda *_: 0.0  # all prompts are hard
    begin, generate = run.trainer.method.begin_step, run.engines[0].generate_responses
    run.trainer.method.begin_step = lambda step: begun.append((step, begin(step))) or begun[-1][1]
    limits = set()  # step, whether the response goes on, and the tokens that it may get; of a hard prompt there is none

    def generate_responses(**request):
        if "budget" in request:
            limits.add((run.step, "prefix" in request, request["budget"]))
        return generate(**request)

    run.engines[0].generate_responses = generate_responses
    run.trainer.fit()
    assert limits - {(step, True, 3) for step in (0, 5)} == {
        *((step, False, 3) for step in (0, 1, 2, 3, 5, 6, 7, 8)),
        *((step, True, 3) for step in (1, 2, 3, 6, 7, 8)),
        *((step, True, None) for step in (4, 9)),
    }
    rows = run.metrics()
    assert [step for step, _ in begun] == list(range(len(rows)))  # each step asks for its hard prompts once
    prompts = [[request.prompt for request in run.requests if request.step == step] for step in range(len(rows))]
    assert len({prompt for step in range(4) for prompt in prompts[step]}) == 16
    assert len(rows) == 2 * 5 == run_steps(run.args, 16, 1)
    for last in (4, 9):
        assert rows[last - 1]["groups/in_flight"] > 0 == rows[last]["groups/in_flight"]
        hard = [prompt.text for prompt in begun[last][1]]
        assert hard and Counter(prompts[last]) - Counter(hard) and rows[last]["rollouts/step"] > 4 * len(hard)
        assert len(prompts[last]) == rows[last]["responses/continued"] + len(hard)


def test_a_reward_model_scores_the_responses_of_complete_groups(world):
    run = world(prompts=14, **WORDS | SCORED | {"adapt.reward_range": ["-3", "5"]})
    seen = watched(run)
    run.trainer.fit()
    for step, *groups, _ in seen:
        complete = {tuple(r.token_ids.tolist()) for group in itertools.chain(*groups) for r in group.responses}
        assert {tuple(tokens) for at, tokens in run.scored if at == step} == complete
        assert complete
