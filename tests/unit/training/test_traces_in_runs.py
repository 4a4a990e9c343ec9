"""Runs with traces on the fake stack: LUFFY, ReLIFT and fine-tuning."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bapo_openrlhf.cpu import stack as cpu

cpu.prepare_environment()
cpu.install()

from fake_stack import EXTRAS, STATES, Group, traces_file  # noqa: E402

from bapo_openrlhf.adapt.arithmetic import BatchArithmetic  # noqa: E402
from bapo_openrlhf.record import metrics  # noqa: E402
from bapo_openrlhf.record.run_record import read_groups  # noqa: E402
from bapo_openrlhf.training import samples  # noqa: E402


class TestTraces:
    def luffy(self, world, tmp_path, **words):
        options = {"adapt.method": "luffy", "adapt.options": f"traces={traces_file(tmp_path, range(0, 16, 2))}"}
        return world(**options | words)

    def test_their_tokens(self, world, tmp_path):
        traces = self.luffy(world, tmp_path).trainer.method.trace_of
        assert sorted(traces) == sorted(f"prompt {n}" for n in range(0, 16, 2))
        assert traces["prompt 2"].tolist() == [197, 198, 199, 2] and traces["prompt 2"].dtype == np.int32

    @pytest.mark.parametrize(("length", "new", "kept"), [(64, 4, 3), (64, 3, 2), (13, None, 4), (12, None, 3)])
    def test_those_that_are_too_long_are_left_out(self, world, tmp_path, length, new, kept):
        """The prompts have 8 tokens, the traces 2, 3, 4, 5 and 6 with the end."""
        path = tmp_path / "traces.jsonl"
        rows = [{"prompt": f"prompt {n}", "response": "abcdefg"[: n + 1]} for n in range(5)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = {"data.max_len": length, "adapt.method": "luffy", "adapt.options": f"traces={path}"}
        made = world(**words | ({"rollout.max_new_tokens": new} if new else {}))
        assert sorted(made.trainer.method.trace_of) == [f"prompt {n}" for n in range(kept)]

    def test_a_whole_run_of_luffy(self, world, tmp_path):
        made = self.luffy(world, tmp_path)
        made.trainer.fit()
        assert made.noted("shape") == [0.1]
        rows = made.metrics()
        found = {name for row in rows for name in row} - {"step"}
        assert found <= metrics.names("bapo_grpo", optional=True) and len(rows) == 8
        for step, row in enumerate(rows):
            fresh, hard = made.of_step(step)
            mixed = [request.prompt for request in fresh if int(request.prompt[7:]) % 2 == 0]
            assert not hard and row["traces/mixed"] == len(mixed) and row["traces/prompts"] == 8
            assert row["groups/generated"] == 4 == sum(row[f"groups/{state}"] for state in STATES)
            for experience in (e for at, batch in made.trained if at == step for e in batch):
                for at, prompt in enumerate(experience.prompts):
                    external = (
                        bool(experience.info[samples.EXTERNAL][at]) if samples.EXTERNAL in experience.info else False
                    )
                    text = [token for token in experience.sequences[at].tolist() if token]
                    n = int(prompt[7:])
                    trace = [100 + ord(character) for character in "abcde"[: 1 + n % 5]] + [2]
                    assert (text == [3, 4, *trace]) is external
                    assert external is (prompt in mixed and experience.index[at] % 4 == 3)
                    assert not external or experience.rewards[at] == 1.0
            # the record has what was generated
            responses = [row for row in read_groups(made.record) if row["step"] == step + 1]
            assert {row["responses"] for row in responses} == {4}
        assert sum(row["groups/fresh"] for row in rows) > 8

    def test_a_run_without_traces_tells_the_actor_nothing(self, world):
        made = world()
        made.trainer.fit()
        assert not made.noted("shape", "finetune")
        assert all(samples.EXTERNAL not in e.info for _, batch in made.trained for e in batch)

    @pytest.mark.parametrize("solved", [False, True])
    def test_a_whole_run_of_relift(self, world, tmp_path, solved):
        """`solved`: some groups have a signal; otherwise every update is skipped, and fine-tuning is not."""
        path = traces_file(tmp_path, range(16))
        options = ["traces=" + str(path), "finetune_batch=3", "finetune_weight=0.5"]
        made = world(**{"adapt.method": "relift", "adapt.rollout_delay": 1, "adapt.options": options})
        hard = {f"prompt {n}" for n in range(0, 16, 1 + solved)}
        made.reward = lambda prompt, weights, n: float(prompt not in hard and n == 1)
        made.trainer.fit()
        rows, waiting, due = made.metrics(), [], {}
        for step, row in enumerate(rows):
            for request in made.of_step(step)[0]:
                if request.prompt in hard and request.prompt not in waiting:
                    waiting.append(request.prompt)
            if len(waiting) >= 3:
                due[step], waiting = waiting[:3], waiting[3:]
            assert row.get("finetune/demonstrations") == (3 if step in due else None)
            assert row.get("finetune/loss") == (0.5 if step in due else None)
            assert row["finetune/waiting"] == len(waiting) and row.get("skipped_update") == (None if solved else 1)
        assert {step for step, *_ in made.noted("finetune")} == set(due) and len(due) >= 3
        for step, batches, tokens, ranks, weight in made.noted("finetune"):
            by_length = sorted(due[step], key=lambda prompt: int(prompt[7:]) % 5)
            assert [prompt for batch in batches for prompt in batch.prompts] == by_length
            wanted = [[100 + ord(c) for c in "abcde"[: 1 + int(p[7:]) % 5]] + [2] for p in by_length]
            shown = [
                [int(token) for token, counts in zip(row[1:], mask, strict=True) if counts]
                for batch in batches
                for row, mask in zip(batch.sequences, batch.action_mask, strict=True)
            ]
            assert shown == wanted and tokens == sum(map(len, wanted)) and (ranks, weight) == (1, 0.5)
            assert [len(batch.prompts) for batch in batches] == [2, 1]  # micro-batches of 2
        # before the weights are synced, and after the update
        names = [name for name, _ in made.events if name in ("finetune", "sync")]
        assert all(names[at + 1] == "sync" for at, name in enumerate(names) if name == "finetune")
        assert made.trainer.step == len(rows) == 8

    @pytest.mark.parametrize(
        ("ranks", "prompts"),
        [
            (1, [[["p0", "p1"], ["p2", "p3"], ["p4"]]]),
            (2, [[["p0", "p2"], ["p4"]], [["p1", "p3"], []]]),
            (3, [[["p0", "p3"]], [["p1", "p4"]], [["p2"]]]),
            (4, [[["p0", "p4"]], [["p1"]], [["p2"]], [["p3"]]]),
            (7, [[["p0"]], [["p1"]], [["p2"]], [["p3"]], [["p4"]], [[]], [[]]]),
        ],
    )
    def test_ranks_get_shares_that_differ_by_one(self, world, make_group, ranks, prompts):
        """There are 5 demonstrations, of 1 to 5 tokens, in micro-batches of 2; [] stands for a filler."""
        made = world()
        made.trainer.arithmetic = BatchArithmetic(4, 4, 4, 8, {"actor": ranks}, 2, 3)
        made.trainer.actor_model_group = made.groups["actor"] = Group(made, "actor", ranks)
        groups = [make_group([1.0], prompt=f"p{n}", extras=EXTRAS, response_tokens=n + 1) for n in range(5)]
        made.trainer.method.demonstrations = lambda step: [groups[n] for n in (3, 0, 4, 1, 2)]
        assert made.trainer._finetune() == {"finetune/demonstrations": 5, "finetune/loss": 0.5 * ranks}
        given_ = made.noted("finetune")
        assert {call[2:] for call in given_} == {(15, ranks, 1.0)}
        found = [[batch.prompts if batch.action_mask.any() else [] for batch in batches] for _, batches, *_ in given_]
        assert found == prompts
        counted = [
            (prompt, int(mask.sum()))
            for _, batches, *_ in given_
            for batch in batches
            for prompt, mask in zip(batch.prompts, batch.action_mask, strict=True)
        ]
        fillers = sum(batch == [] for batches in prompts for batch in batches)
        # a filler is like the shortest demonstration
        assert sorted(counted) == [("p0", 0)] * fillers + [(f"p{n}", n + 1) for n in range(5)]

    def test_models_that_sleep_are_woken_for_it(self, world, make_group):
        made = world()
        made.args.ds.enable_sleep = True
        made.trainer.method.demonstrations = lambda step: [make_group([1.0], extras=EXTRAS)]
        made.trainer._finetune()
        assert [name for name, _ in made.events] == ["reload", "finetune", "offload"]

    def test_a_failure_says_where(self, world, make_group):
        made = world()
        made.trainer.method.demonstrations = lambda step: [make_group([1.0], extras=EXTRAS)] if step == 2 else []
        made.faults["finetune"] = (2, FloatingPointError("the loss is nan"))
        with pytest.raises(RuntimeError, match="step 2, fine-tuning: FloatingPointError: the loss is nan"):
            made.trainer.fit()

    def test_distances_leave_traces_out(self, world, tmp_path):
        """A trace is far from any policy: with its ratio, each mixed group would be too far."""
        made = self.luffy(world, tmp_path, **{"adapt.max_tv_fresh": 0.6, "adapt.rollout_delay": 2})
        made.trainer.fit()
        assert sum(row["groups/too_far"] for row in made.metrics()) == 0
        assert all(row["tv/fresh"] < 0.5 for row in made.metrics() if "tv/fresh" in row)
