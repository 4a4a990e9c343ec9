"""Calls of the rollout engines. OpenRLHF's generator and that of this project (`Ask`) share them.

With `requests` among `run.faster`, prompts reach the engines in few calls, because each call costs both processes time.
Otherwise each prompt is a call, as in OpenRLHF.
"""

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call
from tqdm import tqdm
from vllm import SamplingParams

from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.training.trainer.samples import Answers, generated_response
from bapo_openrlhf.training.wire.failures import Failures
from bapo_openrlhf.training.wire.responses import Prefix

CALLS = 8  # of each engine and rollout at most, so that the progress bar moves and samples are made meanwhile
NOTHING: Mapping[str, Any] = {}
SentPrompt = tuple[Prompt, Any]  # a prompt that was sent to an engine, and Ray's reference to the responses


class EngineCalls:
    """Calls of the rollout engines of a run. They get the tokenizer once, and not with each prompt."""

    def __init__(self, engines: Sequence[Any], args: SimpleNamespace, tokenizer: Any) -> None:
        self.engines, self.args, self.tokenizer = engines, args, tokenizer
        self.few_calls = args.run.does_faster("requests")

    def set_up(self) -> None:
        """Give each engine the tokenizer and the limits of the reward function, before anything is generated."""
        settings = (self.tokenizer, self.args.verifier, self.args.adapt.enabled)
        ray.get([engine.set_up.remote(*settings) for engine in self.engines])

    def failures_text(self) -> str:
        """What the engines say of failed calls of the reward function or the agent, to go on a sentence."""
        failures = Failures.of(ray.get([engine.reward_failures.remote() for engine in self.engines]))
        return f". {failures}" if failures.kinds else ""

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let the engines be awake in the block, if they sleep otherwise (`--vllm.enable_sleep`)."""
        if not self.args.vllm.enable_sleep:
            yield
            return
        batch_vllm_engine_call(self.engines, "wake_up")
        try:
            yield
        finally:
            batch_vllm_engine_call(self.engines, "sleep")

    def send(self, requests: Sequence[Mapping[str, Any]], **generation: Any) -> list[Any]:
        """Send each request to the engine that has least to do. Returns Ray's reference to the responses of each."""
        args, size = self.args, generation.get("n_samples_per_prompt")
        size = args.rollout.n_samples_per_prompt if size is None else size
        log_probs = args.adapt.enabled or args.algo.advantage.is_correction_level != "off"  # stored ones need them
        shared = {
            "sampling_params": SamplingParams(
                temperature=generation.get("temperature", 1.0),
                top_p=generation.get("top_p", 1.0),
                top_k=generation.get("top_k", -1),
                max_tokens=generation.get("max_new_tokens"),  # None: as many as fit into max_length
                min_tokens=generation.get("min_new_tokens", 1),
                skip_special_tokens=generation.get("skip_special_tokens", False),
                logprobs=1 if log_probs else None,
            ),
            "max_length": generation.get("max_len", 2048),
            "num_samples": size,
        }
        loads = ray.get([engine.get_num_unfinished_requests.remote() for engine in self.engines])
        places: list[list[int]] = [[] for _ in self.engines]
        for place in range(len(requests)):
            least = loads.index(min(loads))
            loads[least] += size
            places[least].append(place)
        refs: dict[int, Any] = {}
        for engine, engine_places in zip(self.engines, places, strict=True):
            engine_refs = self._send_to(engine, [requests[place] for place in engine_places], shared)
            refs |= zip(engine_places, engine_refs, strict=True)
        return [refs[place] for place in range(len(requests))]

    def _send_to(self, engine: Any, requests: Sequence[Mapping[str, Any]], shared: Mapping[str, Any]) -> list[Any]:
        """Send requests to an engine, with what they share. Returns Ray's reference for each."""
        if self.args.train.agent_func_path or not self.few_calls:
            # The responses of an agent may take very different times.
            return [engine.generate_responses.remote(**shared, **request) for request in requests]
        # OpenRLHF's dynamic filtering replaces a filtered prompt as soon as its responses are there.
        one_by_one = self.args.algo.dynamic_filtering_enable and not self.args.adapt.enabled
        size = 1 if one_by_one else -(-len(requests) // CALLS) or 1
        refs: list[Any] = []
        for start in range(0, len(requests), size):
            part = requests[start : start + size]
            results = engine.generate_groups.options(num_returns=len(part)).remote(part, **shared)
            refs += results if len(part) > 1 else [results]
        return refs


def prompt_seed(seed: int, step: int, kind: str, number: int) -> int:
    """Seed of the `number`-th prompt of a kind in a step. It is the same in every run and for every engine."""
    digest = hashlib.blake2b(f"{seed}/{step}/{kind}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


class Ask:
    """Asks the engines for responses of one step."""

    def __init__(self, calls: EngineCalls, step: int, generation: Mapping[str, Any]) -> None:
        self.calls, self.step, self.generation = calls, step, generation
        train = calls.args.train
        # Without a seed, vLLM has one random stream for all requests, in the order in which they arrive. This is
        # faster, and such a run cannot be repeated.
        self._seed = train.seed if train.full_determinism_enable else None
        self._numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)

    def send(
        self,
        kind: str,
        prompts: Sequence[Prompt],
        *,
        numbers: Iterable[int] | None = None,
        size: int | None = None,
        extras: Iterable[Mapping[str, Any]] = itertools.repeat(NOTHING),
    ) -> list[SentPrompt]:
        """Send prompts to the engines.

        Args:
            kind: What the prompts are for, such as "fresh" or "evaluation". Each kind has seeds of its own.
            numbers: The number of each prompt, of which its seed is made; those that follow if none are given.
            size: Number of responses to each; that of the generation if it is None.
        """
        requests = []
        for prompt, number, extra in zip(prompts, numbers or self._numbers[kind], extras, strict=False):
            seed = None if self._seed is None else prompt_seed(self._seed, self.step, kind, number)
            prefix = {"prefix": Prefix(np.array(prompt.prefix, dtype=np.int32))} if prompt.prefix else NOTHING
            request = {"prompt": prompt.text, "label": prompt.label, "images": prompt.images, "seed": seed}
            requests.append({**request, **extra, **prefix})
        generation = self.generation if size is None else {**self.generation, "n_samples_per_prompt": size}
        refs = self.calls.send(requests, **generation) if requests else []
        return list(zip(prompts, refs, strict=True))

    def answers(self, sent: Sequence[SentPrompt]) -> list[Answers]:
        """The responses to each prompt, in order. Those that are there are converted while others are generated."""
        answers, pending = {ref: Answers(prompt, []) for prompt, ref in sent}, [ref for _, ref in sent]
        with tqdm(total=len(sent), desc="Generate samples", disable=not sent) as bar:
            while pending:
                (ready,), pending = ray.wait(pending, num_returns=1)
                answers[ready].responses += [generated_response(one, **self.generation) for one in ray.get(ready)]
                bar.update()
        return list(answers.values())
