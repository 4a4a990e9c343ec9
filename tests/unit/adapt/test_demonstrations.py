"""The loss of a demonstration, against the formula of LUFFY (arXiv 2504.14945)."""

import pytest

from bapo_openrlhf.adapt.corrections import GAMMA, shaped


def test_shaping_by_hand():
    assert GAMMA == 0.1
    assert shaped(0.1) == pytest.approx(1 / 2) and shaped(0.9) == pytest.approx(0.9) and shaped(0.0) == 0
