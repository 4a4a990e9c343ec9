"""What YAML files and the command line say, each by itself, and which of them is in effect.

A file is of one of two kinds. The file of a task names a model or data. It may name an algorithm and a method, and a
later file or the command line may switch them. Any other file that names a method is a method's file: it is refused if
its method would not be used, because the run would be taken for one of that method.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.flags.config import ALGORITHMS, Algorithm
from bapo_openrlhf.user_file import at_home, read_yaml

METHOD, ESTIMATOR = "adapt.method", "algo.advantage.estimator"
SKIP = "adapt.skip_zero_advantage"  # not with a critic
TASK = ("actor.model_name_or_path", "data.prompt_dataset")  # a file with one of them is the file of a task
SIZES = ("num_nodes", "num_gpus_per_node")


def settings_of(path: str) -> Iterator[tuple[str, Any]]:
    """The flags of a YAML file by dotted name. A section without any value is left out, if it is not a flag."""
    content = read_yaml("config", at_home(path), as_text="all")
    if content is None:  # nothing but comments
        return
    if not isinstance(content, dict):
        raise ConfigError(f"config {path} must hold flags as `name: value`; found {type(content).__name__}")
    names = set()
    for name, value in dotted(content):
        if name in names:
            raise ConfigError(f"config {path}: {name} is set twice, once nested and once with dots; remove one")
        names.add(name)
        yield name, value


def dotted(node: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a section and of the sections in it, by dotted name. `prefix` is put before each name."""
    for key, value in node.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from dotted(value, name + ".")
        else:
            yield name, value


@dataclass(frozen=True)
class Layers:
    """The flags of each YAML file, in order, and those of the command line, by dotted name."""

    files: Mapping[str, Mapping[str, Any]]  # the flags of each file, by its path
    words: Mapping[str, Any]  # the flags of the command line

    def last(self, name: str) -> tuple[str, Any]:
        """Where a flag gets its value, and the value; ("", None) if it is not given."""
        if name in self.words:
            return f"--{name}", self.words[name]
        path = self.last_file(name)
        return path, self.files[path][name] if path else None

    def last_file(self, name: str) -> str:
        """The last file that has a flag; empty if there is none."""
        return next((path for path in reversed([*self.files]) if name in self.files[path]), "")

    def meaning(self, algorithm: Algorithm) -> Iterator[tuple[str, str]]:
        """Flags that the algorithm stands for, unless a file chose another variant of it."""
        estimator, method = (Layers(self.files, {}).last(name)[1] for name in (ESTIMATOR, METHOD))
        named = {file["algorithm"] for file in self.files.values() if file.get("algorithm")}
        switched = "algorithm" in self.words or len(named) > 1
        if not estimator or (switched and estimator not in algorithm.estimators):
            yield ESTIMATOR, algorithm.estimators[0]
        if not method or (switched and (method == "none") != (algorithm.method == "none")):
            yield METHOD, algorithm.method
        path = self.last_file(SKIP)  # a critic needs the groups that the file of a task without one skips
        file = self.files.get(path, {})
        its_estimators = ALGORITHMS[file["algorithm"]].estimators if file.get("algorithm") in ALGORITHMS else ()
        if self._is_task(path) and "gae" in set(algorithm.estimators) - set(its_estimators):
            yield SKIP, "false"

    def _is_task(self, path: str) -> bool:
        return any(self.files.get(path, {}).get(name) for name in TASK)

    def check_methods(self) -> None:
        """Refuse a method's file whose method is not used."""
        if METHOD in self.words:  # The command line overrules all files.
            return
        methods = {path: str(file[METHOD]) for path, file in self.files.items() if file.get(METHOD)}
        tasks = [path for path in methods if self._is_task(path)]
        by_name = {name: path for path, name in methods.items() if path not in tasks}
        if len(by_name) > 1:
            (one, first), (other, second) = list(by_name.items())[:2]
            raise ConfigError(
                f"adapt.method is {one} in {first} and {other} in {second}; a run has one method: leave out one of "
                "the files, or choose with --adapt.method"
            )
        where, algorithm = self.last("algorithm")
        if algorithm not in ALGORITHMS or ALGORITHMS[algorithm].method != "none":
            return
        for path, name in methods.items():
            switched = path in tasks and self.files[path].get("algorithm") not in (None, algorithm)
            if name != "none" and not switched:
                raise ConfigError(
                    f"algorithm {algorithm} ({where}) and adapt.method {name} ({path}) contradict each other; "
                    f"{algorithm} has no batch adaptation. Leave out one of them, or give --adapt.method none"
                )

    def chosen(self, algorithm: str | None, method: str) -> set[str]:
        """Flags that were given for this algorithm and method. With a switch, those for another have no effect."""
        names = set(self.words)
        for file in self.files.values():
            its_algorithm = file.get("algorithm")
            its_method = file.get(METHOD) or (ALGORITHMS[its_algorithm].method if its_algorithm in ALGORITHMS else None)
            if its_algorithm in (None, algorithm) and its_method in (None, method):
                names |= {name for name, value in file.items() if value is not None}
        return names

    def critic_follows(self) -> bool:
        """Whether a critic takes as many GPUs as the actor, because an algorithm was given and no size of a critic."""
        return self.last("algorithm")[1] is not None and all(self.last(f"critic.{size}")[1] is None for size in SIZES)
