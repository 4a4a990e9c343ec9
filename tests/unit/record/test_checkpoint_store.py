"""Which checkpoints are whole after any crash, on a full disk, and with any damage."""

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from watched_disk import each_crash, let_fail, logged

from bapo_openrlhf.record.checkpoint_store import CheckpointStore
from bapo_openrlhf.record.durable import undeleted
from bapo_openrlhf.record.state_file import CheckpointError, load_state, save_state

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")

PARTS = ("_actor", "_critic", "_adapt")


def write_models(path, tag, attempt, parts=("_actor", "_critic")):
    """Write the files of OpenRLHF's model save. Each file says which attempt wrote it."""
    for part in parts:
        folder = path / part / tag / "zero"
        folder.mkdir(parents=True, exist_ok=True)
        for file in (folder.parent / "mp_rank_00_model_states.pt", folder / "optim_states.pt"):
            file.write_text(f"{file.name} of attempt {attempt}")
        (path / part / "latest").write_text(tag)
        (folder.parent / "metric.json").write_text("{}")


def save(path, tag, attempt=1, *, critic=True, rotate=()):
    """Save like the trainer: OpenRLHF deletes old checkpoints, then saves."""
    store = CheckpointStore(path, critic=critic)
    folder = store.begin(tag)
    for old in rotate:
        for part in store.models:
            shutil.rmtree(path / part / old)
    write_models(path, tag, attempt, store.models)
    save_state(folder, {"attempt": attempt, "log_probs": np.full(5, float(attempt))})
    store.complete(tag, int(tag.split("step")[1]))
    store.forget_rotated()
    return store


def attempt_of(path, tag):
    """The attempt that wrote a checkpoint. A mixture of attempts fails."""
    attempts = {load_state(path / "_adapt" / tag)["attempt"]}
    for part in ("_actor", "_critic"):
        attempts |= {int(file.read_text()[-1]) for file in (path / part / tag).rglob("*.pt")}
    assert len(attempts) == 1
    return attempts.pop()


def newest(store):
    reports = []
    return store.newest_whole(reports.append), reports


def tree(path):
    return sorted(str(entry.relative_to(path)) for entry in path.rglob("*"))


def test_manifest_by_hand(tmp_path):
    save(tmp_path, "best_global_step12", 3)
    folder = tmp_path / "_adapt" / "best_global_step12"
    (folder / "more").mkdir()
    store = CheckpointStore(tmp_path, critic=True)
    (folder / "more" / "é").write_bytes(b"")
    store.complete("best_global_step12", 12)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    assert (manifest["format"], manifest["kind"], manifest["step"]) == (3, "bapo_openrlhf checkpoint", 12)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name not in ("latest", "manifest.json")]
    expected = {}
    for file in files:
        expected[str(file.relative_to(tmp_path))] = entry = {"bytes": file.stat().st_size}
        if "_adapt" in file.parts:
            entry["blake2b"] = hashlib.blake2b(file.read_bytes(), digest_size=32).hexdigest()
    assert manifest["files"] == expected and len(expected) == 2 * 3 + 3
    order = ["_actor", "_critic", "_adapt"]
    assert list(manifest["files"]) == sorted(expected, key=lambda path: (order.index(path.split("/")[0]), path))
    store.check("best_global_step12")


@pytest.mark.parametrize("part", ["_actor", "_critic"])
@pytest.mark.parametrize("left", [None, ".", "zero"])
def test_a_model_that_was_not_saved(tmp_path, part, left):
    store = CheckpointStore(tmp_path, critic=True)
    store.begin("global_step1")
    write_models(tmp_path, "global_step1", 1)
    shutil.rmtree(tmp_path / part / "global_step1")
    if left:
        (tmp_path / part / "global_step1" / left).mkdir(parents=True)
    with pytest.raises(CheckpointError, match=f"{tmp_path / part / 'global_step1'}.* no file"):
        store.complete("global_step1", 1)
    assert newest(store)[0] is None and store.remove_unfinished() == ["global_step1"]


def test_begin_clears_what_an_older_attempt_left(tmp_path):
    save(tmp_path, "global_step1")
    save(tmp_path, "global_step2", 1)
    for part in PARTS:
        (tmp_path / part / "global_step2" / "deep" / "er").mkdir(parents=True)
        (tmp_path / part / "global_step2" / "deep" / "er" / "stale").write_text("")
    before = tree(tmp_path)
    store = CheckpointStore(tmp_path, critic=False)  # models of a critic are deleted too
    store.begin("global_step2")
    kept = [entry for entry in before if "global_step2" not in entry]
    assert tree(tmp_path) == sorted([*kept, "_adapt/global_step2", "_adapt/global_step2/UNFINISHED"])
    assert newest(store)[0] == "global_step1"


def test_newest_step_first_and_regular_before_best(tmp_path):
    tags = ["best_global_step9", "global_step10", "global_step9", "best_global_step100", "global_step2"]
    for tag in tags:
        store = save(tmp_path, tag, critic=False)
    (tmp_path / "_adapt" / "notes").mkdir()
    (tmp_path / "_adapt" / "global_step5x").mkdir()
    (tmp_path / "_adapt" / "global_step77").write_text("a file")
    expected = ["best_global_step100", "global_step10", "global_step9", "best_global_step9", "global_step2"]
    assert store.tags() == expected
    for count, tag in enumerate(expected):
        actual, reports = newest(store)
        assert actual == tag and len(reports) == count
        assert all(f"checkpoint {other} is skipped" in text for other, text in zip(expected, reports, strict=False))
        (tmp_path / "_actor" / tag / "metric.json").unlink()
    actual, reports = newest(store)
    assert actual is None and len(reports) == len(expected)
    assert reports[0].endswith(f"{tmp_path}/_actor/best_global_step100/metric.json is missing")


@pytest.mark.parametrize("method", ["begin", "check", "point_to", "complete", "folder"])
def test_tags_that_openrlhf_does_not_give(tmp_path, method):
    store = save(tmp_path, "global_step1")
    before = tree(tmp_path)
    for tag in ("a/b", "../global_step1", "global_step1/", "/global_step1", "..", ".", "", "latest", "global_step1\n"):
        with pytest.raises(ValueError, match=re.escape(repr(tag))):
            getattr(store, method)(tag, *([1] if method == "complete" else []))
        assert tree(tmp_path) == before


TAG = "global_step3"


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def to_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(("file", "damage", "message"), [
    (f"_critic/{TAG}/mp_rank_00_model_states.pt", Path.unlink, "is missing"),
    (f"_actor/{TAG}/metric.json", cut, "has 1 bytes instead of 2"),
    (f"_actor/{TAG}/metric.json", to_folder, "is not a file"),
    (f"_adapt/{TAG}/manifest.json", Path.unlink, "is missing"),
    (f"_adapt/{TAG}/manifest.json", cut, "is damaged or cut short"),
])  # fmt: skip
def test_damage_is_named_and_passed_over(tmp_path, file, damage, message):
    save(tmp_path, "global_step2")
    store = save(tmp_path, TAG)
    damage(tmp_path / file)
    with pytest.raises(CheckpointError) as error:
        store.check(TAG)
    assert str(error.value).startswith(f"{tmp_path / file} ") and message in str(error.value)
    tag, (report,) = newest(store)
    assert tag == "global_step2" and TAG in report and str(error.value) in report
    assert store.remove_unfinished() == []  # a user may want to look at it


@pytest.mark.parametrize("name", ["state.json", "state.safetensors"])
def test_all_damage_of_the_state_is_noticed(tmp_path, name):
    store = save(tmp_path, TAG)
    path = tmp_path / "_adapt" / TAG / name
    whole = path.read_bytes()
    for place in range(len(whole)):
        for damaged in (whole[:place], whole[:place] + bytes([whole[place] ^ 1 << place % 7]) + whole[place + 1 :]):
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=rf"{name} (has \d+ bytes|is damaged)"):
                store.check(TAG)
    path.write_bytes(whole)
    store.check(TAG)


def test_what_is_no_damage(tmp_path):
    """Of a model's file only the size is checked, and other files may be beside it."""
    store = save(tmp_path, TAG)
    file = tmp_path / "_actor" / TAG / "zero" / "optim_states.pt"
    file.write_text(file.read_text().upper())
    for part in PARTS:
        (tmp_path / part / TAG / "notes").write_text("mine")
    store.check(TAG)


@pytest.mark.parametrize(
    "link",
    [*(f"_actor/{TAG}/{name}" for name in ("metric.json", "zero")), f"_critic/{TAG}", "_actor",
     *(f"_adapt/{TAG}/{name}" for name in ("state.json", "manifest.json"))],
)  # fmt: skip
def test_links_are_not_followed(tmp_path, link):
    """Replace a path by a link to exactly the same content."""
    path = tmp_path / "run"
    store = save(path, TAG)
    os.rename(path / link, tmp_path / "elsewhere")
    (path / link).symlink_to(tmp_path / "elsewhere")
    outside = tree(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=f"^{path / link} is a symbolic link"):
        store.check(TAG)
    if not link.endswith("manifest.json"):
        with pytest.raises(CheckpointError, match="is a symbolic link"):
            store.complete(TAG, 3)
    try:
        store.begin(TAG)
    except CheckpointError as error:
        assert "is a symbolic link" in str(error)
    assert (tmp_path / "elsewhere").exists() and tree(tmp_path / "elsewhere") == outside


@pytest.mark.parametrize("link", ["_adapt", f"_adapt/{TAG}", "_actor"])
@pytest.mark.parametrize("method", ["begin", "remove_unfinished", "forget_rotated"])
def test_nothing_is_deleted_through_a_link(tmp_path, link, method):
    path = tmp_path / "run"
    store = save(path, TAG)
    if method == "forget_rotated":  # OpenRLHF has deleted its part
        shutil.rmtree(path / "_actor" / TAG)
    else:
        (path / "_adapt" / TAG / "manifest.json").unlink()
        (path / "_adapt" / TAG / "UNFINISHED").touch()
    os.rename(path / link, tmp_path / "elsewhere")
    (path / link).symlink_to(tmp_path / "elsewhere")
    outside = tree(tmp_path / "elsewhere")
    try:
        getattr(store, method)(*([TAG] if method == "begin" else []))
    except CheckpointError as error:
        assert f"{path / link} is a symbolic link" in str(error)
    assert tree(tmp_path / "elsewhere") == outside


def test_the_checkpoints_folder_itself_may_be_a_link(tmp_path):
    (tmp_path / "large_disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "large_disk")
    save(tmp_path / "run", TAG).check(TAG)


def test_remove_unfinished(tmp_path):
    """Finished saves stay even if they are damaged. Files of other programs stay too."""
    save(tmp_path, "global_step1")
    store = save(tmp_path, "global_step2")
    (tmp_path / "_actor" / "global_step2" / "metric.json").unlink()
    write_models(tmp_path, "global_step3", 1)  # foreign
    (tmp_path / "_adapt" / "global_step4").mkdir()
    (tmp_path / "_adapt" / "global_step4" / "unknown").touch()
    (tmp_path / "_adapt" / "global_step2" / "UNFINISHED").touch()  # killed between manifest and marker
    before = tree(tmp_path)
    save_state(store.begin("global_step10"), {"a": np.ones(3)})
    write_models(tmp_path, "global_step10", 1)
    store.begin("best_global_step5")
    write_models(tmp_path, "best_global_step5", 1, ["_critic"])
    (tmp_path / "_adapt" / "global_step6").mkdir()  # killed between the first two operations of `begin`
    assert store.remove_unfinished() == ["global_step10", "global_step6", "best_global_step5"]
    assert tree(tmp_path) == before
    assert store.remove_unfinished() == []


def test_forget_rotated(tmp_path):
    for step in range(1, 5):
        store = save(tmp_path, f"global_step{step}")
    store.begin("global_step6")  # unfinished, so another method deletes it
    shutil.rmtree(tmp_path / "_actor" / "global_step1")
    shutil.rmtree(tmp_path / "_critic" / "global_step1")
    shutil.rmtree(tmp_path / "_actor" / "global_step3")
    shutil.rmtree(tmp_path / "_critic" / "global_step4")
    with pytest.raises(CheckpointError, match=r"_actor/global_step1/\S+ is missing"):
        store.check("global_step1")
    models = tree(tmp_path / "_actor") + tree(tmp_path / "_critic")
    store.forget_rotated()
    assert store.tags() == ["global_step6", "global_step4", "global_step2"]
    assert tree(tmp_path / "_actor") + tree(tmp_path / "_critic") == models
    assert newest(store)[0] == "global_step2"


def converted_for(path):
    folders = {part: path / "converted" / part for part in ("_actor", "_critic")}
    for folder in folders.values():
        (folder / "layer.weight").mkdir(parents=True, exist_ok=True)
        for file in (folder / "optimizer_state.pt", folder / "layer.weight" / "fp32.pt"):
            file.write_text("universal")
    return folders


def save_of_ranks(path, tag, actors, critics):
    store = CheckpointStore(path, critic=True)
    save_state(store.begin(tag), {"attempt": 1})
    for part, ranks in (("_actor", actors), ("_critic", critics)):
        (path / part / tag).mkdir(parents=True)
        (path / part / tag / "mp_rank_00_model_states.pt").write_text("model")
        for rank in range(ranks):
            (path / part / tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").write_text(f"rank {rank}")
    store.complete(tag, 7)
    return store


def test_ranks_and_the_universal_format(tmp_path):
    store = save_of_ranks(tmp_path, TAG, 3, 12)
    assert store.ranks(TAG) == {"_actor": 3, "_critic": 12} and not store.is_universal(TAG)
    path = tmp_path / "_adapt" / TAG / "manifest.json"
    listed = json.loads(path.read_bytes())["files"]
    CheckpointStore(tmp_path, critic=False).add_universal(TAG, converted_for(tmp_path))
    assert not store.is_universal(TAG) and newest(store) == (TAG, [])
    store.add_universal(TAG, converted_for(tmp_path))
    assert store.is_universal(TAG) and store.ranks(TAG) == {"_actor": 3, "_critic": 12} and newest(store) == (TAG, [])
    manifest = json.loads(path.read_bytes())
    assert listed.items() <= manifest["files"].items() and len(manifest["files"]) == len(listed) + 4
    assert manifest["step"] == 7
    (tmp_path / "_critic" / TAG / "zero" / "layer.weight" / "fp32.pt").unlink()
    with pytest.raises(CheckpointError, match=r"zero/layer\.weight/fp32\.pt is missing"):
        store.check(TAG)


SAVES = {
    "first": ([], "global_step3", ()),
    "second": ([("global_step2", 1)], "global_step3", ()),
    "best": ([("global_step3", 1)], "best_global_step4", ()),
    "again": ([("global_step2", 1), ("global_step3", 1)], "global_step3", ()),
    "with rotation": ([("global_step1", 1), ("global_step2", 1)], "global_step3", ["global_step1"]),
}


@pytest.mark.parametrize(("older", "tag", "rotate"), SAVES.values(), ids=SAVES)
def test_killed_at_any_operation_of_a_save(tmp_path, older, tag, rotate):
    """The old or the new checkpoint is found, whole and from one attempt. Then the run continues and saves again."""
    base, work = tmp_path / "base", tmp_path / "work"
    base.mkdir()
    for old, attempt in older:
        save(base, old, attempt)
    kept = {None: None} | {old: attempt for old, attempt in older if old not in (tag, *rotate)}
    allowed = {max(kept, key=lambda name: name or ""), tag}
    seen = set()
    for _ in each_crash(base, work, lambda path: save(path, tag, 2, rotate=rotate)):
        store = CheckpointStore(work, critic=True)
        actual, _ = newest(store)
        assert actual in allowed
        if actual is not None:
            store.check(actual)
            attempt = attempt_of(work, actual)
            assert attempt == 2 if actual == tag and tag not in dict(older) else attempt in (1, 2)
            seen.add((actual, attempt))
        assert not store.has_foreign()
        # A run that continues from this checkpoint:
        removed = store.remove_unfinished()
        assert set(removed) <= {tag, *rotate} and actual not in removed
        assert newest(store)[0] == actual
        assert set(os.listdir(work / "_actor") if (work / "_actor").exists() else []) - {"latest"} <= set(store.tags())
        if actual is not None:
            store.point_to(actual)
            assert (work / "_actor" / "latest").read_text() == (work / "_critic" / "latest").read_text() == actual
        save(work, tag, 3)
        assert newest(store) == (tag, []) and attempt_of(work, tag) == 3
        assert not any("UNFINISHED" in entry or ".unfinished" in entry for entry in tree(work))
    # Each outcome has occurred: the old one, the new one, and the old attempt if the tag existed before.
    expected = {(tag, 2)} | {(name, 1) for name in allowed & set(dict(older))}
    assert seen == expected


def test_killed_at_any_operation_of_clearing_up(tmp_path):
    base, work = tmp_path / "base", tmp_path / "work"
    for step in (1, 2, 3):
        store = save(base, f"global_step{step}")
    save_state(store.begin("global_step4"), {"a": 1})
    write_models(base, "global_step4", 1)
    for part in ("_actor", "_critic"):
        shutil.rmtree(base / part / "global_step1")
    for name in range(8):  # so that the order of the file system is not the right one by chance
        (base / "_adapt" / "global_step1" / str(name)).touch()

    def clear(path):
        store = CheckpointStore(path, critic=True)
        store.remove_unfinished()
        store.forget_rotated()
        store.point_to("global_step3")

    for _ in each_crash(base, work, clear):
        store = CheckpointStore(work, critic=True)
        assert newest(store)[0] == "global_step3" and attempt_of(work, "global_step3") == 1
        assert not store.has_foreign()
        assert (work / "_actor" / "latest").read_text() in ("global_step4", "global_step3")
        clear(work)
        assert store.tags() == ["global_step3", "global_step2"]
        assert set(os.listdir(work / "_actor")) == {"latest", "global_step2", "global_step3"}
        assert (work / "_actor" / "latest").read_text() == (work / "_critic" / "latest").read_text() == "global_step3"


def test_killed_at_any_operation_of_a_conversion(tmp_path):
    """The checkpoint is whole all the time, and universal or not. The conversion can be made again."""
    base, work = tmp_path / "base", tmp_path / "work"
    save_of_ranks(base, TAG, 2, 2)
    converted_for(base)
    seen = set()

    def convert(path):
        CheckpointStore(path, critic=True).add_universal(TAG, converted_for(path))

    for _ in each_crash(base, work, convert):
        store = CheckpointStore(work, critic=True)
        assert newest(store) == (TAG, [])
        seen.add(store.is_universal(TAG))
        if not store.is_universal(TAG):
            store.add_universal(TAG, converted_for(work))
        assert newest(store) == (TAG, []) and store.is_universal(TAG)
        assert store.remove_unfinished() == []
    assert seen == {False, True}


def test_what_begin_and_complete_make_durable(tmp_path, monkeypatch):
    """The order survives a power cut: marker, then deletions; manifest, then deletion of the marker."""
    save(tmp_path, TAG)
    log = logged(monkeypatch, "fsync", "unlink", "replace")
    store = CheckpointStore(tmp_path, critic=True)
    store.begin(TAG)
    manifest = log.index(("unlink", "manifest.json"))
    assert [entry for entry in log[:manifest] if entry[0] == "unlink"] == []
    assert log[:2] == [("fsync", "UNFINISHED"), ("fsync", TAG)]
    assert {("fsync", "_adapt"), ("fsync", tmp_path.name)} < set(log[:manifest])
    assert log[manifest + 1] == ("fsync", TAG)  # before the models are deleted
    write_models(tmp_path, TAG, 2)
    log.clear()
    store.complete(TAG, 3)
    assert [(call, names[-1]) for call, *names in log[1:]] == [
        ("replace", "manifest.json"), ("fsync", TAG), ("unlink", "UNFINISHED"), ("fsync", TAG)
    ]  # fmt: skip
    store.begin("global_step4")
    write_models(tmp_path, "global_step4", 1)
    log.clear()
    store.remove_unfinished()
    marker = log.index(("unlink", "UNFINISHED"))
    assert {("fsync", "_actor"), ("fsync", "_critic")} < set(log[:marker])  # otherwise the models could outlive it
    assert log[-1] == ("fsync", "_adapt")


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system with 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", folder]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"a file system cannot be mounted: {error}")
    if done.returncode:
        pytest.skip(f"a file system cannot be mounted: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def fill(folder):
    with (folder / "filler").open("ab", buffering=0) as file:
        for size in (4096, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC


def test_disk_full_while_completing(small_disk):
    store = save(small_disk, "global_step1", critic=False)
    folder = store.begin("global_step2")
    write_models(small_disk, "global_step2", 2, ["_actor"])
    save_state(folder, {"a": 1})
    fill(small_disk)
    with pytest.raises(CheckpointError, match=f"^{folder / 'manifest.json'}: No space left"):
        store.complete("global_step2", 2)
    assert sorted(os.listdir(folder)) == ["UNFINISHED", "state.json", "state.safetensors"]
    with pytest.raises(CheckpointError, match=r"_actor/latest: No space left on device"):
        store.point_to("global_step1")
    assert (small_disk / "_actor" / "latest").read_text() == "global_step2"
    assert newest(store)[0] == "global_step1" and attempt_of(small_disk, "global_step1") == 1
    assert store.remove_unfinished() == ["global_step2"]
    (small_disk / "filler").unlink()
    store.point_to("global_step1")
    save(small_disk, "global_step2", 3, critic=False)
    assert newest(store)[0] == "global_step2"


@pytest.mark.parametrize(("method", "arguments", "function", "part"), [
    ("begin", ["global_step9"], "mkdir", "_adapt/global_step9"),
    ("complete", [TAG, 3], "scandir", "_actor/global_step3/zero"),
    ("complete", [TAG, 3], "lstat", "_actor/global_step3/zero/optim_states.pt"),
    ("complete", [TAG, 3], "replace", "_adapt/global_step3/.manifest.json"),
    ("check", [TAG], "lstat", "_actor/global_step3/metric.json"),
    ("tags", [], "scandir", "_adapt"),
    ("newest_whole", [print], "scandir", "_adapt"),
    ("has_foreign", [], "scandir", "_actor"),
    ("remove_unfinished", [], "listdir", "_adapt/global_step3"),
])  # fmt: skip
def test_errors_of_the_system_name_the_file(tmp_path, monkeypatch, method, arguments, function, part):
    store = save(tmp_path, TAG)
    let_fail(monkeypatch, function, errno.EACCES, lambda path: part in path)
    with pytest.raises(CheckpointError, match=f"^{tmp_path}.*Permission denied") as error:
        getattr(store, method)(*arguments)
    assert part.removesuffix("/.manifest.json") in str(error.value)


def test_what_cannot_be_deleted_is_no_part_of_a_new_attempt_and_is_forgotten(tmp_path, monkeypatch):
    for number in (1, 3):
        store = save(tmp_path, f"global_step{number}")
    with monkeypatch.context() as patch:
        let_fail(patch, "unlink", errno.EACCES, lambda path: "optim_states.pt" in path)
        store.begin(TAG)
    assert not (tmp_path / "_actor" / TAG).exists() and os.listdir(store.folder(TAG)) == ["UNFINISHED"]
    save(tmp_path, TAG)
    assert newest(store)[0] == TAG
    shutil.rmtree(tmp_path / "_actor" / "global_step1")
    let_fail(monkeypatch, "rmdir", errno.EACCES, lambda path: "_adapt/global_step1" in path)
    store.forget_rotated()
    assert store.tags() == [TAG] and undeleted(tmp_path)
