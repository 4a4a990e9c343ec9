"""Runs with traces on the fake stack: LUFFY."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bapo_openrlhf.cpu import stack as cpu

cpu.prepare_environment()
cpu.install()

from fake_stack import STATES, traces_file  # noqa: E402

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
        assert not made.noted("shape")
        assert all(samples.EXTERNAL not in e.info for _, batch in made.trained for e in batch)

    def test_distances_leave_traces_out(self, world, tmp_path):
        """A trace is far from any policy: with its ratio, each mixed group would be too far."""
        made = self.luffy(world, tmp_path, **{"adapt.max_tv_fresh": 0.6, "adapt.rollout_delay": 2})
        made.trainer.fit()
        assert sum(row["groups/too_far"] for row in made.metrics()) == 0
        assert all(row["tv/fresh"] < 0.5 for row in made.metrics() if "tv/fresh" in row)
