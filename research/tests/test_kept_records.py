"""Records that are kept find their way back into a worktree, on another machine too."""

import tarfile
from dataclasses import replace

import decision_stages as stages
import kept_records
import pytest
from hard_prompts import AGAIN, SOLVED
from made_runs import write_run

pytestmark = pytest.mark.usefixtures("small_search")
SEARCH = stages.Stage("search", 1, "best_rates", (201, 202), {"plain": 1.0}, grid=(1e-4,))
CRITIC = stages.Stage("critic", 3, "critic", (81,), {"plain": 1.0}, rates_from="search")
OTHER = stages.Stage("other", 1, "best_rates", (61,), {"plain": 1.0, "bapo": 1.0})


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """Three runs that are done and kept, and one that has failed."""
    monkeypatch.setattr(stages, "STAGES", (SEARCH, OTHER, CRITIC))
    monkeypatch.setattr(stages, "MOST_MORE", 0)
    monkeypatch.setattr(kept_records, "RESULTS", tmp_path / "kept")
    kept_records.folder_of("decision").mkdir(parents=True)
    root = tmp_path / "first"
    done = [*stages.planned(SEARCH, root), *stages.planned(OTHER, root)[:1]]
    for run in done:
        write_run(run, 0.5, commit="a" * 40)
    (done[0].folder / SOLVED).write_text('{"solved": 1, "of": 2, "right": {"1 + 1 =": 2}}\n')
    (root / AGAIN).mkdir(parents=True)
    (root / AGAIN / SOLVED).write_text('{"solved": 0, "of": 2, "right": {}}\n')
    failed = stages.planned(OTHER, root)[1].folder
    failed.mkdir(parents=True)
    (failed / stages.FAILED).touch()
    stages.planned(CRITIC, root)[0].folder.mkdir(parents=True)  # it has been begun, so there is no record of it
    kept_records.keep_all(root)
    assert not (kept_records.folder_of("decision") / "critic.tar.xz").exists()
    return root


def contents(root, names=("run.json", "metrics.jsonl", "summary.json", SOLVED, stages.FAILED)):
    return {path.relative_to(root): path.read_text() for path in root.rglob("*") if path.name in names}


def test_records_come_back(kept, tmp_path):
    """Each run is as it was, and none of them is left to be run."""
    kept_records.unpack(tmp_path / "second")
    assert contents(tmp_path / "second") == contents(kept) and len(contents(kept)) == 3 * 3 + 3
    for stage in (SEARCH, OTHER):
        assert all(map(stages.ended, stages.planned(stage, tmp_path / "second")))


def test_a_run_that_is_there_stays(kept, tmp_path):
    """A run of another machine with the same seed is not replaced, and one that was interrupted is."""
    there, begun = stages.planned(SEARCH, tmp_path / "second")
    write_run(there, 0.9)
    begun.folder.mkdir(parents=True)
    (begun.folder / "metrics.jsonl").write_text("")
    before = (there.folder / "metrics.jsonl").read_text()
    kept_records.unpack(tmp_path / "second")
    assert (there.folder / "metrics.jsonl").read_text() == before
    assert begun.done and (begun.folder / "metrics.jsonl").read_text()


def test_a_run_whose_model_has_to_be_counted_is_kept_after_that(kept, monkeypatch):
    """Its model is not kept, so another machine could not count it."""
    counted, uncounted = stages.planned(SEARCH, kept)
    monkeypatch.setattr(stages, "STAGES", (replace(SEARCH, solved=True),))
    kept_records.keep_all(kept)
    with tarfile.open(kept_records.folder_of("decision") / "search.tar.xz") as file:
        assert {name.split("/")[0] for name in file.getnames()} == {counted.name} != {uncounted.name}


def test_the_commit_that_goes_on(kept, monkeypatch, tmp_path):
    """That of the newest stage that has runs. An earlier one may have another."""
    for run in stages.planned(SEARCH, kept):
        write_run(run, 0.5, commit="c" * 40)
    kept_records.keep_all(kept)
    assert kept_records.newest_commit() == "a" * 40
    for run in stages.planned(OTHER, kept):
        (run.folder / stages.FAILED).unlink(missing_ok=True)
        write_run(run, 0.5, commit=("b" if run.arm.method == "bapo" else "a") * 40)
    kept_records.keep_all(kept)
    with pytest.raises(ValueError, match=r"has runs of 2 commits: a+, b+$"):
        kept_records.newest_commit()
    monkeypatch.setattr(kept_records, "RESULTS", tmp_path / "nothing")
    assert kept_records.newest_commit() is None
