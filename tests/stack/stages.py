"""Notes which functions of docs/images/step.svg a process calls: their names come into PROBE_FOLDER/stages.txt."""

import functools
import inspect
import os
import runpy
import sys
from pathlib import Path

import bapo_openrlhf.methods.bapo  # noqa: F401  (a run imports it later than this is called)

FIGURE = Path(__file__).parents[2] / "docs" / "architecture_picture.py"
STAGES = runpy.run_path(str(FIGURE))["STAGES"]


@functools.cache
def note(name):
    with (Path(os.environ["PROBE_FOLDER"]) / "stages.txt").open("a") as file:
        file.write(f"{name}\n")


def noting(function, name):
    """The function, which first notes that it is called. Ray must see whether it is a coroutine."""

    @functools.wraps(function)
    def noted(*args, **kwargs):
        note(name)
        return function(*args, **kwargs)

    @functools.wraps(function)
    async def noted_coroutine(*args, **kwargs):
        note(name)
        return await function(*args, **kwargs)

    return noted_coroutine if inspect.iscoroutinefunction(function) else noted


def note_calls():
    """Let the functions of all modules that this process has imported note their first call."""
    for stage in STAGES:
        module = sys.modules.get(f"bapo_openrlhf.{stage.file.removesuffix('.py').replace('/', '.')}")
        owner, _, name = stage.function.rpartition(".")
        if module is None:
            continue
        if owner:
            owners = [getattr(module, owner)]
        else:  # other modules have a function under its name
            owners = [
                m for m in list(sys.modules.values()) if getattr(m, "__dict__", {}).get(name) is vars(module)[name]
            ]
        function = noting(getattr(owners[0], name), stage.function)
        for each in owners:
            setattr(each, name, function)
