"""What the installed torch asks of NVIDIA's driver, of nvcc, and of the variables that its memory depends on."""

import os
import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace

from bapo_openrlhf import machine
from bapo_openrlhf.errors import ConfigError

LOCKED = "13.0"  # CUDA of the torch in requirements/cuda.lock.txt
DRIVERS = {12: 525, 13: 580}  # the oldest for a CUDA: docs.nvidia.com/deploy/cuda-compatibility, Table 1
SAME_MINOR = 13  # from this CUDA on, DeepSpeed 0.19.6 takes only the nvcc of torch's own minor version
DRIVER = Path("/proc/driver/nvidia/version")
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


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
    names = [name for name in VARIABLES if setting in os.environ.get(name, "").replace(" ", "").lower()]
    if not names or not args.train.colocate_all or args.train.async_enable or machine.on_cpu():
        return
    raise ConfigError(
        f"{names[0]} is {os.environ[names[0]]}; it must not have expandable_segments:True with train.colocate_all, "
        "because the engines then sleep and get their weights by CUDA IPC. Many containers forbid the system call that "
        "shares such segments (pytorch/pytorch#165685), and an engine that sleeps cannot have them "
        "(pytorch/pytorch#147851)"
    )
