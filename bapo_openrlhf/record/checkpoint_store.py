"""Which checkpoints are whole. OpenRLHF saves the models, and this project saves the state of the batch adaptation.

    ckpt.path/_actor/TAG/    the actor, saved by DeepSpeed
    ckpt.path/_critic/TAG/   the critic, if there is one
    ckpt.path/_adapt/TAG/    the batch adaptation: its state and manifest.json

TAG is global_stepN, or best_global_stepN after an evaluation. A checkpoint is *whole* if it has a manifest, which is
written last, and every listed file is unchanged: by its digest in _adapt, and only by its size elsewhere, because model
files are too large to hash at every save. A checkpoint is *universal* if `bapo-openrlhf universal` has added
DeepSpeed's universal format to each model, a folder `zero`, which any number of ranks can load.
"""

import hashlib
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from bapo_openrlhf.record.durable import discard, sync, write_atomically
from bapo_openrlhf.record.state_file import CheckpointError, blake2b, os_errors, read_document, write_document

ACTOR, CRITIC, ADAPT = "_actor", "_critic", "_adapt"
MANIFEST = "manifest.json"
UNIVERSAL = "zero"  # where DeepSpeed looks for its universal format, in the folder of a model
MARKER = "UNFINISHED"  # is there from `begin` to `complete`
KIND = "bapo_openrlhf checkpoint"
OF_A_RANK = "_optim_states.pt"  # the end of the name of DeepSpeed's file with the optimizer of one rank
TAG = re.compile(r"(best_)?global_step([0-9]+)")


class CheckpointStore:
    """The checkpoints of one run, in `ckpt.path`. A save is `begin`, then all files in any order, then `complete`.

    A symbolic link is an error. Any method raises CheckpointError, which names the file, if one cannot be read or
    written, and ValueError if a tag is not one of OpenRLHF's.
    """

    def __init__(self, path: Path, *, critic: bool) -> None:
        self.path = Path(path)
        self.models = (ACTOR, CRITIC) if critic else (ACTOR,)

    # ── Saving ──

    @os_errors()
    def begin(self, tag: str) -> Path:
        """Create _adapt/TAG, which contains only a marker, and return it. An older attempt is deleted first."""
        folder = self.folder(tag)
        folder.mkdir(parents=True, exist_ok=True)
        # The order matters: the old checkpoint is whole until its manifest is deleted, and by then the marker is there.
        with open(folder / MARKER, "wb") as file:
            os.fsync(file.fileno())
        for place in (folder, folder.parent, self.path):
            sync(place)
        (folder / MANIFEST).unlink(missing_ok=True)
        sync(folder)
        # This comes here because DeepSpeed overwrites file by file, and a mixture of two attempts could look like one.
        self._remove_models(tag)
        _empty(folder, self.path, but=MARKER)
        return folder

    @os_errors()
    def complete(self, tag: str, step: int) -> None:
        """Write the manifest, with the step, and delete the marker; a CheckpointError if a model has no file."""
        folder = self.folder(tag)
        files = {}
        for part in self.models:
            paths = self._files(part, tag)
            if not paths:
                raise CheckpointError(f"{self.path / part / tag} has no file: the model was not saved")
            files |= {path: {"bytes": self._size(path)} for path in paths}
        for path in self._files(ADAPT, tag):
            if self.path / path not in (folder / MARKER, folder / MANIFEST):
                files[path] = {"bytes": self._size(path), "blake2b": self._digest(path)}
        write_document(folder / MANIFEST, KIND, {"step": step, "files": files})
        (folder / MARKER).unlink(missing_ok=True)
        sync(folder)

    def folder(self, tag: str, part: str = ADAPT) -> Path:
        """Path of _adapt/TAG, or of TAG in the folder of a model."""
        if not TAG.fullmatch(tag):
            raise ValueError(f"tag {tag!r} of a checkpoint must be global_stepN or best_global_stepN")
        self._refuse_links(f"{part}/{tag}")
        return self.path / part / tag

    # ── Loading ──

    @os_errors()
    def check(self, tag: str) -> None:
        """Raise CheckpointError unless the tag is whole. The message names the first missing or changed file."""
        files = self._manifest(tag)["files"]
        for part in self.models:
            if not any(PurePosixPath(path).parts[0] == part for path in files):
                raise CheckpointError(
                    f"{self.path / part / tag} is not in the checkpoint, which was saved without this model"
                )
        for path, expected in files.items():
            size = self._size(path)
            if size != expected["bytes"]:
                raise CheckpointError(f"{self.path / path} has {size} bytes instead of {expected['bytes']}")
            if "blake2b" in expected and self._digest(path) != expected["blake2b"]:
                raise CheckpointError(f"{self.path / path} is damaged")

    @os_errors()
    def tags(self) -> list[str]:
        """All tags with a folder in _adapt, newest step first. Within a step global_stepN comes before the best one."""
        return sorted(self._tags_in(ADAPT), key=lambda tag: (-step_of(tag), tag.startswith("best")))

    @os_errors()
    def newest_whole(self, report: Callable[[str], None], *, but: Collection[str] = ()) -> str | None:
        """The newest tag that passes `check` and is not in `but`, or None. A line about each newer one is reported."""
        for tag in filter(lambda tag: tag not in but, self.tags()):
            try:
                self.check(tag)
            except CheckpointError as error:
                report(f"checkpoint {tag} is skipped: {error}")
            else:
                return tag
        return None

    @os_errors()
    def point_to(self, tag: str) -> None:
        """Make OpenRLHF load this tag. It reads the tag from `latest`, or from `latest_universal` for that format."""
        for name in ("latest", "latest_universal") if self.is_universal(tag) else ("latest",):
            for part in self.models:
                write_atomically(self.folder(tag, part).parent / name, tag.encode("ascii"))

    @os_errors()
    def has_foreign(self) -> bool:
        """Whether _actor has a tag that _adapt lacks, because the checkpoint was written without batch adaptation."""
        return not set(self._tags_in(ACTOR)) <= set(self._tags_in(ADAPT))

    # ── Other numbers of ranks ──

    @os_errors()
    def ranks(self, tag: str) -> dict[str, int]:
        """How many ranks wrote each model of a whole checkpoint; 0 if it was written without ZeRO."""
        parts = Counter(path.split("/")[0] for path in self._manifest(tag)["files"] if path.endswith(OF_A_RANK))
        return {part: parts[part] for part in self.models}

    @os_errors()
    def is_universal(self, tag: str) -> bool:
        """Whether every model of a whole checkpoint has the universal format too."""
        files = self._manifest(tag)["files"]
        return all(f"{part}/{tag}/{UNIVERSAL}/optimizer_state.pt" in files for part in self.models)

    @os_errors()
    def add_universal(self, tag: str, converted: Mapping[str, Path]) -> None:
        """Move what DeepSpeed's converter wrote, by model, into a checkpoint. A crash leaves it as it was."""
        for part in self.models:
            folder = self.folder(tag, part) / UNIVERSAL
            if folder.exists():  # of a conversion that was interrupted: no manifest has it
                discard(folder, self.path)
            converted[part].rename(folder)
            sync(folder.parent)
        manifest = self._manifest(tag)
        models = {path: {"bytes": self._size(path)} for part in self.models for path in self._files(part, tag)}
        body = {"step": manifest["step"], "files": manifest["files"] | models}
        write_document(self.folder(tag) / MANIFEST, KIND, body)
        sync(self.folder(tag))

    # ── Deleting ──

    @os_errors()
    def remove_unfinished(self) -> list[str]:
        """Delete `unfinished` saves, which OpenRLHF would count for --ckpt.max_num, and return their tags."""
        removed = unfinished(self)
        for tag in removed:
            self._remove_models(tag)
            _remove_last(self.folder(tag), self.path, MARKER)
        return removed

    @os_errors()
    def forget_rotated(self) -> None:
        """Delete from _adapt the finished tags that OpenRLHF has deleted from _actor because of --ckpt.max_num."""
        for tag in self.tags():
            folder = self.folder(tag)
            if (folder / MANIFEST).exists() and not self.folder(tag, ACTOR).exists():
                _remove_last(folder, self.path, MANIFEST)

    # ── Files. Paths are relative to `self.path` and have slashes ──

    def _refuse_links(self, path: str) -> None:
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
        folder = self.folder(tag)
        self._refuse_links(f"{ADAPT}/{tag}/{MANIFEST}")
        if (folder / MARKER).exists() and not (folder / MANIFEST).exists():
            raise CheckpointError(f"{folder / MANIFEST} is missing: the save did not finish")
        return read_document(folder / MANIFEST, KIND)

    def _files(self, part: str, tag: str) -> list[str]:
        return sorted(path.relative_to(self.path).as_posix() for path in _entries(self.folder(tag, part)))

    def _size(self, path: str) -> int:
        self._refuse_links(path)
        status = os.lstat(self.path / path)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{self.path / path} is not a file")
        return status.st_size

    def _digest(self, path: str) -> str:
        with open(self.path / path, "rb") as file:
            return hashlib.file_digest(file, blake2b).hexdigest()

    def _remove_models(self, tag: str) -> None:
        for part in (ACTOR, CRITIC):
            folder = self.folder(tag, part)
            if folder.exists():
                discard(folder, self.path)
                sync(folder.parent)


@os_errors()
def unfinished(store: CheckpointStore) -> list[str]:
    """The tags of saves that were interrupted, or that go on now, newest step first."""
    files_by_tag = {tag: os.listdir(store.folder(tag)) for tag in store.tags()}
    # A folder is empty between two operations of `begin` or of `remove_unfinished`.
    return [tag for tag, names in files_by_tag.items() if MANIFEST not in names and (MARKER in names or not names)]


def step_of(tag: str) -> int:
    return int(tag.split("global_step")[1])


def _entries(top: Path) -> Iterator[Path]:
    def stop(error: OSError) -> None:
        raise error

    for folder, folders, names in os.walk(top, onerror=stop) if top.exists() else ():
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        yield from (Path(folder) / name for name in names + links)


def _empty(folder: Path, checkpoints: Path, *, but: str) -> None:
    for path in sorted(folder.iterdir()):
        if path.name == but:
            continue
        if path.is_dir() and not path.is_symlink():
            discard(path, checkpoints)
        else:
            path.unlink()
    sync(folder)


def _remove_last(folder: Path, checkpoints: Path, name: str) -> None:
    """Delete a folder. The file `name` goes last, because it describes the folder until then."""
    _empty(folder, checkpoints, but=name)
    (folder / name).unlink(missing_ok=True)
    discard(folder, checkpoints)
    sync(folder.parent)
