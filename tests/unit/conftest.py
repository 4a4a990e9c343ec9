"""What the unit tests share: a builder of groups, and pages without their charts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from bapo_openrlhf.adapt.group import Group, Prompt, Response


@pytest.fixture(scope="session")
def make_group() -> Callable[..., Group]:
    """Builds a group: `make_group(3, step=2)` has 3 of 8 responses right, `make_group([0.5, 1.0])` these rewards.

    Session-wide so that property tests may use it; it keeps nothing but the next uid.
    """
    uids = itertools.count()

    def build(
        right: int | Sequence[float],
        *,
        size: int = 8,
        prompt: str | Prompt | None = None,
        step: int = 0,
        policy_step: int | None = None,
        uid: int | None = None,
        prompt_tokens: int = 3,
        response_tokens: int = 2,
        extras: dict[str, Any] | None = None,
    ) -> Group:
        uid = next(uids) if uid is None else uid
        rewards = [1.0] * right + [0.0] * (size - right) if isinstance(right, int) else list(right)
        if not isinstance(prompt, Prompt):
            prompt = Prompt(f"prompt {uid}" if prompt is None else prompt)
        responses = tuple(
            Response(
                token_ids=np.arange(prompt_tokens + response_tokens) + 100 * index,
                action_spans=((prompt_tokens, prompt_tokens + response_tokens),),
                log_probs=np.full(response_tokens, -0.5 - index),
                reward=reward,
                extras=dict(extras or {}),
            )
            for index, reward in enumerate(rewards)
        )
        return Group(uid, prompt, responses, step, step if policy_step is None else policy_step)

    return build


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Charts of pages are made, but neither compared with Vega-Lite's schema nor drawn, which takes most of the time.

    The pages that are drawn have charts of every kind. `make test-all` compares all charts with the schema.
    """
    from altair.utils import schemapi

    from bapo_openrlhf.workbench.pages import figure

    thorough = settings.get_current_profile_name() == "thorough"
    if not thorough:
        monkeypatch.setattr(figure, "specification", lambda chart: {"mark": type(chart).__name__})
    monkeypatch.setattr(figure.vl_convert, "vegalite_to_svg", lambda spec: json.dumps(spec) and "<svg><g></g></svg>")
    with schemapi.debug_mode(thorough):
        yield
