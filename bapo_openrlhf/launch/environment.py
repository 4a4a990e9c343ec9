"""Find what in the environment of a process a run would stumble over."""

import os
import sysconfig
import tempfile
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

from bapo_openrlhf import machine
from bapo_openrlhf.errors import ConfigError, one_line
from bapo_openrlhf.flags.paths import check_utf8

LONGEST_SOCKET = 107  # bytes of the path of a socket (AF_UNIX)
# The longest sockets below the folder for temporary files: Ray's, with a process number of 7 digits, and vLLM's.
RAYS = "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
VLLMS = "/00000000-0000-0000-0000-000000000000"
TESTS = ("test", "tests")  # several packages install one, and no library imports it
PACKAGE = __name__.partition(".")[0]
# Packages of attention, by their modules.
_FLASH = {"flash_attn_2_cuda": "flash-attn"}  # The compiled module may be missing from the package.
_HUB = {"kernels": "kernels"}  # transformers gets the attention from the model hub with it
_NEEDS = {"flash_attention_2": _FLASH | _HUB, "flash_attention_3": {"flash_attn_interface": "flash-attn-3"} | _HUB}


def check_environment() -> None:
    """Check the working folder, the folder for temporary files, and the variables that vLLM reads."""
    _check_working_folder()
    _check_temporary_folder()
    _check_variables()


def _check_working_folder() -> None:
    """Ray's workers import from the working folder first, also if this process does not."""
    folder = Path.cwd()
    check_utf8(f"the working folder is {folder}", folder)
    folders = [sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")]
    for name in sorted({entry.name.partition(".")[0] for entry in folder.iterdir()} - {PACKAGE, *TESTS}):
        own_file = _origin(name, [str(folder)]) if name.isidentifier() else None
        library_file = _origin(name, folders) if own_file else None
        if own_file and library_file and own_file.resolve() != library_file.resolve():
            raise ConfigError(
                f"{own_file} would be imported in the place of the library {name}, because it is in the folder in "
                "which the run is started: rename it, or start the run in another folder"
            )


def _origin(name: str, folders: list[str]) -> Path | None:
    """The file of a module in one of these folders. A folder without code, as one of data, has none."""
    spec = PathFinder.find_spec(name, folders)
    return Path(spec.origin) if spec and spec.origin else None


def _check_temporary_folder() -> None:
    try:
        temporary = tempfile.gettempdir()
    except FileNotFoundError as error:
        raise ConfigError(f"TMPDIR is {os.environ.get('TMPDIR')}; {error.strerror}: set it to another folder") from None
    places = [("TMPDIR", temporary, VLLMS)]
    if not (os.environ.get("RAY_ADDRESS") or os.environ.get(machine.SHARED_RAY)):  # there is no Ray yet
        name = next((name for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ), "TMPDIR")
        places.insert(0, (name, os.environ.get(name, "/tmp"), RAYS))
    for name, folder, socket in places:
        most = LONGEST_SOCKET - len(socket)
        if len(os.fsencode(folder)) > most:
            raise ConfigError(
                f"{name} is {folder}, {len(os.fsencode(folder))} bytes; it must have at most {most}, because the path "
                f"of a socket below it has at most {LONGEST_SOCKET}: set {name} to a shorter folder, such as /tmp"
            )
        try:
            parent = next(place for place in (Path(folder), *Path(folder).absolute().parents) if place.exists())
            os.rmdir(tempfile.mkdtemp(dir=parent))
        except OSError as error:
            raise ConfigError(
                f"{name} is {folder}; no file can be made there: {error.strerror}. Set {name} to another folder, such "
                "as /tmp"
            ) from None


def _check_variables() -> None:
    """Let vLLM read each of its variables that is set. Kubernetes sets VLLM_PORT for a service of that name."""
    names = [name for name in os.environ if name.startswith("VLLM_")]
    vllm = find_spec("vllm") if names else None
    if vllm is None or vllm.origin is None:
        return
    spec = spec_from_file_location("vllm_envs", Path(vllm.origin).with_name("envs.py"))  # without vLLM, which is slow
    assert spec is not None and spec.loader is not None
    envs = module_from_spec(spec)
    spec.loader.exec_module(envs)
    for name in names:
        try:
            envs.environment_variables.get(name, str)()
        except Exception as error:
            raise ConfigError(f"{name} is {os.environ[name]}; vLLM cannot read it: {one_line(error)}") from None


def missing_attention(args: SimpleNamespace) -> str | None:
    """A sentence on what the attention or a kernel needs that is not installed; None if nothing is missing.

    Without flash-attn, sdpa, eager and flex_attention work, but samples cannot be packed.
    """
    if args.ds.use_liger_kernel and find_spec("liger_kernel") is None:
        return "ds.use_liger_kernel is True; it needs the package liger-kernel, which is not installed on this machine"
    attention = args.ds.attn_implementation
    packages = _FLASH if args.ds.packing_samples else _HUB if "/" in attention else _NEEDS.get(attention, {})
    if not packages or any(map(find_spec, packages)):
        return None
    flag, value = ("ds.packing_samples", True) if args.ds.packing_samples else ("ds.attn_implementation", attention)
    return (
        f"{flag} is {value}; it needs the package {' or '.join(packages.values())}, which is not installed on this "
        "machine (docs/dependencies.md). ds.attn_implementation sdpa needs none, without packed samples"
    )
