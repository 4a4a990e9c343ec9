"""Writes what every benchmark writes: its result as NAME.json and its page as NAME.md, with their origin."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bapo_openrlhf.record.run_record import provenance

RESULTS = Path(__file__).parent / "results"
CORES = f"{os.cpu_count()} cores"


def again(script: str) -> str:
    """The command that this process was started with, as it makes the result again.

    Args:
        script: path of the script in the project's folder.
    """
    return shlex.join(["python", script, *sys.argv[1:]])


def origin(command: str, *machine: str) -> dict[str, Any]:
    """Machine, commit, versions and command of a result.

    Args:
        command: the command that makes the result again.
        machine: a description of the machine, put between its architecture and its Python.
    """
    facts = provenance()
    words = [platform.machine(), *machine, f"Python {platform.python_version()}"]
    return {
        "machine": ", ".join(words),
        "commit": facts["commit"],
        "versions": facts["versions"],
        "command": command,
    }


def opening(title: str, text: str, result: Mapping[str, Any]) -> list[str]:
    """The first lines of a page: its title, what was measured, where, and the command that measures it again.

    Args:
        text: what was measured, in whole sentences.
        result: what `origin` returned, and more.
    """
    where = f"{result['machine']}; commit {result['commit']}."
    return [f"# {title}", "", f"{text} {where}", "", f"`{result['command']}`", ""]


def python_path() -> str:
    """PYTHONPATH with this folder, so that Ray's workers can import its modules."""
    return os.pathsep.join([str(RESULTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])])


def write(folder: Path, name: str, result: Mapping[str, Any], page: str) -> None:
    """Print the page, and write FOLDER/NAME.md and FOLDER/NAME.json."""
    print(page)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(page, encoding="utf-8")
    (folder / f"{name}.json").write_text(json.dumps(result, indent=2, allow_nan=False) + "\n", encoding="utf-8")
