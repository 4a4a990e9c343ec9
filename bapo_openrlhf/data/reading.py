"""Read data sets once, and keep their rows for the run.

Text files are read here, and each value is what the file has: nothing is made of a text that looks like a date. A CSV
file has only texts. Other files, saved data sets and the hub are read with OpenRLHF's own `blending_datasets`.
"""

import csv
import gzip
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from bapo_openrlhf.data.messages import as_written
from bapo_openrlhf.data.sources import ENDINGS, DataSource, SourceFlags, sources
from bapo_openrlhf.errors import ConfigError, one_line
from bapo_openrlhf.host import module_of
from bapo_openrlhf.user_file import ENCODINGS

Row = Mapping[str, Any]
STEP = 1000  # rows that are read together
DATA = {*ENDINGS} - {".json"}  # endings of files that hold rows; a .json file may describe them
TEXTS = (".json", ".jsonl", ".csv")  # endings of these files
READ_AS = "save the file as UTF-8, for example with `iconv -f {} -t utf-8`"


@dataclass(frozen=True)
class DataSet:
    """One data set that flags name, and that was read. Errors name `where`: flag and data set.

    `kept` is the folder with its `rows`, a `datasets.Dataset` with only the columns that the flags name. `names` are
    all of its columns. `unread` are data files of its folder that are of another kind than those that were read.
    """

    where: str
    kept: Path
    rows: Any
    names: list[str]
    is_csv: bool
    unread: tuple[Path, ...]

    def places(self) -> Iterator[tuple[str, Row]]:
        """Place and content of each row. A value that the row does not have is None."""
        return ((f"{self.where}, row {number}", row) for number, row in numbered(self.rows))


@dataclass(frozen=True)
class Read:
    """What was read. `rows` is None if a data set is `elsewhere`: a name on the hub that was not looked at."""

    parts: list[DataSet]
    elsewhere: list[DataSource]
    rows: int | None

    @property
    def names(self) -> str:
        """The folders of the parts, as a flag of OpenRLHF names data sets."""
        return ",".join(str(part.kept) for part in self.parts)


def read(flags: SourceFlags, folder: Path, *, download: bool) -> Read:
    """Read the data sets that flags name into `folder`, the hub's with `download`. ConfigError names what fails."""
    if mark := next((mark for mark in ",@" if mark in str(folder)), None):
        raise ConfigError(
            f"{flags.flag} is {flags.names}; its rows would be kept in {folder}, and OpenRLHF splits this path at "
            f"{mark!r}: give another run.dir, or for other commands another folder in TMPDIR"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{flags.flag}: its rows are kept in {folder}, which {one_line(error)}") from None
    data_sources = sources(flags)
    elsewhere = [] if download else [source for source in data_sources if not source.here]
    result = Read([_part(flags, source, folder) for source in data_sources if source not in elsewhere], elsewhere, None)
    if elsewhere:
        return result
    rows = result.parts[0].rows
    if len(result.parts) > 1 or flags.probabilities:
        with _quiet(None):
            rows = _blended(flags, result.names, flags.probabilities)
    return Read(result.parts, [], min(flags.most, len(rows)))


def _blended(flags: SourceFlags, names: str, probabilities: str | None = None) -> Any:
    """What OpenRLHF's function returns. It asks the training's strategy only for these three."""
    strategy = SimpleNamespace(
        args=SimpleNamespace(use_ms=flags.modelscope), print=lambda *_: None, is_rank_0=lambda: False
    )
    return module_of("datasets/utils.py").blending_datasets(
        names, probabilities, strategy, flags.seed, max_count=flags.most, dataset_split=flags.split
    )


@contextmanager
def _quiet(cache: Path | None) -> Iterator[None]:
    """`datasets` without progress bars, messages that it logs before it raises them, and counting.

    For each local file it asks the hub to count a download, which takes seconds without a network. Without a `cache` of
    its own it would find what it kept of a file that another one replaced with the same time.
    """
    import datasets

    bars, level = datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    config = datasets.config
    before = config.HF_UPDATE_DOWNLOAD_COUNTS, config.HF_DATASETS_CACHE
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    config.HF_UPDATE_DOWNLOAD_COUNTS, config.HF_DATASETS_CACHE = False, cache or config.HF_DATASETS_CACHE
    try:
        yield
    finally:
        config.HF_UPDATE_DOWNLOAD_COUNTS, config.HF_DATASETS_CACHE = before
        datasets.logging.set_verbosity(level)
        if not bars:
            datasets.enable_progress_bars()


def _part(flags: SourceFlags, source: DataSource, folder: Path) -> DataSet:
    where = f"{flags.flag} {source}"
    try:
        with TemporaryDirectory(dir=folder, prefix=".") as cache, _quiet(Path(cache) if source.here else None):
            import datasets

            from bapo_openrlhf.record.kept_rows import keep

            files, unread = _files(flags, source, where)
            texts = chain.from_iterable(rows_of(where, file) for file in files)
            rows, names = (islice(texts, flags.most), []) if files else _typed(flags, source, where)
            kept, columns = keep(where, rows, flags.kept, folder, source.path.name)
            dataset = datasets.load_from_disk(kept)
    except ConfigError:
        raise
    except Exception as error:
        cause = error.__cause__ if error.__cause__ is not None else error
        raise ConfigError(f"{where} cannot be read: {one_line(cause)}") from error
    return DataSet(where, kept, dataset, names or columns, ".csv" in map(kind_of, files), unread)


def _files(flags: SourceFlags, source: DataSource, where: str) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """The text files of a data set in the order in which they are read; none if it has types. And `DataSet.unread`."""
    is_saved = any((source.path / file).is_file() for file in ("state.json", "dataset_dict.json"))
    if is_saved or not source.here:
        return (), ()
    part_folder = None
    if source.path.is_file():
        files = {"train": [source.path]}
    else:
        import datasets

        part_folder = source.name.partition("@")[2].partition("@")[0].strip() or None
        data_files = datasets.load_dataset_builder(str(source.path), data_dir=part_folder).config.data_files or {}
        files = {part: [Path(file) for file in paths] for part, paths in data_files.items()}
    kinds = {kind_of(file) for paths in files.values() for file in paths}
    others = sorted((source.path / (part_folder or "")).rglob("*"))
    unread = tuple(path for path in others if path.suffix in DATA and path.suffix not in kinds)
    if not kinds <= {*TEXTS}:
        return (), unread
    if flags.split not in files:
        raise _no_part(flags, where, files)
    return tuple(files[flags.split]), unread


def _no_part(flags: SourceFlags, where: str, parts: Iterable[str]) -> ConfigError:
    has = ", ".join(map(str, parts))
    return ConfigError(f"{flags.split_flag} is {flags.split}; {where} has no such part, it has {has}")


def _typed(flags: SourceFlags, source: DataSource, where: str) -> tuple[Iterator[Row], list[str]]:
    try:
        rows = _blended(flags, source.name)
    except AttributeError as error:
        if isinstance(parts := error.obj, dict):
            raise _no_part(flags, where, parts) from None
        raise
    names = rows.column_names
    columns = as_written(rows.select_columns([column for column in flags.kept if column in names] or names[:1]))
    return (row for _, row in numbered(columns)), names


def numbered(rows: Any) -> Iterator[tuple[int, Row]]:
    """Number and content of each row of a `datasets.Dataset`."""
    blocks = (zip(*block.values(), strict=True) for block in rows.iter(STEP))
    for number, values in enumerate(chain.from_iterable(blocks), 1):
        yield number, dict(zip(rows.column_names, values, strict=True))


# ── Text files ──


def kind_of(path: Path) -> str:
    """The ending of a file, without that of gzip: .jsonl for rows.jsonl.gz."""
    return path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix


def rows_of(where: str, path: Path) -> Iterator[Row]:
    """The rows of a file that ends in .json, .jsonl or .csv, or such a file packed with gzip.

    Only a .json file is held in memory as a whole. A line that is not what its ending says is a ConfigError.
    """
    if kind_of(path) == ".csv":
        return _csv_rows(where, _lines(where, path))
    if kind_of(path) == ".json":
        text = "".join(_lines(where, path))
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            if error.msg != "Extra data":  # it is not lines of JSON either
                raise ConfigError(f"{where}, line {error.lineno}: no valid JSON ({error.msg})") from None
        except ValueError as error:  # a number with more digits than Python reads
            raise ConfigError(f"{where}: no valid JSON ({error})") from None
        else:
            return _objects(where, enumerate(content if isinstance(content, list) else [content], 1), "element")
    return _objects(where, _values(where, _lines(where, path)), "line")


def _lines(where: str, path: Path) -> Iterator[str]:
    start = b""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                start = start or line
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
    except (OSError, EOFError) as error:  # no permission, or it is not packed
        raise ConfigError(f"{where} cannot be read: {one_line(error)}") from None
    except UnicodeDecodeError as error:
        encoding = next((name for mark, name in ENCODINGS.items() if start.startswith(mark)), "latin1")
        raise ConfigError(
            f"{where}, line {number}: no valid UTF-8 ({error.reason}); {READ_AS.format(encoding)}"
        ) from None


def _values(where: str, lines: Iterable[str]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise ConfigError(
                    f"{where}, line {number}: no valid JSON ({getattr(error, 'msg', str(error))})"
                ) from None


def _objects(where: str, values: Iterable[tuple[int, Any]], unit: str) -> Iterator[Row]:
    for number, value in values:
        if not isinstance(value, dict):
            raise ConfigError(f"{where}, {unit} {number}: must be a JSON object, is {type(value).__name__}")
        yield value


def _csv_rows(where: str, text: Iterable[str]) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)
    lines = csv.reader(text)
    try:
        header = next(lines, [])
        if twice := next((name for name in header if name and header.count(name) > 1), None):
            raise ConfigError(f"{where}, line 1: the column {twice!r} is there twice; each must have a name of its own")
        for cells in lines:
            if len(cells) < 2 and not "".join(cells).strip():
                continue  # an empty line
            if len(cells) != len(header):
                raise ConfigError(f"{where}, line {lines.line_num}: {len(cells)} cells for {len(header)} columns")
            yield dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise ConfigError(f"{where}, line {lines.line_num}: no valid CSV ({error})") from None
