"""Responses of one turn: all responses to a prompt are one request of vLLM, and go back as packed arrays.

OpenRLHF's executor makes one response a call. It still does, but the responses to a prompt share what is equal for all:
the tokens of the prompt are computed once, and vLLM gets one request for n responses. A response that is finished goes
on to its reward at once, and does not wait for the others.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
from openrlhf.utils.agent import SingleTurnAgentExecutor
from vllm.sampling_params import RequestOutputKind

from bapo_openrlhf import user_file
from bapo_openrlhf.errors import one_line
from bapo_openrlhf.training.contract import extends
from bapo_openrlhf.training.reward.failures import Failures
from bapo_openrlhf.training.reward.reward_pool import RewardPool

WHOLE = 2**31  # tokens; vLLM gives the first token of a response, and the others together at its end


class SingleTurn(SingleTurnAgentExecutor):
    """OpenRLHF's executor. Its reward file is loaded as everywhere, and its rewards may come from a pool of processes.

    Attributes:
        failures: The calls of the reward function or of the endpoint that failed. A pool counts its own.
    """

    def __init__(self, remote_rm_url: str | list[str] | None = None) -> None:
        endpoints = [remote_rm_url] if isinstance(remote_rm_url, str) else remote_rm_url or []
        file = bool(endpoints) and endpoints[0].endswith(".py")
        super().__init__([] if file else endpoints)
        self.failures = Failures()
        if file:
            self.reward_endpoints = endpoints
            self.reward_func = user_file.load("reward.remote_url", Path(endpoints[0])).reward_func

    @extends(SingleTurnAgentExecutor)
    async def _fetch_rewards_via_func(
        self, queries_list: Sequence[str], prompts_list: Sequence[str], labels_list: Sequence[Any]
    ) -> list[dict[str, Any]]:
        """The reward of the one response. A pool needs no thread that waits for it."""
        if isinstance(self.reward_func, RewardPool):
            return [await asyncio.wrap_future(self.reward_func.submit(queries_list, prompts_list, labels_list))]
        try:
            return await super()._fetch_rewards_via_func(queries_list, prompts_list, labels_list)
        except Exception as error:
            place = user_file.place(error, self.reward_func)
            self.failures.add("raised", f"reward_func raised {one_line(error)}", place)
            raise

    @extends(SingleTurnAgentExecutor)
    async def _fetch_rewards_via_http(self, *request: Any) -> list[dict[str, Any]]:
        """The reward of the one response from an endpoint."""
        try:
            return await super()._fetch_rewards_via_http(*request)
        except Exception as error:
            self.failures.add("raised", f"no reward came: {one_line(error)}", ", ".join(self.reward_endpoints))
            raise


@dataclass(frozen=True)
class PackedGroup:
    """The G responses to a prompt as they travel between processes. Iterating over it gives OpenRLHF's responses.

    Attributes:
        shared: What is equal for all responses: prompt, label, images, their tensors, and the number of the request.
        responses: For each response, all its other entries.
        prompt_tokens: Token ids of the prompt, int32, shape (P,).
        tokens: Generated token ids of all responses one after the other, int32, shape (T,).
        log_probs: Their log-probs, float32, shape (T,); None if they were not asked for.
        lengths: Number of generated tokens of each response, shape (G,).
    """

    shared: dict[str, Any]
    responses: list[dict[str, Any]]
    prompt_tokens: np.ndarray
    tokens: np.ndarray
    log_probs: np.ndarray | None
    lengths: list[int]

    SHARED = ("prompt", "label", "images", "mm_train_inputs")

    @classmethod
    def of(cls, responses: Sequence[dict[str, Any]], number: int | None, log_probs: Sequence[Any]) -> Self:
        """Pack what OpenRLHF's executor gave for each response of a prompt.

        Args:
            responses: Of one prompt; each has one action range, which ends with its last token.
            number: Number of the request.
            log_probs: For each response the log-probs of its generated tokens; None if they were not asked for.
        """
        ((start, _),) = responses[0]["action_ranges"]
        shared = {name: responses[0][name] for name in cls.SHARED} | {"number": number}
        packed = {*cls.SHARED, "observation_tokens", "action_ranges", "rollout_log_probs"}
        generated = [response["observation_tokens"][start:] for response in responses]
        return cls(
            shared,
            [{name: value for name, value in response.items() if name not in packed} for response in responses],
            np.array(responses[0]["observation_tokens"][:start], dtype=np.int32),
            np.concatenate([np.array(tokens, dtype=np.int32) for tokens in generated]),
            None if log_probs[0] is None else np.concatenate([np.array(one, dtype=np.float32) for one in log_probs]),
            [len(tokens) for tokens in generated],
        )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The responses in their order, with arrays in place of OpenRLHF's lists of tokens and log-probs."""
        start, end = len(self.prompt_tokens), 0
        for response, length in zip(self.responses, self.lengths, strict=True):
            begin, end = end, end + length
            log_probs = None
            if self.log_probs is not None:
                log_probs = np.concatenate([np.zeros(start, dtype=np.float32), self.log_probs[begin:end]])
            yield {
                **self.shared,
                **response,
                "observation_tokens": np.concatenate([self.prompt_tokens, self.tokens[begin:end]]),
                "action_ranges": [(start, start + length)],
                "rollout_log_probs": log_probs,
            }


class GroupTurn:
    """One prompt, as OpenRLHF's executor sees engine and tokenizer while it makes the prompt's responses.

    Args:
        engine: The rollout engine.
        tokenizer: Its tokenizer or processor.
        seeds: Seed of each response; None if they share vLLM's stream of random numbers, and so one request.
        size: Number of responses.
    """

    def __init__(self, engine: Any, tokenizer: Any, seeds: Sequence[int] | None, size: int) -> None:
        self.engine, self.seeds, self.size = engine, seeds, size
        self.tokenizer = _Once(tokenizer)
        self.turns = [_Turn(self, place) for place in range(size)]
        self._finished: list[asyncio.Future] = []  # of each response, once they are asked for
        self._request: asyncio.Task | None = None

    async def response(self, place: int, tokens: Any, params: Any, images: Any) -> "_Generated":
        """What vLLM generated for the response in this place. The first one that asks sends the request of all."""
        if self.seeds is not None:
            params.seed = self.seeds[place]
            return _Generated.of((await self.engine.generate(tokens, params, images)).outputs)
        if self._request is None:
            loop = asyncio.get_running_loop()
            self._finished = [loop.create_future() for _ in range(self.size)]
            self._request = loop.create_task(self._generate(tokens, params, images))
        return await self._finished[place]

    async def _generate(self, tokens: Any, params: Any, images: Any) -> None:
        """Send one request, and hand out each response when it is finished. An error goes to all that wait."""
        error: BaseException = RuntimeError(f"vLLM did not finish all {self.size} responses of a request")
        asked = {"n": self.size, "output_kind": RequestOutputKind.DELTA, "stream_interval": WHOLE}
        parts: dict[int, list[Any]] = {}  # of each response
        try:
            async for output in self.engine.outputs(tokens, params, images, **asked):
                for part in output.outputs:
                    parts.setdefault(part.index, []).append(part)
                    if part.finish_reason is not None:
                        self._finished[part.index].set_result(_Generated.of(parts.pop(part.index)))
        except BaseException as raised:
            error = raised
        for future in self._finished:
            if not future.done():
                future.set_exception(error)


@dataclass(frozen=True)
class _Generated:
    """A finished response, in the form of a completion of vLLM.

    OpenRLHF's executor finds no log-probs in it, so it does not look them up token by token.
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    log_probs: list[float] | None
    logprobs: None = None

    @classmethod
    def of(cls, parts: Sequence[Any]) -> Self:
        """The response from its parts, in order.

        Raises:
            RuntimeError: The log-probs are not those of the generated tokens.
        """
        tokens = [token for part in parts for token in part.token_ids]
        log_probs = None
        if parts[0].logprobs is not None:
            if [token for part in parts for token in part.logprobs.token_ids] != tokens:
                raise RuntimeError("vLLM's log-probs are not those of the tokens that it generated")
            log_probs = [value for part in parts for value in part.logprobs.logprobs]
        return cls(tokens, "".join(part.text for part in parts), parts[-1].finish_reason, log_probs)


class _Turn:
    """The engine as the executor sees it for one response. It keeps the log-probs."""

    def __init__(self, group: GroupTurn, place: int) -> None:
        self._group, self._place = group, place
        self.log_probs: list[float] | None = None

    async def generate(self, prompt_token_ids: Any, sampling_params: Any, multi_modal_data: Any = None) -> Any:
        """This response, in the form of vLLM's output."""
        response = await self._group.response(self._place, prompt_token_ids, sampling_params, multi_modal_data)
        self.log_probs = response.log_probs
        return SimpleNamespace(outputs=[response])


class _Once:
    """A tokenizer that is asked the same for each response of a prompt, and computes it for the first one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._encoded = tokenizer, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, **request: Any) -> Any:
        if self._encoded is None:
            self._encoded = self._tokenizer(**request)
        return self._encoded
