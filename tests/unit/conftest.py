"""What the unit tests share: a builder of groups, and pages without their charts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

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
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts of pages are not drawn, which takes its time; everything else is made."""
    from bapo_openrlhf.workbench.pages import figure

    monkeypatch.setattr(figure.vl_convert, "vegalite_to_svg", lambda spec: json.dumps(spec) and "<svg><g></g></svg>")
