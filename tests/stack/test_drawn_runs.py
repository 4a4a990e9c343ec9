"""A run of any flags that `check` calls valid begins, makes its first step and ends.

The configurations are drawn from the table of flags (tests/unit/flags/drawn_flags.py). That of `make test` is always
the same; those marked slow are other ones each time. A failure names its seed: DRAWN_SEED=SEED draws the same again.
"""

import json
import os
import random
import subprocess
import sys

import pytest
from drawn_flags import Value, drawn, table, words_of

pytestmark = pytest.mark.stack

RUNS, FIXED = 50, 1  # the first FIXED are not marked slow
GIVEN = os.environ.get("DRAWN_SEED")
ANY = random.SystemRandom().randrange(2**31)
TRIES = 40  # configurations until one is valid; more than half are refused
TEXTS = ["1+2=", "Größe ∑ 数", "{} {x} %s", "a\nb", "'\"\\", "x" * 20, "🙂", "<b>"]


def first_valid(seed: int, base: dict[str, str], folder, environment) -> tuple[dict[str, Value], str]:
    """The first of the drawn configurations that `check` calls valid, and how to draw it again."""
    choices = table()
    for number in range(TRIES):
        flags = drawn(seed + 1000 * number, choices)
        command = [sys.executable, "-m", "bapo_openrlhf.cli", "check", *words_of(base | flags)]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        text = f"DRAWN_SEED={seed}, try {number + 1}: {' '.join(words_of(flags))}"
        if done.returncode == 0:
            return flags, text
        assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("error: "), f"{text}\n{done.stderr}"
    raise AssertionError(f"DRAWN_SEED={seed}: none of {TRIES} configurations is valid")


@pytest.mark.parametrize("number", [pytest.param(n, marks=[pytest.mark.slow] * (n >= FIXED)) for n in range(RUNS)])
def test_what_check_calls_valid_makes_its_first_step(number, train, workspace, small_flags):
    seed = int(GIVEN or (0 if number < FIXED else ANY)) + number
    rng = random.Random(seed)
    folder = workspace / f"drawn{number}"
    folder.mkdir()
    rows = [{"input": f"{row}: {rng.choice(TEXTS)}", "label": str(rng.randrange(9))} for row in range(64)]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text(text, encoding="utf-8")
    places = {"data.prompt_dataset": folder / "rows.jsonl", "data.max_len": 64, "data.max_samples": 16}
    places |= {f"{model}.model_name_or_path": workspace / "model" for model in ("actor", "critic")}
    base = {name: str(value) for name, value in (small_flags | places).items()}
    flags, what = first_valid(seed, base, workspace, os.environ | {"BAPO_OPENRLHF_CPU": "1"})
    print(what)
    words = {name.replace(".", "__"): value for name, value in (places | flags).items()}
    done = train(f"drawn{number}", "-m", "bapo_openrlhf.cli", "train", **words)
    assert "Global step 1:" in done.output or done.metrics, what
