"""What a name of a data set stands for: a file or a folder of this machine, or a name on the hub."""

import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.user_file import is_dir, is_file, start_of

ENDINGS = (".json", ".jsonl", ".csv", ".parquet", ".arrow")  # of the files that OpenRLHF reads
SOLUTION = "data.solution_key"  # the flag that names the column with worked solutions
SOURCE = "datasource"  # the column by which OpenRLHF names the numbers of an evaluation
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class SourceFlags:
    """What a run reads, and which columns it uses. Errors name the flags.

    Attributes:
        names: Names of data sets, separated by commas. A folder can have a part: FOLDER@PART.
        probabilities: How often each data set is drawn from, as the flag has it. None means one after the other.
        split: The part of a data set that has several.
        most: The most rows of each data set, and of all of them together.
        seed: Seed of the order in which they are drawn from.
        modelscope: Whether names that are not on this machine are ModelScope's.
        columns: The columns that are used, by the flags that name them. The first one has the prompt.
        others: Columns that are used if they are there.
    """

    flag: str
    names: str
    columns: dict[str, str]
    others: tuple[str, ...] = ()
    probabilities: str | None = None
    split: str = "train"
    split_flag: str = ""
    most: int = 10**8  # OpenRLHF's default
    seed: int = 42
    modelscope: bool = False

    @property
    def prompt(self) -> str:
        """Name of the column with the prompts."""
        return next(iter(self.columns.values()))

    @property
    def kept(self) -> list[str]:
        """All columns that are used. Flags may name the same one."""
        return list(dict.fromkeys([*self.columns.values(), *self.others]))


@dataclass(frozen=True)
class DataSource:
    """One data set that flags name. Its `path` counts only if it is `here`, on this machine."""

    name: str
    path: Path
    here: bool

    def __str__(self) -> str:
        return str(self.path) if self.here else self.name


def of_training(args: SimpleNamespace) -> SourceFlags:
    """What a run trains on."""
    data = args.data
    columns = _columns(args) | _named({SOLUTION: data.solution_key})
    return SourceFlags(
        "data.prompt_dataset", data.prompt_dataset, columns, (data.image_key, SOURCE),
        data.prompt_probs, data.prompt_split, "data.prompt_split", data.max_samples, args.train.seed, args.use_ms,
    )  # fmt: skip


def of_evaluation(args: SimpleNamespace) -> SourceFlags:
    """What a run is evaluated on while it trains. OpenRLHF reads all of it, and evaluates the first rows."""
    return SourceFlags(
        "eval.dataset", args.eval.dataset, _columns(args), (args.data.image_key, SOURCE),
        split=args.eval.split, split_flag="eval.split", modelscope=args.use_ms,
    )  # fmt: skip


def _columns(args: SimpleNamespace) -> dict[str, str]:
    return _named({"data.input_key": args.data.input_key, "data.label_key": args.data.label_key})


def _named(columns: dict[str, str | None]) -> dict[str, str]:
    return {flag: column for flag, column in columns.items() if column}


def sources(flags: SourceFlags) -> list[DataSource]:
    """The data sets that flags name; a ConfigError if a name can be neither a file, a folder, nor one on the hub."""
    if not flags.names:
        raise ConfigError(f"{flags.flag} is not set; it must be a file, a folder or a data set's hub name")
    names = [name.strip() for name in flags.names.split(",")]
    whole = flags.names.strip()
    if (mark := next((one for one in ",@" if one in whole), None)) and is_file(flags.flag, Path(whole)):
        raise ConfigError(
            f"{flags.flag} is {whole}; the file's name has {mark!r}, at which OpenRLHF splits the value: rename it"
        )
    if not all(names):
        raise ConfigError(f"{flags.flag} is {flags.names}; a name is empty: remove the comma that is not needed")
    return [_source(flags.flag, name) for name in names]


def _source(flag: str, name: str) -> DataSource:
    place = name.split("@")[0].strip()  # OpenRLHF takes what follows the first @ for a part of a folder
    path = Path(place)
    ending = path.suffix
    if is_dir(flag, path) or (is_file(flag, path) and ending in ENDINGS):
        return DataSource(name, path, here=True)
    if is_file(flag, path):
        raise ConfigError(
            f"{flag} is {name}; OpenRLHF reads files that end in {', '.join(ENDINGS)}, and folders: unpack or convert "
            "the file, or rename it if only its ending is another"
        )
    if ending in ENDINGS:
        raise ConfigError(f"{flag} is {name}; there is no such file{start_of(path)}")
    if looks_local(place):
        raise ConfigError(f"{flag} is {name}; there is no such file or folder{start_of(path)}")
    return DataSource(name, path, here=False)


def looks_local(name: str) -> bool:
    """Whether a name that is no file or folder was meant as a path, not as a name on the hub."""
    return not HUB_NAME.fullmatch(name) or name.startswith(".") or not {*ENDINGS}.isdisjoint(Path(name).suffixes)
