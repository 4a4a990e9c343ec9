"""The rewards of a smoke run, which let a random model learn."""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bapo_openrlhf.tasks.task import vector
from bapo_openrlhf.training.engine.reward_worker import call, checked
from bapo_openrlhf.user_file import at_home

CHANCES = (1, 3, 4, 6)  # in 8: hard prompts, and prompts with all kinds of groups

REWARD = '''"""Calls {file}, then replaces its rewards by a hash of the response."""

from pathlib import Path

from bapo_openrlhf.user_file import load
from bapo_openrlhf.workbench.smoke.reward import by_hash

file = {file!r}
reward_func = by_hash(load("reward.remote_url", Path(file)).reward_func if file else None, {low}, {high})
'''


def by_hash(function: Callable[..., dict[str, Any]] | None, low: float, high: float) -> Callable[..., dict[str, Any]]:
    """A reward function that calls `function`, but returns a reward that the text decides.

    A random model solves nothing, so all its groups would have equal rewards. The prompt decides the chance of a good
    response, the response whether it is good: `high` or `low`. Without a `function` rewards come from elsewhere.
    """

    def reward_func(queries: list[str], prompts: list[str], labels: list[Any], responses: list[str]) -> dict[str, Any]:
        result = checked(call(function, queries, prompts, labels, responses)) if function else {}
        rewards = []
        for query, prompt in zip(queries, prompts, strict=True):
            chance = CHANCES[zlib.crc32(prompt.encode()) % len(CHANCES)]
            rewards.append(high if zlib.crc32(query.encode()) % 8 < chance else low)
        logs = {name: vector([number]) for name, number in result.get("extra_logs", {}).items()}
        return {"rewards": vector(rewards), "scores": vector(rewards), "extra_logs": logs}

    return reward_func


def write_reward(path: Path, file: str | None, low: float, high: float) -> None:
    """Write the reward file of the smoke run. Without `file`, the true one, rewards come from elsewhere."""
    absolute = str(at_home(file).resolve()) if file else None
    path.write_text(REWARD.format(file=absolute, low=low, high=high), encoding="utf-8")
