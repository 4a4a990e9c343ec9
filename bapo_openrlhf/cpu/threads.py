"""How many threads a process of a run on the CPU computes with.

The phases of a step exclude one another: the engines generate, then the models compute log-probs, then they train. So
each process may take all cores of its phase, and waiting threads must sleep (`OMP_WAIT_POLICY`). A small model computes
with one thread, because handing work to threads takes longer than its operations.
"""

import ctypes
import os

from bapo_openrlhf.errors import ConfigError

LIMIT = "BAPO_OPENRLHF_THREADS"  # threads that one process may take: OMP_NUM_THREADS if the user set it, or all cores
SMALL = 1_000_000  # parameters
# Threads that wait sleep, because otherwise they would take the cores of those that compute, also of other programs.
# OpenMP reads this when torch is imported. The second variable is for the OpenMP of vLLM's wheel.
WAIT_PASSIVELY = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # of glibc's malloc.h


def limit() -> int:
    """The number of threads that one process may take; a ConfigError if the environment says something else."""
    for name in (LIMIT, "OMP_NUM_THREADS"):
        setting = os.environ.get(name)
        if setting:
            first = setting.split(",")[0]  # OpenMP allows a list, with a number for each level
            if not first.isdecimal() or int(first) < 1:
                raise ConfigError(f"{name} is {setting!r}; allowed: a number of threads, at least 1")
            return int(first)
    return len(os.sched_getaffinity(0))


def use_threads(parameters: int, processes: int) -> None:
    """Let this process, whose model has so many parameters, compute with its share of the cores of `processes`."""
    import torch

    # vLLM replaces `torch.set_num_threads` by a function that does nothing.
    torch._C.set_num_threads(1 if parameters < SMALL else max(1, limit() // processes))


def keep_memory() -> None:
    """Let this process keep freed memory: glibc gives large blocks to the kernel, which fills new ones with zeros."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        for option, value in {_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 64 * 2**20}.items():
            set_option(option, value)
