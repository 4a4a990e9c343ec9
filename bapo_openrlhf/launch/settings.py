"""The settings of a run: every flag, and what the files that flags name hold.

Its record (run.json) has them, and its checkpoints do (`ckpt.path`/settings.json). So a resume and a study can tell
whether a run was begun with other ones.
"""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.flags.config import FROM_NOW_ON, HOW, described, flags_of
from bapo_openrlhf.record import run_record as record
from bapo_openrlhf.user_file import at_home

PLACES = ("run.*", "ckpt.*", "logger.*")  # of flags that say nothing about the training


def _resumes(row: str) -> list[str]:
    return [name for name, its_row, _ in described("resumes") if its_row == row]


# What may change when a run is resumed: the change is said and recorded, unless it is of PLACES. A change of any other
# flag is refused. A name with * at its end stands for all flags that begin so. A test compares docs/reliability.md.
MAY_CHANGE = {
    "the length of the run": ("train.num_episodes",),
    FROM_NOW_ON: (*_resumes(FROM_NOW_ON), "train.async_queue_size"),
    "the evaluation": ("eval.*",),
    HOW: (
        "vllm.*", "verifier.*", "ref.*", "reward.num_*", "reward.offload", "train.colocate_*", "ds.enable_sleep",
        "ds.attn_implementation", "ds.use_universal_ckpt", "actor.gradient_checkpointing_*", "rollout.micro_batch_size",
        "rollout.max_tokens_per_gpu", "train.micro_batch_size", "train.max_tokens_per_gpu", *_resumes(HOW),
    ),
    "where the record, the checkpoints and the logs are, and how often they are written": PLACES,
}  # fmt: skip
# The flags that name the user's own code. It may be mended, and a server may move: this is said and recorded.
CODE = ("reward.remote_url", "train.agent_func_path", "adapt.method")
MODELS = ("actor.model_name_or_path", "critic.model_name_or_path", "reward.model_name_or_path")
DATA = "data.prompt_dataset"
RANKS = {f"{model}.num_nodes x {model}.num_gpus_per_node": model for model in ("actor", "critic")}
OF_RANKS = [flag for both in RANKS for flag in both.split(" x ")]
# How flags were given, and what `inputs` has instead.
NOT_COMPARED = (*PLACES, "config", "local_rank", *MODELS, *CODE, DATA, *OF_RANKS)
OF_ROWS = re.compile(r"^\d+ rows, ")  # the beginning of the text for the training data, if their number is known
END = 2**20  # bytes at each end of a model's file that are read

Settings = Mapping[str, Mapping[str, Any]]


def settings_of(args: SimpleNamespace, prompts: int | None) -> Settings:
    """The settings of a run. `prompts` are rows of the training data; None if it is not on this machine.

    "config" has every flag by its dotted name, as the user gave it. "inputs" has a text for each flag that names data,
    models or code, and the numbers of actor and critic ranks. Files of equal content have equal texts, wherever they
    are. A name on a hub, an address and the name of a method stand for themselves.
    """
    flags = flags_of(args)
    hidden = {name: record.HIDDEN for name in record.SECRETS if flags.get(name)}
    inputs = {name: ", ".join(_known(name, part) for part in _parts(flags[name])) for name in (*MODELS, *CODE, DATA)}
    if prompts is not None:
        inputs[DATA] = f"{prompts} rows, {inputs[DATA]}"
    for name, model in RANKS.items():
        if flags[MODELS[0].replace("actor", model)]:
            inputs[name] = str(flags[f"{model}.num_nodes"] * flags[f"{model}.num_gpus_per_node"])
    return {"config": record.plain("config", flags | hidden), "inputs": {k: v for k, v in inputs.items() if v}}


def changes(before: Settings, now: Settings) -> dict[str, tuple[Any, Any]]:
    """The old and the new value of every flag that is not the same, without those that say where files are.

    A flag that only one has says nothing, because versions differ. Rows of the training data count if both know them.
    """
    old, new = before["config"], now["config"]
    pairs = {name: (old[name], new[name]) for name in old if name in new and not is_one_of(name, NOT_COMPARED)}
    if "inputs" in before:
        old, new = before["inputs"], now["inputs"]
        pairs |= {name: (old.get(name), new.get(name)) for name in {**old, **new}}
        data = [OF_ROWS.split(text) for text in pairs.get(DATA, ()) if text]
        if len(data) == 2 and len(data[0]) != len(data[1]):  # one of them does not know the rows
            pairs[DATA] = (data[0][-1], data[1][-1])
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def may_change(flag: str) -> bool:
    """Whether a flag may have another value when a run is resumed."""
    return any(is_one_of(flag, names) for names in MAY_CHANGE.values())


def is_one_of(flag: str, names: tuple[str, ...]) -> bool:
    """Whether a flag is one of the names. A name that ends with * stands for all flags that begin with the rest."""
    return any(flag.startswith(name[:-1]) if name.endswith("*") else flag == name for name in names)


def is_mended(flag: str, before: Any, now: Any) -> bool:
    """Whether a change is one of the user's code: a file has another content, or a server another address."""
    return flag in CODE and _kind(before) == _kind(now)


def _kind(text: str | None) -> str:
    return re.sub(r"https?://\S+", "address", re.sub(r"blake2b \w+", "file", text or "none"))


def _parts(value: Any) -> list[str]:
    return value if isinstance(value, list) else [text.strip() for text in (value or "").split(",") if text.strip()]


# ── What a name stands for ──


def _known(flag: str, text: str) -> str:
    place, mark, part = text.partition("@") if flag == DATA else (text, "", "")  # a folder in a data set
    if flag == "adapt.method":
        place, mark, part = text.rpartition(":")
    if flag in CODE and not place.endswith(".py"):  # a method's name, a server, or OpenRLHF's word for an agent
        return text
    path = at_home(place)
    try:
        if not path.exists():
            return text
        digest_of_all, files = blake2b(digest_size=8), [path] if path.is_file() else [*_files(flag, path)]
        for file in files:
            status = file.stat()
            digest = _digest(file, status.st_size, status.st_mtime_ns, ends=flag in MODELS)
            digest_of_all.update(f"{file.relative_to(path).as_posix()}\0{digest}\0".encode())
    except OSError as error:
        raise ConfigError(f"{flag} is {text}; {error.filename or path} cannot be read: {error.strerror}") from None
    return f"blake2b {digest_of_all.hexdigest()}{mark}{part}"


def _files(flag: str, folder: Path) -> Iterable[Path]:
    """The files of a model or of a data set, without the caches that `datasets` writes when it reads one."""
    paths = folder.iterdir() if flag in MODELS else folder.rglob("*")
    return (path for path in sorted(paths) if path.is_file() and not path.name.startswith((".", "cache-")))


@lru_cache(maxsize=4096)
def _digest(path: Path, size: int, _changed: int, *, ends: bool) -> str:
    """Of a large file only its `ends` are read, because reading all takes too long. `_changed` is for the cache."""
    digest = blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        if ends and size > 2 * END:
            digest.update(file.read(END))
            file.seek(-END, 2)
        while block := file.read(END):
            digest.update(block)
    return digest.hexdigest()
