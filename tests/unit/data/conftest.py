"""A run whose data the tests change."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bapo_openrlhf.cli import arguments

sys.path.insert(0, str(Path(__file__).parent))

from data_sets import Checks


@pytest.fixture(scope="session")
def run_args(tmp_path_factory) -> SimpleNamespace:
    """Arguments of a run of one prompt a step, without data. Its model has no tokenizer."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "model").mkdir()
    (folder / "reward.py").write_text("def reward_func(queries, prompts, labels):\n    return {'rewards': [0.5]}\n")
    flags = {
        "algorithm": "bapo_grpo", "actor.model_name_or_path": folder / "model",
        "reward.remote_url": folder / "reward.py", "data.prompt_dataset": "none", "data.input_key": "q",
        "data.label_key": "a", "rollout.batch_size": 1, "train.batch_size": 2, "train.micro_batch_size": 1,
        "rollout.n_samples_per_prompt": 2, "rollout.micro_batch_size": 1, "actor.num_gpus_per_node": 1,
        "ref.num_gpus_per_node": 1, "vllm.num_engines": 1, "ds.attn_implementation": "eager",
    }  # fmt: skip
    return arguments.parse([f"--{name}={value}" for name, value in flags.items()])


@pytest.fixture
def check(run_args, tmp_path, keep_environment) -> Checks:
    return Checks(run_args, tmp_path)
