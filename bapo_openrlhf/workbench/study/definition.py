"""What a study compares: arms (a method on an advantage path), seeds, and the claims to look at, from a YAML file.

name: countdown
config: ../quickstart.yaml           # what all runs share; a list is laid over one another
prepare: [[python, -m, bapo_openrlhf.workbench.quickstart, --only-prepare]]   # before the first run
flags: {eval.steps: 12}              # over the config, for all runs
seeds: [1, 2, 3, 4, 5]
evaluations: [cd34, cd4]             # data sets of eval.dataset, as their rows' `datasource` names them
targets: [0.25]                      # accuracies that "rollouts to reach" asks for
parallel: 2                          # runs at a time
methods:
  plain: {arms: {group: GRPO, critic: PPO}, flags: {adapt.method: none}}
  bapo: {arms: {group: BAPO-GRPO, critic: BA-PPO}}
claims:
  - {says: BA-PPO ends above PPO, source: A.9, better: bapo-critic, than: plain-critic, measure: accuracy}
smoke: {methods: [plain, bapo], flags: {data.max_samples: 64}}      # what --smoke makes of it
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from bapo_openrlhf.errors import ConfigError

ALGORITHMS = {"group": ("bapo_grpo", "grpo"), "critic": ("ba_ppo", "ppo")}  # with batch adaptation, without
MEASURES = ("accuracy", "rollouts", "solved", "rollouts_to")
NAME = re.compile(r"[A-Za-z0-9_.]+")


@dataclass(frozen=True)
class Arm:
    """A method on an advantage path.

    Attributes:
        method: its key among the study's methods, such as bapo_without_x2.
        path: group (group-relative advantages) or critic (GAE).
        label: what tables and figures call it.
        flags: its own, by dotted name, over those of the study.
        config: its own YAML files, laid over those of the study.
    """

    method: str
    path: str
    label: str
    flags: Mapping[str, Any] = field(default_factory=dict)
    config: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """METHOD-PATH."""
        return f"{self.method}-{self.path}"


@dataclass(frozen=True)
class Claim:
    """A sentence to hold against the numbers.

    Attributes:
        says: in words.
        source: where it stands, such as A.9.
        better, than: names of two arms.
        measure: accuracy (at the end), rollouts (generated in all; fewer are better), solved (share of the prompts that
            failed at first and were solved later), rollouts_to (rollouts until the first target was reached).
        ratio: what the source says of `better` over `than`; nothing is decided by it.
        margin: above 0, the claim is "about equal": the interval lies within this much of `than`'s value (accuracy
            and solved: absolute; rollouts: relative).
    """

    says: str
    source: str
    better: str
    than: str
    measure: str = "accuracy"
    ratio: float | None = None
    margin: float = 0.0


@dataclass(frozen=True)
class Study:
    """A study as its YAML file has it.

    Attributes:
        name: of its folder.
        arms: in the file's order.
        seeds: each arm is run with each.
        evaluations: data sets that are evaluated during training.
        targets: accuracies to reach, lowest first.
        claims: see `Claim`.
        config: YAML files of flags that all runs share; later ones win.
        flags: by dotted name, over `config`.
        prepare: commands before the first run, each a list of words.
        parallel: runs at a time.
    """

    name: str
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    evaluations: tuple[str, ...] = ()
    targets: tuple[float, ...] = ()
    claims: tuple[Claim, ...] = ()
    config: tuple[str, ...] = ()
    flags: Mapping[str, Any] = field(default_factory=dict)
    prepare: tuple[tuple[str, ...], ...] = ()
    parallel: int = 1

    def words(self, arm: Arm, seed: int) -> list[str]:
        """The words of `bapo-openrlhf train` for a run, but for where it is written."""
        flags = {**self.flags, **arm.flags}
        adapted = flags.get("adapt.method") != "none"
        words = ["--algorithm", ALGORITHMS[arm.path][0 if adapted else 1]]
        if files := [*self.config, *arm.config]:
            words += ["--config", *files]
        for name, value in flags.items():
            words += _flag(name, value)
        return [*words, "--train.seed", str(seed)]


def _flag(name: str, value: Any) -> list[str]:
    """A flag as words; true and null are a flag alone, false is none."""
    if value is None or value is True:
        return [f"--{name}"]
    if value is False:
        return []
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={value}"]


def read_study(path: Path, *, smoke: bool = False) -> Study:
    """A study from its YAML file.

    Args:
        smoke: only the methods and flags of its `smoke`, and the first seed.

    Raises:
        ConfigError: naming the file, the field, the value and what is allowed.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"study {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"study {path} is no valid YAML: {' '.join(str(error).split())}") from None
    reader = _Reader(path)
    study = reader.study(content)
    return reader.smoke(study, content.get("smoke")) if smoke else study


@dataclass(frozen=True)
class _Reader:
    """Checks the YAML's content, field by field."""

    path: Path

    def fail(self, message: str) -> ConfigError:
        return ConfigError(f"study {self.path}: {message}")

    def study(self, content: Any) -> Study:
        known = {"name", "config", "prepare", "flags", "seeds", "evaluations", "targets", "parallel", "methods"}
        given = self.fields("the file", content, known | {"claims", "smoke"}, required=("name", "seeds", "methods"))
        if not NAME.fullmatch(str(given["name"])):
            raise self.fail(f"name is {given['name']!r}; it must be letters, digits, _ and .")
        methods = given["methods"]
        if not isinstance(methods, dict) or not methods:
            raise self.fail("methods must map at least one name to its arms")
        arms = tuple(arm for name, about in methods.items() for arm in self.arms(str(name), about))
        seeds = self.numbers("seeds", given["seeds"], int)
        if not seeds or len(set(seeds)) != len(seeds) or min(seeds) < 0:
            raise self.fail(f"seeds is {list(seeds)}; it must hold different whole numbers from 0")
        targets = self.numbers("targets", given.get("targets", []), (int, float))
        if list(targets) != sorted(set(targets)) or any(not 0 < target <= 1 for target in targets):
            raise self.fail(f"targets is {list(targets)}; it must hold rising numbers in (0, 1]")
        parallel = given.get("parallel", 1)
        if not isinstance(parallel, int) or isinstance(parallel, bool) or parallel < 1:
            raise self.fail(f"parallel is {parallel!r}; it must be a whole number from 1")
        names = [arm.name for arm in arms]
        return Study(
            name=str(given["name"]),
            arms=arms,
            seeds=tuple(seeds),
            evaluations=self.strings("evaluations", given.get("evaluations", [])),
            targets=tuple(targets),
            claims=tuple(self.claim(claim, names) for claim in given.get("claims") or []),
            config=self.files("config", given.get("config", [])),
            flags=self.flags("flags", given.get("flags")),
            prepare=tuple(self.strings("prepare", command) for command in given.get("prepare") or []),
            parallel=parallel,
        )

    def smoke(self, study: Study, about: Any) -> Study:
        given = self.fields("smoke", about, {"methods", "flags"}, required=("methods",))
        methods = self.strings("smoke: methods", given["methods"])
        arms = tuple(arm for arm in study.arms if arm.method in methods)
        if missing := sorted(set(methods) - {arm.method for arm in arms}):
            raise self.fail(f"smoke: methods has {', '.join(missing)}; the study has none of that name")
        flags = {**study.flags, **self.flags("smoke: flags", given.get("flags"))}
        return replace(study, name=f"{study.name}_smoke", arms=arms, seeds=study.seeds[:1], flags=flags)

    def arms(self, method: str, about: Any) -> list[Arm]:
        where = f"methods: {method}"
        if not NAME.fullmatch(method):
            raise self.fail(f"{where}: a method's name is made of letters, digits, _ and .")
        given = self.fields(where, about, {"arms", "flags", "config"}, required=("arms",))
        paths = given["arms"]
        if not isinstance(paths, dict) or not paths or not set(paths) <= set(ALGORITHMS):
            raise self.fail(f"{where}: arms is {paths!r}; it must map {' or '.join(ALGORITHMS)} to a label")
        flags = self.flags(f"{where}: flags", given.get("flags"))
        files = self.files(f"{where}: config", given.get("config", []))
        return [Arm(method, path, str(label), flags, files) for path, label in paths.items()]

    def claim(self, about: Any, arms: Sequence[str]) -> Claim:
        known = {"says", "source", "better", "than", "measure", "ratio", "margin"}
        claim = Claim(**self.fields("claims", about, known, required=("says", "source", "better", "than")))
        for name in ("better", "than"):
            if getattr(claim, name) not in arms:
                raise self.fail(f"claims: {name} is {getattr(claim, name)!r}; it must be one of {', '.join(arms)}")
        if claim.measure not in MEASURES:
            raise self.fail(f"claims: measure is {claim.measure!r}; it must be one of {', '.join(MEASURES)}")
        return claim

    def fields(self, where: str, content: Any, known: set[str], required: Sequence[str] = ()) -> dict[str, Any]:
        if not isinstance(content, dict):
            raise self.fail(f"{where} must hold `name: value`; found {type(content).__name__}")
        if unknown := sorted(str(name) for name in set(content) - known):
            raise self.fail(f"{where} has {', '.join(unknown)}; it takes {', '.join(sorted(known))}")
        if missing := [name for name in required if content.get(name) is None]:
            raise self.fail(f"{where} lacks {', '.join(missing)}")
        return content

    def flags(self, where: str, content: Any) -> dict[str, Any]:
        """Flags by dotted name, whether they were nested or not."""
        found: dict[str, Any] = {}
        for name, value in (self.fields(where, content or {}, set(content or {}))).items():
            if isinstance(value, dict):
                found |= {f"{name}.{inner}": item for inner, item in self.flags(where, value).items()}
            else:
                found[str(name)] = value
        return found

    def files(self, where: str, content: Any) -> tuple[str, ...]:
        """Paths, as they are relative to the study's file."""
        names = self.strings(where, [content] if isinstance(content, str) else content)
        found = [(self.path.parent / name).resolve() for name in names]
        if missing := [name for name, file in zip(names, found, strict=True) if not file.is_file()]:
            raise self.fail(f"{where} names {', '.join(missing)}; there is no such file beside {self.path}")
        return tuple(map(str, found))

    def strings(self, where: str, content: Any) -> tuple[str, ...]:
        if not isinstance(content, list):
            raise self.fail(f"{where} is {content!r}; it must be a list")
        return tuple(map(str, content))

    def numbers(self, where: str, content: Any, kind: Any) -> list[Any]:
        if not isinstance(content, list) or any(not isinstance(v, kind) or isinstance(v, bool) for v in content):
            raise self.fail(f"{where} is {content!r}; it must be a list of numbers")
        return content
