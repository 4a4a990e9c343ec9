"""The probe of gradients on the real stack: what it writes, and that the run is the same without it."""

import json
import math

import pytest
from test_training import succeeded

from bapo_openrlhf.record.run_record import PROBES

pytestmark = pytest.mark.stack

RUN = {"algorithm": "bapo_grpo", "data__max_samples": 40, "adapt__rollout_delay": 3, "adapt__reevaluate_every": 2}
CLI = ("-m", "bapo_openrlhf.cli.train_ppo_ray")
CLOCK = ("timing", "probe/", "perf")


def test_it_says_where_each_group_points_and_changes_nothing(train):
    flags = RUN | {"switches": ("train.full_determinism_enable",)}
    plain = succeeded(train("without_probe", *CLI, run__name="without_probe", **flags))
    probed = succeeded(train("with_probe", *CLI, run__name="with_probe", run__gradient_probe=2, **flags))
    for one, other in zip(plain.metrics, probed.metrics, strict=True):
        numbers = [{k: v for k, v in row.items() if not k.startswith(CLOCK)} for row in (one, other)]
        differ = {k for k in numbers[0].keys() | numbers[1].keys() if numbers[0].get(k) != numbers[1].get(k)}
        assert not {k for k in differ if "seconds" not in k and "per_" not in k}, differ

    rows = [json.loads(line) for line in (probed.folder / PROBES).read_text().splitlines()]
    by_step = {row["step"]: row for row in probed.metrics}
    assert {row["step"] for row in rows} == {3, 5} == {step for step, row in by_step.items() if "probe/halves" in row}
    for step in (3, 5):
        here, metrics = [row for row in rows if row["step"] == step], by_step[step]
        for source in ("fresh", "reevaluated", "replayed"):
            own = [row for row in here if row["source"] == source]
            assert len(own) == metrics[f"groups/{source}"]
            assert (f"probe/{source}" in metrics) == bool(own)
            if own and source == "replayed":
                mean = sum(row["tv"] for row in own) / len(own)
                assert mean == pytest.approx(metrics["tv/replayed"], abs=1e-6)
        assert any(row["norm"] > 0 for row in here)
        for row in here:
            assert -1.0001 <= row["cosine"] <= 1.0001 if row["norm"] else row["cosine"] is None
        assert math.isfinite(metrics["probe/halves"]) and metrics["timing/probe"] > 0
