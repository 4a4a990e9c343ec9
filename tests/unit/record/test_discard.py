"""Folders that cannot be deleted, as on a network's file system."""

import errno
import os

import pytest

from bapo_openrlhf.record.durable import discard, undeleted


def tree(folder):
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "file").write_text("x")
    return folder


def let_fail(monkeypatch, function, number, part):
    original = getattr(os, function)

    def fail(path, *args, **kwargs):
        if part in os.fspath(path):
            raise OSError(number, os.strerror(number), os.fspath(path))
        return original(path, *args, **kwargs)

    monkeypatch.setattr(os, function, fail)


def test_it_is_deleted_and_a_link_in_it_is_not_followed(tmp_path):
    folder, other = tree(tmp_path / "_actor" / "global_step1"), tree(tmp_path / "other")
    (folder / "link").symlink_to(other)
    discard(folder, tmp_path)
    assert not folder.exists() and (other / "inner" / "file").exists() and not undeleted(tmp_path)


@pytest.mark.parametrize(("function", "part"), [("rmdir", "inner"), ("rmdir", "global_step1"), ("unlink", "file")])
@pytest.mark.parametrize("number", [errno.ENOTEMPTY, errno.EBUSY, errno.EACCES])
def test_what_resists_is_moved_and_deleted_with_a_later_one(tmp_path, monkeypatch, function, part, number):
    first, second = (tree(tmp_path / "_actor" / f"global_step{n}") for n in (1, 2))
    with monkeypatch.context() as patch:
        let_fail(patch, function, number, part)
        discard(first, tmp_path)
        assert os.listdir(tmp_path / "_actor") == ["global_step2"]
        assert str(tmp_path) in undeleted(tmp_path)
        if function == "rmdir" and part == "global_step1":
            discard(second, tmp_path)  # the first one still resists
    discard(tree(tmp_path / "_actor" / "global_step3"), tmp_path)
    assert not undeleted(tmp_path)


def test_what_cannot_even_be_moved_is_an_error_that_names_it(tmp_path, monkeypatch):
    folder = tree(tmp_path / "_actor" / "global_step1")
    let_fail(monkeypatch, "unlink", errno.EACCES, "file")
    let_fail(monkeypatch, "rename", errno.EACCES, "global_step1")
    with pytest.raises(PermissionError) as error:
        discard(folder, tmp_path)
    assert error.value.filename == str(folder / "inner" / "file")
