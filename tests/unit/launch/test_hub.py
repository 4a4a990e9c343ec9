"""Models that are not on this machine, with the cache of the hub's own library and no network."""

import subprocess
import sys
from pathlib import Path

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


def checked(tmp_path, *words: str) -> str:
    """What is said, by a process whose hub is a folder without a network."""
    environment = {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[3])
    command = [sys.executable, "-c", CHECK, *REQUIRED, *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def downloaded(tmp_path, name: str) -> None:
    folder = tmp_path / "hub" / "hub" / f"models--{name.replace('/', '--')}"
    (folder / "snapshots" / "0123").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0123")
    (folder / "snapshots" / "0123" / "config.json").write_text("{}")


def test_a_name_that_is_nowhere(tmp_path):
    (tmp_path / "there").mkdir()
    for flag, words in (
        ("actor", ["--algorithm=bapo_grpo", "--actor.model_name_or_path=nope"]),
        ("critic", ["--algorithm=ba_ppo", "--actor.model_name_or_path=there", "--critic.model_name_or_path=nope"]),
    ):
        says = checked(tmp_path, *words)
        assert says.startswith(f"{flag}.model_name_or_path is nope; ") and str(tmp_path) in says and "\n" not in says


def test_one_that_was_downloaded_and_a_folder(tmp_path):
    downloaded(tmp_path, "org/model")
    assert checked(tmp_path, "--algorithm=ba_ppo", "--actor.model_name_or_path=org/model") == ""


def test_only_models_that_are_loaded(tmp_path):
    (tmp_path / "there").mkdir()
    words = ["--actor.model_name_or_path=there", "--critic.model_name_or_path=nope"]
    assert checked(tmp_path, "--algorithm=bapo_grpo", *words) == ""
