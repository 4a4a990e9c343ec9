"""Find what in the environment of a process a run would stumble over."""

import os
import sys
import tempfile
from importlib.machinery import PathFinder
from pathlib import Path

from bapo_openrlhf.cpu import stack as cpu
from bapo_openrlhf.errors import ConfigError

LONGEST_SOCKET = 107  # bytes of the path of a socket (AF_UNIX)
# The longest sockets below the folder for temporary files: Ray's, with a process number of 7 digits, and vLLM's.
RAYS = "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
VLLMS = "/00000000-0000-0000-0000-000000000000"
# What the processes of a run import, and a folder or file of one's own may be called. No library imports `test`.
LIBRARIES = ("accelerate", "datasets", "deepspeed", "numpy", "openrlhf", "peft", "ray", "torch", "transformers", "vllm")
PYTHONS = sorted(sys.stdlib_module_names - set(sys.builtin_module_names) - {"test"})


def check_working_folder() -> None:
    """Check that nothing in the working folder would be imported in the place of a library.

    Ray's workers look there first, also if this process does not.

    Raises:
        ConfigError: The message names the file, and the library of that name.
    """
    here = Path.cwd()
    elsewhere = [entry for entry in sys.path if Path(entry).resolve() != here]
    for name in (*LIBRARIES, *PYTHONS):
        found = PathFinder.find_spec(name, [str(here)])
        if found and found.origin and PathFinder.find_spec(name, elsewhere):
            raise ConfigError(
                f"{found.origin} would be imported in the place of the library {name}, because it is in the folder in "
                "which the run is started: rename it, or start the run in another folder"
            )


def check_temporary_folder() -> None:
    """Check that there is a folder for temporary files, and that sockets fit into it.

    Raises:
        ConfigError: The message names the variable, its value, how long it may be and what to set.
    """
    try:
        temporary = tempfile.gettempdir()
    except FileNotFoundError as error:
        raise ConfigError(f"TMPDIR is {os.environ.get('TMPDIR')}; {error.strerror}: set it to another folder") from None
    shared = os.environ.get("RAY_ADDRESS") or os.environ.get(cpu.SHARED_RAY)  # of a Ray that is there already
    places = [("TMPDIR", temporary, VLLMS)]
    if not shared:
        name = next((name for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ), "TMPDIR")
        places.append((name, os.environ.get(name, "/tmp"), RAYS))
    for name, folder, socket in reversed(places):
        most = LONGEST_SOCKET - len(socket)
        if len(os.fsencode(folder)) > most:
            raise ConfigError(
                f"{name} is {folder}, {len(os.fsencode(folder))} bytes; it must have at most {most}, because the path "
                f"of a socket below it has at most {LONGEST_SOCKET}: set {name} to a shorter folder, such as /tmp"
            )
