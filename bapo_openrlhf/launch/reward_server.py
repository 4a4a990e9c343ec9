"""Ask each reward server once before any model loads, as the rollout engines ask it later."""

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp

from bapo_openrlhf.errors import ConfigError, one_line
from bapo_openrlhf.training.engine.reward_server import answer_of, request_of
from bapo_openrlhf.training.engine.reward_worker import Invalid, checked

FLAG = "reward.remote_url"
SECONDS = 30.0  # that a server has for its answer
NOT_READY = (502, 503, 504)  # statuses of HTTP with which a server or what is before it asks to come again


def check_reward_servers(
    endpoints: Sequence[str], problem: tuple[str, Any] | None, *, send_responses: bool
) -> list[str]:
    """Check the addresses, and ask each server for the reward of an empty response if there is a problem.

    Args:
        endpoints: Addresses of the servers.
        problem: Prompt and label.
        send_responses: Whether they also get what the model wrote.

    Returns:
        A warning for each server that does not answer: it may be started later, or be reached only from elsewhere.

    Raises:
        ConfigError: An address is none of HTTP, or its answer cannot be used. The message names both.
    """
    commas = "; there is a comma between two addresses, and none in a name" if len(endpoints) > 1 else ""
    for endpoint in endpoints:
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"{FLAG} is {endpoint}; it must be a .py file with reward_func, or addresses that begin with http:// "
                f"or https://{commas}"
            )
    if problem is None:
        return []
    prompt, label = problem
    request = request_of(prompt, prompt, label, "" if send_responses else None)
    return [warning for endpoint in dict.fromkeys(endpoints) if (warning := _ask(endpoint, request))]


def _ask(endpoint: str, request: dict[str, Any]) -> str:
    """A warning if the server does not answer."""
    asked = f"{FLAG} is {endpoint}; asked for the reward of an empty response to the first prompt"
    try:
        checked(asyncio.run(answer_of(endpoint, request, SECONDS)))
    except (aiohttp.ClientResponseError, aiohttp.ClientConnectionError, TimeoutError) as error:
        if isinstance(error, aiohttp.ClientResponseError) and error.status not in NOT_READY:
            raise ConfigError(f"{asked}, it answered {error.status} {error.message}") from None
        return f"{FLAG} is {endpoint}; it does not answer now ({one_line(error)}), and the first step needs it"
    except Invalid as error:
        raise ConfigError(f"{asked}, it {error}") from None
    except (aiohttp.ClientError, ValueError, TypeError) as error:  # such as an answer or a label that is no JSON
        raise ConfigError(f"{asked}: {one_line(error)}") from None
    return ""
