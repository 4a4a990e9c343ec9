"""The rollout engine, a Ray actor around vLLM. It keeps delayed weights, seeds requests and isolates rewards."""

import asyncio
import hashlib
import os
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from copy import copy, deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import packaging.version
import ray
import torch
import vllm
from openrlhf.trainer.ray import vllm_engine
from openrlhf.utils.vlm_utils import dedup_media_tokens
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind

from bapo_openrlhf.flags.config import VerifierConfig
from bapo_openrlhf.host import extends, plain_class
from bapo_openrlhf.record.durable import open_to_others
from bapo_openrlhf.training.engine.agents import LimitedAgent, NamedAgent
from bapo_openrlhf.training.engine.engine_core import ENGINE, end_with
from bapo_openrlhf.training.engine.pictures import pictures
from bapo_openrlhf.training.engine.reward_pool import RewardPool
from bapo_openrlhf.training.engine.single_turn import Encoded, Generated, GroupTurn, SingleTurn
from bapo_openrlhf.training.engine.user_agent import load_agent
from bapo_openrlhf.training.engine.weight_receipt import borrow, merge_adapters, receive, require_merged
from bapo_openrlhf.training.wire.failures import Failures
from bapo_openrlhf.training.wire.packing import Piece
from bapo_openrlhf.training.wire.responses import STOPPED, VERSIONS, PackedGroup
from bapo_openrlhf.training.wire.signals import leave_to_driver

# ── In each vLLM worker ──


def _parameters(worker: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.data for name, parameter in worker.model_runner.model.named_parameters()}


def _weights_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"rollout_weights_rank{rank}.safetensors"


def _keep(worker: Any) -> None:
    """Copy the worker's weights to host memory."""
    weights = _parameters(worker)
    copies = getattr(worker, "kept_weights", None)
    if copies is None:
        # The memory is pinned, so that a GPU copies at full speed. It is allocated once and used again.
        copies = {name: torch.empty_like(w, device="cpu", pin_memory=w.is_cuda) for name, w in weights.items()}
        worker.kept_weights = copies
    for name, weight in weights.items():
        copies[name].copy_(weight)


def _restore(worker: Any) -> None:
    for name, weight in _parameters(worker).items():
        weight.copy_(worker.kept_weights[name])


def _save(worker: Any, folder: str) -> None:
    from safetensors.torch import save_file

    weights = {name: weight.cpu().contiguous() for name, weight in _parameters(worker).items()}
    save_file(weights, _weights_file(folder, worker.rank))
    open_to_others(Path(folder))


def _load(worker: Any, folder: str) -> None:
    from safetensors.torch import load_file

    path = _weights_file(folder, worker.rank)
    tensors, weights = load_file(path), _parameters(worker)
    shapes = {name: weight.shape for name, weight in weights.items()}
    if {name: weight.shape for name, weight in tensors.items()} != shapes:
        raise ValueError(f"{path} holds other tensors than this model under this vllm.tensor_parallel_size")
    for name, weight in weights.items():
        weight.copy_(tensors[name])


# ── The engine ──


def request_seed(seed: int, sample: int) -> int:
    """The seed of one response, from the seed of its prompt and its number in the group."""
    digest = hashlib.blake2b(f"{seed}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2  # 62 bits, because vLLM takes at most 63


Engine = plain_class(vllm_engine.RolloutRayActor)


class RolloutEngine(Engine):
    """OpenRLHF's rollout engine, extended for batches that mix policies."""

    faster = True  # whether vLLM is asked only for what is read (`requests` of `--run.faster`)
    weights_version: int | None = None  # updates behind the weights that it holds; None without batch adaptation
    tokenizer: Any = None  # OpenRLHF's asynchronous trainer sends one with each request and does not call `set_up`

    async def __init__(
        self, *, num_gpus: float, bundle_indices: list[int] | None = None, full_determinism: bool = False,
        faster: bool = True, agent_func_path: str | None = None, remote_rm_url: str | None = None,
        mm_pad_token_ids: set[int] | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        """Load the model and the user's agent or reward function. `kwargs` are arguments of vLLM's engine.

        Args:
            num_gpus: Share of a GPU that each worker of vLLM asks Ray for, if there are several workers.
            bundle_indices: Places of these workers in the placement group.
            remote_rm_url: The reward function or the addresses of its servers.
            mm_pad_token_ids: Tokens that stand for a part of an image or of a video.
        """
        self.faster = faster
        if faster:
            kwargs.setdefault("disable_log_stats", True)  # they are counted at each token, and nobody reads them
        os.environ[ENGINE] = str(os.getpid())
        self._configure_device_env(kwargs.get("distributed_executor_backend"), bundle_indices, num_gpus)
        self._configure_vllm_env(packaging.version, vllm, full_determinism)
        self.executor = load_agent(agent_func_path) if agent_func_path else SingleTurn(remote_rm_url)
        self._mm_pad_token_ids = mm_pad_token_ids
        leave_to_driver()
        self.llm = vllm.AsyncLLMEngine.from_engine_args(vllm.AsyncEngineArgs(**kwargs))
        end_with(self.llm)
        await self.llm.is_sleeping()  # waits until it has loaded
        self.rewards: RewardPool | LimitedAgent | SingleTurn | None = None  # what counts failed calls

    async def live(self) -> None:
        """Never return, so that a caller who waits for this call learns at once that the engine died."""
        await asyncio.Event().wait()

    async def answers(self) -> None:
        """Return as soon as vLLM's process answers."""
        await self.llm.is_sleeping()

    def set_up(self, tokenizer: Any, verifier: VerifierConfig, adapted: bool) -> None:
        """Take the tokenizer, and limit the reward function. An agent is limited only if batches are adapted."""
        self.tokenizer, self.weights_version = tokenizer, 0 if adapted else None
        executor = self.executor
        if type(executor) is not SingleTurn:
            self.executor = NamedAgent(executor)
            if verifier.processes and adapted:  # OpenRLHF's own trainer needs a reward for each response
                self.executor = self.rewards = LimitedAgent(executor, self, verifier.timeout)
            return
        self.rewards, executor.send_responses = executor, verifier.send_responses
        if verifier.processes and executor.reward_func:
            self.rewards = executor.reward_func = RewardPool(executor.endpoints[0], verifier)

    async def merge_adapters(self, scale: float) -> None:
        """Merge the actor's LoRA adapters into the weights of each sync from now on, times alpha / r."""
        await self.llm.collective_rpc(merge_adapters, args=(scale,))

    @extends(Engine)
    async def generate_responses(
        self, prompt: str, label: Any, sampling_params: Any, *args: Any, num_samples: int = 1, images: Any = None,
        seed: int | None = None, hf_tokenizer: Any = None, **kwargs: Any,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Generate as OpenRLHF does, for an agent. If the prompt has a seed, each response gets a seed of its own."""
        tokenizer = self.tokenizer or hf_tokenizer
        inputs = pictures(images) if images and hasattr(tokenizer, "image_processor") else images
        generate = partial(super().generate_responses, hf_tokenizer=tokenizer, images=inputs)
        first = self.weights_version
        tasks = []
        for sample in range(num_samples):
            params = copy(sampling_params)  # because OpenRLHF's executor of agents writes into them
            if seed is not None:
                params.seed = request_seed(seed, sample)
            tasks.append(generate(prompt, label, params, *args, num_samples=1, **kwargs))
        responses = [response for group in await asyncio.gather(*tasks) for response in group]
        return [self._versioned(response, first) | {"images": images} for response in responses]

    def _versioned(self, response: dict[str, Any], first: int | None) -> dict[str, Any]:
        """A response that began with weights of version `first`, with its versions. OpenRLHF puts them in `info`."""
        if first is None:
            return response
        versions = dict(zip(VERSIONS, (first, self.weights_version), strict=True))
        return response | {"extra_logs": {**(response.get("extra_logs") or {}), **versions}}

    async def generate_groups(self, requests: Sequence[dict[str, Any]], **shared: Any) -> Any:
        """A list with a `PackedGroup` for each prompt. For one prompt it is no list, because Ray expects none.

        The requests have the arguments of `_group` that are a prompt's own, and `shared` has the others.
        """
        groups = await asyncio.gather(*(self._group(**request, **shared) for request in requests))
        return groups if len(groups) > 1 else groups[0]

    async def _group(
        self, prompt: str, label: Any, images: Any, sampling_params: Any, max_length: int, num_samples: int,
        seed: int | None = None, **part: Any,
    ) -> PackedGroup:  # fmt: skip
        """The responses to one prompt; `part` goes to `GroupTurn`. One that used up its budget is not judged."""
        first, encoded = self.weights_version, Encoded.of(self.tokenizer, prompt, images, sampling_params, max_length)
        seeds = None if seed is None else [request_seed(seed, sample) for sample in range(num_samples)]
        turn = GroupTurn(self, encoded, seeds, num_samples, **part)

        async def respond(place: int) -> tuple[Generated, dict[str, Any]]:
            generated = await turn.response(place)
            if generated.finish_reason == STOPPED:
                verdict: dict[str, Any] = {"reward": None, "scores": None, "extra_logs": {STOPPED: 1}}
            else:
                tokens = [*turn.context[len(encoded.tokens) :], *generated.token_ids]  # a prefix is judged, too
                verdict = await self.executor.judged(self.tokenizer, encoded.tokens, tokens, prompt, label)
            return generated, self._versioned(verdict | {"truncated": generated.finish_reason == "length"}, first)

        shared = {"prompt": prompt, "label": label, "images": images, "mm_train_inputs": encoded.train_inputs}
        return PackedGroup.of(shared, turn.context, await asyncio.gather(*map(respond, range(num_samples))))

    @extends(Engine)
    async def generate(self, prompt_token_ids: Any, sampling_params: Any, multi_modal_data: Any = None) -> Any:
        """vLLM's last output for a prompt. If that is faster, it makes no other, because an executor reads no other."""
        if not self.faster:
            return await super().generate(prompt_token_ids, self._allowed(sampling_params), multi_modal_data)
        last = None
        outputs = self.outputs(
            prompt_token_ids, sampling_params, multi_modal_data, output_kind=RequestOutputKind.FINAL_ONLY
        )
        async for output in outputs:
            last = output
        return last

    def outputs(self, tokens: Any, sampling_params: Any, images: Any = None, **changes: Any) -> AsyncIterator[Any]:
        """vLLM's outputs for a prompt, as it makes them. Images are by kind, and sampling parameters may change.

        The outputs are without what nobody reads.
        """
        # OpenRLHF's prompt has a token for each part of an image, and vLLM makes these out of one token.
        if images and self._mm_pad_token_ids:
            tokens = dedup_media_tokens(tokens, self._mm_pad_token_ids)
        prompt = TokensPrompt(prompt_token_ids=tokens)
        if images:
            prompt["multi_modal_data"] = images
        params = self._allowed(sampling_params)
        for name, value in changes.items():
            setattr(params, name, value)
        # Of one turn, only tokens and their own log-probs are read. Stop strings and a user's executor may need text.
        if type(self.executor) is SingleTurn:
            params.detokenize = bool(params.stop)
            if params.logprobs is not None:
                params.logprobs, params.flat_logprobs = 0, True
        return self.llm.generate(prompt, params, request_id=uuid.uuid4().hex)

    def _allowed(self, sampling_params: Any) -> Any:
        """A copy of the parameters. No response has a token that stands for a part of an image or of a video.

        The actor would look for that image, and its forward pass would fail.
        """
        params = deepcopy(sampling_params)  # vLLM adds to its sets
        if self._mm_pad_token_ids:
            params.logit_bias = dict.fromkeys(self._mm_pad_token_ids, -100.0)  # the least that vLLM takes
        return params

    def reward_failures(self) -> Failures:
        """The failed calls of the reward function or the agent so far. An agent without limits ends the run instead."""
        return self.rewards.failures if self.rewards else Failures()

    async def update_weights(self, pieces: Sequence[Piece], dtype: torch.dtype) -> None:
        """Receive and load a parcel of the actor's weights."""
        await self.llm.collective_rpc(receive, args=(pieces, dtype))

    async def borrow_weights(self, pieces: Sequence[Piece], handles: Mapping[str, tuple[Any, tuple]]) -> None:
        """Load a parcel of the actor's weights from memory of the same GPUs."""
        await self.llm.collective_rpc(borrow, args=(pieces, handles))

    async def keep_weights(self) -> None:
        """Keep a copy of its weights in host memory instead of those kept before."""
        await self.llm.collective_rpc(_keep)

    async def restore_weights(self, version: int) -> None:
        """Sample from the kept weights again, which are those of this version."""
        await self.llm.collective_rpc(_restore)
        await self.changed(version)

    async def save_weights(self, folder: str) -> None:
        """Write the weights that the engine holds now: one safetensors file for each tensor-parallel rank."""
        await self.llm.collective_rpc(_save, args=(folder,))

    async def load_weights(self, folder: str, version: int) -> None:
        """Sample from saved weights of this version.

        Raises:
            ValueError: The weights are of another model or of another tensor-parallel size.
        """
        await self.llm.collective_rpc(_load, args=(folder,))
        await self.changed(version)

    async def changed(self, version: int) -> None:
        """Note the version of the new weights, and forget what others computed: keys and values, image embeddings.

        Call this after every change of weights, because vLLM does not do it, and OpenRLHF resets only the first cache.
        A request that goes on, such as one of an agent that was given up, begins again with the new weights. Otherwise
        vLLM would keep all keys and values.

        Raises:
            RuntimeError: A part of an adapter did not arrive.
        """
        await self.llm.collective_rpc(require_merged)
        self.weights_version = version
        await self.llm.reset_prefix_cache(reset_running_requests=True)
        await self.llm.reset_encoder_cache()


RolloutActor = ray.remote(RolloutEngine)
