"""Every command in the documentation is run here, or parsed by what would run it."""

import argparse
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml

from bapo_openrlhf.cli import arguments, evaluate, main, model, study
from bapo_openrlhf.cli.parser import Parser, parse_words
from bapo_openrlhf.errors import Ended
from bapo_openrlhf.tasks import countdown, task_of
from bapo_openrlhf.workbench.prepare.build import Preparation, prepare
from bapo_openrlhf.workbench.study.definition import read_study
from bapo_openrlhf.workbench.study.runner import plan

pytestmark = pytest.mark.usefixtures("without_models")

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/trl/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
# What a fence may hold. Commands are only in bash; a shell block under another name would pass unseen.
LANGUAGES = {"bash", "python", "text", "bibtex", ""}
PROGRAMS = (
    *("bapo-openrlhf", "python", "pip", "make", "ray", "git", "ssh", "pre-commit", "ruff", "mypy", "pytest"),
    *("sbatch", "docker", "kubectl", "rm"),
)


def run_it(call, here):
    """For real, in the project's folder `here`."""
    assert main.run(call[1:]) == 0


def check_it(call, here):
    """With a name of its own: `train` refuses the name of a run that is there, and `check` says so."""
    run_it([*call, "--run.name", "checked"], here)


def run_pytest(call, here):
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *call[1:]]
    subprocess.run([sys.executable, *words], check=True, cwd=here)


def parse_it(call, here):
    def parse(parser, words):
        parse_words(parser, words)
        raise Ended("parsed", 0, "")

    with patch.object(Parser, "parse_args", parse):
        run_it(call, here)


def over_ssh(call, here):
    assert call[1] == "-t"
    parse_it(call[3:], here)


def parse_train(call, here):
    """By the real parser and its checks, with exactly these flags; "..." stands for others, that OpenRLHF needs."""
    others = ["--reward.remote_url=reward.py", "--rollout.n_samples_per_prompt=8"] if "..." in call else []
    first = next(place for place, word in enumerate(call) if word.startswith("--"))
    arguments.parse([*call[first:], *others])


def parse_script(call, here):
    """A preset's. Slurm's own flags, which have values, come before it, and the training's after it."""
    (script,) = [word for word in call if word.startswith("examples/")]
    before, after = call[1 : max(call.index(script), 1)], call[call.index(script) + 1 :]
    assert all(flag in ("--nodes", "--time", "--partition") for flag in before[::2]) and len(before) % 2 == 0
    arguments.parse(["--config", f"configs/{Path(script).stem}.yaml", *after])


def names_what_is_there(call, here):
    """Its files, and the job of the RayJob that is there."""
    jobs = {yaml.safe_load(path.read_text())["metadata"]["name"] for path in (here / "examples").rglob("*.yaml")}
    for word in call:
        assert "/" not in word or (here / word).is_file() or word.removeprefix("job/") in jobs, word


def parse_in_an_image(call, here):
    """The training that runs in a container, after Docker's own words. Its data and its run are in the volume."""
    given = arguments.parse(call[call.index("train") + 1 :])
    volume = call[call.index("--volume") + 1].partition(":")[2]
    for path in (given.data.prompt_dataset, given.run.dir):
        assert Path(path).is_relative_to(volume), path


def parse_quickstart(call, here):
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", default="sums")
    parser.add_argument("--only-prepare", action="store_true")
    given, flags = parser.parse_known_args(call[2:])
    source = (ROOT / "examples" / "quickstart" / "__main__.py").read_text()
    assert all(f'"{flag}"' in source for flag in parser._option_string_actions if flag not in ("-h", "--help"))
    files = {"sums": ["quickstart"], "countdown": ["countdown/train"], "steps": ["countdown/train", "steps/train"]}
    arguments.parse(["--config", *(f"configs/{name}.yaml" for name in files[given.size]), *flags])


def parse_evaluate(call, here):
    """By the real parser; the benchmarks are known, the files there."""
    given = evaluate.build_parser("docs").parse_args(call[2:])
    for benchmark in given.benchmarks.split(","):
        _, is_file, file = benchmark.partition("=")
        assert (here / file).is_file() if is_file else task_of(benchmark, here / given.data)
    assert given.reward is None or (here / given.reward).is_file()


def parse_study(call, here):
    """By the real parser; each arm's flags by the one of `train`."""
    given = study._parse(call[2:], "docs")
    result = read_study(given.config, smoke=given.smoke)
    for run in plan(result, here)[: len(result.arms)]:
        arguments.parse(run.words)


def has_flags_of(package, file):
    """A handler: the command's flags are in the source of another program. Nothing of it is imported."""

    def has_flags(call, here):
        source = (Path(find_spec(package).submodule_search_locations[0]) / file).read_text()
        assert all(f'"{word}"' in source for word in call if word.startswith("--"))

    return has_flags


def has_the_servers_flags(call, here):
    """The end of the address that the page gives to the run is the server's."""
    has_flags_of("openrlhf", "cli/serve_rm.py")(call, here)
    port = call[call.index("--port") + 1]
    assert f":{port}/get_reward" in (ROOT / "docs" / "rewards.md").read_text()


def is_a_target(call, here):
    """Or a variable that the Makefile reads."""
    file = (ROOT / "Makefile").read_text()
    for word in call[1:]:
        name, is_variable, _ = word.partition("=")
        assert f"$({name})" in file if is_variable else re.search(rf"^{word}:", file, re.M), word


def is_a_pinned_package(call, here):
    """In the version that the example names, which need not exist."""
    package = re.fullmatch(r"(\w+)==[\d.]+", call[-1])[1]
    assert f"{package}==" in (ROOT / "requirements" / "cpu-no-deps.txt").read_text()


def is_the_benchmarks_version(call, here):
    """The environment that the page makes has the version of TRL that was measured."""
    [series] = [word.removeprefix("trl==").removesuffix("*") for word in call if word.startswith("trl==")]
    assert f"TRL {series}" in (ROOT / "research" / "benchmarks" / "results" / "steps.md").read_text()


def is_a_known_model(call, here):
    assert call[2] in model.MODELS or call[2].endswith(".gguf")


def parse_contract(call, here):
    runpy.run_path(str(ROOT / call[1]))["build_parser"]().parse_args(call[2:])


def is_an_evaluation(call, here):
    assert call[1] == "-rf" and [str(Path(path).parent) for path in call[2:]] == ["runs/eval"]


def leave_it(call, here):
    """It names nothing of this project."""


# What is done here with all the words of a command, by how it begins.
RULES = {
    start: do
    for do, starts in (
        (run_it, ["bapo-openrlhf init", "bapo-openrlhf methods", "bapo-openrlhf plan"]),
        (run_it, ["bapo-openrlhf prepare countdown --generate"]),
        (parse_it, ["bapo-openrlhf universal", "bapo-openrlhf compare", "bapo-openrlhf watch", "bapo-openrlhf report"]),
        (parse_it, ["bapo-openrlhf prepare"]),
        (check_it, ["bapo-openrlhf check"]),
        (parse_train, ["bapo-openrlhf train", "bapo-openrlhf smoke", "python -m bapo_openrlhf.cli.train_ppo_ray"]),
        (parse_evaluate, ["bapo-openrlhf evaluate"]),
        (parse_study, ["bapo-openrlhf study"]),
        (is_a_known_model, ["bapo-openrlhf model"]),
        (run_pytest, ["pytest my_task"]),
        (over_ssh, ["ssh"]),
        (has_flags_of("openrlhf", "cli/train_sft.py"), ["python examples/warmup.py"]),
        (has_flags_of("openrlhf", "cli/lora_combiner.py"), ["python -m openrlhf.cli.lora_combiner"]),
        (has_flags_of("ray", "scripts/scripts.py"), ["ray start"]),
        (has_the_servers_flags, ["python -m bapo_openrlhf.cli.serve_rm"]),
        (parse_quickstart, ["python examples/quickstart"]),
        (parse_script, ["examples/ray_job", "sbatch"]),
        (parse_contract, ["python tools/openrlhf_contract.py"]),
        (names_what_is_there, ["docker build", "kubectl", "python examples/trl"]),
        (parse_in_an_image, ["docker run"]),
        (is_an_evaluation, ["rm -rf runs/eval"]),
        (is_a_target, ["make"]),
        (is_the_benchmarks_version, ["pip install ."]),
        (is_a_pinned_package, ["pip install --no-deps --target"]),
        (leave_it, ["python -m venv", "pre-commit install"]),
    )
    for start in starts
}


def rule_of(call):
    """The longest start of a rule."""
    text = " ".join(call)
    fitting = [start for start in RULES if f"{text} ".startswith(tuple(start + end for end in " /:"))]
    assert fitting, f"no rule for this command: {text}"
    return max(fitting, key=len)


def blocks(page):
    """(language, text) of each fenced block."""
    return re.findall(r"^```(\w*)[^\n]*\n(.*?)^```$", page.read_text(), re.M | re.S)


def shell(script, folder):
    """The commands that bash would start, by letting it: programs are stand-ins that only note how they were called.

    Anything that is none of PROGRAMS is not found, which fails.
    """
    stubs, calls = folder / "stubs", folder / "calls"
    note = '#!/bin/bash\n{ printf "%s\\0" "$0" "$@"; printf "\\1"; } >> "$CALLS"\n'
    scripts = [path.relative_to(ROOT) for path in (ROOT / "examples").rglob("*.sh")]
    for path in [*(stubs / name for name in PROGRAMS), *(folder / name for name in scripts)]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(note)
        path.chmod(0o755)
    for name in (".venv", ".venv-gpu", ".venv-trl"):
        (folder / name / "bin").mkdir(parents=True)
        (folder / name / "bin" / "activate").write_text("")
    environment = {"PATH": str(stubs), "CALLS": str(calls)}
    words = ["/bin/bash", "-eu", "-c", script]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stderr}\n{script}"
    result = [call.split("\0")[:-1] for call in calls.read_text().split("\1")[:-1]] if calls.exists() else []
    return [[call[0].removeprefix(f"{stubs}/"), *call[1:]] for call in result]


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """(page, words) of each command in a bash block, and in the example that no other test runs."""
    table = re.sub(r"^cd .*$", "", (ROOT / "examples" / "countdown_table.sh").read_text(), flags=re.M)
    scripts = [("countdown_table.sh", table)]
    scripts += [(page.name, text) for page in PAGES for language, text in blocks(page) if language == "bash"]
    result = []
    for name, script in scripts:
        calls = shell(script, tmp_path_factory.mktemp("shell"))
        assert calls, f"{name}: a script without a command:\n{script}"
        result += [(name, call) for call in calls]
    return result


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """The project's folder as far as commands read it, with the quickstart's data and no model to speak of."""
    here = tmp_path_factory.mktemp("project")
    for name in ("configs", "examples", "research", "bapo_openrlhf"):
        (here / name).symlink_to(ROOT / name)
    for name in ("base_model", "sums_model"):
        (here / "runs" / name).mkdir(parents=True)
        (here / "runs" / name / "config.json").write_text('{"model_type": "qwen2"}')
        (here / "runs" / name / "pytorch_model.bin").touch()
    runpy.run_path(str(ROOT / "examples" / "quickstart" / "sums.py"))["write"](here / "runs" / "sums", 64)
    levels = yaml.safe_load((ROOT / "configs" / "steps" / "sums.yaml").read_text())
    for folder, names in (("runs", levels), ("data", ("three", "six"))):
        (here / folder / "reasoning_gym").mkdir(parents=True)
        for level in names:
            (here / folder / "reasoning_gym" / f"{level}.jsonl").write_text("")
    small = Preparation(out=here / "runs" / "data", generator="small", style="short", limits={"train": 32})
    prepare(countdown.TASK, small)
    return here


def test_commands_are_in_bash_blocks_alone():
    for page in PAGES:
        fences = blocks(page)
        others = [line.split() for language, text in fences if language != "bash" for line in text.splitlines()]
        assert not [words for words in others if words and words[0] in PROGRAMS], page.name
        assert {language for language, _ in fences} <= LANGUAGES, page.name
        assert page.read_text().count("```") == 2 * len(fences), f"{page.name}: a fence that is not seen"


@pytest.fixture
def hold(project, monkeypatch, capsys):
    """Does with the commands of a page what their rules say. Returns the starts of these rules.

    research/tests/test_pages.py does so with its pages.
    """
    monkeypatch.chdir(project)
    done = set()

    def check(result):
        used = set()
        for page, call in result:
            used.add(rule_of(call))
            if tuple(call) in done:
                continue
            done.add(tuple(call))
            try:
                RULES[rule_of(call)](call, project)
            except (Exception, SystemExit) as error:
                what = f"{type(error).__name__}: {error}\n{capsys.readouterr().err}"
                pytest.fail(f"{page}: {' '.join(call)}\n{what}")
        return used

    return check


def test_every_command_has_a_rule_and_holds(commands, hold):
    assert {*RULES} == hold(commands), "rules that no page needs"


def test_the_table_of_countdown_can_be_made_again(commands):
    """`evaluate` refuses the folder of an earlier model, so that folder goes once the new model is there."""
    calls = [" ".join(call) for page, call in commands if page == "countdown_table.sh"]
    for name in ("countdown_bapo_grpo", "countdown_ba_ppo"):
        starts = ("bapo-openrlhf train", f"rm -rf runs/eval/{name}", "bapo-openrlhf evaluate")
        found = [call for call in calls if call.startswith(starts) and name in call]
        assert [call.startswith(start) for call, start in zip(found, starts, strict=True)] == [True] * 3, found


def inline_commands():
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
        for words in map(str.split, re.findall(r"`([^`]+)`", text)):
            if len(words) > 1 and words[0] in ("bapo-openrlhf", "make", "python"):
                yield f"{page.name}: {' '.join(words)}", words


def test_commands_in_sentences():
    """Flags with dots are looked at in test_docs.py."""
    source = "".join(path.read_text() for path in (ROOT / "bapo_openrlhf" / "cli").glob("*.py"))
    result = [*inline_commands()]
    assert len(result) > 15
    for where, words in result:
        program, name, *rest = words
        if program == "bapo-openrlhf":
            assert name in main.COMMANDS or name.isupper() or name in ("--help", "--version"), where
            flags = {word.split("=")[0] for word in rest if re.fullmatch(r"--[a-z][\w-]*(=.*)?", word)} - {"--help"}
            assert all(f'"{flag}"' in source for flag in flags), where
        elif program == "make":
            is_a_target(words[:2], ROOT)
        elif name == "-m":
            assert find_spec(rest[0]) or rest[0].startswith("openrlhf."), where
        else:
            assert name == "-c" or (ROOT / name).is_file() or (ROOT / name / "__main__.py").is_file(), where
