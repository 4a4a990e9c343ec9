"""Fixtures for tests of the decision's study."""

import decision_stages as stages
import pytest


@pytest.fixture
def small_search(monkeypatch):
    """The searches of these tests have two methods, and BAPO without X2 takes the rate of BAPO."""
    monkeypatch.setitem(stages.NEAREST, "without_x2", "bapo")
