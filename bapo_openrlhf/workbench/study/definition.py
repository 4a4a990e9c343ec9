"""The definition of a study, from its YAML file: arms, seeds, and the claims to test.

An arm is a method on an advantage path (group-relative advantages or a critic), and is run with every seed.
docs/studies.md describes the fields of the file, and configs/studies/countdown.yaml is an example.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from bapo_openrlhf.errors import ALLOWED, NUMBERS, ConfigError
from bapo_openrlhf.flags.files import dotted
from bapo_openrlhf.user_file import read_yaml

ALGORITHMS = {"group": ("bapo_grpo", "grpo"), "critic": ("ba_ppo", "ppo")}  # with batch adaptation, without
MEASURES = ("accuracy", "curve", "rollouts", "solved")
SMOKE = {"methods", "flags", "evaluations"}
SAME_WAYS = {"run.faster": ["all"]}  # so that times of arms with and without batch adaptation can be compared
NAME = re.compile(r"[A-Za-z0-9_.]+")


@dataclass(frozen=True)
class Arm:
    """A method on an advantage path. Its own flags and files win over those of the study."""

    method: str  # its key among the study's methods, such as bapo_without_x2
    path: str  # "group" (group-relative advantages) or "critic" (GAE)
    label: str  # its name in tables and figures
    flags: Mapping[str, Any] = field(default_factory=dict)  # by dotted name
    config: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()  # empty: all seeds of the study

    @property
    def name(self) -> str:
        """METHOD-PATH."""
        return f"{self.method}-{self.path}"


@dataclass(frozen=True)
class Claim:
    """A sentence that the study tests with its numbers.

    `measure` is "accuracy" (held-out, at the end), "curve" (mean height of the learning curve, `Results.curve`),
    "rollouts" (generated responses; fewer are better), or "solved" (share of the prompts that failed at first, solved
    later).
    """

    says: str
    source: str  # the place that makes the claim, such as A.9 of the paper
    better: str  # an arm, as `than`
    than: str
    measure: str = "accuracy"
    ratio: float | None = None  # of `better` to `than`, by the source; it is shown, but decides nothing
    margin: float = 0.0  # above 0: "about equal", if the interval lies this near (relative for rollouts)


@dataclass(frozen=True)
class Study:
    """A study as its YAML file defines it."""

    name: str
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    evaluations: tuple[str, ...] = ()  # data sets that are evaluated during training
    start: float | None = None  # held-out accuracy before the first step, the mean over `evaluations`; None: unknown
    targets: tuple[float, ...] = ()  # held-out accuracies to reach, lowest first
    claims: tuple[Claim, ...] = ()
    config: tuple[str, ...] = ()  # YAML files of flags that all runs share; later files win
    flags: Mapping[str, Any] = field(default_factory=dict)  # of all runs, by dotted name; they win over `config`
    prepare: tuple[tuple[str, ...], ...] = ()  # commands before the first run, each a list of words
    parallel: int = 1  # runs at a time

    @property
    def runs(self) -> list[tuple[Arm, int]]:
        """All runs, in an order in which an unfinished study can already be compared: seed by seed, path by path."""
        arms = [arm for path in ALGORITHMS for arm in self.arms if arm.path == path]
        return [(arm, seed) for seed in self.seeds for arm in arms if seed in (arm.seeds or self.seeds)]

    def words(self, arm: Arm, seed: int) -> list[str]:
        """A run's command line after `bapo-openrlhf train`, without the flags that say where its files lie."""
        flags = {**SAME_WAYS, **self.flags, **arm.flags}
        with_adaptation, without = ALGORITHMS[arm.path]
        algorithm = without if flags.get("adapt.method") == "none" else with_adaptation
        words = words_of([*self.config, *arm.config], flags)
        return ["--algorithm", algorithm, *words, "--train.seed", str(seed)]


FIELDS = {one.name for one in fields(Study)} - {"arms"} | {"methods", "smoke"}  # of a file


def words_of(files: Sequence[str], flags: Mapping[str, Any]) -> list[str]:
    """Files and flags as words of a command line. Null gives a flag without a value."""
    words = ["--config", *files] if files else []
    for name, value in flags.items():
        if value is None or isinstance(value, list):
            words += [f"--{name}", *map(str, value or ())]
        else:
            words.append(f"--{name}={value}")
    return words


def read_study(path: Path, *, smoke: bool = False) -> Study:
    """Read a study; with `smoke` only its smoke methods, flags and one seed. A ConfigError names file and field."""
    try:
        content = _content(path)
        study = _study(content, path)
        return _smoke(study, content.get("smoke")) if smoke else study
    except ConfigError as error:
        named = str(error).startswith(f"study {path}")  # as `read_yaml` does
        raise ConfigError(str(error) if named else f"study {path}: {error}") from None


# ── the content of the file, checked field by field ──


def _content(path: Path, users: tuple[str, ...] = ()) -> Any:
    """The fields of the file, and those that it takes from the file that it is `like`, which may be like another."""
    content = read_yaml("study", path, as_text="flags")
    if not isinstance(content, dict) or "like" not in content:
        return content
    like = str(content.pop("like"))
    if Path(like).name != like:
        raise ConfigError(f"like is {like!r}; it must be the name of a file in the same folder")
    users = (*users, path.name)
    if like in users:
        raise ConfigError(f"like is {like!r}; it must be a file that is not like this one")
    base = _fields(like, _content(path.parent / like, users), FIELDS)
    _study(base, path)
    if isinstance(names := content.get("methods"), list):
        known = [*base["methods"]]  # a list, because a name of the file may be anything
        if missing := [str(name) for name in names if name not in known]:
            raise ConfigError(f"methods has {', '.join(missing)}; {like} has {', '.join(map(str, known))}")
        content["methods"] = {name: base["methods"][name] for name in names}
    if isinstance(content.get("smoke"), dict):
        content["smoke"] = {**_fields(f"{like}: smoke", base.get("smoke") or {}, SMOKE), **content["smoke"]}
    flags = {**_flags("flags", base.get("flags")), **_flags("flags", content.get("flags"))}
    return {**base, **content, "flags": flags}


def _study(content: Any, path: Path) -> Study:
    content = _fields("the file", content, {*FIELDS, "like"}, required=("name", "seeds", "methods"))
    if not NAME.fullmatch(str(content["name"])):
        raise ConfigError(f"name is {content['name']!r}; it must be made of letters, digits, _ and .")
    methods = content["methods"]
    if not isinstance(methods, dict) or not methods:
        raise ConfigError("methods must map at least one name to its arms")
    arms = tuple(arm for name, entry in methods.items() for arm in _arms(str(name), entry, path))
    seeds = content["seeds"]
    if isinstance(seeds, dict):  # a list for each path
        for arm in arms:
            if arm.path not in seeds:
                raise ConfigError(f"seeds has none for {arm.path}, and the study has the arm {arm.name}")
        arms = tuple(replace(arm, seeds=_seeds(seeds[arm.path])) for arm in arms)
        seeds = sorted({seed for arm in arms for seed in arm.seeds})
    targets = [_number("targets has", one, "in (0, 1]") for one in _list("targets", content.get("targets", []))]
    if targets != sorted(set(targets)):
        raise ConfigError(f"targets is {targets}; its numbers must rise")
    start = content.get("start")
    names = [arm.name for arm in arms]
    return Study(
        name=str(content["name"]),
        arms=arms,
        seeds=_seeds(seeds),
        evaluations=_strings("evaluations", content.get("evaluations", [])),
        start=None if start is None else _number("start is", start, "in [0, 1]"),
        targets=tuple(targets),
        claims=tuple(_claim(claim, names) for claim in _list("claims", content.get("claims") or [])),
        config=_files("config", content.get("config", []), path),
        flags=_flags("flags", content.get("flags")),
        prepare=tuple(_strings("prepare", command) for command in _list("prepare", content.get("prepare") or [])),
        parallel=_number("parallel is", content.get("parallel", 1), "at least 1", "int"),
    )


def _smoke(study: Study, entry: Any) -> Study:
    entry = _fields("smoke", entry, SMOKE, required=("methods",))
    methods = _strings("smoke: methods", entry["methods"])
    arms = tuple(arm for arm in study.arms if arm.method in methods)
    if missing := sorted(set(methods) - {arm.method for arm in arms}):
        raise ConfigError(f"smoke: methods has {', '.join(missing)}; the study has no method of that name")
    flags = {**study.flags, **_flags("smoke: flags", entry.get("flags"))}
    evaluations = _strings("smoke: evaluations", entry.get("evaluations", [*study.evaluations]))
    arms = tuple(replace(arm, seeds=(arm.seeds or study.seeds)[:1]) for arm in arms)
    seeds = tuple(sorted({seed for arm in arms for seed in arm.seeds}))
    return replace(study, name=f"{study.name}_smoke", arms=arms, seeds=seeds, flags=flags, evaluations=evaluations)


def _arms(method: str, entry: Any, path: Path) -> list[Arm]:
    where = f"methods: {method}"
    if not NAME.fullmatch(method):
        raise ConfigError(f"{where}: a method's name must be made of letters, digits, _ and .")
    entry = _fields(where, entry, {"arms", "flags", "config"}, required=("arms",))
    paths = entry["arms"]
    if not isinstance(paths, dict) or not paths or not set(paths) <= set(ALGORITHMS):
        raise ConfigError(f"{where}: arms is {paths!r}; it must map {' or '.join(ALGORITHMS)} to a label")
    flags = _flags(f"{where}: flags", entry.get("flags"))
    files = _files(f"{where}: config", entry.get("config", []), path)
    return [Arm(method, name, str(label), flags, files) for name, label in paths.items()]


def _seeds(content: Any) -> tuple[int, ...]:
    seeds = tuple(_number("seeds has", seed, "at least 0", "int") for seed in _list("seeds", content))
    if not seeds or len(set(seeds)) != len(seeds):
        raise ConfigError(f"seeds is {content}; it must hold at least one number, and none twice")
    return seeds


def _claim(entry: Any, arms: Sequence[str]) -> Claim:
    names = {one.name for one in fields(Claim)}
    claim = Claim(**_fields("claims", entry, names, required=("says", "source", "better", "than")))
    for name, values in (("better", arms), ("than", arms), ("measure", MEASURES)):
        if (value := getattr(claim, name)) not in values:
            raise ConfigError(f"claims: {name} is {value!r}; it must be one of {', '.join(values)}")
    for name in ("margin", "ratio"):
        if (value := getattr(claim, name)) is not None:
            _number(f"claims: {name} is", value, "finite and at least 0")
    return claim


def _fields(where: str, content: Any, names: Collection[str] | None, required: Sequence[str] = ()) -> dict[str, Any]:
    """The content, if it is a mapping that has the required names and, unless `names` is None, none but these."""
    if not isinstance(content, dict):
        raise ConfigError(f"{where} must hold `name: value`; found {type(content).__name__}")
    if names is not None and (unknown := sorted(str(name) for name in set(content) - set(names))):
        raise ConfigError(f"{where} has {', '.join(unknown)}; it takes {', '.join(sorted(names))}")
    if missing := [name for name in required if content.get(name) is None]:
        raise ConfigError(f"{where} lacks {', '.join(missing)}")
    return content


def _flags(where: str, content: Any) -> dict[str, Any]:
    return dict(dotted(_fields(where, content or {}, None)))


def _files(where: str, content: Any, path: Path) -> tuple[str, ...]:
    names = _strings(where, [content] if isinstance(content, str) else content)
    files = [(path.parent / name).resolve() for name in names]
    if missing := [name for name, file in zip(names, files, strict=True) if not file.is_file()]:
        raise ConfigError(f"{where} names {', '.join(missing)}; there is no such file (paths are relative to {path})")
    return tuple(map(str, files))


def _list(where: str, content: Any) -> list[Any]:
    if not isinstance(content, list):
        raise ConfigError(f"{where} is {content!r}; it must be a list")
    return content


def _strings(where: str, content: Any) -> tuple[str, ...]:
    return tuple(map(str, _list(where, content)))


def _number(where: str, value: Any, allowed: str, kind: str = "float") -> Any:
    """A number of a kind of NUMBERS, if it is as ALLOWED says. `where` ends with the verb of the error message."""
    kinds = int if kind == "int" else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not ALLOWED[allowed](value):
        raise ConfigError(f"{where} {value!r}; it must be {NUMBERS[kind]}, {allowed}")
    return value
