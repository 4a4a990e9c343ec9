"""The files of the user that a run uses, as they were when it started.

Processes of a run load them again, for example after a reward function crashed. If the user edits one meanwhile, the
rewards would change within a run. So the run has copies in its record, and all processes load these.
"""

import shutil
from pathlib import Path
from types import SimpleNamespace

from bapo_openrlhf.record.run_record import CODE
from bapo_openrlhf.user_file import ORIGIN, at_home


def keep_user_files(args: SimpleNamespace, folder: Path) -> None:
    """Copy the user's files into the record, and let the run use the copies. OSError if one cannot be copied."""
    place = folder / CODE
    shutil.rmtree(place, ignore_errors=True)  # of an earlier start
    args.reward.remote_url = [_kept(name, place) for name in args.reward.remote_url or []] or args.reward.remote_url
    if args.train.agent_func_path:
        args.train.agent_func_path = _kept(args.train.agent_func_path, place)
    file, colon, kind = args.adapt.method.rpartition(":")
    if colon:
        args.adapt.method = f"{_kept(file, place)}:{kind}"


def _kept(name: str, place: Path) -> str:
    path = at_home(name)
    if not name.endswith(".py") or not path.is_file():
        return name
    place.mkdir(exist_ok=True)
    copy = place / f"{len(list(place.iterdir())) // 2}_{path.name}"
    shutil.copyfile(path, copy)
    Path(f"{copy}{ORIGIN}").write_text(str(path.resolve()), encoding="utf-8")
    return str(copy)
