"""Writing on file systems that cannot make a folder durable. `os.fsync` fails as it does there."""

import errno
import os
import stat

import pytest

from bapo_openrlhf.record.durable import write_atomically


def let_fail(monkeypatch, number, *, of_folders):
    def fail(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) == of_folders:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_the_fsync_of_a_folder(tmp_path, monkeypatch, number):
    let_fail(monkeypatch, number, of_folders=True)
    write_atomically(tmp_path / "file", b"whole")
    assert (tmp_path / "file").read_bytes() == b"whole"


@pytest.mark.parametrize(("number", "of_folders"), [(errno.EINVAL, False), (errno.EIO, False), (errno.EIO, True)])
def test_any_other_failure_is_an_error(tmp_path, monkeypatch, number, of_folders):
    let_fail(monkeypatch, number, of_folders=of_folders)
    with pytest.raises(OSError) as error:
        write_atomically(tmp_path / "file", b"whole")
    assert error.value.errno == number
