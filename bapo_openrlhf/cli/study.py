"""`bapo-openrlhf study`: run a grid of methods, advantage paths and seeds on the real stack, and compare them.

Several runs are in one Ray. The results are one table (parquet and CSV), one HTML page, and the page's main tables in
Markdown. If the study was stopped, the same command continues it.
"""

import argparse
import importlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

from bapo_openrlhf.cli.parser import Parser, parse_words
from bapo_openrlhf.errors import ConfigError, RunError
from bapo_openrlhf.flags.ranges import check_ranges
from bapo_openrlhf.training.driver.signals import caught


def main(argv: Sequence[str], prog: str = "bapo-openrlhf study") -> int:
    """Check every arm, run what is not done, and write table and page. A signal ends this when the runs have saved."""
    with caught("within the study, which the same command continues"):
        return _main(_parse(argv, prog), prog)


def _main(options: argparse.Namespace, prog: str) -> int:
    for name in ("pandas", "pyarrow", "scipy"):
        importlib.import_module(name)  # what needs them comes after the runs

    from bapo_openrlhf.cli import arguments
    from bapo_openrlhf.record.owner import owned
    from bapo_openrlhf.workbench.study import runner
    from bapo_openrlhf.workbench.study.definition import read_study

    study = read_study(options.config, smoke=options.smoke)
    out = options.output or Path("runs/studies") / study.name
    planned = runner.plan(study, out.resolve())
    if options.only_report:
        for arm in study.arms if find_spec("openrlhf") else ():
            with _naming(arm.name):
                parse_words(arguments.build_parser(prog), next(run.words for run in planned if run.arm == arm))
        return _write(study, _begun_runs(planned), out)
    if options.check:
        steps, _ = _check(planned)
        runs = f"{len(planned)} runs of {len(study.arms)} arms"
        done = sum(run.done for run in planned)
        print(f"{runs}, each of {min(steps.values())} to {max(steps.values())} steps; {done} are done")
        return 0
    with owned(out, field=f"--output is {out}", what="study", instead="give another --output"):
        for command in study.prepare:
            _prepare(command)
        steps, devices = _check(planned)
        outcome = _run(study.name, planned, steps, devices, options.parallel or study.parallel, options.max_hours)
    begun = _begun_runs(planned)
    if begun or not outcome.failed:
        _write(study, begun, out)
    print(f"{outcome.done} of {len(planned)} runs are done", end="")
    print(f"; {outcome.left} are left: the same command continues with them" if outcome.left else "")
    if outcome.failed:
        places = ", ".join(outcome.failed)
        raise RunError(f"{len(outcome.failed)} runs failed: {places}; the output of each is in {out}/runs/NAME")
    return 0


def _parse(argv: Sequence[str], prog: str) -> argparse.Namespace:
    parser = Parser(prog, __doc__)
    add = parser.add_argument
    add("--config", type=Path, required=True, metavar="YAML", help="the study's file: configs/studies/*.yaml")
    add("--output", type=Path, metavar="DIR", help="default: runs/studies/NAME")
    add("--parallel", type=int, metavar="N", help="number of runs at a time; default: the file's")
    add("--max-hours", type=float, metavar="H", help="start no further run after H hours")
    add("--check", action="store_true", help="check each arm and say how many runs there are; run nothing")
    add("--smoke", action="store_true", help="run only the file's `smoke`, with the first seed")
    add("--only-report", action="store_true", help="run nothing; write table and page of the runs so far")
    options = parser.parse_args(argv)
    values = {"--parallel": options.parallel, "--max-hours": options.max_hours}
    check_ranges(values, {"--parallel": "at least 1", "--max-hours": "at least 0"})
    return options


def _prepare(command: Sequence[str]) -> None:
    words = [sys.executable if word == "python" else word for word in command]
    try:
        subprocess.run(words, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise RunError(f"study: {' '.join(command)} failed: {error}") from error


@contextmanager
def _naming(arm: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"study, {arm}: {error}") from error


def _check(planned: Sequence) -> tuple[dict[str, int], int]:
    """Check every arm; return the trainer steps of each run by name, and the most devices that a run takes."""
    from bapo_openrlhf.cli import arguments
    from bapo_openrlhf.flags.sizes import run_steps
    from bapo_openrlhf.launch.preflight import check_inputs, print_warnings
    from bapo_openrlhf.launch.settings import Settings, settings_of
    from bapo_openrlhf.launch.start import logical_gpus
    from bapo_openrlhf.workbench.study import runner

    of_arm: dict[str, tuple[int, int]] = {}
    settings: dict[str, Settings] = {}
    for run in planned:
        if run.arm.name not in of_arm:
            with _naming(run.arm.name):
                args: SimpleNamespace = arguments.parse(run.words, "bapo-openrlhf train")
                runner.require_steps(args)
                checked = check_inputs(args, keep=False)  # each run keeps its own
                if checked.prompts is None:
                    raise ConfigError(f"data.prompt_dataset is {args.data.prompt_dataset}; a study needs a local file")
            print_warnings(checked, f"study, {run.arm.name}: ")
            settings[run.arm.name] = settings_of(args, checked.prompts)
            of_arm[run.arm.name] = run_steps(args, checked.prompts, checked.candidates), logical_gpus(args)
        runner.require_same(run, settings[run.arm.name])
    steps = {run.name: of_arm[run.arm.name][0] for run in planned}
    return steps, max(devices for _, devices in of_arm.values())


def _run(name: str, planned: Sequence, steps: dict[str, int], devices: int, parallel: int, hours: float | None):
    from bapo_openrlhf.launch.start import shared_ray
    from bapo_openrlhf.workbench.study import runner

    if all(run.done for run in planned):  # Ray takes seconds to start
        return runner.Outcome(done=len(planned))
    until = None if hours is None else time.monotonic() + 3600 * hours
    with shared_ray(devices * parallel, parallel) as environment, runner.on_terminal(name, steps, planned) as callback:
        return runner.run_all(planned, parallel=parallel, environment=environment, until=until, callback=callback)


def _begun_runs(planned: Sequence) -> list:
    from bapo_openrlhf.record import run_record as record

    return [run for run in planned if record.read_metrics(run.folder)]


def _write(study, begun: Sequence, out: Path) -> int:
    from bapo_openrlhf.record import run_record as record
    from bapo_openrlhf.workbench.report.runs import read_run
    from bapo_openrlhf.workbench.study.claims import claims_table
    from bapo_openrlhf.workbench.study.data import Results, StudyRun, write_table
    from bapo_openrlhf.workbench.study.page import make_study_page, summary

    if not begun:
        raise ConfigError(f"study: no run in {out}/runs has made a step yet; --output names the study's folder")
    runs = [StudyRun(run.arm, run.seed, read_run(run.folder)) for run in begun]
    commits = sorted({str(study_run.run.metadata.get("commit")) for study_run in runs})
    metadata = {
        **record.provenance(),
        "commits of the runs": ", ".join(commits),
        "seeds": ", ".join(map(str, study.seeds)),
    }
    results = Results(study, runs)
    paths = [*write_table(results.table, out), out / "summary.md", out / "report.html"]
    paths[-2].write_text(summary(results, metadata), encoding="utf-8")
    paths[-1].write_text(make_study_page(results, metadata), encoding="utf-8")
    for row in claims_table(results).rows:
        says, source, verdict, measured, interval, *_ = row
        print(f"{verdict:<15} {says} ({source}): {measured}, 95 % {interval}")
    for path in paths:
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    return 0
