"""A folder for temporary files in which sockets do not fit, compared with the operating system and Ray itself."""

import datetime
import inspect
import socket
import tempfile
import uuid

import pytest

from bapo_openrlhf.cpu import stack as cpu
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.launch.environment import LONGEST_SOCKET, RAYS, VLLMS, check_temporary_folder, check_working_folder

MOST = {"RAY_TMPDIR": 39, "TMPDIR": 39}
OF_VLLM = 70


@pytest.mark.parametrize("file", ["datasets/__init__.py", "torch.py", "random.py"])
def test_what_would_hide_a_library(tmp_path, monkeypatch, file):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "datasets").mkdir()  # a folder of data hides nothing
    (tmp_path / "mine.py").touch()
    (tmp_path / "test").mkdir()  # the package of that name is imported by no library
    (tmp_path / "test" / "__init__.py").touch()
    check_working_folder()
    (tmp_path / file).touch()
    with pytest.raises(ConfigError) as error:
        check_working_folder()
    library = file.removesuffix(".py").removesuffix("/__init__")
    assert str(error.value).startswith(f"{tmp_path / file} would be imported in the place of the library {library}, ")
    monkeypatch.setattr("sys.path", [str(tmp_path)])  # as in the folder of the library's own source
    check_working_folder()


@pytest.fixture
def temporary(monkeypatch):
    """Sets variables as the user does. tempfile has its folder from its first call, so it is told."""
    for name in ("RAY_TMPDIR", "TMPDIR", "RAY_ADDRESS", cpu.SHARED_RAY):
        monkeypatch.delenv(name, raising=False)

    def set_(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(tempfile, "tempdir", variables.get("TMPDIR", "/tmp"))

    set_()
    return set_


def test_the_default_is_short_enough(temporary):
    check_temporary_folder()


@pytest.mark.parametrize("name", MOST)
def test_rays_sockets(temporary, name):
    """The number of 92 characters is that of a public report."""
    temporary(**{name: "/" + "t" * (MOST[name] - 1)})
    check_temporary_folder()
    for length in (MOST[name] + 1, 92):
        folder = "/" + "t" * (length - 1)
        temporary(**{name: folder})
        with pytest.raises(ConfigError) as error:
            check_temporary_folder()
        assert str(error.value) == (
            f"{name} is {folder}, {length} bytes; it must have at most {MOST[name]}, because the path of a socket "
            f"below it has at most 107: set {name} to a shorter folder, such as /tmp"
        )


@pytest.mark.parametrize("other", ["RAY_ADDRESS", cpu.SHARED_RAY, "RAY_TMPDIR"])
def test_vllms_sockets_are_shorter(temporary, other):
    temporary(TMPDIR="/" + "t" * (OF_VLLM - 1), **{other: "/r"})
    check_temporary_folder()
    temporary(TMPDIR="/" + "t" * OF_VLLM, **{other: "/r"})
    with pytest.raises(ConfigError, match=r"^TMPDIR is /t+, 71 bytes; it must have at most 70, "):
        check_temporary_folder()


def test_bytes_count_and_not_characters(temporary):
    temporary(TMPDIR="/" + "ü" * 20)
    with pytest.raises(ConfigError, match="41 bytes; it must have at most 39"):
        check_temporary_folder()


def test_the_longest_socket_is_that_of_the_system(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as one:
        with pytest.raises(OSError, match="path too long"):
            one.bind("s" * (LONGEST_SOCKET + 1))
        one.bind("s" * LONGEST_SOCKET)


def test_the_sockets_are_named_as_ray_and_vllm_name_them(monkeypatch):
    from ray._common import utils
    from ray._private import node

    source = inspect.getsource(node.Node)
    assert 'f"session_{date_str}_{os.getpid()}"' in source and "%Y-%m-%d_%H-%M-%S_%f" in source
    assert 'default_prefix="plasma_store"' in source and '"sockets"' in source
    date = datetime.datetime(2026, 1, 1).strftime("%Y-%m-%d_%H-%M-%S_%f")
    monkeypatch.setenv("RAY_TMPDIR", "")
    assert utils.get_default_ray_temp_dir() + f"/session_{date}_4194304/sockets/plasma_store" == RAYS.removeprefix("/")
    assert len(VLLMS) == len(f"/{uuid.uuid4()}")


def test_without_a_folder_for_temporary_files(temporary, monkeypatch):
    def fail():
        raise FileNotFoundError(2, "No usable temporary directory found in []")

    monkeypatch.setattr(tempfile, "gettempdir", fail)
    with pytest.raises(ConfigError, match=r"^TMPDIR is None; No usable temporary directory found in \[\]: set it to"):
        check_temporary_folder()
