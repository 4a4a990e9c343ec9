"""How `make test` shares the tests out to two processes."""

from __future__ import annotations

from typing import Any

import pytest

# They start a Ray for each run. The other tests of the stack share one, and both parts take about as long.
OWN_RAY = ("test_faults.py", "test_first_hour.py", "test_smoke.py", "test_vision.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """First each of two processes gets one part of the tests of the real stack. Then they share the unit tests.

    A run of the stack uses a core and a half, so that two of them at a time leave no core idle.
    """
    from xdist.scheduler import LoadScopeScheduling

    class TwoStacks(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            own_ray = file.endswith(OWN_RAY)
            return f"stack {own_ray}" if file.startswith("tests/stack/") else file

    config.option.loadscopereorder = False  # the stack first, because it takes longest
    return TwoStacks(config, log)
