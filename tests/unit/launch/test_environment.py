"""What a run would stumble over in its environment, compared with the operating system, Ray and vLLM themselves."""

import datetime
import inspect
import os
import socket
import tempfile
import uuid

import pytest

from bapo_openrlhf.cpu import stack as cpu
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.launch.environment import LONGEST_SOCKET, RAYS, VLLMS, check_environment

NAMES = ("RAY_TMPDIR", "TMPDIR")


@pytest.mark.parametrize("file", ["datasets/__init__.py", "torch.py", "random.py", "openai.py"])
def test_what_would_hide_a_library(tmp_path, monkeypatch, file):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "datasets").mkdir()  # a folder of data hides nothing
    for name in ("test", "tests", "bapo_openrlhf"):  # no library imports the first two; another checkout of this
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "scripts").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "scripts")
    for name in ("agent.py", "scripts/agent.py", ".hidden"):
        (tmp_path / name).touch()
    check_environment()
    (tmp_path / file).touch()
    library = file.removesuffix(".py").removesuffix("/__init__")
    with pytest.raises(ConfigError, match=f"^{tmp_path / file} .* {library}, "):
        check_environment()
    installed = tmp_path / "installed"  # by a link to its source, which is in the working folder
    installed.mkdir()
    name = file.partition("/")[0]
    (installed / name).symlink_to(tmp_path / name)
    monkeypatch.setattr("sysconfig.get_path", lambda kind: str(installed))
    check_environment()


def test_a_working_folder_whose_name_is_not_utf8(tmp_path, monkeypatch):
    folder = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(folder)
    monkeypatch.chdir(os.fsdecode(folder))
    with pytest.raises(ConfigError, match=r"^'the working folder is .*caf\\udce9'; "):
        check_environment()


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


@pytest.mark.parametrize("name", NAMES)
def test_rays_sockets(temporary, name):
    """Bytes count, and not characters."""
    temporary(**{name: "/" + "t" * 38})
    check_environment()
    for folder, length in (("/" + "t" * 39, 40), ("/" + "ü" * 20, 41)):
        temporary(**{name: folder})
        with pytest.raises(ConfigError, match=f"^{name} is {folder}, {length} bytes; .* at most 39, "):
            check_environment()


@pytest.mark.parametrize("other", ["RAY_ADDRESS", cpu.SHARED_RAY, "RAY_TMPDIR"])
def test_vllms_sockets_are_shorter(temporary, other):
    temporary(TMPDIR="/" + "t" * 69, **{other: "/r"})
    check_environment()
    temporary(TMPDIR="/" + "t" * 70, **{other: "/r"})
    with pytest.raises(ConfigError, match=r"^TMPDIR is /t+, 71 bytes; it must have at most 70, "):
        check_environment()


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
        check_environment()


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_for_temporary_files_that_cannot_be_written(temporary, name):
    """Not even root can make a file in /proc."""
    temporary(**{name: "/proc"})
    with pytest.raises(ConfigError, match=rf"^{name} is /proc; "):
        check_environment()
    temporary(**{name: "/tmp/is-made-later"})  # by Ray
    check_environment()


def test_variables_of_vllm(monkeypatch):
    """Kubernetes sets VLLM_PORT for a service that is named vllm. The others are read as vLLM itself reads them."""
    from vllm import envs

    monkeypatch.setenv("VLLM_SERVICE_HOST", "10.0.0.7")
    monkeypatch.setenv("VLLM_PORT", "8000")
    check_environment()
    for name, value in {"VLLM_PORT": "tcp://10.0.0.7:8000", "VLLM_CPU_KVCACHE_SPACE": "a lot"}.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(ValueError):
                envs.environment_variables[name]()
            with pytest.raises(ConfigError, match=rf"^{name} is {value}; "):
                check_environment()
