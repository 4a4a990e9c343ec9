"""The record that a run on the fake stack leaves."""

from collections import Counter

import pytest
from fake_stack import STATES, digest, tokens_of

from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.adapt.metric import ADAPTED, ALL
from bapo_openrlhf.record import metrics
from bapo_openrlhf.record.run_record import read_answers, read_groups
from bapo_openrlhf.training.trainer.plain_trainer import RecordedPPOTrainer
from bapo_openrlhf.training.trainer.trainer import AdaptedPPOTrainer


def assert_counted(metric: dict, groups: list[dict]) -> None:
    """The metrics of a step are those of its lines of groups.jsonl."""
    states = Counter(row["state"] for row in groups)
    assert {state: count for state in STATES if (count := metric.get(f"groups/{state}"))} == states
    kinds = {0: "filtered/none_right", 1: "filtered/all_right"}
    dropped = Counter(kinds.get(row["mean"], "filtered/by_draw") for row in groups if row["state"] == "filtered")
    assert all(metric[reason] == dropped[reason] for reason in (*kinds.values(), "filtered/by_draw"))
    rated = [row for row in groups if row["mean"] is not None]
    assert metric["groups/with_signal"] == sum(0 < row["mean"] < 1 for row in rated)
    means = [row["mean"] for row in rated if row["source"] == "fresh"]
    assert metric["reward/fresh_mean"] == (pytest.approx(sum(means) / len(means), abs=1e-12) if means else None)
    assert metric["rollouts/step"] == 4 * metric["groups/generated"] == 4 * len(groups)
    assert metric["tokens/generated"] == sum(row["tokens"] for row in groups)


class TestRecord:
    """What a run leaves, against what the engines were asked for and what was trained on."""

    @pytest.mark.parametrize(
        "case", [{}, {"algorithm": "ba_ppo", "adapt.filter": "gaussian", "adapt.max_shift_fresh": 1e-5}]
    )
    def test_every_group_has_its_line(self, world, case):
        """Some prompts always fail, and others in some steps, also hard ones. Nothing of what fails is trained on."""
        run = world(prompts=40, **{"adapt.max_failed_share": 1}, **case)
        plain = run.reward

        def fails(prompt, weights):
            return int(prompt[7:]) % 10 == 3 or (weights % 4 == 1 and int(prompt[7:]) % 2 == 0)

        run.reward = lambda prompt, weights, n: None if n == 1 and fails(prompt, weights) else plain(prompt, weights, n)
        run.trainer.fit()
        rows, metrics = read_groups(run.record), run.metrics()
        failing = {f"prompt {n}" for n in range(3, 40, 10)}
        trained = {prompt for _, batch in run.trained for experience in batch for prompt in experience.prompts}
        stored = {entry.prompt.text for entry in run.trainer.method.hard.oldest(99)}
        assert trained and not failing & (trained | stored)
        assert run.trainer.ledger.counts["generated"] == len(run.requests)
        assert [row["uid"] for row in rows] == list(range(len(run.requests)))
        ids = {Prompt(f"prompt {n}", str(n)).id: f"prompt {n}" for n in range(40)}
        for step, metric in enumerate(metrics):
            of_step = [row for row in rows if row["step"] == step + 1]
            fresh, hard = run.of_step(step)
            for source, requests in (("fresh", fresh), ("reevaluated", hard)):
                result = [row for row in of_step if row["source"] == source]
                assert sorted(ids[row["prompt"]] for row in result) == sorted(request.prompt for request in requests)
                for row in result:
                    (request,) = (request for request in requests if request.prompt == ids[row["prompt"]])
                    rewards = [plain(request.prompt, request.weights, n) for n in range(4)]
                    failed = fails(request.prompt, request.weights)
                    assert row["mean"] == (None if failed else sum(rewards) / 4)
                    assert (row["state"] == "failed") == failed
                    assert row["responses"] == 4 and row["tokens"] == tokens_of(request)
            assert_counted(metric, of_step)
            assert metric["tokens/generated_total"] == sum(row["tokens"] for row in rows if row["step"] <= step + 1)
            trained = [experience for at, batch in run.trained if at == step for experience in batch]
            assert metric["tokens/trained"] == sum(int(experience.action_mask.sum()) for experience in trained)
            assert metric["tokens/trained_total"] == sum(row["tokens/trained"] for row in metrics[: step + 1])
            used = sum(metric[f"groups/{source}"] for source in ("fresh", "reevaluated", "replayed"))
            assert metric["groups/capacity_used"] == used / metric["groups/capacity"] <= 1
            again = metric["groups/reevaluation_attempts"]
            assert metric.get("reevaluation/improved_share") == (
                metric["groups/reevaluated"] / again if again else None
            )
        assert {row["state"] for row in rows} >= {"fresh", "filtered", "failed", "unimproved"}
        assert {row["source"] for row in rows if row["state"] == "failed"} == {"fresh", "reevaluated"}
        assert metrics[-1]["rollouts/total"] == 4 * len(rows)

    def test_answers_of_prompts_that_failed_and_were_solved(self, world):
        run = world(prompts=12, **{"train.num_episodes": 4})
        run.reward = lambda prompt, weights, n: float(weights >= int(prompt[7:]) and n == 2)
        run.trainer.fit()
        rows, groups = read_answers(run.record), read_groups(run.record)
        wanted = set()
        for prompt in {row["prompt"] for row in groups}:
            of_prompt = [row for row in groups if row["prompt"] == prompt]
            failed = [row["step"] for row in of_prompt if row["mean"] == 0]
            wanted |= {(prompt, "failed", step) for step in failed[:1]}
            solved = [row["uid"] for row in of_prompt if row["mean"] > 0 and failed and row["step"] > failed[0]]
            wanted |= {(prompt, "solved", row["step"]) for row in of_prompt if row["uid"] in solved[:1]}
        assert {(row["prompt"], row["kind"], row["step"]) for row in rows} == wanted
        assert len(rows) == len(wanted) and {kind for _, kind, _ in wanted} == {"failed", "solved"}
        for row in rows:
            number = int(row["text"].removeprefix("prompt "))
            assert row["prompt"] == Prompt(row["text"], row["label"]).id and row["label"] == str(number)
            assert row["reward"] == (row["kind"] == "solved")
            # the third response is the right one; of equally wrong ones it is the first
            answers = {w: digest(row["text"], w, 2 * (row["kind"] == "solved"), None) for w in range(13)}
            made_by = [" ".join(str(5 + d // 7**p % 40) for p in range(1 + d % 4)) for d in answers.values()]
            assert row["response"] in made_by

    @pytest.mark.parametrize("chars", [0, 5])
    def test_how_long_answers_are(self, world, chars):
        run = world(**{"run.answer_chars": chars})
        run.reward = lambda *_: 0.0
        run.trainer.tokenizer.decode = lambda tokens, **_: "123456789" if isinstance(tokens, list) else ["x"]
        run.trainer.fit()
        assert {row["response"] for row in read_answers(run.record)} == ({" ... "} if chars else set())
        assert (run.record / "answers.jsonl").exists() == bool(chars)
        assert len(read_groups(run.record)) == len(run.requests)


# What OpenRLHF's workers report comes from `World.norms` here: it is looked at on the real stack.
WORKERS = {metric.name for metric in metrics.OPENRLHF if "/" not in metric.name}


class TestCatalogue:
    """The metrics that a run writes and those that the catalogue says it writes."""

    @pytest.mark.parametrize("algorithm", ALL)
    def test_is_what_a_run_writes(self, fitted, algorithm):
        kind = AdaptedPPOTrainer if algorithm in ADAPTED else RecordedPPOTrainer
        run = fitted(algorithm=algorithm, kind=kind, prompts=24, **{"train.num_episodes": 3})
        actual = {name for row in run.metrics() for name in row} - {"step"}
        wanted = metrics.names(algorithm, optional=False) - WORKERS
        assert actual - WORKERS >= wanted
        assert actual <= metrics.names(algorithm, optional=True)
