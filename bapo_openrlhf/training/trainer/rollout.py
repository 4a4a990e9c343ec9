"""Generation: fresh samples with behaviour log-probs, re-evaluation of hard prompts, and a seed for each request."""

import hashlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator, _collect_prompt_batch
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call
from tqdm import tqdm

from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.host import extends
from bapo_openrlhf.methods.base import are_positions
from bapo_openrlhf.training.trainer.dispatch import DispatchingGenerator
from bapo_openrlhf.training.trainer.generated import usable_groups
from bapo_openrlhf.training.trainer.samples import by_request


def prompt_seed(seed: int, step: int, kind: str, number: int) -> int:
    """Seed of the `number`-th prompt that a step dispatches. It is the same in every run and for every engine."""
    digest = hashlib.blake2b(f"{seed}/{step}/{kind}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def reward_of(value: Any) -> float | None:
    """A reward function's answer for one response, rounded to float32 as in OpenRLHF; None if it is not finite."""
    try:
        numbers = torch.as_tensor(value, dtype=torch.float32).flatten().tolist()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return numbers[0] if len(numbers) == 1 and math.isfinite(numbers[0]) else None


def chosen_prompts(
    items: Iterator[Any], count: int, candidates: int, choose: Callable[[Sequence[Prompt], int], Sequence[int]]
) -> tuple[Iterator[Any], int, bool]:
    """Draw more prompts from the data than a step generates for, and choose some of them.

    Args:
        items: OpenRLHF's iterator over the data.
        count: Number of prompts to generate for.
        candidates: Number of prompts to draw for each of them.
        choose: Called with the drawn prompts and the number of prompts to choose. Returns the positions of the chosen
            prompts, each once.

    Returns:
        The chosen prompts in the form of `items`: (data source, prompt, label, images), in lists of one. Then the
        number of prompts that were drawn and not chosen, and whether the data has ended.

    Raises:
        ValueError: `choose` returned a wrong number of positions, one position twice, or one that does not exist.
    """
    *columns, ended = _collect_prompt_batch(items, count * candidates)
    drawn = list(zip(*columns, strict=True))
    count = min(count, len(drawn))
    chosen = list(range(count))
    if len(drawn) > count:  # otherwise the data ends here, and all drawn prompts are taken
        chosen = list(choose([Prompt(text, label, images or None) for text, label, images in drawn], count))
    if not are_positions(chosen, count, len(drawn)):
        raise ValueError(f"{count} of {len(drawn)} prompts were to be chosen, each once; the positions are {chosen}")
    return iter([(None, *([part] for part in drawn[place])) for place in chosen]), len(drawn) - count, ended


class RecordedSamplesGenerator(DispatchingGenerator):
    """OpenRLHF's generator, which also reports the samples that its dynamic filtering drops.

    Args:
        filtered: List to which the samples of the dropped groups are added, in whole groups.

    Attributes:
        exhausted: Whether the last samples have the last prompts of an epoch.
    """

    def __init__(self, *, filtered: list[Experience], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._filtered, self.exhausted = filtered, False
        self._converted: list[Experience] = []

    @extends(SamplesGenerator)
    def generate_samples(self, **kwargs: Any) -> Any:
        """Generate the samples of a step, as OpenRLHF does."""
        self.before_samples()
        samples = super().generate_samples(**kwargs)
        self.exhausted = samples[-1]
        return samples

    @extends(SamplesGenerator)
    def _process_response_into_experience(self, response: dict[str, Any], **kwargs: Any) -> Experience:
        """Make a sample of a response, and remember it."""
        sample = super()._process_response_into_experience(response, **kwargs)
        self._converted.append(sample)
        return sample

    @extends(SamplesGenerator)
    def _generate_vllm(self, **kwargs: Any) -> Any:
        """Generate, and report the samples that OpenRLHF did not accept."""
        self._converted = []
        accepted, *rest = super()._generate_vllm(**kwargs)
        kept = set(map(id, accepted))
        self._filtered += [sample for sample in self._converted if id(sample) not in kept]
        return accepted, *rest


Samples = tuple[list[Experience], float | None, int, bool]
"""What OpenRLHF's `generate_samples` returns: samples, the responses of prompts that passed dynamic filtering for each
100 prompts, how many prompts were drawn, and whether the data of the epoch has ended."""


@dataclass(frozen=True)
class Rollout:
    """What was generated for a step, in addition to the samples that OpenRLHF's loop gets.

    Attributes:
        weights_version: Number of updates behind the weights that generated it.
        hard_samples: Samples of the hard prompts that were generated together with the fresh ones: G each, in order.
        added_seconds: Time that the rollout waited for hard prompts after its fresh prompts were done.
        passed_over: Number of prompts that were drawn and not generated for.
        asked: Number of prompts that were generated for; with partial rollouts, those whose groups are complete.
        exhausted: Whether it has the last prompts of an epoch.
        seconds: Time that it took.
        numbers: Other metrics of it.
    """

    weights_version: int = 0
    hard_samples: Sequence[Experience] = ()
    added_seconds: float = 0.0
    passed_over: int = 0
    asked: int = 0
    exhausted: bool = False
    seconds: float = 0.0
    numbers: Mapping[str, float] = field(default_factory=dict)


class AdaptedSamplesGenerator(DispatchingGenerator):
    """OpenRLHF's generator, which keeps behaviour log-probs and can re-evaluate hard prompts.

    Hard prompts are re-evaluated together with the fresh prompts of a step if the engines hold today's weights then.
    That needs no weight sync and fills the engines better. Otherwise `reevaluate` generates for them afterwards.

    Args:
        begin_step: Called when the fresh prompts of a step have been dispatched. Returns the hard prompts to
            re-evaluate together with them.
        step: Returns the trainer step, for the seeds.
        weights_version: Returns the number of updates behind the weights that the engines hold.
        candidates: See `chosen_prompts`.
        choose: See `chosen_prompts`.
        first: Number of responses to each fresh prompt that are generated first; None for all.
        more: Called with the rewards of the responses to each prompt without a failed one, if `first` is set. Returns
            how many more to generate for each.
        score: Called with samples that were generated, while the engines rest. Gives them rewards if they have none.

    Attributes:
        rollout: The rollout of the samples that OpenRLHF's loop got last.
        evaluated, evaluation_failed: Groups of the last evaluation, and how many of them have no usable rewards.
        rng_after_first_draw: State of torch's generator of random numbers, set when a run is resumed. The first draw
            of prompts makes it again.
    """

    HARD_KIND = "reevaluated"  # kind of the hard prompts that a rollout takes along, for their seeds
    log_probs = True  # a stored response needs them

    def __init__(
        self,
        *,
        strategy: Any,
        begin_step: Callable[[], Sequence[Prompt]],
        step: Callable[[], int],
        weights_version: Callable[[], int] = lambda: 0,
        candidates: int = 1,
        choose: Callable[[Sequence[Prompt], int], Sequence[int]] = lambda prompts, count: range(count),
        first: int | None = None,
        more: Callable[[Sequence[Sequence[float]]], Sequence[int]] = lambda rewards: [0] * len(rewards),
        score: Callable[[Sequence[Experience]], None] = lambda samples: None,
        **kwargs: Any,
    ) -> None:
        super().__init__(strategy=strategy, **kwargs)
        self.begin_step, self.step, self.weights_version = begin_step, step, weights_version
        self.candidates, self.choose = candidates, choose
        self.first, self.more, self.score = first, more, score
        self.rng_after_first_draw: torch.Tensor | None = None
        self.rollout = Rollout()
        self.evaluated = self.evaluation_failed = 0
        self._passed_over, self._added_seconds, self._asked = 0, 0.0, 0
        # Kind of the prompts that are dispatched now, the step that asks for them, and their numbers: for their seeds.
        self._kind, self._step = "evaluation", 0
        self._numbers = itertools.count()
        self._hard_prompts = begin_step
        self._hard_requests: list[Any] = []  # requests for hard prompts that were dispatched with the fresh ones
        self._hard_samples: list[Experience] = []  # their samples

    def _next_number(self) -> dict[str, int | None]:
        """The next request's number and seed.

        The number comes back with the responses, because they arrive in the order in which they are finished. The seed
        is None without full determinism. Then vLLM has one random stream for all requests, in the order in which they
        arrive, which is faster. Such a run cannot be repeated.
        """
        number, train = next(self._numbers), self.args.train
        seeds = train.full_determinism_enable
        return {"number": number, "seed": prompt_seed(train.seed, self._step, self._kind, number) if seeds else None}

    def _dispatch_hard_prompts(self, prompts: Sequence[Prompt], kind: str = "reevaluated", **kwargs: Any) -> list[Any]:
        """Send prompts to the engines, with seeds of their own for each kind. Returns Ray's references."""
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

    @extends(SamplesGenerator)
    def _dispatch_prompts_to_vllm(self, prompts: list[str], labels: list, **kwargs: Any) -> list:
        """Send prompts to the engines, and then the hard prompts of the step."""
        refs = super()._dispatch_prompts_to_vllm(prompts, labels, **kwargs)
        if self._kind == "fresh":
            hard, self._hard_prompts = self._hard_prompts(), list  # they are asked for once in a step
            self._asked += len(prompts) + len(hard)
            if hard:
                kwargs = {name: kwargs[name] for name in kwargs if name not in ("images", "n_samples_per_prompt")}
                self._hard_requests = self._dispatch_hard_prompts(hard, self.HARD_KIND, **kwargs)
        return refs

    @extends(SamplesGenerator)
    def _process_response_into_experience(self, response: dict[str, Any], **kwargs: Any) -> Experience:
        """Make a sample of a response. A reward that is not a finite number becomes None."""
        reward, score = reward_of(response.get("reward")), reward_of(response.get("scores"))
        if reward is None or score is None:
            score = reward  # OpenRLHF does the same if there is no score
        sample = super()._process_response_into_experience(response | {"reward": reward, "scores": score}, **kwargs)
        sample.index = [response["number"]]  # only to sort the samples; a batch gives them other positions
        return sample

    @extends(SamplesGenerator)
    def _generate_vllm(self, dataloader_iter: Any, num_prompts: int, **kwargs: Any) -> Any:
        """Generate for prompts of the data, and collect the samples of the hard prompts that went with them."""
        generated = self._generate_prompts(dataloader_iter, num_prompts, **kwargs)
        start = time.perf_counter()
        # Collect them here, because OpenRLHF puts the engines to sleep after this.
        self._hard_samples, self._hard_requests = self._collect(self._hard_requests, **kwargs), []
        self._added_seconds = time.perf_counter() - start
        return generated

    def _generate_prompts(
        self, dataloader_iter: Any, num_prompts: int, **kwargs: Any
    ) -> tuple[list[Experience], int, bool]:
        """Generate for the next prompts of the data, which are chosen first if there are more.

        Returns:
            The samples in the order of their requests; OpenRLHF has them in the order in which they were finished. Then
            the number of prompts that were drawn, and whether the data has ended.
        """
        passed_over, ended = 0, False
        if self._kind == "fresh" and self.candidates > 1:
            chosen = chosen_prompts(dataloader_iter, num_prompts, self.candidates, self.choose)
            dataloader_iter, passed_over, ended = chosen
            self._passed_over += passed_over
        staged = self._kind == "fresh" and self.first is not None
        samples, consumed, exhausted = super()._generate_vllm(
            dataloader_iter=dataloader_iter,
            num_prompts=num_prompts,
            **kwargs | ({"n_samples_per_prompt": self.first} if staged else {}),
        )
        samples.sort(key=lambda sample: sample.index)
        if staged:
            samples = self._generate_more(samples, **kwargs)
        return samples, consumed + passed_over, exhausted or ended

    def _generate_more(self, samples: list[Experience], **kwargs: Any) -> list[Experience]:
        """The samples, and more to the prompts for which the method asks, in stages. They are in the order of prompts.

        Raises:
            ValueError: The method asks for more than G responses to a prompt.
        """
        kind, numbers, most = self._kind, self._numbers, self.args.rollout.n_samples_per_prompt
        for stage in itertools.count(1):
            groups = [group for group in by_request(samples) if all(one.rewards is not None for one in group)]
            counts = list(self.more([[float(one.rewards[0]) for one in group] for group in groups]))
            sizes = [len(group) + count for group, count in zip(groups, counts, strict=True)]
            if max(sizes, default=0) > most or min(counts, default=0) < 0:
                raise ValueError(f"groups of {sizes} responses were asked for; each may have at most {most}")
            if not any(counts):
                return samples
            refs = []
            for count in sorted(set(counts) - {0}):
                asked = [group[0] for group, wanted in zip(groups, counts, strict=True) if wanted == count]
                self._kind, self._numbers = f"{kind} {stage}", iter([one.index[0] for one in asked])
                refs += self._dispatch_prompts_to_vllm(
                    [one.prompts[0] for one in asked],
                    [one.labels[0] for one in asked],
                    images=[one.images[0] for one in asked],
                    **kwargs | {"n_samples_per_prompt": count},
                )
            self._kind, self._numbers = kind, numbers
            samples = sorted([*samples, *self._collect(refs, **kwargs)], key=lambda sample: sample.index)

    def _collect(self, refs: Sequence[Any], **kwargs: Any) -> list[Experience]:
        """The samples of the given requests, in order."""
        return [
            self._process_response_into_experience(response, **kwargs)
            for ref in tqdm(refs, desc="Generate more responses", disable=not refs)
            for response in ray.get(ref)
        ]

    @extends(SamplesGenerator)
    def generate_samples(self, **kwargs: Any) -> Samples:
        """Generate the fresh samples of a step. Groups are in the order of their prompts."""
        self.before_samples()
        samples, self.rollout = self._generate_rollout(self.step(), self.weights_version(), self.begin_step, **kwargs)
        self.score([*samples[0], *self.rollout.hard_samples])
        return samples

    @torch.no_grad()
    def _generate_rollout(
        self, step: int, weights_version: int, hard_prompts: Callable[[], Sequence[Prompt]], **kwargs: Any
    ) -> tuple[Samples, Rollout]:
        """What OpenRLHF's loop gets for a trainer step, and what else there is of it."""
        start, self._hard_prompts = time.perf_counter(), hard_prompts
        self._kind, self._step, self._numbers = "fresh", step, itertools.count()
        self._asked = self._passed_over = 0
        if self.rng_after_first_draw is not None:
            # Creating the iterator consumes random numbers. The original run did so before the checkpoint, so create
            # it first, then restore the generator.
            self._dataloader_iter, self._sample_buffer = iter(self.prompts_dataloader), []
            torch.set_rng_state(self.rng_after_first_draw)
            self.rng_after_first_draw = None
        try:
            batch = super().generate_samples(**kwargs)
        finally:
            self._kind, self._numbers = "evaluation", itertools.count()
        hard, self._hard_samples = self._hard_samples, []
        numbers = {"added_seconds": self._added_seconds, "passed_over": self._passed_over, "asked": self._asked}
        seconds = time.perf_counter() - start
        return batch, Rollout(weights_version, hard, **numbers, exhausted=batch[-1], seconds=seconds)

    def wait(self) -> None:
        """Wait until all that was asked for is generated. Here a rollout is generated when it is asked for."""

    def metrics(self) -> dict[str, float]:
        """Numbers of the last step for the log."""
        return {"prompts/passed_over": self.rollout.passed_over, **self.rollout.numbers}

    def unfinished(self) -> list[dict[str, Any]]:
        """The groups in flight that go on in the next step, as plain data and tensors. Here there are none."""
        return []

    @property
    def exhausted(self) -> bool:
        """Whether the last rollout has the last prompts of an epoch."""
        return self.rollout.exhausted

    @property
    def epoch_done(self) -> bool:
        """Whether OpenRLHF has seen the end of the data. The next samples then belong to another epoch."""
        return getattr(self, "_dataloader_iter", None) is None

    @torch.no_grad()
    @extends(SamplesGenerator)
    def generate_eval_samples(self, **kwargs: Any) -> list[Experience]:
        """Generate for the evaluation. Groups without usable rewards are left out: OpenRLHF cannot average them."""
        self._step, self._numbers = self.step(), itertools.count()
        samples = super().generate_eval_samples(**kwargs)
        self.score(samples)
        groups = by_request(samples, kwargs["n_samples_per_prompt"])
        usable = usable_groups(groups)
        self.evaluated, self.evaluation_failed = len(groups), len(groups) - len(usable)
        return list(itertools.chain(*usable))

    @torch.no_grad()
    def reevaluate(self, prompts: Sequence[Prompt], kind: str = "reevaluated", **kwargs: Any) -> list[Experience]:
        """Samples of given prompts from the weights that the engines hold now: G each, in order."""
        self._step = self.step()
        if self.args.vllm.enable_sleep:
            batch_vllm_engine_call(self.vllm_engines, "wake_up")
        samples = self._collect(self._dispatch_hard_prompts(prompts, kind, **kwargs), **kwargs)
        if self.args.vllm.enable_sleep:
            batch_vllm_engine_call(self.vllm_engines, "sleep")
        self.score(samples)
        return samples
