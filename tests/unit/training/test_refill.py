"""Dynamic filtering with batch adaptation: how many rounds a step makes, of which prompts, and what becomes of them."""

import itertools
from collections import Counter
from fractions import Fraction

import pytest
from fake_stack import DYNAMIC, STATES, digest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rollout import SEED, Clock, Engine, Generation, arguments, generator_of, hard, rows, texts

from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.record import metrics
from bapo_openrlhf.record.run_record import read_groups
from bapo_openrlhf.training.trainer.engine_calls import prompt_seed
from bapo_openrlhf.training.trainer.fresh import Rounds

pytestmark = pytest.mark.usefixtures("values_for_refs")

REWARDS = ((0.0, 0.0), (1.0, 1.0), (0.0, 1.0), (1.0, 0.0), (None, 1.0))


def refilling(data: list, *, batch: int, wanted: list[int], with_fresh=(), **method):
    """A generator over prompts with these rewards, which wants one number after the other; `calls` notes the rest."""
    calls, clock, begun = [], Clock(0), []
    args = arguments(batch_size=batch, sleep=True)
    args.algo.dynamic_filtering_enable = True
    method |= {
        "begin_step": lambda step: begun.append(step) or with_fresh,
        "wanted": lambda step, prompts: wanted[step % len(wanted)],
    }
    engines = [Engine(calls, lambda prompt, sample: data[int(prompt)][sample] if prompt.isdigit() else 1.0)]
    options = {"method": method, "between": (Fraction(-1), Fraction(2))}
    prompts = rows(*map(str, range(len(data))))
    generator = generator_of(Rounds, args, prompts, rows("0", "1"), engines, clock, **options)
    return Generation(generator=generator, calls=calls, clock=clock, begun=begun)


def by_hand(data: list, start: int, batch: int, wanted: int) -> tuple[range, int, int, bool]:
    """Prompts of a step from position `start` on, its rounds, its groups with a signal, and whether the data ends."""
    end, rounds, informative = start, 0, 0
    while True:
        part = range(end, min(end + batch, len(data)))
        end, rounds = part.stop, rounds + (len(part) > 0)
        informative += sum(set(data[place]) == {0.0, 1.0} for place in part)
        if len(part) < batch or informative >= wanted or rounds == 4:
            return range(start, end), rounds, informative, len(part) < batch


class TestRounds:
    @given(
        data=st.lists(st.sampled_from(REWARDS), min_size=1, max_size=40),
        batch=st.integers(1, 6),
        wanted=st.lists(st.integers(-2, 9), min_size=1, max_size=5),
    )
    @settings(max_examples=5 * settings.default.max_examples, derandomize=True, database=None)
    def test_are_those_of_a_plain_loop_over_the_data(self, data, batch, wanted):
        run = refilling(data, batch=batch, wanted=wanted, with_fresh=hard("h"))
        for _ in range(2):  # epochs
            start, ended = 0, False
            while not ended:
                run.calls.clear()
                step = run.clock.step
                prompts, rounds, informative, ended = by_hand(data, start, batch, wanted[step % len(wanted)])
                rollouts, rate, drawn, exhausted = run.generator.generate_samples()
                fresh = [answers for rollout in rollouts for answers in rollout.fresh]
                assert (drawn, exhausted, start + drawn) == (len(prompts), ended, prompts.stop)
                assert texts(fresh) == [str(place) for place in prompts for _ in range(2)]
                assert rate == (200 * informative / len(prompts) if prompts else None)
                assert run.generator.exhausted == ended
                numbers = run.generator.metrics()
                assert numbers["prompts/rounds"] == rounds
                assert numbers["groups/wanted"] == wanted[step % len(wanted)]
                again = {"h": prompt_seed(SEED, step, "reevaluated", 0)} if prompts else {}
                assert run.seeds() == again | {
                    str(place): prompt_seed(SEED, step, "fresh", number) for number, place in enumerate(prompts)
                }
                assert [texts(rollout.hard) for rollout in rollouts] == [["h", "h"]] * bool(prompts)
                methods = [method for method, _ in itertools.groupby(call.method for call in run.calls)]
                assert methods == ["wake_up", *["generate"] * bool(prompts), "sleep"]
                start, run.clock.step = prompts.stop, step + 1
        asked = Counter(run.begun)
        assert set(asked.values()) <= {1} and len(asked) >= 2  # hard prompts are asked for once in a step

    def test_draw_more_prompts_for_a_method_that_chooses(self):
        data = [(0.0, 0.0)] * 20
        choose = lambda step, prompts, count: range(1, 1 + count)  # noqa: E731
        run = refilling(data, batch=2, wanted=[9], candidates=2, choose_prompts=choose)
        (rollout,), _, drawn, _ = run.generator.generate_samples()
        assert texts(rollout.fresh)[::2] == ["1", "2", "5", "6", "9", "10", "13", "14"]  # of 4 at a time
        assert drawn == 16 and run.generator.metrics()["prompts/passed_over"] == 8
        run.clock.step += 1
        (rollout,), *_, drawn, ended = run.generator.generate_samples()
        assert (drawn, ended) == (4, True)  # 4 are left, and the next round finds none
        assert run.generator.metrics()["prompts/passed_over"] == 2

    def test_are_whole_before_the_next_one_if_responses_come_in_stages(self):
        data = [(0.0, 1.0), (0.0, 0.0), (0.0, 1.0), (1.0, 1.0)]
        more = lambda given: [int(len(rewards) == 1 and rewards[0] == 0) for rewards in given]  # noqa: E731
        run = refilling(data, batch=1, wanted=[1], first_responses=1, more_responses=more)
        # the second response to a prompt is sample 0 of its request, so it is always equal to the first
        (rollout,), *_ = run.generator.generate_samples()
        assert texts(rollout.fresh) == ["0", "0", "1", "1", "2", "2", "3"]
        assert [call.prompt for call in run.requests()] == ["0", "0", "1", "1", "2", "2", "3"]
        assert len({call.seed for call in run.requests()}) == 7


WORDS = DYNAMIC | {"adapt.batch_size": 10, "adapt.rollout_delay": 2, "train.full_determinism_enable": True}


def of_record(run) -> dict[int, list[dict]]:
    """The lines of groups.jsonl of fresh groups, by step from 0."""
    groups = sorted(read_groups(run.record), key=lambda group: group["step"])
    fresh = (group for group in groups if group["source"] == "fresh")
    return {step - 1: list(of_step) for step, of_step in itertools.groupby(fresh, key=lambda group: group["step"])}


class TestRun:
    @pytest.mark.parametrize("algorithm", ["bapo_grpo", "ba_ppo"])
    def test_every_group_is_counted_and_no_prompt_is_left_out(self, fitted, algorithm):
        run = fitted(algorithm=algorithm, prompts=90, **WORDS)
        rows, groups = run.metrics(), of_record(run)
        epochs: list[list[str]] = [[]]
        for step, row in enumerate(rows):
            assert set(row) - {"step"} <= metrics.names(algorithm, optional=True)
            assert row["groups/generated"] == sum(row[f"groups/{state}"] for state in STATES)
            assert row["groups/generated"] == sum(request.step == step for request in run.requests)
            fresh = groups[step]
            with_signal = sum(0 < group["mean"] < 1 for group in fresh)
            full = len(fresh) == 4 * row["prompts/rounds"]
            assert row["dynamic_filtering_pass_rate"] == 400 * with_signal / len(fresh)
            before = sum(0 < group["mean"] < 1 for group in fresh[: 4 * (row["prompts/rounds"] - 1)])
            assert before < row["groups/wanted"] or row["prompts/rounds"] == 1
            assert with_signal >= row["groups/wanted"] or row["prompts/rounds"] == 4 or not full
            assert {group["state"] for group in fresh if group["mean"] in (0, 1)} <= {"filtered"}
            epochs[-1] += [group["prompt"] for group in fresh]
            if len(epochs[-1]) == 90:
                epochs.append([])
        ids = sorted(Prompt(f"prompt {n}", str(n)).id for n in range(90))
        assert [sorted(prompts) for prompts in epochs] == [ids, ids, []]
        assert len({row["prompts/rounds"] for row in rows}) > 2 and run.trainer.ledger.counts["filtered"] > 0
        assert run.trainer.ledger.counts["generated"] == len(run.requests)

    def test_other_methods_want_a_group_for_each_prompt_of_a_rollout(self, fitted):
        run = fitted(prompts=30, **WORDS, **{"adapt.method": "freshness"})
        assert {row["groups/wanted"] for row in run.metrics()} == {4}
        assert max(row["prompts/rounds"] for row in run.metrics()) > 1

    def test_a_range_drops_groups_with_a_signal(self, fitted):
        run = fitted(prompts=90, **WORDS, **{"algo.dynamic_filtering_range": (0.3, 0.6), "adapt.replay_steps": 0})
        groups = [group for fresh in of_record(run).values() for group in fresh]
        assert {group["mean"] for group in groups if group["state"] == "fresh"} == {0.5}
        assert {group["mean"] for group in groups if group["state"] == "filtered"} == {0, 0.25, 0.75, 1}
        assert sum(row["filtered/by_draw"] for row in run.metrics()) > 0
        for row, fresh in zip(run.metrics(), of_record(run).values(), strict=True):
            assert row["dynamic_filtering_pass_rate"] == 400 * sum(g["mean"] == 0.5 for g in fresh) / len(fresh)

    def test_what_does_not_fit_is_cut_and_may_be_replayed(self, world):
        run = world(prompts=90, **WORDS | {"adapt.batch_size": 6, "rollout.batch_size": 5, "adapt.buffer_size": 20})
        run.reward = lambda prompt, weights, n: float(n < 1 + digest(prompt) % 3)
        run.trainer.fit()
        first, second = run.metrics()[:2]
        assert (first["prompts/rounds"], first["groups/fresh"], first["groups/cut"]) == (2, 6, 4)
        assert (second["groups/wanted"], second["prompts/rounds"], second["groups/replayed"]) == (-4, 1, 1)
