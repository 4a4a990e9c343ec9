"""Fixtures for tests of the decision's study."""

import decision_stages as stages
import pytest


@pytest.fixture
def small_search(monkeypatch):
    """The searches of these tests have no runs yet, and two methods. BAPO without X2 takes the rate of BAPO."""
    monkeypatch.setattr(stages, "known_heights", lambda stage: {})
    monkeypatch.setitem(stages.NEAREST, "without_x2", "bapo")
