"""How `make test` shares the tests out to two processes."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of the real stack one after the other in one process, while the others run the unit tests."""
    from xdist.scheduler import LoadScopeScheduling

    class OneStack(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "stack" if nodeid.startswith("tests/stack/") else nodeid

    return OneStack(config, log)
