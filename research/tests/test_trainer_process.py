"""research/benchmarks/trainer_process.py, short: it drives the real classes, and what it says of them adds up."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "benchmarks" / "trainer_process.py"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "forward", "training"), [("grpo", 6, 22), ("ppo", 6, 26)])
def test_what_is_put_into_the_object_store(name, forward, training):
    """Bytes a token: int32 and two bool for the passes; for the training also 4 or 5 numbers in float32.

    The first batch has no replayed response, so the reference model passes all of it, as actor and critic do. All
    models have equally many ranks, so each batch is put once: a part for each rank and pass.
    """
    words = ["--one", name, "--groups", "16", "--tokens", "4096", "--ranks", "4", "--steps", "1"]
    done = subprocess.run([sys.executable, FILE, *words], check=True, capture_output=True, text=True)
    result = json.loads(done.stdout.splitlines()[-1])
    (step,) = result["steps"]
    assert step["puts"] == 2 * 4
    tokens = step["trained_tokens"] + step["trained"] * 4096 / 8  # the prompts' too
    most = (forward + training) * step["trained"] * 4096  # as many as if all responses were of full length
    assert forward * tokens + training * tokens < step["bytes"] < 1.05 * most
    assert step["generated"] == 16 * 8 >= step["trained"] > 0
    assert result["imported_gib"] <= result["peak_gib"]
    assert all(seconds >= 0 for seconds in step["seconds"].values())
