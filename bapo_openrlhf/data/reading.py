"""Read data sets with OpenRLHF's own function, `blending_datasets`, as a run does."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bapo_openrlhf.data import original
from bapo_openrlhf.data.sources import ENDINGS, TEXTS, Request, Source, sources
from bapo_openrlhf.errors import ConfigError, one_line
from bapo_openrlhf.host import module_of
from bapo_openrlhf.training.wire.messages import blending

STEP = 1000  # rows that are read together
DATA = {*ENDINGS} - {".json"}  # endings of files that hold rows; a .json file may describe them


@dataclass(frozen=True)
class Part:
    """One data set of a request that was read.

    Attributes:
        where: Flag and data set. Errors name them.
        rows: Its rows, a `datasets.Dataset`.
        files: The text files that it was read from, in their order. It is empty if the data set has types of its own.
        whole: Whether all rows were read, and not only as many as a limit allows.
        unread: Data files of its folder that are of another kind than those that were read.
    """

    where: str
    rows: Any
    files: tuple[Path, ...]
    whole: bool
    unread: tuple[Path, ...] = ()

    def values(self, columns: list[str]) -> Iterator[dict[str, Any]]:
        """Each row with these of its columns, as a run gets them.

        Raises:
            ConfigError: A value cannot be decoded.
        """
        kept = [column for column in columns if column in self.rows.column_names]
        rows = self.rows.select_columns(kept)
        for start in range(0, len(rows), STEP):
            try:
                block = rows[start : start + STEP]
            except Exception as error:  # of pyarrow, or of a library for images
                raise ConfigError(f"{self.where} cannot be read: {one_line(error)}") from error
            yield from (dict(zip(kept, row, strict=True)) for row in zip(*block.values(), strict=True))

    def originals(self) -> Iterator[tuple[original.Row, bool]]:
        """Each row as its file has it, and whether it is of a CSV file. There are none without text files.

        Raises:
            ConfigError: A file has another number of rows than a run reads, or a line is not what its ending says.
        """
        count = 0
        rows = ((row, file) for file in self.files for row in original.rows_of(self.where, file))
        for row, file in rows if self.whole else islice(rows, len(self.rows)):
            count += 1
            yield row, original.kind_of(file) == ".csv"
        if self.files and count != len(self.rows):
            raise ConfigError(f"{self.where} has {count} rows, and OpenRLHF's reader finds {len(self.rows)} in it")


@dataclass(frozen=True)
class Read:
    """What was read.

    Attributes:
        parts: The data sets that are on this machine, in their order.
        elsewhere: Names on the hub that were not looked at.
        rows: Number of rows that a run takes. None if a data set is elsewhere.
    """

    parts: list[Part]
    elsewhere: list[Source]
    rows: int | None


def read(request: Request, *, download: bool) -> Read:
    """Read the data sets of a request.

    Args:
        request: What to read.
        download: Whether to read what is on the hub.

    Raises:
        ConfigError: A data set is missing, empty or unreadable, or they cannot be put together.
    """
    located = sources(request)
    _check_probabilities(request, len(located))
    elsewhere = [] if download else [source for source in located if not source.here]
    parts = [_part(request, source) for source in located if source not in elsewhere]
    if elsewhere:
        return Read(parts, elsewhere, None)
    rows = parts[0].rows
    if len(parts) > 1 or request.probabilities:
        with _quiet():
            try:
                rows = _blended(request, request.names, request.probabilities)
            except Exception as error:
                raise ConfigError(_why_not_together(request, parts, error)) from error
    return Read(parts, [], min(request.most, len(rows)))


def _blended(request: Request, names: str, probabilities: str | None = None) -> Any:
    """What OpenRLHF's function returns. It asks the training's strategy only for these three."""
    strategy = SimpleNamespace(
        args=SimpleNamespace(use_ms=request.modelscope), print=lambda *_: None, is_rank_0=lambda: False
    )
    messages = (request.prompt, request.columns.get("data.output_key"))
    return blending(module_of("datasets/utils.py").blending_datasets, messages)(
        names, probabilities, strategy, request.seed, max_count=request.most, dataset_split=request.split
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """`datasets` without progress bars, without messages that it logs before it raises them, and without counting.

    For each local file it asks the hub to count a download, which takes seconds on a machine without a network.
    """
    import datasets

    bars, level = datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    counts = datasets.config.HF_UPDATE_DOWNLOAD_COUNTS
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    try:
        yield
    finally:
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = counts
        datasets.logging.set_verbosity(level)
        if not bars:
            datasets.enable_progress_bars()


def _part(request: Request, source: Source) -> Part:
    where = f"{request.flag} {source}"
    with _quiet():
        try:
            if (builder := _builder(source)) is not None:
                _renew(builder)
            rows = _blended(request, source.name)
        except Exception as error:
            raise ConfigError(_why_unreadable(request, source, where, error)) from error
        if not len(rows):
            raise ConfigError(f"{where} has no rows; it must have at least one")
    files, unread = _files(request, source, builder)
    return Part(where, rows, files, whole=len(rows) < request.most, unread=unread)


def _builder(source: Source) -> Any:
    """With what `datasets` reads a data set on this machine; None if it was saved by `datasets`, or is elsewhere."""
    saved = any((source.path / file).is_file() for file in ("state.json", "dataset_dict.json"))
    if saved or not source.here:
        return None
    import datasets

    place, inner, *_ = (*map(str.strip, source.name.split("@")), None)
    if source.path.is_file():
        kind = source.path.suffix.removeprefix(".")
        return datasets.load_dataset_builder("json" if kind == "jsonl" else kind, data_files=place)
    return datasets.load_dataset_builder(place, data_dir=inner)


def _data_files(builder: Any) -> dict[str, list[Path]]:
    """The files that it reads, by the parts of the data set."""
    return {part: [Path(file) for file in files] for part, files in (builder.config.data_files or {}).items()}


def _renew(builder: Any) -> None:
    """Let `datasets` read again what it keeps of files that changed since. It goes by their paths and times only.

    A file that replaces another may have its time, as from an archive. When it was put there cannot be set.
    """
    kept = Path(builder.cache_dir, "dataset_info.json")  # written last
    files = [file for files in _data_files(builder).values() for file in files if file.is_file()]
    changed = max((stat.st_ctime for file in files for stat in (file.stat(), file.lstat())), default=0.0)
    if kept.is_file() and changed >= kept.stat().st_mtime:
        builder.download_and_prepare(download_mode="reuse_cache_if_exists")


def _files(request: Request, source: Source, builder: Any) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """The text files of a data set on this machine, in the order in which they are read, and `Part.unread`."""
    if builder is None:
        return (), ()
    if source.path.is_file():
        return ((source.path,) if source.path.suffix in TEXTS else ()), ()
    files = _data_files(builder)
    paths = tuple(files.get(request.split, []))
    texts = paths if all(original.kind_of(path) in TEXTS for path in paths) else ()
    kinds = {original.kind_of(file) for part in files.values() for file in part}
    there = sorted((source.path / (builder.config.data_dir or "")).rglob("*"))
    return texts, tuple(path for path in there if path.suffix in DATA and path.suffix not in kinds)


def _why_unreadable(request: Request, source: Source, where: str, error: Exception) -> str:
    """What is wrong with a data set that OpenRLHF's function cannot read."""
    owner = getattr(error, "obj", None)
    if isinstance(error, AttributeError) and isinstance(owner, dict):
        return f"{request.split_flag} is {request.split}; {where} has no such part, it has {', '.join(map(str, owner))}"
    if source.path.suffix in TEXTS and source.path.is_file():
        try:
            rows = list(original.rows_of(where, source.path))
            if not rows:
                return f"{where} has no rows; it must have at least one"
            if not any(rows):
                return f"{where}, row 1: no column {request.prompt!r} ({next(iter(request.columns))}); it has none"
            for number, row in enumerate(rows, 1):
                for column, value in row.items():
                    if wrong := original.unreadable([column, value]):
                        return f"{where}, row {number}: column {column!r}: {wrong}"
        except ConfigError as found:
            return str(found)
    cause = error.__cause__ if error.__cause__ is not None else error
    if isinstance(cause, OSError) and cause.filename and _is_of_cache(Path(cause.filename), source.path):
        import datasets

        return (
            f"HF_DATASETS_CACHE, or else the folder datasets in HF_HOME, is {datasets.config.HF_DATASETS_CACHE}, which "
            f"OpenRLHF's reader cannot use ({one_line(cause)}); it must be a folder that can be written"
        )
    return f"{where} cannot be read: {one_line(cause)}"


def _is_of_cache(path: Path, data: Path) -> bool:
    """Whether a path is in the folder in which `datasets` keeps what it reads, or above it, and not the data's."""
    import datasets

    cache = Path(datasets.config.HF_DATASETS_CACHE)
    return (path.is_relative_to(cache) or cache.is_relative_to(path)) and not path.is_relative_to(data)


def _why_not_together(request: Request, parts: list[Part], error: Exception) -> str:
    """What is wrong with data sets that can be read, but not put together."""
    for one, other in combinations(parts, 2):
        for column, kind in one.rows.features.items():
            second = other.rows.features.get(column, kind)
            if kind != second and "null" not in (getattr(kind, "dtype", ""), getattr(second, "dtype", "")):
                return (
                    f"{one.where} and {other.where}: the column {column!r} has the type {_shown(kind)} in the first "
                    f"and {_shown(second)} in the second; it must have one type"
                )
    return f"{request.flag} {request.names} cannot be put together: {one_line(error)}"


def _shown(kind: Any) -> str:
    return str(getattr(kind, "dtype", kind))[:80]


def _check_probabilities(request: Request, count: int) -> None:
    if request.probabilities is None:
        return
    try:
        values = [float(word) for word in request.probabilities.split(",")]
    except ValueError:
        values = []
    if len(values) != count or not all(p > 0 for p in values) or abs(sum(values) - 1) > 1e-6:
        raise ConfigError(
            f"{request.probabilities_flag} is {request.probabilities}; it must be {count} numbers above 0 whose "
            f"sum is 1, one for each data set of {request.flag}"
        )
