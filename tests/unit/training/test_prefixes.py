"""Prefixes in whole runs on the fake stack: what is asked for, which tokens train, what is recorded, and resumed."""

from types import SimpleNamespace

import numpy as np
import pytest
from fake_stack import trained, without_times
from test_checkpoints import REPEATABLE, continued
from test_demonstrations_in_runs import Letters
from test_record_of_runs import assert_counted

from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.record.run_record import read_answers, read_groups
from bapo_openrlhf.training.trainer.demonstrations import Solutions

SYNCHRONOUS = {"adapt.rollout_delay": 1, "adapt.reevaluate_every": 1, "train.num_episodes": 3}
AHEAD = SYNCHRONOUS | {"train.async_enable": True, "train.async_queue_size": 2, "adapt.rollout_delay": 2}
BAPO = {"adapt.method": "bapo", "adapt.options": "prefix_share=1/2", "adapt.buffer_size": 16}
BAPO |= {"adapt.max_reevaluated_prompts": 8}
SAMPLING = {"adapt.method": "prefix_sampling", "adapt.options": "prefix_share=1/2"}


@pytest.fixture
def solved(monkeypatch):
    """A worked solution of each second prompt: its letters, and the end token 0."""

    def of(args, strategy, dataset, tokenizer):
        pairs = [(Prompt(text, label), f"{text} solved" if int(label) % 2 else None) for _, text, label, _ in dataset]
        limits = SimpleNamespace(rollout=SimpleNamespace(max_new_tokens=30), data=SimpleNamespace(max_len=64))
        return Solutions(pairs, Letters(), limits)

    monkeypatch.setattr(Solutions, "of", of)


def watched(run) -> tuple[list, list]:
    """What the method gets in each step, and its batches."""
    seen, batches, build = [], [], run.trainer.method.build_batch

    def build_batch(step, fresh, reevaluated):
        seen.append((step, list(fresh), list(reevaluated)))
        batches.append(build(step, fresh, reevaluated))
        return batches[-1]

    run.trainer.method.build_batch = build_batch
    return seen, batches


def own(response) -> list[int]:
    """The generated tokens of a response."""
    ((start, end),) = response.action_spans
    return response.token_ids[start:end].tolist()


@pytest.mark.parametrize(
    ("method", "algorithm", "mode"),
    [
        (BAPO, "bapo_grpo", SYNCHRONOUS),
        (BAPO, "bapo_grpo", SYNCHRONOUS | {"adapt.partial_rollout_tokens": 2}),
        (BAPO, "ba_ppo", AHEAD),
        (SAMPLING, "ba_ppo", SYNCHRONOUS | {"adapt.rollout_delay": 2}),
        (SAMPLING, "bapo_grpo", AHEAD),
    ],
    ids=["bapo", "bapo with partial rollouts", "bapo ahead", "prefix_sampling delayed", "prefix_sampling ahead"],
)
class TestRun:
    @pytest.fixture
    def run(self, world, solved, method, algorithm, mode):
        made = world(prompts=24, algorithm=algorithm, evaluation=1, **mode | method | {"eval.steps": 2})
        made.seen, made.batches = watched(made)
        made.trainer.fit()
        return made

    def test_prefixes_are_of_stored_responses_of_the_prompt(self, run, method):
        stored, kinds = {}, set()
        for _, fresh, again in run.seen:
            for group in again:
                prefix, begin = list(group.prompt.prefix), 2 + len(group.prompt.prefix)
                for response in group.responses:
                    assert response.token_ids[2:begin].tolist() == prefix
                    assert response.action_spans == ((begin, len(response.token_ids)),)
                    assert len(response.log_probs) == len(response.token_ids) - begin
                if not prefix:
                    continue
                worked = [ord(letter) for letter in f"{group.prompt.text} solved"]
                if prefix == worked[: len(prefix)]:
                    assert 1 <= len(prefix) <= len(worked) and int(group.prompt.label) % 2
                    kinds.add("worked")
                    continue
                kind, tokens = next(one for one in stored[group.prompt.id] if one[1][: len(prefix)] == prefix)
                kinds.add(kind)
                assert 1 <= len(prefix) < len(tokens)
            for group in [*fresh, *(group for group in again if not group.prompt.prefix)]:
                few = {1: 1.0, 3: 0.0}.get(int(4 * group.mean))
                stored.setdefault(group.prompt.id, []).extend(
                    ("right" if few else "wrong", own(one)) for one in group.responses if one.reward == few
                )
        assert kinds == {"right", "wrong"} | ({"worked"} if method is BAPO else set())
        for request in run.requests:
            is_context = request.prefix is not None and request.prefix.is_context  # otherwise a response goes on
            assert not is_context or request.prompt.startswith("prompt")

    def test_only_tokens_after_the_prefix_train(self, run, algorithm):
        seen = 0
        for step, experiences in run.trained + run.taught:
            rows = [(group, one) for _, group in run.batches[step].with_sources() for one in group.responses]
            for (group, response), e in zip(rows, experiences, strict=True):
                tokens, mask = e.sequences[0].tolist(), e.action_mask[0].bool()
                assert tokens == response.token_ids.tolist()
                begin = 2 + len(group.prompt.prefix)
                trained = [place + 1 for place, on in enumerate(mask.tolist()) if on]
                assert trained == list(range(begin, len(tokens)))
                if not group.prompt.prefix:
                    continue
                seen, rewards = seen + 1, np.array([one.reward for one in group.responses])
                if algorithm == "ba_ppo":  # gamma = lambda = 1 and no KL: each return is the reward
                    wanted = [response.reward] * len(trained)
                    assert e.returns[0][mask].tolist() == pytest.approx(wanted, abs=1e-5)
                else:
                    wanted = (response.reward - rewards.mean()) / np.sqrt(rewards.var() + 1e-6)
                    assert e.advantages[0][mask].tolist() == pytest.approx([wanted] * len(trained), rel=1e-4)
        assert seen > 4

    def test_they_have_an_origin_and_a_count_of_their_own(self, run):
        rows, groups = run.metrics(), read_groups(run.record)
        lengths = {g.uid: len(g.prompt.prefix) for _, _, again in run.seen for g in again if g.prompt.prefix}
        assert {g["uid"]: g["prefix_tokens"] for g in groups if g["source"] == "prefixed"} == lengths
        assert {g["state"] for g in groups if g["source"] == "prefixed"} >= {"prefixed", "unsteered"}
        assert not {"prefixed", "unsteered"} & {g["state"] for g in groups if g["source"] != "prefixed"}
        for row, (step, _, again) in zip(rows, run.seen, strict=True):
            of_step = [g for g in groups if g["step"] == step + 1]
            assert_counted(row, of_step)
            begun = [g for g in again if g.prompt.prefix]
            given = sum(len(g.prompt.prefix) * 4 for g in begun)
            made = sum(len(own(response)) for g in begun for response in g.responses)
            assert row.get("prefix/token_share") == (pytest.approx(given / (given + made)) if begun else None)
            attempts = len(again) - len(begun)
            assert row.get("groups/reevaluation_attempts", 0) == attempts
            assert row.get("reevaluation/improved_share", 0) == row["groups/reevaluated"] / max(attempts, 1)
        assert sum(row["groups/prefixed"] for row in rows) > 2


@pytest.mark.parametrize("mode", [SYNCHRONOUS, AHEAD], ids=["synchronous", "ahead"])
@pytest.mark.parametrize("method", [BAPO, SAMPLING], ids=["bapo", "prefix_sampling"])
def test_a_resumed_run_is_the_same(fitted, solved, tmp_path, method, mode):
    words = mode | method | REPEATABLE | {"algorithm": "ba_ppo"}
    run = fitted(prompts=24, **words)
    for saved in (3, 7):
        again = continued(run, tmp_path / f"again {saved}", f"global_step{saved}", **words)
        assert trained(again, saved) == trained(run, saved)
        assert without_times(again) == without_times(run)
    assert sum(row["groups/prefixed"] for row in run.metrics()[7:]) > 0


def test_no_prompt_is_solved_by_a_group_with_a_prefix(world, solved):
    """The first answers of a prompt are those of its own groups: one that failed, and one that solved it."""
    run = world(prompts=24, **SYNCHRONOUS | BAPO | {"algorithm": "bapo_grpo"})
    run.reward = lambda prompt, weights, sample: float(run.requests[-1].prefix is not None and sample % 2)
    run.trainer.fit()
    assert sum(row["groups/prefixed"] for row in run.metrics()) > 2
    assert {row["kind"] for row in read_answers(run.record)} == {"failed"}
    assert len(run.trainer.method.hard) == 16 and not run.trainer.method.replay


def test_a_group_without_a_reward_comes_back_too(world, solved):
    run = world(prompts=24, **SYNCHRONOUS | BAPO)
    run.reward = lambda prompt, weights, sample: 0.0 if run.requests[-1].prefix is None else None
    run.trainer.fit()
    groups = read_groups(run.record)
    assert {row["state"] for row in groups if row["source"] == "prefixed"} == {"failed"}
    assert run.trainer.method.prefixes.state_dict()["sent"] == []
