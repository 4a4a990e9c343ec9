"""`bapo-openrlhf universal`, with another converter in the place of DeepSpeed's.

stack/test_universal.py has the real one.
"""

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from bapo_openrlhf.cli import arguments
from bapo_openrlhf.cli import main as cli
from bapo_openrlhf.launch.resume import SETTINGS, SETTINGS_KIND
from bapo_openrlhf.launch.settings import settings_of
from bapo_openrlhf.record.checkpoint_store import CheckpointStore
from bapo_openrlhf.record.owner import owned
from bapo_openrlhf.record.state_file import save_state, write_document

FLAGS = [
    "--algorithm=ba_ppo", "--actor.model_name_or_path=hub/model", "--reward.remote_url=http://judge",
    "--rollout.n_samples_per_prompt=4", "--vllm.num_engines=1", "--data.prompt_dataset=hub/data",
]  # fmt: skip


class Converter:
    def __init__(self) -> None:
        self.asked: list[SimpleNamespace] = []
        self.fails_at = 9

    def main(self, words: SimpleNamespace) -> None:
        print("*** 1. Extracting ZeRO fragments")
        self.asked.append(words)
        output = Path(words.output_folder)
        (output / "zero" / "layer.weight").mkdir(parents=True)
        (output / "mp_rank_00_model_states.pt").write_text("a copy")
        (output.parent / "latest_universal").write_text(output.name)
        if len(self.asked) == self.fails_at:
            raise KeyError("exp_avg")
        for name in ("optimizer_state.pt", "layer.weight/fp32.pt"):
            (output / "zero" / name).write_text("universal")


@pytest.fixture
def converter(monkeypatch):
    instead, parent = Converter(), ModuleType("deepspeed.checkpoint")
    parent.ds_to_universal = instead
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    monkeypatch.setitem(sys.modules, "deepspeed.checkpoint", parent)
    return instead


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A run with actor and critic, of 2 ranks each, and checkpoints after 2 and after 4 steps."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    store = CheckpointStore(tmp_path / "checkpoints", critic=True)
    for step in (2, 4):
        save(store, step)
    write_settings(store)
    return store


def save(store, step, state=None, ranks=2):
    folder = store.begin(f"global_step{step}")
    save_state(folder, {})
    moments = {0: {"exp_avg": torch.ones(3)}} if state is None else state
    for model in (store.path / part / f"global_step{step}" for part in store.models):
        model.mkdir(parents=True)
        (model / "mp_rank_00_model_states.pt").touch()
        for rank in range(ranks):
            file = model / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": {"base_optimizer_state": {"state": moments}}}, file)
    store.complete(f"global_step{step}", step)


def write_settings(store, *words):
    write_document(store.path / SETTINGS, SETTINGS_KIND, settings_of(arguments.parse([*FLAGS, *words]), 8))


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run(store, capsys):
    status = cli.run(["universal", str(store.path)])
    return status, *capsys.readouterr()


def test_the_newest_checkpoint_becomes_universal(store, converter, capsys):
    before = tree(store.path)
    status, out, _ = run(store, capsys)
    assert status == 0 and out.startswith(f"{store.path}: any number of ranks can resume global_step4")
    assert store.is_universal("global_step4") and not store.is_universal("global_step2")
    store.check("global_step4")
    folders = [f"{part}/global_step4" for part in ("_actor", "_critic")]
    files = [f"{folder}/zero/{name}" for folder in folders for name in ("optimizer_state.pt", "layer.weight/fp32.pt")]
    assert tree(store.path).keys() - before.keys() == {*files}
    unchanged = {name: content for name, content in before.items() if "manifest" not in name}
    assert unchanged.items() <= tree(store.path).items()
    assert [words.input_folder for words in converter.asked] == [str(store.path / folder) for folder in folders]
    assert all(words.inject_missing_state and words.strict and not words.keep_temp_folder for words in converter.asked)


def test_a_second_conversion_has_nothing_to_do(store, converter, capsys):
    first, before = run(store, capsys), tree(store.path)
    assert run(store, capsys)[:2] == first[:2] and len(converter.asked) == 2 and tree(store.path) == before


def test_a_run_without_a_critic(store, converter, capsys, tmp_path):
    alone = CheckpointStore(tmp_path / "alone", critic=False)
    save(alone, 6)
    assert run(alone, capsys)[0] == 0 and alone.is_universal("global_step6") and len(converter.asked) == 1


def test_a_damaged_checkpoint_is_named_and_an_older_one_converted(store, converter, capsys):
    (store.path / "_critic" / "global_step4" / "mp_rank_00_model_states.pt").unlink()
    status, out, err = run(store, capsys)
    assert status == 0 and "global_step2" in out and "checkpoint global_step4 is skipped: " in err


@pytest.mark.parametrize(("fails_at", "part"), [(1, "_actor"), (2, "_critic")])
def test_a_conversion_that_fails_changes_nothing(store, converter, capsys, fails_at, part):
    before, converter.fails_at = tree(store.path), fails_at
    status, out, err = run(store, capsys)
    assert (status, out) == (1, "")
    assert err.splitlines()[-1].startswith(f"error: {store.path}/{part}/global_step4: ") and "'exp_avg'" in err
    assert tree(store.path) == before


def test_what_a_killed_conversion_left_is_removed(store, converter, capsys):
    before = tree(store.path)
    half = store.path / "_universal" / "_actor" / "universal" / "zero" / "half.pt"
    half.parent.mkdir(parents=True)
    half.touch()
    assert run(store, capsys)[0] == 0
    assert not (store.path / "_universal").exists() and len(tree(store.path)) == len(before) + 4


def without_parts(store):
    (store.path / SETTINGS).unlink()
    save(store, 6, ranks=0)


@pytest.mark.parametrize(("change", "says"), [
    (lambda store: write_settings(store, "--ds.zero_stage=0"), "ds.zero_stage is 0; with ds.use_universal_ckpt "),
    (without_parts, "global_step6 has no part for each rank (ds.zero_stage 0)"),
    (lambda store: save(store, 6, state={}), "_actor/global_step6 has no state of an optimizer"),
])  # fmt: skip
def test_what_deepspeed_cannot_convert(store, converter, capsys, change, says):
    change(store)
    before = tree(store.path)
    status, _, err = run(store, capsys)
    assert status == 2 and says in err and err.count("\n") == 1 and tree(store.path) == before and not converter.asked


def test_while_the_run_goes_on(store, converter, capsys):
    with owned(store.path, field="x", what="run", instead="wait"):
        status, _, err = run(store, capsys)
    assert status == 2 and f"error: CKPT is {store.path}, and {store.path} already has a run that is going on: " in err
    assert not converter.asked


def test_no_checkpoint(tmp_path, capsys):
    missing = CheckpointStore(tmp_path / "runs" / "mine", critic=False)
    status, _, err = run(missing, capsys)
    assert status == 2 and err.startswith(f"error: CKPT is {missing.path}; it must be the folder")
    assert not missing.path.exists()
    missing.begin("global_step3")
    status, _, err = run(missing, capsys)
    says = f"error: CKPT is {missing.path}; none of its checkpoints is whole: global_step3"
    assert (status, err.splitlines()[-1]) == (2, says)
