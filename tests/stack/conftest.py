"""A model with random weights, a data set, and a way to run the real stack in a process of its own."""

import ast
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from bapo_openrlhf import user_file
from bapo_openrlhf.cpu import stack as cpu
from bapo_openrlhf.cpu.prefork import client

DEVICES = 16  # of the shared Ray; it only counts them
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for tests that share helpers
from one_process import begun, ended  # noqa: E402

BASE_MODEL = HERE.parents[1] / "examples" / "quickstart" / "base_model.py"
CLI = ("-m", "bapo_openrlhf.cli.train_ppo_ray")
STEP_LINE = re.compile(r"Global step (\d+): (\{.*\})")
# One actor, critic, reference and engine; a few steps of 8 prompts x 4 responses of 8 tokens. True is a switch.
FLAGS = {
    "actor.num_gpus_per_node": 1, "critic.num_gpus_per_node": 1, "ref.num_gpus_per_node": 1, "vllm.num_engines": 1,
    "vllm.sync_backend": "gloo", "vllm.gpu_memory_utilization": 0.5, "vllm.enforce_eager": True,
    "rollout.batch_size": 8, "rollout.n_samples_per_prompt": 4, "rollout.micro_batch_size": 8,
    "rollout.max_new_tokens": 8, "train.batch_size": 16, "train.micro_batch_size": 4, "data.max_len": 32,
    "data.input_key": "input", "data.label_key": "label", "reward.remote_url": HERE / "reward.py",
    "algo.kl.init_coef": 0.001, "algo.kl.estimator": "k3", "algo.kl.use_loss": True,
    "ds.attn_implementation": "eager", "actor.adam.lr": 1e-3,
}  # fmt: skip


@dataclass
class Result:
    """What a run left behind."""

    status: int
    output: str
    folder: Path

    @property
    def logged(self) -> list[dict]:
        """The status that OpenRLHF logs at each step, from its own log lines."""
        plain = re.sub(r"\x1b\[[0-9;]*m", "", self.output)
        rows = {int(step): ast.literal_eval(re.sub(r"\bnan\b", "None", row)) for step, row in STEP_LINE.findall(plain)}
        return [rows[step] for step in sorted(rows)]

    @property
    def metrics(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def summary(self) -> dict:
        return json.loads((self.folder / "summary.json").read_text())


@pytest.fixture(scope="session", autouse=True)
def forked_processes():
    """The runs of all tests fork from one process."""
    with cpu.forked_processes():
        yield


RAY = """
import json, os, sys
from bapo_openrlhf.launch.start import shared_ray
with shared_ray(int(sys.argv[1]), 2) as environment:
    os.write(int(sys.argv[2]), json.dumps(environment).encode() + b"\\n")
    sys.stdin.read()
"""


@pytest.fixture(scope="session")
def one_ray(forked_processes, tmp_path_factory):
    """The environment with which a run goes to a Ray that the tests share.

    It belongs to another process, because Ray's threads would go on in this one during the unit tests.
    """
    path, (ours, theirs) = tmp_path_factory.mktemp("ray") / "log", os.pipe()
    words = [sys.executable, "-c", RAY, str(DEVICES), str(theirs)]
    with path.open("w") as log:
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[theirs])
    os.close(theirs)
    with open(ours) as told:
        line = told.readline()
    assert line, path.read_text()
    yield json.loads(line)
    process.communicate()


@pytest.fixture(scope="session")
def workspace(tmp_path_factory):
    """A folder with model/ (random weights) and data.jsonl (48 prompts, labels from always to never solved)."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("stack")
    torch.manual_seed(0)
    tokenizer = user_file.load("base model", BASE_MODEL).make_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, tie_word_embeddings=False,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [{"input": f"{i}+{i % 7}=", "label": str((8, 4, 4, 2, 2, 0)[i % 6])} for i in range(48)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="session")
def small_flags():
    """FLAGS as a YAML file can hold them."""
    return {key: str(value) if isinstance(value, Path) else value for key, value in FLAGS.items()}


@pytest.fixture(scope="session")
def train(workspace, request):
    """train(name, *command, flag=value...): run to the end, in a process group of its own.

    A flag that is None is left out. If `status` is not None, the process must end with it. The run goes to the Ray that
    the tests share, or to another one whose environment is `shared`; with `own_ray` it starts one, as a user's does.
    """

    def start(
        name: str,
        *command: str,
        status: int | None = 0,
        environment: dict[str, str] | None = None,
        own_ray: bool = False,
        shared: dict[str, str] | None = None,
        **flags,
    ) -> Result:
        values = FLAGS | {
            "actor.model_name_or_path": workspace / "model", "critic.model_name_or_path": workspace / "model",
            "data.prompt_dataset": workspace / "data.jsonl", "ckpt.output_dir": workspace / name / "model",
            "ckpt.path": workspace / name / "checkpoints", "run.name": name,
        }  # fmt: skip
        values |= {key.replace("__", "."): value for key, value in flags.items()}
        words = [word for key, value in values.items() if value is not None for word in _words(key, value)]
        python_path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        more = {"PYTHONPATH": python_path} | (environment or {})
        if not own_ray:
            # Workers of a shared Ray do not inherit the environment of a run. This is how Ray's own jobs pass it on.
            job = {"runtime_env": {"env_vars": {name: more[name] for name in more if name != client.ADDRESS}}}
            more |= (shared or request.getfixturevalue("one_ray")) | {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job)}
        output, ended_with = ended(begun([*(command or CLI), *words], workspace, more))
        (workspace / f"{name}.log").write_text(output)
        assert status in (None, ended_with), output[-6000:]
        return Result(ended_with, output, workspace / "runs" / name)

    return start


@pytest.fixture(scope="session")
def watch(train, workspace):
    """watch(name, flag=value...): `train` with a probe (probe.py) and scripted_reward.py; and what the probe noted."""

    def start(name: str, **flags) -> tuple[Result, Path]:
        folder = workspace / f"probe_{name}"
        folder.mkdir()
        words, environment = (str(HERE / "probe.py"), "watched"), {"PROBE_FOLDER": str(folder)}
        values = {"reward__remote_url": HERE / "scripted_reward.py"} | flags
        return train(name, *words, environment=environment, **values), folder

    return start


def _words(key: str, value) -> list[str]:
    if value is True:
        return [f"--{key}"]
    return [f"--{key}", *map(str, value if isinstance(value, (list, tuple)) else [value])]
