"""A run uses the files of its user as they were at its start, and says of them what it would say of the originals."""

from types import SimpleNamespace

import pytest

from bapo_openrlhf import user_file
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.flags.config import VerifierConfig
from bapo_openrlhf.launch.start import keep_user_files
from bapo_openrlhf.methods.registry import method_class
from bapo_openrlhf.training.engine.reward_pool import RewardFailure, RewardPool

REWARD = """
import pathlib
beside = pathlib.Path(__file__).with_name("beside.txt").read_text()

def reward_func(queries, prompts, labels):
    if queries[0] == "fails":
        1 / 0
    if queries[0] == "ends":
        __import__("os")._exit(3)
    return {"rewards": [float(beside)]}
"""
METHOD = "from bapo_openrlhf.methods import BAPO\n\n\nclass Mine(BAPO):\n    weight = 1\n"


@pytest.fixture
def run_files(tmp_path):
    """The arguments of a run after its start, and the user's folder."""
    mine, folder = tmp_path / "mine", tmp_path / "runs" / "r"
    mine.mkdir()
    folder.mkdir(parents=True)
    (mine / "reward.py").write_text(REWARD)
    (mine / "beside.txt").write_text("0.5")
    (mine / "method.py").write_text(METHOD)
    (mine / "agent.py").write_text("x = 1\n")
    args = SimpleNamespace(
        reward=SimpleNamespace(remote_url=[str(mine / "reward.py")]),
        train=SimpleNamespace(agent_func_path=str(mine / "agent.py")),
        adapt=SimpleNamespace(method=f"{mine / 'method.py'}:Mine"),
    )
    keep_user_files(args, folder)
    return args, mine, folder


def test_an_edit_during_the_run_changes_nothing(run_files):
    args, mine, _ = run_files
    for name in ("reward", "method", "agent"):
        (mine / f"{name}.py").write_text("def broken(:\n")
    pool = RewardPool(args.reward.remote_url[0], VerifierConfig(processes=1, timeout=60, memory_gib=0.25))
    try:
        assert pool.submit("", "", None, "").result()["rewards"] == 0.5  # it finds what is beside the original
        for query, says in {"fails": "raised ZeroDivisionError", "ends": "ended its process: exit status 3"}.items():
            with pytest.raises(RewardFailure, match=f"^{mine / 'reward.py'}: reward_func {says}") as error:
                pool.submit(query, "", None, "").result()
            place = f"{mine / 'reward.py'}:{7 if query == 'fails' else 5}"
            assert (error.value.kind, place) in pool.failures.causes
            assert pool.submit("", "", None, "").result()["rewards"] == 0.5  # also in a new process
    finally:
        pool.close()
    assert method_class(args.adapt.method).weight == 1
    assert user_file.load("train.agent_func_path", args.train.agent_func_path).x == 1


def test_an_error_in_a_copy_names_the_original(run_files):
    args, mine, folder = run_files
    (mine / "reward.py").write_text("def broken(:\n")
    args.reward.remote_url = [str(mine / "reward.py")]
    keep_user_files(args, folder)  # as a resume does it
    with pytest.raises(ConfigError, match=f"{mine / 'reward.py'}:1"):
        user_file.load("reward.remote_url", args.reward.remote_url[0])
