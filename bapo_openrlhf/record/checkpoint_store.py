"""Which checkpoints are whole. OpenRLHF saves the models, this project the state of the batch adaptation.

    ckpt.path/_actor/TAG/    the actor, by DeepSpeed
    ckpt.path/_critic/TAG/   the critic, where there is one
    ckpt.path/_adapt/TAG/    the batch adaptation: its state, and manifest.json

TAG is global_stepN, or best_global_stepN after an evaluation. A checkpoint is whole when its manifest is there and
every file that it lists is as it was. The manifest is written last, so whatever stops a save, the newest whole
checkpoint is an older one and is found.

The manifest has a digest of each file in _adapt, but of model files only the size: they are too large to hash at every
save. So a model file that lost its content but not its size, say in a power cut, passes.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from bapo_openrlhf.record.state_file import (
    CheckpointError,
    blake2b,
    read_document,
    sync_folder,
    write_atomically,
    write_document,
)

ACTOR, CRITIC, ADAPT = "_actor", "_critic", "_adapt"
MANIFEST = "manifest.json"
MARKER = "UNFINISHED"  # from `begin` to `complete`
KIND = "bapo_openrlhf checkpoint"
TAG = re.compile(r"(best_)?global_step([0-9]+)")


@contextmanager
def os_errors() -> Iterator[None]:
    """A CheckpointError that names the file, for an OSError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {error.strerror}") from error


class CheckpointStore:
    """The checkpoints of one run.

    A save is `begin`, then all files in any order, then `complete`. A folder that is a symbolic link is an error: what
    it leads to is neither read nor deleted. Every method raises CheckpointError, which names the file, where the
    system does not let it read or write, and ValueError for a tag that OpenRLHF does not give.

    Args:
        path: ckpt.path.
        critic: whether the run has a critic.
    """

    def __init__(self, path: Path, *, critic: bool) -> None:
        self.path = Path(path)
        self.models = (ACTOR, CRITIC) if critic else (ACTOR,)

    # ── Saving ──

    @os_errors()
    def begin(self, tag: str) -> Path:
        """Make _adapt/TAG, empty but for a marker, and return it.

        What an older attempt left of this tag is removed first, the models too: DeepSpeed would overwrite them file by
        file, and a mixture of two attempts must not pass for one.
        """
        folder = self._folder(ADAPT, tag)
        folder.mkdir(parents=True, exist_ok=True)
        # In this order: the tag is whole as before until its manifest goes, and by then it has the marker.
        with open(folder / MARKER, "wb") as file:
            os.fsync(file.fileno())
        sync_folder(folder)
        sync_folder(folder.parent)
        sync_folder(self.path)
        (folder / MANIFEST).unlink(missing_ok=True)
        sync_folder(folder)
        self._remove_models(tag)
        _empty(folder, but=MARKER)
        return folder

    @os_errors()
    def complete(self, tag: str, step: int) -> None:
        """Write the manifest over all files of the tag, and take the marker away.

        Args:
            tag: as given to `begin`.
            step: trainer step, for the record.

        Raises:
            CheckpointError: a model's folder holds no file.
        """
        folder = self._folder(ADAPT, tag)
        files = {}
        for part in self.models:
            paths = self._files(part, tag)
            if not paths:
                raise CheckpointError(f"{self.path / part / tag} holds no file: the model was not saved")
            files |= {path: {"bytes": self._size(path)} for path in paths}
        for path in self._files(ADAPT, tag):
            if self.path / path not in (folder / MARKER, folder / MANIFEST):
                files[path] = {"bytes": self._size(path), "blake2b": self._digest(path)}
        write_document(folder / MANIFEST, KIND, {"step": step, "files": files})
        (folder / MARKER).unlink(missing_ok=True)
        sync_folder(folder)

    @os_errors()
    def abandon(self, tag: str) -> None:
        """Undo `begin`, where no models were saved after all."""
        _remove_last(self._folder(ADAPT, tag), MARKER)

    @os_errors()
    def has_models(self, tag: str) -> bool:
        """Whether OpenRLHF saved the actor under this tag."""
        return bool(self._files(ACTOR, tag))

    def folder(self, tag: str) -> Path:
        """_adapt/TAG."""
        return self._folder(ADAPT, tag)

    # ── Loading ──

    @os_errors()
    def check(self, tag: str) -> None:
        """Raise CheckpointError unless the tag is whole; names the first file that is missing or not as it was."""
        files = self._manifest(tag)["files"]
        for part in self.models:
            if not any(PurePosixPath(path).parts[0] == part for path in files):
                raise CheckpointError(f"{self.path / part / tag} is not in the checkpoint: it was saved without one")
        for path, expected in files.items():
            size = self._size(path)
            if size != expected["bytes"]:
                raise CheckpointError(f"{self.path / path} has {size} bytes instead of {expected['bytes']}")
            if "blake2b" in expected and self._digest(path) != expected["blake2b"]:
                raise CheckpointError(f"{self.path / path} is damaged")

    @os_errors()
    def tags(self) -> list[str]:
        """All tags that have a folder in _adapt: newest step first, then the regular before the best one."""

        def age(tag: str) -> tuple[int, bool]:
            best, step = TAG.fullmatch(tag).groups()
            return -int(step), best is not None

        return sorted(self._tags_in(ADAPT), key=age)

    @os_errors()
    def newest_whole(self, report: Callable[[str], None]) -> str | None:
        """The newest tag that passes `check`; None where there is none.

        Args:
            report: is called with the name of each newer one, and why it was passed over.
        """
        for tag in self.tags():
            try:
                self.check(tag)
            except CheckpointError as error:
                report(f"checkpoint {tag} is passed over: {error}")
            else:
                return tag
        return None

    @os_errors()
    def point_to(self, tag: str) -> None:
        """Have OpenRLHF load this tag: it loads the one that a file `latest` beside each model's tags names."""
        for part in self.models:
            write_atomically(self._folder(part, tag).parent / "latest", tag.encode("ascii"))

    @os_errors()
    def has_foreign(self) -> bool:
        """Whether _actor has a checkpoint without a folder in _adapt: one written without batch adaptation."""
        return not set(self._tags_in(ACTOR)) <= set(self._tags_in(ADAPT))

    # ── Clearing up ──

    @os_errors()
    def remove_unfinished(self) -> list[str]:
        """Delete what saves that never ended left, the models too, and return the tags.

        They can never be loaded, and would count for OpenRLHF, which keeps --ckpt.max_num of them.
        """
        removed = []
        for tag in self.tags():
            folder = self._folder(ADAPT, tag)
            names = os.listdir(folder)
            # An empty folder is what is left between two operations of `begin`, or of this method.
            if MANIFEST not in names and (MARKER in names or not names):
                self._remove_models(tag)
                _remove_last(folder, MARKER)
                removed.append(tag)
        return removed

    @os_errors()
    def forget_rotated(self) -> None:
        """Delete from _adapt the finished tags that OpenRLHF has deleted from _actor, as --ckpt.max_num asks."""
        for tag in self.tags():
            folder = self._folder(ADAPT, tag)
            if (folder / MANIFEST).exists() and not self._folder(ACTOR, tag).exists():
                _remove_last(folder, MANIFEST)

    # ── Files; paths are relative to `self.path`, with slashes ──

    def _folder(self, part: str, tag: str) -> Path:
        if not TAG.fullmatch(tag):
            raise ValueError(f"tag {tag!r} of a checkpoint must be global_stepN or best_global_stepN")
        self._refuse_links(f"{part}/{tag}")
        return self.path / part / tag

    def _refuse_links(self, path: str) -> None:
        """Raise unless no step on the way from ckpt.path to `path` is a symbolic link."""
        step = self.path
        for name in PurePosixPath(path).parts:
            step = step / name
            if step.is_symlink():
                raise CheckpointError(f"{step} is a symbolic link, which checkpoints do not follow")

    def _tags_in(self, part: str) -> list[str]:
        self._refuse_links(part)
        if not (self.path / part).exists():
            return []
        with os.scandir(self.path / part) as entries:
            return [e.name for e in entries if TAG.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]

    def _manifest(self, tag: str) -> dict[str, Any]:
        folder = self._folder(ADAPT, tag)
        self._refuse_links(f"{ADAPT}/{tag}/{MANIFEST}")
        if (folder / MARKER).exists() and not (folder / MANIFEST).exists():
            raise CheckpointError(f"{folder / MANIFEST} is missing: the save did not end")
        manifest = read_document(folder / MANIFEST, KIND)
        for path in manifest["files"]:
            parts = PurePosixPath(path).parts
            if parts[:2] not in [(part, tag) for part in (ACTOR, CRITIC, ADAPT)] or ".." in parts:
                raise CheckpointError(f"{folder / MANIFEST} lists {path}, which is not of this checkpoint")
        return manifest

    def _files(self, part: str, tag: str) -> list[str]:
        """Every file of the tag, links included, sorted."""

        def stop(error: OSError) -> None:
            raise error

        top = self._folder(part, tag)
        found = []
        for folder, folders, names in os.walk(top, onerror=stop) if top.exists() else ():
            links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
            found += [(Path(folder) / name).relative_to(self.path).as_posix() for name in names + links]
        return sorted(found)

    def _size(self, path: str) -> int:
        self._refuse_links(path)
        try:
            status = os.lstat(self.path / path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointError(f"{self.path / path} is missing") from error
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{self.path / path} is no file")
        return status.st_size

    def _digest(self, path: str) -> str:
        with open(self.path / path, "rb") as file:
            return hashlib.file_digest(file, blake2b).hexdigest()

    def _remove_models(self, tag: str) -> None:
        for part in (ACTOR, CRITIC):
            folder = self._folder(part, tag)
            if folder.exists():
                _remove_tree(folder)
                sync_folder(folder.parent)


def _empty(folder: Path, *, but: str) -> None:
    """Delete all in the folder except the entry `but`."""
    for path in sorted(folder.iterdir()):
        if path.name == but:
            continue
        if path.is_dir() and not path.is_symlink():
            _remove_tree(path)
        else:
            path.unlink()
    sync_folder(folder)


def _remove_last(folder: Path, name: str) -> None:
    """Delete the folder, the file `name` in it last: what it says of the folder holds until then."""
    _empty(folder, but=name)
    (folder / name).unlink(missing_ok=True)
    folder.rmdir()
    sync_folder(folder.parent)


def _remove_tree(folder: Path) -> None:
    """Delete a folder; links in it are deleted, not followed."""

    def stop(_function: Any, path: str, error: tuple) -> None:
        # Python's own error has the last part of the path alone.
        raise OSError(error[1].errno, error[1].strerror, path) from error[1]

    shutil.rmtree(folder, onerror=stop)
