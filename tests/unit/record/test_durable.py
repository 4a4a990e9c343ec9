"""Writing and deleting on file systems that cannot make a folder durable, or not delete it, as a network's may."""

import errno
import os

import pytest
from watched_disk import let_fail

from bapo_openrlhf.record.durable import discard, undeleted, write_atomically


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_the_fsync_of_a_folder(tmp_path, monkeypatch, number):
    let_fail(monkeypatch, "fsync", number, os.path.isdir)
    write_atomically(tmp_path / "file", b"whole")
    assert (tmp_path / "file").read_bytes() == b"whole"


@pytest.mark.parametrize(("number", "of_folders"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_any_other_failure_is_an_error(tmp_path, monkeypatch, number, of_folders):
    let_fail(monkeypatch, "fsync", number, lambda path: os.path.isdir(path) == of_folders)
    with pytest.raises(OSError) as error:
        write_atomically(tmp_path / "file", b"whole")
    assert error.value.errno == number


def tree(folder):
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "file").write_text("x")
    return folder


def test_a_folder_is_deleted_and_a_link_in_it_is_not_followed(tmp_path):
    folder, other = tree(tmp_path / "_actor" / "global_step1"), tree(tmp_path / "other")
    (folder / "link").symlink_to(other)
    discard(folder, tmp_path)
    assert not folder.exists() and (other / "inner" / "file").exists() and not undeleted(tmp_path)


@pytest.mark.parametrize(("function", "part"), [("rmdir", "inner"), ("rmdir", "global_step1"), ("unlink", "file")])
def test_what_resists_is_moved_and_deleted_with_a_later_one(tmp_path, monkeypatch, function, part):
    first, second = (tree(tmp_path / "_actor" / f"global_step{n}") for n in (1, 2))
    with monkeypatch.context() as patch:
        let_fail(patch, function, errno.EBUSY, lambda path: part in path)
        discard(first, tmp_path)
        assert os.listdir(tmp_path / "_actor") == ["global_step2"]
        assert str(tmp_path) in undeleted(tmp_path)
        if part == "global_step1":
            discard(second, tmp_path)  # the first one still resists
    discard(tree(tmp_path / "_actor" / "global_step3"), tmp_path)
    assert not undeleted(tmp_path)


def test_what_cannot_even_be_moved_is_an_error_that_names_it(tmp_path, monkeypatch):
    folder = tree(tmp_path / "_actor" / "global_step1")
    for function, part in (("unlink", "file"), ("rename", "global_step1")):
        let_fail(monkeypatch, function, errno.EACCES, lambda path, part=part: part in path)
    with pytest.raises(PermissionError) as error:
        discard(folder, tmp_path)
    assert error.value.filename == str(folder / "inner" / "file")
