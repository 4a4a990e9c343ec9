"""The rows of data that a run reads, in a folder of their own: each value is JSON, and so is what its file has.

The columns of `datasets` have one type each, and its own type for JSON loses digits. A reader must import this file.
"""

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import pyarrow  # type: ignore[import-untyped]
from datasets import Dataset, Features
from datasets.features.features import register_feature

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.record.durable import sync

STEP = 1000  # rows that are written together


@dataclass
class Written:
    """A type of columns for `datasets`: any value, as it was written."""

    pa_type: ClassVar[Any] = pyarrow.string()
    _type: str = field(default="Written", init=False, repr=False)

    def __call__(self) -> Any:
        return self.pa_type

    def decode_example(self, text: str, token_per_repo_id: object = None) -> Any:
        """The value that a text stands for."""
        return json.loads(text)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the function is experimental
    register_feature(Written, "Written")


def keep(
    where: str, rows: Iterable[Mapping[str, Any]], columns: Sequence[str], folder: Path, name: str
) -> tuple[Path, list[str]]:
    """Write rows into a folder inside `folder`, unless they are there already. Return it, and all columns of the rows.

    Its name is `name` and a digest of the rows. Several processes may write into `folder`. Columns that no row has are
    left out. A ConfigError, which names `where`, says that there are no rows, or that JSON cannot hold a value.
    """
    digest, names = blake2b("\0".join(columns).encode(), digest_size=8), dict[str, None]()
    cells = (_cells(f"{where}, row {number}", row, columns, names) for number, row in enumerate(rows, 1))
    block = list(islice(cells, STEP))
    if not block:
        raise ConfigError(f"{where} has no rows; it must have at least one")
    schema = Features({column: Written() for column in columns}).arrow_schema
    with TemporaryDirectory(dir=folder, prefix=".") as scratch:
        file, dataset = f"{scratch}/rows.arrow", Path(scratch, "made")
        with pyarrow.OSFile(file, "wb") as sink, pyarrow.ipc.new_stream(sink, schema) as writer:
            while block:
                digest.update(repr(block).encode())
                table = {column: [row.get(column) for row in block] for column in columns}
                writer.write_table(pyarrow.table(table, schema=schema))
                block = list(islice(cells, STEP))
        kept = folder / f"{name[:50]}-{digest.hexdigest()}"
        if not kept.exists():
            used_columns = [column for column in columns if column in names] or columns[:1]
            Dataset.from_file(file).select_columns(used_columns).save_to_disk(dataset)
            for path in dataset.iterdir():
                sync(path)
            with suppress(OSError):  # another process was faster
                dataset.rename(kept)
    return kept, [*names]


def _cells(place: str, row: Mapping[str, Any], columns: Sequence[str], names: dict[str, None]) -> dict[str, str]:
    names.update(dict.fromkeys(row))
    cells = {}
    for column in columns:
        if column in row:
            try:
                cells[column] = json.dumps(row[column], ensure_ascii=False)
                cells[column].encode()  # half of a surrogate pair cannot be written
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"{place}: {column} is {row[column]!r:.80}, which is not valid in JSON ({error}); save it as "
                    "a text, and an image as the path of its file"
                ) from None
    return cells
