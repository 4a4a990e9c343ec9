"""Commands on an installation without an extra."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

RUN = "import sys; sys.modules[{!r}] = None; from bapo_openrlhf.cli import main; sys.exit(main.run({}))"
# The message of pandas, whose error has no name of a module.
MARKDOWN = """
import sys
sys.modules["tabulate"] = None
from bapo_openrlhf.cli import main
from bapo_openrlhf.workbench.pages.table import Table
try:
    Table.of(["a"], [[1]]).markdown()
except ImportError as error:
    print(main.remedy(error), file=sys.stderr)
    sys.exit(2)
"""


@pytest.mark.parametrize(("code", "lacks", "remedy"), [
    (RUN.format("pandas", ["report", "x"]), "pandas", "'.[pages]'"),
    (RUN.format("scipy", ["study", "--config", "x", "--check"]), "scipy", "`make`"),
    (MARKDOWN, "tabulate", "'.[pages]'"),
    (RUN.format("bapo_openrlhf.adapt", ["methods"]), "Traceback", ""),  # nothing here installs it
])  # fmt: skip
def test_a_command_says_in_one_line_what_to_install(code, lacks, remedy):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    lines = done.stderr.splitlines()
    assert lacks in lines[0] and remedy in lines[0]
    assert (done.returncode, len(lines)) == (2, 1) or not remedy


WITHOUT = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.partition(".")[0] in ("torch", "vllm", "ray", "deepspeed", "PIL", "math_verify")
        return None if hidden else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""
CHECK = ["check", "--algorithm=bapo_grpo", "--rollout.n_samples_per_prompt=8", "--rollout.batch_size=16",
         "--vllm.num_engines=1", "--data.label_key=label", "--reward.remote_url=bapo_openrlhf/tasks/math.py",
         "--data.apply_chat_template"]  # fmt: skip


def test_check_of_a_laptop_says_what_it_cannot_check(tmp_path, tokenizer_folder):
    """`pip install ".[check]"` (docs/install.md): neither this process nor one that it starts finds these packages."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    # Only these variables, because other tests may have set some of a run on the CPU.
    environment = {name: os.environ[name] for name in ("PATH", "HOME")} | {"PYTHONPATH": str(tmp_path)}
    save_file({"weight": np.zeros(1)}, tokenizer_folder / "model.safetensors")
    rows = [{"input": [{"role": "user", "content": f"{n}?"}], "label": r"\frac{1}{2}"} for n in range(16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [f"--actor.model_name_or_path={tokenizer_folder}", f"--data.prompt_dataset={tmp_path / 'rows.jsonl'}"]
    done = subprocess.run(
        [sys.executable, "-m", "bapo_openrlhf.cli", *CHECK, *files],
        capture_output=True, text=True, timeout=120, env=environment,
    )  # fmt: skip
    said = [line for line in done.stderr.splitlines() if "not all was checked" in line]
    starts = ("the GPUs of", "the prompts of data.prompt_dataset", "actor.model_name_or_path is", "actor.lr_scheduler")
    assert done.returncode == 0, done.stderr
    assert all(any(line.startswith(f"warning: {start}") for line in said) for start in starts)
    assert any("because torch is not installed here" in line for line in said)
