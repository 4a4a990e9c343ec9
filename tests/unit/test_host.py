"""The contract with OpenRLHF: what is overridden, replaced and called of it, in the version that is pinned."""

import importlib.metadata
import inspect
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bapo_openrlhf.cpu import stack as cpu

cpu.prepare_environment()
cpu.install()


from bapo_openrlhf import host  # noqa: E402
from bapo_openrlhf.errors import ConfigError  # noqa: E402
from bapo_openrlhf.host import EXTENDED, extends  # noqa: E402

ROOT = Path(__file__).parents[2]
TOOL = runpy.run_path(str(ROOT / "tools" / "openrlhf_contract.py"))
RECORD = json.loads(TOOL["RECORD"].read_text(encoding="utf-8"))
SOURCES = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "bapo_openrlhf").rglob("*.py"))]


@pytest.fixture(scope="module")
def overrides() -> dict[tuple[type, type], set[str]]:
    return TOOL["overrides"]()


@pytest.fixture(scope="module")
def installed() -> dict[str, Path]:
    """The packages of the record. vLLM and DeepSpeed are among them only on the CPU, because it pins them."""
    folders = TOOL["folders"]()
    return folders if cpu.active() else {"openrlhf": folders["openrlhf"]}


def test_the_pinned_version_is_as_it_was_recorded(installed):
    messages = TOOL["changes"](RECORD, installed)
    assert not messages, "\n".join(["Look at these; then run: python tools/openrlhf_contract.py --write", *messages])


def test_the_record_has_all_that_this_project_depends_on(installed):
    if not cpu.active():
        pytest.skip("reads DeepSpeed and vLLM in the versions that are pinned for the CPU")
    assert TOOL["record"](installed) == RECORD, "run: python tools/openrlhf_contract.py --write"


def test_each_override_carries_the_mark(overrides):
    """Without `@extends`, an override whose base method is renamed would become dead code that nobody notices."""
    missing = []
    for (subclass, base), names in overrides.items():
        for name in names - {"__init__"}:  # a constructor is called under this name in every version
            method = inspect.unwrap(vars(subclass)[name])  # Ray wraps the methods of its actors
            if not any(other is method and issubclass(extended, base) for extended, other in EXTENDED):
                missing.append(f"@extends({base.__name__}) on {subclass.__module__}.{subclass.__name__}.{name}")
    assert not missing


def test_each_mark_is_on_an_override(overrides):
    overriding = {inspect.unwrap(vars(subclass)[name]) for (subclass, _), names in overrides.items() for name in names}
    package = [method for _, method in EXTENDED if method.__module__.startswith("bapo_openrlhf.")]
    assert package and not [method.__qualname__ for method in package if method not in overriding]


def test_a_mark_on_no_override_fails_at_import():
    class Base:
        def fit(self): ...

    class Ours(Base):
        @extends(Base)
        def fit(self): ...

    assert EXTENDED.pop() == (Base, Ours.fit)
    with pytest.raises(RuntimeError, match=r"Base\.train"):

        class Dead(Base):
            @extends(Base)
            def train(self): ...


def test_each_private_name_of_openrlhf_is_in_recorded_source(installed):
    """Private names that this project uses and does not define, as far as OpenRLHF has them. Or they are recorded."""
    used, defined = set(), set()
    for source in SOURCES:
        used |= {*re.findall(r"\.(_[a-z]\w*)", source), *re.findall(r"attr\(\w+, \"(_[a-z]\w*)\"", source)}
        defined |= {
            *re.findall(r"def (_\w+)", source),
            *re.findall(r"^ *(?:self\.)?(_[a-z]\w*)(?:: .*)? = ", source, re.M),
        }
    openrlhf = "".join(path.read_text(encoding="utf-8") for path in installed["openrlhf"].rglob("*.py"))
    theirs = {name for name in used - defined if re.search(rf"self\.{name}\b", openrlhf)}
    recorded = " ".join(RECORD)
    for name in RECORD:
        module, function = name.split(":")
        if name.startswith("openrlhf.") and "digest" in RECORD[name]:
            recorded += TOOL["functions"](TOOL["file_of"](module, installed))[function][1]
    assert {"_actor_handlers", "_model_update_group"} <= theirs
    assert not {name for name in theirs if name not in recorded}


def test_what_is_recorded_as_compared_has_its_test():
    for name, place in TOOL["COMPARED"].items():
        file, _, test = place.partition(":")
        (path,) = (ROOT / "tests" / "unit").rglob(file)
        assert re.search(rf"def {test}\(", path.read_text(encoding="utf-8")), name


def test_what_is_recorded_by_its_parameters_still_runs(overrides):
    """So an override that leaves `super()` out cannot stay in this table."""
    for (own, base), names in overrides.items():
        for name in names:
            if f"{base.__module__}:{base.__qualname__}.{name}" in TOOL["ADDED_TO"]:
                source = inspect.getsource(inspect.unwrap(vars(own)[name]))
                assert re.search(rf"(super\(\)|self\.executor)\.{name}\b", source), f"{own.__name__}.{name}"


OURS = "AdaptedPPOTrainer in training/trainer/trainer.py overrides it."
# A file of OpenRLHF, what is replaced in it by what, and what the message about it begins with and has; None for none.
VERSIONS = {
    "renamed": (
        "trainer/ppo_trainer.py", "    def get_max_steps(self", "    def max_steps(self",
        "openrlhf.trainer.ppo_trainer:PPOTrainer.get_max_steps was renamed to PPOTrainer.max_steps. ", OURS,
    ),
    "removed": (
        "trainer/ray/ppo_actor.py", "    def broadcast_to_vllm(self):\n", "    def sync(self):\n        return None\n",
        "openrlhf.trainer.ray.ppo_actor:ActorPPOTrainer.broadcast_to_vllm was removed. ", "ParcelActorTrainer in ",
    ),
    "changed": (
        "trainer/ray/ppo_critic.py", "drop_last=True", "drop_last=False",
        "openrlhf.trainer.ray.ppo_critic:CriticPPOTrainer.ppo_train was changed (", "_WholeBatch in ",
    ),
    "the body of a method that is only added to": (
        "trainer/ppo_trainer.py", "all_rewards.float().mean()", "all_rewards.double().mean()", None, None,
    ),
    "the parameters of such a method": (
        "trainer/ppo_trainer.py",
        "def _compute_rollout_stats(self, experiences)", "def _compute_rollout_stats(self, experiences, step=0)",
        "openrlhf.trainer.ppo_trainer", "_compute_rollout_stats was given other parameters (",
    ),
}  # fmt: skip


@pytest.fixture
def package(tmp_path, installed) -> Path:
    ignored = shutil.ignore_patterns("*.pyc")
    return Path(shutil.copytree(installed["openrlhf"], tmp_path / "openrlhf", ignore=ignored))


@pytest.mark.parametrize(("file", "old", "new", "begins", "has"), VERSIONS.values(), ids=VERSIONS)
def test_another_version(package, file, old, new, begins, has):
    text = (package / file).read_text(encoding="utf-8")
    assert old in text
    (package / file).write_text(text.replace(old, new, 1), encoding="utf-8")
    messages = TOOL["changes"](RECORD, {"openrlhf": package})
    assert len(messages) == (begins is not None)
    assert all(message.startswith(begins) and has in message for message in messages)


def test_a_module_that_moved(package):
    (package / "trainer" / "ray" / "vllm_engine.py").rename(package / "trainer" / "engine.py")
    messages = TOOL["changes"](RECORD, {"openrlhf": package})
    assert len(messages) == sum(name.startswith("openrlhf.trainer.ray.vllm_engine:") for name in RECORD) > 2
    assert all(" was removed with its module. Look again, because: " in message for message in messages)


def test_a_name_that_is_read_nowhere(installed):
    with pytest.raises(KeyError, match=r"no function of openrlhf\.trainer\.ray\.ppo_actor reads Loader"):
        TOOL["readers"]("openrlhf.trainer.ray.ppo_actor", "Loader", installed)


def test_the_command(package):
    def run(folder: Path) -> tuple[int, list[str]]:
        words = [sys.executable, TOOL["RECORD"].with_suffix(".py"), "--source", folder]
        done = subprocess.run(words, capture_output=True, text=True)
        return done.returncode, done.stdout.splitlines()

    assert run(package.parent) == (0, ["nothing changed in openrlhf"])
    shutil.rmtree(package / "cli")
    status, lines = run(package.parent)
    assert (status, len(lines)) == (1, 4) and all("openrlhf.cli." in line for line in lines)
    assert run(package) == (2, [])  # it has no folder openrlhf


def test_another_version_that_is_installed_or_none(monkeypatch):
    host._main_block.cache_clear()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.11.20")
    with pytest.raises(RuntimeError, match=r"openrlhf 0\.11\.20 is installed; .* extends openrlhf 0\.11\.2"):
        host.build_parser()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: importlib.metadata.distribution("no_such"))
    with pytest.raises(ConfigError, match="openrlhf is not installed"):
        host.build_parser()


GOOD = """
if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--a.b", type=int, default=1)
    args = parser.parse_args()
    from openrlhf.utils.config import hierarchize

    args = hierarchize(args)
    assert args.a.b < 9, "b is too large"
    args.a.c = args.a.b + 1
    train(args)
"""


class TestCommandLineOfOpenRLHF:
    @pytest.fixture
    def script(self, monkeypatch, tmp_path):
        original, path = host.file_of, tmp_path / "train_ppo_ray.py"
        monkeypatch.setattr(host, "file_of", lambda file: path if file == "cli/train_ppo_ray.py" else original(file))

        def write(text: str) -> None:
            path.write_text(text, encoding="utf-8")
            host._main_block.cache_clear()

        yield write
        host._main_block.cache_clear()

    def test_runs_what_the_file_says(self, script):
        script(GOOD)
        args = host.validate(host.build_parser().parse_args(["--a.b", "4"]))
        assert (args.a.b, args.a.c) == (4, 5)
        with pytest.raises(ConfigError, match="OpenRLHF refuses this configuration: b is too large"):
            host.validate(host.build_parser().parse_args(["--a.b", "9"]))

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            (GOOD, "def main():\n    pass\n"),
            (GOOD, GOOD + GOOD),
            ("    args = parser.parse_args()", "    args = read_arguments(parser)"),
            ("    args = parser.parse_args()", "    args = parser.parse_args()\n    args = parser.parse_args()"),
            ("    parser = argparse", "    seed = 1\n    parser = argparse"),
            ("    train(args)\n", "    train(args)\n    print('done')\n"),
        ],
        ids=range(6),
    )
    def test_another_layout_fails_loudly(self, script, old, new):
        assert old in GOOD
        script(GOOD.replace(old, new))
        for use in (host.build_parser, lambda: host.validate(SimpleNamespace())):
            with pytest.raises(RuntimeError, match=r"train_ppo_ray\.py is not laid out as openrlhf 0\.11\.2's is"):
                use()
