"""Measures what stored groups cost, in memory and in checkpoint time, compared with OpenRLHF's `Experience` objects.

Part of `adaptation.py`, which also starts it in a new process for each measurement of memory:

    python research/benchmarks/adaptation_storage.py KIND GROUPS SIZE TOKENS      # prints bytes

Memory is the growth of the process. The project's own functions write and read a checkpoint, with all that makes it
safe: sync to the disk, digests, a manifest. It is compared with `torch.save` of the same responses, synced too but
without digests, and `torch.load`. The model of the checkpoint is one byte.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from adaptation_layer import Run, World, engine_answers

from bapo_openrlhf.cpu import stack as cpu
from bapo_openrlhf.record.checkpoint_store import CheckpointStore
from bapo_openrlhf.record.state_file import load_state, save_state

KINDS = ("groups", "experience")
TAG = "global_step1"


def rounding(responses: int, tokens: int) -> dict[str, dict[str, float]]:
    """Errors of importance ratios if log-probs were stored in 2 bytes. Log-probs are drawn from -Exp(mean 1/2)."""
    import torch

    exact = torch.from_numpy(-np.random.default_rng(0).exponential(0.5, (responses, tokens))).float()
    errors = {}
    for kind in (torch.float16, torch.bfloat16):
        log_ratio = exact.to(kind).double() - exact.double()
        token, response = log_ratio.expm1().abs(), log_ratio.sum(-1).expm1()
        errors[str(kind).removeprefix("torch.")] = {
            "token_most": float(token.max()),
            "response_deviation": float(response.square().mean().sqrt()),
            "response_most": float(response.abs().max()),
        }
    return errors


def resident() -> int:
    """Memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def grown(kind: str, groups: int, size: int, tokens: int) -> int:
    """Bytes that this process takes to keep groups, as the layer or as OpenRLHF's samples.

    Each group is made by itself, and what it was made from is released, so that only what is kept is counted.
    """
    cpu.prepare_environment()
    cpu.install()
    from bapo_openrlhf.training.trainer.generated import groups_of
    from bapo_openrlhf.training.trainer.samples import Answers, generated_response, samples_of

    world = World(size, tokens, shared=False)

    def kept() -> Any:
        groups = world.groups(world.prompts(1), 0, 0)
        if kind == "experience":
            return samples_of(groups)
        responses = [generated_response(answer, max_len=tokens) for answer in engine_answers(groups[0])]
        return groups_of([Answers(groups[0].prompt, responses)], first_uid=0, step=0, weights_version=0)

    kept()  # this happens only once
    before = resident()
    stored = [kept() for _ in range(groups)]
    after = resident()
    del stored  # not before
    return after - before


def memory_round(groups: int, size: int, tokens: int) -> dict[str, float]:
    """Bytes of a stored token for each of KINDS, each in a new process."""
    result = {}
    for kind in KINDS:
        words = [sys.executable, __file__, kind, str(groups), str(size), str(tokens)]
        done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
        result[kind] = int(done.stdout.split()[-1]) / (groups * size * tokens)
    return result


def save_layer(folder: Path, run: Run) -> None:
    """Save a checkpoint as the trainer does."""
    store = CheckpointStore(folder, critic=False)
    begun = store.begin(TAG)
    model = folder / "_actor" / TAG
    model.mkdir(parents=True)
    (model / "model").write_bytes(b"0")
    save_state(begun, {"method": run.method.state_dict(), "ledger": run.ledger.state_dict()})
    store.complete(TAG, run.step)


def load_layer(folder: Path, run: Run) -> None:
    """Find and load a checkpoint as a resumed run does."""
    store = CheckpointStore(folder, critic=False)
    tag = store.newest_whole(print)
    state = load_state(store.folder(tag))
    run.make_method().load_state_dict(state["method"])


def save_experience(path: Path, run: Run, samples: list[Any]) -> None:
    """Save the samples of the replay buffer and the prompts of the hard buffer."""
    import torch

    hard = [(entry.prompt.text, entry.prompt.label) for entry in run.method.hard.oldest(run.groups)]
    with open(path, "wb") as file:
        torch.save({"samples": samples, "hard": hard}, file)
        file.flush()
        os.fsync(file.fileno())


def timed(action: Any, *args: Any) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    action(*args)
    return time.perf_counter() - start


def checkpoint_round(run: Run) -> dict[str, float]:
    """Seconds to save and to load the run's buffers, and their bytes: as the layer stores them, and as samples."""
    import torch

    from bapo_openrlhf.training.trainer.samples import samples_of

    samples = samples_of(list(run.method.replay))
    with tempfile.TemporaryDirectory() as name:
        ours, theirs = Path(name) / "layer", Path(name) / "experience.pt"
        return {
            "layer_save": timed(save_layer, ours, run),
            "experience_save": timed(save_experience, theirs, run, samples),
            "layer_load": timed(load_layer, ours, run),
            "experience_load": timed(lambda: torch.load(theirs, weights_only=False)),
            "layer_bytes": sum(file.stat().st_size for file in (ours / "_adapt").rglob("*") if file.is_file()),
            "experience_bytes": theirs.stat().st_size,
        }


if __name__ == "__main__":
    print(grown(sys.argv[1], *map(int, sys.argv[2:5])))
