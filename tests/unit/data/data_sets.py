"""Files of rows in each form that OpenRLHF reads, and checks of them."""

import copy
import csv
import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bapo_openrlhf.data.check import Data, check_data
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.host import module_of


def dump(rows: Sequence[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def as_dataset(rows: Sequence[dict]):
    import datasets

    return datasets.Dataset.from_list(list(rows))


def _csv(path: Path, rows: Sequence[dict]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _arrow(path: Path, rows: Sequence[dict]) -> None:
    from datasets.arrow_writer import ArrowWriter

    with ArrowWriter(path=str(path)) as writer:
        for row in rows:
            writer.write(row)
        writer.finalize()


def _folder(path: Path, name: str, content: bytes) -> None:
    path.mkdir()
    (path / name).write_bytes(content)


# Each writes rows to a path without an ending, and returns the name of the data set.
TEXT_KINDS: dict[str, Callable[[Path, Sequence[dict]], object]] = {
    ".jsonl": lambda path, rows: path.write_text(dump(rows), encoding="utf-8"),
    ".json": lambda path, rows: path.write_text(json.dumps(rows, indent=1), encoding="utf-8"),
    " lines.json": lambda path, rows: path.write_text(dump(rows), encoding="utf-8"),
    " folder": lambda path, rows: _folder(path, "train.jsonl", dump(rows).encode()),
    " packed": lambda path, rows: _folder(path, "train.jsonl.gz", gzip.compress(dump(rows).encode())),
}
TYPED_KINDS: dict[str, Callable[[Path, Sequence[dict]], object]] = {
    ".parquet": lambda path, rows: as_dataset(rows).to_parquet(path),
    ".arrow": _arrow,
    " saved": lambda path, rows: as_dataset(rows).save_to_disk(path),
}
KINDS = TEXT_KINDS | TYPED_KINDS | {".csv": _csv}


class Checks:
    """Checks data with the arguments of `run_args` and others, in a folder of its own."""

    def __init__(self, args: SimpleNamespace, folder: Path) -> None:
        self._args, self.folder, self._count = args, folder, 0

    def args(self, **changed: Any) -> SimpleNamespace:
        """The arguments. In the names of `changed`, __ is a dot."""
        args = copy.deepcopy(self._args)
        for name, value in changed.items():
            group, _, flag = name.partition("__")
            setattr(getattr(args, group), flag, value)
        return args

    def write(self, kind: str, rows: Sequence[dict]) -> str:
        """The name of a new data set of these rows."""
        self._count += 1
        path = self.folder / f"rows{self._count}{kind}"
        KINDS[kind](path, rows)
        return str(path)

    def file(self, name: str, content: str | bytes) -> str:
        """The name of a new file."""
        path = self.folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    def __call__(self, names: str, *, ahead: bool = True, takes: Any = None, **changed: Any) -> Data:
        args = self.args(data__prompt_dataset=names, **changed)
        return check_data(args, self.folder / "kept", ahead=ahead, without=(), takes=takes)

    def trained(self, names: str, **changed: Any) -> Any:
        """The rows that OpenRLHF's function gives a run that was checked."""
        args, strategy = self.args(**changed), SimpleNamespace(print=lambda *_: None, is_rank_0=lambda: False)
        kept = self(names, **changed).kept["data.prompt_dataset"]
        return module_of("datasets/utils.py").blending_datasets(
            kept, args.data.prompt_probs, strategy, args.train.seed,
            max_count=args.data.max_samples, dataset_split=args.data.prompt_split,
        )  # fmt: skip

    def refusal(self, names: str, **changed: Any) -> str:
        """The message of the ConfigError without flag and name of the data set."""
        with pytest.raises(ConfigError) as error:
            self(names, **changed)
        return str(error.value).replace(f"data.prompt_dataset {names}", "", 1).removeprefix(", ").removeprefix(" ")
