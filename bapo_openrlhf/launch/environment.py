"""Find what on this machine a run would stumble over: folders, variables, packages, NVIDIA's driver and nvcc."""

import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
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
LOCKED = "13.0"  # CUDA of the torch in requirements/cuda.lock.txt
DRIVERS = {12: 525, 13: 580}  # the oldest for a CUDA: docs.nvidia.com/deploy/cuda-compatibility, Table 1
SAME_MINOR = 13  # from this CUDA on, DeepSpeed 0.19.6 takes only the nvcc of torch's own minor version
DRIVER = Path("/proc/driver/nvidia/version")
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # variables


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


# ── What the installed torch asks of NVIDIA's driver, of nvcc, and of the variables that its memory depends on ──


def cuda_of_torch() -> str:
    """The CUDA version of the torch that is installed, or of the locked one if this machine has none for GPUs."""
    try:
        build = re.search(r"\+cu(\d+)(\d)$", version("torch"))
    except PackageNotFoundError:
        build = None
    return f"{build[1]}.{build[2]}" if build else LOCKED


def driver_here() -> str | None:
    """The version of this machine's driver. None if it has none."""
    match = re.search(r"\s(\d{3,}\.[\d.]+)\s", DRIVER.read_text()) if DRIVER.is_file() else None
    return match[1] if match else None


def nvcc_here() -> str | None:
    """The CUDA version of the nvcc that torch's extensions, and so DeepSpeed, are compiled with. None without one."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = Path(home) / "bin" / "nvcc" if home else Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc")
    try:
        output = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"release (\d+\.\d+)", output)
    return match[1] if match else None


def needs() -> tuple[int | None, str]:
    """The oldest driver, and the nvcc that DeepSpeed takes: a major version, or one with its minor version."""
    cuda = cuda_of_torch()
    major = int(cuda.split(".")[0])
    return DRIVERS.get(major), cuda if major >= SAME_MINOR else str(major)


def versions_in_words() -> str:
    """What a machine with GPUs must have, and what this one has."""
    driver, nvcc = needs()
    versions = f"driver {driver_here() or 'none'}, nvcc {nvcc_here() or 'none'}"
    return f"{cuda_of_torch()}: driver {driver} or newer, nvcc {nvcc}; on this machine: {versions}"


def warnings_of_machine() -> list[str]:
    """Warnings of a driver and an nvcc that do not belong to torch's CUDA, if this machine has a driver."""
    cuda, (oldest, nvcc_of_torch), driver = cuda_of_torch(), needs(), driver_here()
    if driver is None:
        return []
    warnings = []
    if oldest and int(driver.split(".")[0]) < oldest:
        warnings.append(
            f"NVIDIA's driver is {driver}; torch's CUDA {cuda} needs {oldest} or newer, and finds no GPU without "
            "it: update the driver (torch also has wheels for CUDA 12.6, but vLLM must have the same CUDA as torch)"
        )
    nvcc = nvcc_here()
    if not f"{nvcc}.".startswith(f"{nvcc_of_torch}.") and os.environ.get("DS_SKIP_CUDA_CHECK") != "1":
        warnings.append(
            f"nvcc is {nvcc or 'not found'}; DeepSpeed compiles its optimizer with nvcc {nvcc_of_torch}, because torch "
            f"has CUDA {cuda}: install this toolkit and set CUDA_HOME to it, or, at your risk, DS_SKIP_CUDA_CHECK=1"
        )
    return warnings


def check_allocator(args: SimpleNamespace) -> None:
    """Refuse expandable segments of memory if engines share GPUs with models that are trained.

    The engines then get their weights by CUDA IPC. Tensors in such segments are shared through a system call that
    containers forbid (pytorch/pytorch#165685) and old kernels lack (OpenRLHF/OpenRLHF#957). The memory of an engine
    that sleeps cannot be in such segments (pytorch/pytorch#147851): vLLM 0.29 turns them off there, but only if the
    older variable names them.
    """
    setting = "expandable_segments:true"
    names = [name for name in ALLOCATOR if setting in os.environ.get(name, "").replace(" ", "").lower()]
    if not names or not args.train.colocate_all or args.train.async_enable or machine.on_cpu():
        return
    raise ConfigError(
        f"{names[0]} is {os.environ[names[0]]}; it must not have expandable_segments:True with train.colocate_all, "
        "because the engines then sleep and get their weights by CUDA IPC. Many containers forbid the system call that "
        "shares such segments (pytorch/pytorch#165685), and an engine that sleeps cannot have them "
        "(pytorch/pytorch#147851)"
    )
