"""Stands in for `bapo-openrlhf train` in the tests of smoke runs: writes a record, checkpoints and a model.

A fault is named by FAKE_FAULT. The process does what a run does at its worst.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

from bapo_openrlhf.adapt.vocabulary import FAILED, STATES
from bapo_openrlhf.record import run_record as record
from bapo_openrlhf.record.checkpoint_store import CheckpointStore

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # only SIGKILL ends it
fault = os.environ.get("FAKE_FAULT", "")
words = sys.argv[1:]
settings = yaml.safe_load(Path(words[words.index("--config") + 1]).read_text())
resumes = "--ckpt.load_enable" in words
given = [word.partition("=")[2] for word in words if word.startswith("--train.num_episodes=")]
steps = int(given[0]) if given else settings["train.num_episodes"]
folder = Path(settings["run.dir"]) / settings["run.name"]
store = CheckpointStore(Path(settings["ckpt.path"]), critic=False)


def row(step):
    counts = {f"groups/{state}": 0 for state in (*STATES, FAILED)}
    values = counts | {
        "groups/fresh": 2, "groups/generated": 2, "rollouts/step": 16, "policy_loss": 0.1, "actor_grad_norm": 1.0,
        "gap/age": (step - 1) % 2, "gap/kl": (1e-4, 0.5)[(step - 1) % 2], "timing/step_total": 0.1,
        "timing/generation": 0.1,
    }  # fmt: skip
    if step == 3:
        values |= {
            "lost group": {"groups/fresh": 1},
            "failed group": {"groups/fresh": 1, "groups/failed": 1},
            "loss": {"policy_loss": float("nan")},
            "engines": {"gap/kl": 0.0031},
            "few responses": {"rollouts/step": 14},
        }.get(fault, {})
    return values | ({"actor_grad_norm": 0.0} if fault == "no gradient" else {})


tag = store.newest_whole(print) if resumes and fault != "from the beginning" else None
first = int(tag.removeprefix("global_step")) + 1 if tag else 1
record.begin_run(folder, {"started": "now"}, resumes=resumes)
if tag:
    record.cut_rows(folder, first)
if fault == "start" or (fault == "resume" and resumes):
    print("error: no memory left")
    sys.exit(1)
if fault == "survivor" and not resumes:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
for step in range(first, steps + 1):
    time.sleep(0.3 if step == 3 and not resumes else 0)
    record.append_rows(folder, record.METRICS, step, [row(step)])
    begun = store.begin(f"global_step{step}")
    if fault != "no checkpoint":
        model = store.folder(f"global_step{step}", "_actor")
        model.mkdir(parents=True)
        (model / "weights").write_text("weights")
        (begun / "state").write_text("state")
        store.complete(f"global_step{step}", step)
        (store.path / "_actor" / "latest").write_text(f"global_step{step}")
    if step >= 2 and not resumes:
        time.sleep(60)
saved = Path(settings["ckpt.output_dir"])
shutil.copytree(settings["actor.model_name_or_path"], saved)
if fault != "weights":
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-2] + bytes(2))  # the last weight becomes 0
record.write_summary(folder, {"steps": steps})
