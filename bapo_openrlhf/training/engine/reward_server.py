"""Asks a reward server, in the form and as patiently as OpenRLHF's executor does."""

import asyncio
from contextlib import suppress
from typing import Any

import aiohttp

from bapo_openrlhf.errors import one_line

TRIES = 5
SECONDS = 180.0  # that a server has for its answer
PAUSE = 1.0  # seconds between two tries


def request_of(query: str, prompt: str, label: Any, response: str | None) -> dict[str, Any]:
    """What a server is asked of one response. It gets what the model wrote unless that is None."""
    request = {"query": [query], "prompts": [prompt], "labels": [label]}
    return request if response is None else request | {"responses": [response]}


async def answer_of(server: str, request: dict[str, Any], seconds: float = SECONDS) -> Any:
    """The answer of a server that is asked once.

    Raises:
        Exception: It does not answer, or not with JSON.
    """
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=seconds)) as session,
        session.post(server, json=request) as answer,
    ):
        answer.raise_for_status()
        return await answer.json()


async def answer_with_retries(server: str, request: dict[str, Any]) -> Any:
    """The answer of a server that is asked up to TRIES times.

    Raises:
        RuntimeError: It did not answer. The message has what went wrong at last.
    """
    for _ in range(TRIES - 1):
        with suppress(Exception):
            return await answer_of(server, request)
        await asyncio.sleep(PAUSE)
    try:
        return await answer_of(server, request)
    except Exception as error:
        raise RuntimeError(f"{one_line(error)}, asked {TRIES} times") from error
