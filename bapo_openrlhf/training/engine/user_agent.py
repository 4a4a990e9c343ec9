"""The user's agent (`--train.agent_func_path`): how its file is loaded, and what its functions must return.

OpenRLHF reads what an agent returns without looking at it. Here an error names the function, its line, the value, and
what is allowed.
"""

import inspect
import math
from collections.abc import Mapping
from functools import wraps
from numbers import Integral
from pathlib import Path
from typing import Any

from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor

from bapo_openrlhf import user_file
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.training.engine.reward_worker import Invalid, logged, one_number, short_repr

FLAG = "train.agent_func_path"


def load_agent(path: str) -> AgentExecutorBase:
    """The agent executor of a file. What its instances return is checked.

    Raises:
        ConfigError: The file cannot be loaded, or has no AgentExecutor that can be made.
    """
    kind = getattr(user_file.load(FLAG, Path(path)), "AgentExecutor", None)
    if not (isinstance(kind, type) and issubclass(kind, AgentExecutorBase)):
        raise ConfigError(f"{FLAG} {path} has no class AgentExecutor that is an openrlhf.utils.agent.AgentExecutorBase")
    try:
        executor = kind()
    except Exception as error:
        raise ConfigError(f"{FLAG} {path}: AgentExecutor() raised {user_file.described(error)}") from error
    if isinstance(executor, MultiTurnAgentExecutor):
        executor.agent_instance_cls = checked_instance(executor.agent_instance_cls)
    return executor


def checked_instance(kind: type[AgentInstanceBase]) -> type[AgentInstanceBase]:
    """The class of an agent's instances, whose `reset` and `step` check what they return. The error is `Invalid`."""

    class Checked(kind):  # type: ignore[valid-type, misc]
        @wraps(kind.reset)
        async def reset(self, states: dict, **kwargs: Any) -> Mapping[str, Any]:
            return await _checked(kind.reset, super().reset(states, **kwargs), _RESET)

        @wraps(kind.step)
        async def step(self, states: dict, **kwargs: Any) -> Mapping[str, Any]:
            return await _checked(kind.step, super().step(states, **kwargs), _STEP)

    Checked.__name__, Checked.__qualname__ = kind.__name__, kind.__qualname__
    return Checked


async def _checked(function: Any, work: Any, fields: Mapping[str, tuple[str, Any]]) -> Any:
    """What a function of the agent gives once it is done. An error has its name, and the line where it begins."""
    try:
        if not inspect.isawaitable(work):
            raise Invalid("is not async; write `async def`")
        result = await work
        _check(result, fields)
        if fields is _STEP:
            _check_numbers(result)
        return result
    except Invalid as error:
        raise Invalid(f"{function.__qualname__} {error}", user_file.definition(function)) from None


def check_response(response: Any, *, log_probs: bool) -> None:
    """Check what an executor returned for one response. With batch adaptation, each token needs a log-prob.

    Raises:
        Invalid: Something is missing, or is not of the kind that OpenRLHF needs.
    """
    _check(response, _RESPONSE)
    _check_numbers(response)
    tokens, ranges, values = (response[name] for name in ("observation_tokens", "action_ranges", "rollout_log_probs"))
    if not all(0 <= start <= end <= len(tokens) for start, end in ranges):
        raise Invalid(f"returned action_ranges = {short_repr(ranges)}; each must be within the {len(tokens)} tokens")
    if (log_probs or values is not None) and (values is None or len(values) != len(tokens)):
        count = "no" if values is None else len(values)
        raise Invalid(f"returned {count} rollout_log_probs for {len(tokens)} observation_tokens; each needs one")


def _check(result: Any, fields: Mapping[str, tuple[str, Any]]) -> None:
    if not isinstance(result, Mapping):
        raise Invalid(
            f"returned {short_repr(result)}, a {type(result).__name__}; it must be a dict with {', '.join(fields)}"
        )
    for key, (what, fits) in fields.items():
        if key not in result:
            raise Invalid(f"returned no {key}; it must be {what}")
        if not fits(result[key]):
            value = result[key]
            raise Invalid(f"returned {key} = {short_repr(value)}, a {type(value).__name__}; it must be {what}")


def _check_numbers(result: Mapping[str, Any]) -> None:
    """Check the reward of a response, scores and logged numbers, which may be missing."""
    for key in ("reward", "scores"):
        if result.get(key) is not None:
            one_number(key, result[key], finite=True)
    logged(result.get("extra_logs") or None)


def _is_reward(value: Any) -> bool:
    """Whether OpenRLHF can take the reward of a turn from it."""
    try:
        return hasattr(value, "item") and math.isfinite(value.item())
    except (TypeError, ValueError, RuntimeError):  # not one element, or not a number
        return False


def _are_pairs(value: Any) -> bool:
    """Whether it is a list of pairs of whole numbers."""
    pairs = isinstance(value, (list, tuple)) and all(isinstance(one, (list, tuple)) and len(one) == 2 for one in value)
    return pairs and all(isinstance(end, Integral) for pair in value for end in pair)


# What each function returns: by key what the value must be, and a test of it.
_RESET = {"observation": ("a text that is not empty", lambda value: isinstance(value, str) and value)}
_STEP = {
    "rewards": ("a tensor with one finite number", _is_reward),
    "environment_feedback": ("a text, which may be empty", lambda value: isinstance(value, str)),
    "done": ("true or false", lambda value: True),
}
_RESPONSE = {
    "prompt": ("the prompt", lambda value: isinstance(value, str)),
    "label": ("the label", lambda value: True),
    "observation_tokens": ("a list of token ids", lambda value: hasattr(value, "copy") and len(value) > 0),
    "action_ranges": ("a list of pairs (start, end)", _are_pairs),
    "rollout_log_probs": ("a list of numbers, or None", lambda value: value is None or hasattr(value, "__len__")),
}
