"""`bapo-openrlhf smoke` on the real stack: presets with their own architecture, vocabulary and parallelism.

There is no model hub here, so the folders of the models are made on the spot (preset_models.py).
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = [pytest.mark.stack, pytest.mark.slow]  # test_first_hour.py has a smoke run, too

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PRESETS = {path.stem: path for path in sorted((ROOT / "configs").glob("bapo*.yaml"))} | {
    "ba_ppo_qwen3_4b": ROOT / "configs" / "ba_ppo_qwen3_4b.yaml"
}
STAGES = ["start", "step 1", "step 2", "save", "kill", "resume", "step 3", "end"]


@pytest.fixture
def smoke(tmp_path):
    """smoke(preset, *words): the status and the lines of a smoke run of a preset."""

    def start(preset, *words):
        (tmp_path / "site").mkdir()
        if importlib.util.find_spec("torchvision") is None:
            shutil.copy(HERE / "vision_torchvision.py", tmp_path / "site" / "torchvision.py")
        path = os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", str(ROOT))])
        # The C library fills new memory with garbage, so that memory which nothing has written to is noticed.
        environment = os.environ | {"PYTHONPATH": path, "BAPO_OPENRLHF_CPU": "1", "MALLOC_PERTURB_": "128"}
        subprocess.run([sys.executable, HERE / "preset_models.py", preset, tmp_path], env=environment, check=True)
        models = {"actor", "critic"} & yaml.safe_load(PRESETS[preset].read_text()).keys()
        places = {f"{model}.model_name_or_path": tmp_path / "model" for model in models}
        places |= {"data.prompt_dataset": tmp_path / "data.jsonl", "run.dir": tmp_path}
        command = [sys.executable, "-m", "bapo_openrlhf.cli", "smoke", "--config", PRESETS[preset]]
        command += [*(f"--{name}={place}" for name, place in places.items()), *words]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
        print(done.stdout)
        return done.returncode, done.stdout.splitlines()

    return start


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_passes(smoke, preset):
    status, lines = smoke(preset)
    assert status == 0 and sum(line.startswith("  yes ") for line in lines) == 7, lines
    said = [line[2:16].strip() for line in lines]
    assert [name for name in said if name in STAGES] == STAGES


def test_a_reward_function_that_fails_for_real_responses(smoke, tmp_path):
    """The checks call it with an empty response, which it can judge."""
    file = tmp_path / "reward.py"
    file.write_text(
        "def reward_func(queries, prompts, labels, **kwargs):\n"
        "    if queries != prompts:\n        raise KeyError('answer')\n    return {'rewards': [0.0]}\n"
    )
    status, lines = smoke("bapo_grpo_countdown_qwen2.5_math_1.5b", f"--reward.remote_url={file}")
    assert status == 1 and lines[-1].startswith("failed in start: ") and "16 x raised" in lines[-1]
    assert "KeyError: 'answer'" in Path(lines[-1].rpartition("its output is in ")[2]).read_text()
