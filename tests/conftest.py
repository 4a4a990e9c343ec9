"""How `make test` shares the tests out to its processes, and what each test finds: no time limits, and Ctrl-C works."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # on a busy machine a test would fail for being slow
settings.load_profile("untimed")

# A background job of a shell ignores Ctrl-C, and the processes that tests start and interrupt would do so as well.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# They start a Ray for each run. The other tests of the stack share one.
OWN_RAY = ("test_faults.py", "test_first_hour.py", "test_smoke.py", "test_vision.py")


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
