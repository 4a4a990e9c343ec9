"""How `make test` shares the tests out to its processes, what each test finds, and which skips fail a run.

Each test finds no time limits, and Ctrl-C works. If the environment variable CI is set, a skip fails unless it is one
of ALLOWED_SKIPS.
"""

import gc
import os
import signal
import tempfile
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import settings

from bapo_openrlhf.cpu import products

# `make test` tries the same few examples each time, and `make test-all` five times as many. No example has a deadline,
# because on a busy machine a test would fail for being slow.
settings.register_profile("quick", deadline=None, max_examples=20, derandomize=True, database=None)
settings.register_profile("thorough", deadline=None, max_examples=100)
settings.load_profile("quick")

# A background job of a shell ignores Ctrl-C, and the processes that tests start and interrupt would do so as well.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# They start a Ray for each run, or none. The other tests of the stack share one.
OWN_RAY = (
    "test_evaluate.py", "test_faults.py", "test_first_hour.py", "test_forks.py", "test_rotary.py", "test_smoke.py",
    "test_study.py", "test_vision.py", "test_warmup.py",
)  # fmt: skip
MINUTES = 10  # of `make test` on 2 idle cores of a CPU with instructions for bfloat16


def pytest_configure(config: pytest.Config) -> None:
    """Give `datasets` a folder for this run's copies of data. Say first what the time depends on.

    SIGHUP has its usual effect, because tests send it to processes that would inherit that nohup ignores it.
    """
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if "HF_DATASETS_CACHE" not in os.environ:
        copies = tempfile.TemporaryDirectory(prefix="bapo_openrlhf_datasets")
        config.add_cleanup(copies.cleanup)
        os.environ["HF_DATASETS_CACHE"] = copies.name  # the processes of xdist have it, too
    if hasattr(config, "workerinput") or config.option.numprocesses is None:
        return
    has = "with" if products.way() == "direct" else "without"
    print(f"a CPU {has} instructions for bfloat16; make test takes about {MINUTES} minutes on 2 idle cores with them")


def pytest_collection_finish() -> None:
    """Leave what the imports have made out of garbage collections, which OpenRLHF asks for at each checkpoint."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The tests of the real stack come first: those that share a Ray in one process, and each other file in one."""
    from xdist.scheduler import LoadScopeScheduling

    class StackFirst(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            shared = file.startswith("tests/stack/") and not file.endswith(OWN_RAY)
            return "tests/stack" if shared else file

    config.option.loadscopereorder = False  # the stack first, because it takes longest
    return StackFirst(config, log)


# How the reason of a skip begins that the machine decides, and not an installation that is incomplete.
ALLOWED_SKIPS = (
    "a file system cannot be mounted",  # the user is not root, or the container does not permit it
    "could not import 'reasoning_gym': No module named 'reasoning_gym'",  # there is no C compiler (tools/install.sh)
    "reads DeepSpeed and vLLM in the versions that are pinned for the CPU",  # there is a GPU
    "TRL_PYTHON does not name an interpreter that has TRL",  # it is in an environment of its own (examples/trl)
)


def fail_unexpected_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip into a failure if it is not allowed. It is done in each process, so it also holds with xdist."""
    if not os.environ.get("CI") or not report.skipped or hasattr(report, "wasxfail"):
        return
    file, line, text = report.longrepr
    reason = text.removeprefix("Skipped: ")
    if not reason.startswith(ALLOWED_SKIPS):
        report.outcome = "failed"
        report.longrepr = f"{file}:{line}: unexpected skip, which tests/conftest.py does not allow: {reason}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    fail_unexpected_skip(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    fail_unexpected_skip(report)
    return report
