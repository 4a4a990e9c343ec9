"""`--algorithm` works everywhere: all four algorithms from every preset, and from every folder that `init` writes."""

import itertools
from pathlib import Path

import pytest

from bapo_openrlhf.cli import arguments, main
from bapo_openrlhf.flags.config import ALGORITHMS

ROOT = Path(__file__).parents[3]
PRESETS = sorted((ROOT / "configs").glob("*.yaml"))
CRITIC = ("ba_ppo", "ppo")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "bapo_openrlhf").symlink_to(ROOT / "bapo_openrlhf")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def facts(capsys, *words: str) -> dict[str, str]:
    """What `check` prints of a configuration that it calls valid. It warns of nothing but of what is not here."""
    assert main.run(["check", *words]) == 0, capsys.readouterr().err
    out, err = capsys.readouterr()
    assert out.endswith("configuration is valid\n")
    expected = ("there is no such file yet", "looked at", "ds.zero_stage")
    assert all(any(words in line for words in expected) for line in err.splitlines()), err
    return {line[:20].strip().split("  ")[0]: line for line in out.splitlines()}


@pytest.mark.parametrize(
    ("preset", "algorithm"), itertools.product(PRESETS, ALGORITHMS), ids=lambda value: getattr(value, "stem", value)
)
def test_from_every_preset(capsys, preset, algorithm):
    words = ["--config", str(preset), "--algorithm", algorithm]
    if preset.stem == "quickstart":  # what `make quickstart` makes
        words += ["--actor.model_name_or_path=org/m", "--critic.model_name_or_path=org/m", "--eval.dataset=org/e",
                  "--data.prompt_dataset=org/d", f"--reward.remote_url={ROOT}/examples/quickstart/sums.py"]  # fmt: skip
    if "vl" in preset.stem and algorithm in CRITIC:
        assert main.run(["check", *words]) == 2
        assert f"gae (algorithm {algorithm}) needs a critic" in capsys.readouterr().err
        return
    result = facts(capsys, *words)
    assert result["algorithm"].endswith(f" {algorithm}") and ("critic" in result) == (algorithm in CRITIC)
    args = arguments.parse(words)
    assert (args.adapt.method != "none") == algorithm.startswith("ba")
    assert args.critic.num_gpus_per_node == args.actor.num_gpus_per_node or algorithm not in CRITIC
    assert args.adapt.skip_zero_advantage == (preset.stem == "math_one_gpu" and algorithm not in CRITIC)


def test_only_the_file_of_a_task_loses_the_skipping_of_groups(capsys):
    """If it comes from the command line or a method's file, someone wants it in this run."""
    task = ["--config", str(ROOT / "configs" / "ba_ppo_qwen3_4b.yaml")]
    recipe = str(ROOT / "configs" / "methods" / "skip_two_updates.yaml")
    for words in ([*task, "--adapt.skip_zero_advantage"], [*task, recipe, "--algorithm", "ba_ppo"]):
        assert main.run(["check", *words]) == 2
        assert "with adapt.skip_zero_advantage True it must be one of" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["luffy", "pods"])
def test_it_works_over_a_task_that_skips_groups(capsys, name):
    assert main.run(["init", "mine", "--model", "org/model"]) == 0
    for task in ("mine/config.yaml", str(ROOT / "configs" / "math_one_gpu.yaml")):
        words = ["--config", task, str(ROOT / "configs" / "methods" / f"{name}.yaml")]
        words += ["--data.solution_key=input"] if name == "luffy" else []
        assert main.run(["check", *words]) == 0
        capsys.readouterr()
        assert main.run(["check", *words, "--adapt.skip_zero_advantage"]) == 2
        assert f"adapt.method is {name}; with adapt.skip_zero_advantage True it must" in capsys.readouterr().err


@pytest.mark.parametrize(("first", "gpus"), zip(ALGORITHMS, (1, 2, 4, 8), strict=True))
def test_from_every_folder_that_init_writes(capsys, first, gpus):
    assert main.run(["init", "mine", "--algorithm", first, "--gpus", str(gpus), "--model", "org/model"]) == 0
    capsys.readouterr()
    for algorithm in (None, *ALGORITHMS):
        result = facts(capsys, "--config", "mine/config.yaml", *(["--algorithm", algorithm] if algorithm else []))
        algorithm = algorithm or first
        assert result["algorithm"].endswith(f" {algorithm}")
        assert result["actor"].endswith(f"org/model, 1 node(s) x {gpus} GPU(s)")
        assert result["GPUs"].split()[1:4] == [str(gpus), "in", "total:"]  # all models share them
        if algorithm in CRITIC:
            assert result["critic"].endswith(f"org/model, 1 node(s) x {gpus} GPU(s)")


def test_the_critic_follows_the_actors_nodes_too(tmp_path):
    (tmp_path / "run.yaml").write_text("actor: {num_nodes: 2, num_gpus_per_node: 4}\nrollout.n_samples_per_prompt: 8\n")
    words = ["--config", "run.yaml", "--actor.model_name_or_path=m", "--reward.remote_url=r.py"]
    for more, size in (
        (["--algorithm=ba_ppo"], (2, 4)),
        (["--algorithm=ba_ppo", "--critic.num_nodes=1"], (1, 8)),  # OpenRLHF's default for the other number
        (["--algo.advantage.estimator=gae"], (1, 8)),  # OpenRLHF's own command line
    ):
        critic = arguments.parse([*words, *more]).critic
        assert (critic.num_nodes, critic.num_gpus_per_node) == size


def test_init_writes_the_whole_path_of_a_models_folder(folder, monkeypatch):
    (folder / "my model: # 'é'").mkdir()
    monkeypatch.setenv("HOME", str(folder))
    for number, model in enumerate(["my model: # 'é'", "~/my model: # 'é'", "./new/model"]):
        assert main.run(["init", f"mine{number}", "--model", model]) == 0
        args = arguments.parse(["--config", f"mine{number}/config.yaml"])
        assert args.actor.model_name_or_path == str(folder / model.removeprefix("~/"))
