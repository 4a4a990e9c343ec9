"""Deletes folders of a run that may resist. One that is busy, as on a network's file system, is moved aside."""

import os
import shutil
import uuid
from pathlib import Path
from typing import Any

UNDELETED = "_undeleted"  # in ckpt.path: what could not be deleted


def discard(folder: Path, checkpoints: Path) -> None:
    """Delete a folder in `ckpt.path`, or move what is left of it to UNDELETED; an OSError if neither is possible."""

    def stop(_function: Any, path: str, error: tuple) -> None:
        # Python's own error has only the last part of the path.
        raise OSError(error[1].errno, error[1].strerror, path) from error[1]

    aside = checkpoints / UNDELETED
    shutil.rmtree(aside, ignore_errors=True)
    try:
        shutil.rmtree(folder, onerror=stop)
    except OSError as error:
        try:
            aside.mkdir(exist_ok=True)
            os.rename(folder, aside / uuid.uuid4().hex)
        except OSError:
            raise error from None


def undeleted(checkpoints: Path) -> str:
    """What is said if something could not be deleted; otherwise empty."""
    aside = checkpoints / UNDELETED
    return f"{aside} has what could not be deleted; a later save tries it again" if aside.is_dir() else ""
