"""Models that are not on this machine, with the cache of the hub's own library and no network."""

import subprocess
import sys
from pathlib import Path

import pytest

CHECK = """
import sys
from bapo_openrlhf.cli import arguments
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.launch.preflight import check_hub_models
try:
    check_hub_models(arguments.parse(sys.argv[1:]))
except ConfigError as error:
    print(error)
"""
REQUIRED = ["--rollout.n_samples_per_prompt=8", "--reward.remote_url=r.py"]


@pytest.mark.parametrize(("words", "flag"), [
    (["--algorithm=bapo_grpo", "--actor.model_name_or_path=nope"], "actor"),
    (["--algorithm=ba_ppo", "--actor.model_name_or_path=there", "--critic.model_name_or_path=nope"], "critic"),
    (["--algorithm=bapo_grpo", "--actor.model_name_or_path=there", "--critic.model_name_or_path=nope"], ""),  # none
    (["--algorithm=ba_ppo", "--actor.model_name_or_path=org/model"], ""),  # it was downloaded
])  # fmt: skip
def test_a_name_that_is_nowhere_and_models_that_are_there_or_not_loaded(tmp_path, words, flag):
    """In a process whose hub is a folder without a network."""
    (tmp_path / "there").mkdir()
    hub = tmp_path / "hub" / "hub" / "models--org--model"
    (hub / "snapshots" / "0123").mkdir(parents=True)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("0123")
    (hub / "snapshots" / "0123" / "config.json").write_text("{}")
    environment = {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[3])
    command = [sys.executable, "-c", CHECK, *REQUIRED, *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if flag:
        assert done.stdout.startswith(f"{flag}.model_name_or_path is nope; ") and str(tmp_path) in done.stdout
    assert done.stdout.count("\n") == bool(flag)
