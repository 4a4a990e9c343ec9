"""Responses of one turn: all responses to a prompt are one request of vLLM, and go back as packed arrays.

OpenRLHF's executor makes each response in a call of its own. Here the prompt becomes tokens once, and vLLM computes
these once. A response that is finished goes on to its reward at once. What is made is what OpenRLHF's executor makes,
and a test compares them.
"""

import asyncio
from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any, Self

from openrlhf.utils.agent import SingleTurnAgentExecutor
from openrlhf.utils.logging_utils import init_logger
from openrlhf.utils.vlm_utils import process_prompt_with_images
from vllm.sampling_params import RequestOutputKind

from bapo_openrlhf import user_file
from bapo_openrlhf.errors import one_line
from bapo_openrlhf.host import extends
from bapo_openrlhf.training.engine.pictures import pictures
from bapo_openrlhf.training.engine.response_text import texts
from bapo_openrlhf.training.engine.reward_pool import RewardFailure, RewardPool
from bapo_openrlhf.training.engine.reward_server import answer_with_retries, request_of
from bapo_openrlhf.training.engine.reward_worker import Invalid, call, checked
from bapo_openrlhf.training.wire.failures import Failures
from bapo_openrlhf.training.wire.responses import STOPPED, Prefix

WHOLE = 2**31  # tokens; vLLM gives the first token of a response, and the others together at its end
logger = init_logger(__name__)


class SingleTurn(SingleTurnAgentExecutor):
    """OpenRLHF's executor. Its reward file is loaded as everywhere, and its rewards may come from a pool of processes.

    `endpoints` is the reward file, or the addresses of reward servers. A pool counts its own failures.
    """

    def __init__(self, remote_rm_url: str | list[str] | None = None) -> None:
        super().__init__([])  # so that its `execute` judges nothing
        self.endpoints = [remote_rm_url] if isinstance(remote_rm_url, str) else remote_rm_url or []
        self.failures, self.send_responses = Failures(), False
        self._servers = cycle(self.endpoints)
        if self.endpoints and self.endpoints[0].endswith(".py"):
            self.reward_func = user_file.load("reward.remote_url", Path(self.endpoints[0])).reward_func

    @extends(SingleTurnAgentExecutor)
    async def execute(self, *, hf_tokenizer: Any, **request: Any) -> dict[str, Any]:
        """OpenRLHF's response, judged as every response is."""
        entry = await super().execute(hf_tokenizer=hf_tokenizer, **request)
        ((start, _),), tokens = entry["action_ranges"], entry["observation_tokens"]
        return entry | await self.judged(hf_tokenizer, tokens[:start], tokens[start:], entry["prompt"], entry["label"])

    async def judged(
        self, tokenizer: Any, prompt_tokens: Sequence[int], tokens: Sequence[int], prompt: str, label: Any
    ) -> dict[str, Any]:
        """What the reward function or a server says of a response: reward, score, and numbers for the log.

        They are None, and there are no numbers, if nothing judges it here or the call failed.
        """
        answer: dict[str, Any] = {}
        if self.endpoints:
            judge = self.by_function if self.reward_func else self.by_server
            try:
                query, response = texts(tokenizer, prompt_tokens, tokens)
                answer = await judge(query, prompt, label, response)
            except Exception as error:
                logger.info(f"no reward: {one_line(error)}")
        logs = answer.get("extra_logs") or {}
        return {"reward": answer.get("rewards"), "scores": answer.get("scores"), "extra_logs": logs}

    async def by_function(self, query: str, prompt: str, label: Any, response: str) -> dict[str, Any]:
        """What the reward function says. A pool needs no thread that waits for it."""
        function: Any = self.reward_func
        if isinstance(function, RewardPool):
            return await asyncio.wrap_future(function.submit(query, prompt, label, response))
        try:
            answer = await asyncio.to_thread(call, function, [query], [prompt], [label], [response])
        except Exception as error:
            place = user_file.place(error, function)
            self.failures.add("raised", f"reward_func raised {one_line(error)}", place)
            raise
        return self._checked(answer, "reward_func", user_file.definition(function))

    async def by_server(self, query: str, prompt: str, label: Any, response: str) -> dict[str, Any]:
        """What the next server says."""
        request = request_of(query, prompt, label, response if self.send_responses else None)
        try:
            answer = await answer_with_retries(next(self._servers), request)
        except Exception as error:
            self.failures.add("raised", f"no reward came: {one_line(error)}", ", ".join(self.endpoints))
            raise
        return self._checked(answer, "the reward server", ", ".join(self.endpoints))

    def _checked(self, answer: Any, whose: str, place: str) -> dict[str, Any]:
        """An answer as plain numbers. One that cannot be used is counted, and is a RewardFailure."""
        try:
            return checked(answer)
        except Invalid as error:
            self.failures.add("invalid", f"{whose} {error}", place)
            raise RewardFailure("invalid", f"{place}: {whose} {error}") from None


@dataclass(frozen=True)
class Encoded:
    """A prompt as vLLM gets it, with its images by kind, and their tensors for the trainer."""

    tokens: list[int]
    params: Any
    media: dict[str, Any] | None = None
    train_inputs: Any = None

    @classmethod
    def of(cls, tokenizer: Any, prompt: str, images: Any, sampling_params: Any, max_length: int) -> Self:
        """A prompt of text, or of text and images. One that is too long for a response loses its first tokens.

        Args:
            tokenizer: Its tokenizer, or its processor if the model takes images.
            sampling_params: As in vLLM. Without `max_tokens`, a response may have as many as fit.
            max_length: Largest number of tokens of prompt and response.

        Raises:
            ValueError: A prompt with images is too long.
        """
        params, media, inputs = deepcopy(sampling_params), None, None
        if images and hasattr(tokenizer, "image_processor"):
            tokens, inputs, pil_images = process_prompt_with_images(tokenizer, prompt, pictures(images))
            media = {"image": pil_images} if pil_images else None
        else:
            tokens = tokenizer(text=prompt, add_special_tokens=False, return_tensors="pt")["input_ids"][0].tolist()
        if params.max_tokens is None:
            params.max_tokens = max(1, max_length - len(tokens))
        room = max_length - params.max_tokens
        if len(tokens) > room:
            sizes = f"a prompt has {len(tokens)} tokens, and {params.max_tokens} of {max_length} are for the response"
            if media:
                raise ValueError(f"{sizes}; a prompt with images cannot be cut")
            logger.warning(f"{sizes}; its first tokens are cut")
            tokens = tokens[-room:]
        return cls(tokens, params, media, inputs)


class GroupTurn:
    """The responses to one prompt.

    Args:
        seeds: Seed of each response; None if they share vLLM's stream of random numbers, and so one request.
        budget: Tokens that each response may generate now; None for no limit but its own.
        prefix: What the one response has already, or with what all of them begin; None for nothing.

    Attributes:
        context: Token ids of the prompt and of a prefix that is context.
    """

    def __init__(
        self, engine: Any, prompt: Encoded, seeds: Sequence[int] | None, size: int, *, budget: int | None = None,
        prefix: Prefix | None = None,
    ) -> None:  # fmt: skip
        self.engine, self.prompt, self.seeds, self.size = engine, prompt, seeds, size
        prefix_tokens = [] if prefix is None else prefix.tokens.tolist()
        self.prefix, self._tokens = prefix, [*prompt.tokens, *prefix_tokens]
        self.context = self._tokens if prefix and prefix.is_context else prompt.tokens
        self.room = prompt.params.max_tokens - len(prefix_tokens)
        self.params = copy(prompt.params)
        self.params.max_tokens = self.room if budget is None else min(self.room, budget)
        self.params.min_tokens = min(max(self.params.min_tokens - len(prefix_tokens), 0), self.params.max_tokens)
        self._futures: list[asyncio.Future] = []  # of each response, once they are asked for
        self._request: asyncio.Task | None = None

    async def response(self, place: int) -> "Generated":
        """The response in this place, with what it had already."""
        generated = await self._new_tokens(place)
        stopped = generated.finish_reason == "length" and self.params.max_tokens == len(generated.token_ids) < self.room
        if self.prefix and not self.prefix.is_context:
            generated = generated.after(self.prefix)
        return replace(generated, finish_reason=STOPPED) if stopped else generated

    async def _new_tokens(self, place: int) -> "Generated":
        """What vLLM generated for the response in this place. The first one that asks sends the request of all."""
        if self.seeds is not None:
            params = copy(self.params)
            params.seed = self.seeds[place]
            return Generated.of((await self.engine.generate(self._tokens, params, self.prompt.media)).outputs)
        if self._request is None:
            loop = asyncio.get_running_loop()
            self._futures = [loop.create_future() for _ in range(self.size)]
            self._request = loop.create_task(self._generate())
        return await self._futures[place]

    async def _generate(self) -> None:
        """Send one request, and hand out each response when it is finished. An error goes to all that wait."""
        error: BaseException = RuntimeError(f"vLLM did not finish all {self.size} responses of a request")
        changes = {"n": self.size, "output_kind": RequestOutputKind.DELTA, "stream_interval": WHOLE}
        parts: dict[int, list[Any]] = {}  # of each response
        try:
            async for output in self.engine.outputs(self._tokens, self.params, self.prompt.media, **changes):
                for part in output.outputs:
                    parts.setdefault(part.index, []).append(part)
                    if part.finish_reason is not None:
                        self._futures[part.index].set_result(Generated.of(parts.pop(part.index)))
        except BaseException as raised:
            error = raised
        for future in self._futures:
            if not future.done():
                future.set_exception(error)


@dataclass(frozen=True)
class Generated:
    """What vLLM generated for a response. `finish_reason` is `STOPPED` if it used up its budget before its end."""

    token_ids: list[int]
    finish_reason: str
    log_probs: list[float] | None

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
        return cls(tokens, parts[-1].finish_reason, log_probs)

    def after(self, prefix: Prefix) -> Self:
        """The response with what it had already."""
        log_probs = None if self.log_probs is None else [*prefix.log_probs.tolist(), *self.log_probs]
        return replace(self, token_ids=[*prefix.tokens.tolist(), *self.token_ids], log_probs=log_probs)
