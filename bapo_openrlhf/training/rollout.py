"""Generation: fresh samples with behaviour log-probs, hard prompts generated again, and a seed for each request."""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray
import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator, _collect_prompt_batch
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call
from openrlhf.utils.logging_utils import init_logger
from tqdm import tqdm

from bapo_openrlhf.adapt.group import Prompt

logger = init_logger(__name__)


class SeededEngine:
    """A rollout engine as OpenRLHF's generator sees it, which adds the next prompt's seed to each request.

    OpenRLHF leaves vLLM one random stream for all requests, in the order in which they arrive: no run can be repeated.
    """

    def __init__(self, engine: Any, next_seed: Callable[[], int | None]) -> None:
        self._engine = engine
        self.generate_responses = _SeededMethod(engine.generate_responses, next_seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class _SeededMethod:
    def __init__(self, method: Any, next_seed: Callable[[], int | None]) -> None:
        self._method, self._next_seed = method, next_seed

    def remote(self, **kwargs: Any) -> Any:
        return self._method.remote(**kwargs, seed=self._next_seed())


def prompt_seed(seed: int, step: int, kind: str, number: int) -> int:
    """Seed of the `number`-th prompt that a step dispatches; the same in every run, whichever engine gets it."""
    digest = hashlib.blake2b(f"{seed}/{step}/{kind}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def reward_of(value: Any) -> float | None:
    """A reward function's answer for one response, in float32 as OpenRLHF has it; None if it is no finite number."""
    try:
        numbers = torch.as_tensor(value, dtype=torch.float32).flatten().tolist()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return numbers[0] if len(numbers) == 1 and math.isfinite(numbers[0]) else None


def is_usable(sample: Experience) -> bool:
    """Whether a sample has a reward, and finite behaviour log-probs."""
    return sample.rewards is not None and bool(
        torch.isfinite(sample.rollout_log_probs[sample.action_mask.bool()]).all()
    )


def usable_groups(samples: Sequence[Experience], size: int) -> list[Experience]:
    """The samples of the groups of `size` in which every response is usable. The log names the prompts of the others.

    Raises:
        ValueError: the samples are not whole groups.
    """
    if len(samples) % size:
        raise ValueError(f"{len(samples)} samples are not whole groups of {size}")
    usable = []
    for start in range(0, len(samples), size):
        members = samples[start : start + size]
        if all(map(is_usable, members)):
            usable += members
        else:
            logger.warning(f"no reward, or log-probs that are not finite, for prompt {members[0].prompts[0]!r}")
    return usable


class ChosenPrompts:
    """OpenRLHF's iterator over the data for one step: more prompts are drawn than asked for, and some of them chosen.

    Each item is (data source, prompt, label, images), in lists of one.

    Args:
        items: the iterator over the data.
        count: prompts to generate for.
        candidates: prompts drawn for each of them.
        choose: takes the drawn prompts and how many to choose; returns the positions of the chosen, each once.

    Attributes:
        passed_over: prompts that were drawn and not chosen.
    """

    def __init__(
        self,
        items: Iterator[Any],
        count: int,
        candidates: int,
        choose: Callable[[Sequence[Prompt], int], Sequence[int]],
    ) -> None:
        drawn = list(zip(*_collect_prompt_batch(items, count * candidates)[:3], strict=True))
        prompts = [Prompt(text, label, images or None) for text, label, images in drawn]
        count = min(count, len(drawn))
        # All, where there are no more: nothing is to be chosen.
        chosen = list(choose(prompts, count)) if len(drawn) > count else list(range(count))
        if len(set(chosen)) != count or len(chosen) != count or not set(chosen) <= set(range(len(drawn))):
            raise ValueError(
                f"{count} of {len(drawn)} prompts were to be chosen, each once; the positions are {chosen}"
            )
        self.passed_over = len(drawn) - count
        self._items = iter(
            [(None, [text], [label], [images]) for text, label, images in map(drawn.__getitem__, chosen)]
        )

    def __next__(self) -> Any:
        return next(self._items)


class RecordedSamplesGenerator(SamplesGenerator):
    """OpenRLHF's generator, which also tells what its dynamic filtering dropped.

    Args:
        filtered: gets the samples of the groups that were dropped, in whole groups.
    """

    def __init__(self, *, filtered: list[Experience], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._filtered = filtered
        self._made: list[Experience] = []

    def _process_response_into_experience(self, response: dict[str, Any], **kwargs: Any) -> Experience:
        sample = super()._process_response_into_experience(response, **kwargs)
        self._made.append(sample)
        return sample

    def _generate_vllm(self, **kwargs: Any) -> Any:
        self._made = []
        accepted, *rest = super()._generate_vllm(**kwargs)
        kept = set(map(id, accepted))
        self._filtered += [sample for sample in self._made if id(sample) not in kept]
        return accepted, *rest


class AdaptedSamplesGenerator(SamplesGenerator):
    """OpenRLHF's generator, which keeps behaviour log-probs and can generate given prompts again.

    Args:
        along: called when a step's fresh prompts are dispatched: hard prompts to generate together with them.
        step: called to know the trainer step, for the seeds.
        candidates, choose: see `ChosenPrompts`.

    Attributes:
        passed_over: prompts that the last step drew and did not generate for.
    """

    def __init__(
        self,
        *,
        strategy: Any,
        along: Callable[[], Sequence[Prompt]],
        step: Callable[[], int],
        candidates: int = 1,
        choose: Callable[[Sequence[Prompt], int], Sequence[int]] = lambda prompts, count: range(count),
        **kwargs: Any,
    ) -> None:
        super().__init__(strategy=strategy, **kwargs)
        # OpenRLHF asks vLLM for log-probs when its IS correction is on: so it is, in this object's own view alone.
        self.args = copy.deepcopy(strategy.args)
        self.args.algo.advantage.is_correction_level = "token"
        self.vllm_engines = [SeededEngine(engine, self._next_seed) for engine in self.vllm_engines]
        self.along, self.step = along, step
        self.candidates, self.choose, self.passed_over = candidates, choose, 0
        self.rng_after_first_draw: torch.Tensor | None = None  # set on resume, see generate_samples
        self._kind = "evaluation"
        self._numbers = itertools.count()
        self._dispatched: dict[str, int] = {}
        self._together: list[Any] = []  # requests of the hard prompts dispatched along
        self._again: list[Experience] = []
        self.waited = 0.0  # seconds for hard prompts, after the fresh ones were done

    def _next_seed(self) -> int | None:
        """The next request's seed; None where the run need not be repeatable: vLLM samples faster without."""
        if not self.args.train.full_determinism_enable:
            return None
        return prompt_seed(self.args.train.seed, self.step(), self._kind, next(self._numbers))

    def _dispatch_as(self, kind: str, prompts: Sequence[Prompt], **kwargs: Any) -> list[Any]:
        """Send prompts to the engines, with the seeds of this kind."""
        before = self._kind, self._numbers
        self._kind, self._numbers = kind, itertools.count()
        refs = super()._dispatch_prompts_to_vllm(
            [prompt.text for prompt in prompts],
            [prompt.label for prompt in prompts],
            images=[prompt.images for prompt in prompts],
            **kwargs,
        )
        self._kind, self._numbers = before
        return refs

    def _dispatch_prompts_to_vllm(self, prompts: list[str], labels: list, **kwargs: Any) -> list:
        for prompt in prompts:
            self._dispatched.setdefault(prompt, len(self._dispatched))
        refs = super()._dispatch_prompts_to_vllm(prompts, labels, **kwargs)
        if self._kind == "fresh":
            hard = self.along()
            if hard:
                kwargs.pop("images", None)
                self._together = self._dispatch_as("reevaluated", hard, **kwargs)
        return refs

    def _process_response_into_experience(self, response: dict[str, Any], **kwargs: Any) -> Experience:
        reward, score = reward_of(response.get("reward")), reward_of(response.get("scores"))
        if reward is None or score is None:
            score = reward  # as OpenRLHF where there is none
        return super()._process_response_into_experience(response | {"reward": reward, "scores": score}, **kwargs)

    def _generate_vllm(self, dataloader_iter: Any, num_prompts: int, **kwargs: Any) -> Any:
        passed_over = 0
        if self._kind == "fresh" and self.candidates > 1:
            dataloader_iter = ChosenPrompts(dataloader_iter, num_prompts, self.candidates, self.choose)
            passed_over = self.passed_over = dataloader_iter.passed_over
        samples, consumed, exhausted = super()._generate_vllm(
            dataloader_iter=dataloader_iter, num_prompts=num_prompts, **kwargs
        )
        start = time.perf_counter()
        # Here, before OpenRLHF puts the engines to sleep.
        self._again, self._together = self._collect(self._together, **kwargs), []
        self.waited = time.perf_counter() - start
        return samples, consumed + passed_over, exhausted

    def _collect(self, refs: Sequence[Any], **kwargs: Any) -> list[Experience]:
        """The samples of the given requests, in order."""
        return [
            self._process_response_into_experience(response, **kwargs)
            for ref in tqdm(refs, desc="Re-evaluate hard prompts", disable=not refs)
            for response in ray.get(ref)
        ]

    @torch.no_grad()
    def generate_samples(self, **kwargs: Any) -> tuple[list[Experience], float | None, int, bool]:
        """As OpenRLHF's, with the groups in the order of their prompts instead of that in which they were finished."""
        self._dispatched = {}
        self._kind, self._numbers = "fresh", itertools.count()
        if self.rng_after_first_draw is not None:
            # OpenRLHF would make the iterator itself; a new iterator draws from this process's generator, which had
            # been done before the checkpoint.
            self._dataloader_iter, self._sample_buffer = iter(self.prompts_dataloader), []
            torch.set_rng_state(self.rng_after_first_draw)
            self.rng_after_first_draw = None
        try:
            samples, *rest = super().generate_samples(**kwargs)
        finally:
            self._kind, self._numbers = "evaluation", itertools.count()
        samples.sort(key=lambda sample: self._dispatched.get(sample.prompts[0], -1))
        return samples, *rest

    @property
    def exhausted(self) -> bool:
        """Whether OpenRLHF has seen the end of the data, so that the next samples are of another epoch."""
        return getattr(self, "_dataloader_iter", None) is None

    @torch.no_grad()
    def generate_eval_samples(self, **kwargs: Any) -> list[Experience]:
        """As OpenRLHF's, without the groups that have a response without reward: it could not average them."""
        return usable_groups(super().generate_eval_samples(**kwargs), kwargs["n_samples_per_prompt"])

    def taken_along(self) -> list[Experience]:
        """The samples of the hard prompts that were generated together with the last fresh ones: G each, in order."""
        again, self._again = self._again, []
        return again

    @torch.no_grad()
    def generate_again(self, prompts: Sequence[Prompt], **kwargs: Any) -> list[Experience]:
        """Samples of the given prompts with the weights the engines hold now: G each, in order."""
        if self.args.vllm.enable_sleep:
            batch_vllm_engine_call(self.vllm_engines, "wake_up")
        samples = self._collect(self._dispatch_as("reevaluated", prompts, **kwargs), **kwargs)
        if self.args.vllm.enable_sleep:
            batch_vllm_engine_call(self.vllm_engines, "sleep")
        return samples
