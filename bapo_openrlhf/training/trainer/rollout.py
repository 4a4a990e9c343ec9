"""Generation: fresh samples with behaviour log-probs, and re-evaluation of hard prompts."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import ray
import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator, _collect_prompt_batch
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call
from tqdm import tqdm

from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.adapt.rewards import UNIT, exact_rewards
from bapo_openrlhf.host import extends
from bapo_openrlhf.methods.base import Method, are_positions
from bapo_openrlhf.training.trainer.ask import Ask
from bapo_openrlhf.training.trainer.dispatch import DispatchingGenerator
from bapo_openrlhf.training.trainer.generated import usable_groups
from bapo_openrlhf.training.trainer.reward_model import RewardModel
from bapo_openrlhf.training.trainer.rollout_weights import RolloutWeights
from bapo_openrlhf.training.trainer.run_state import RunState
from bapo_openrlhf.training.trainer.samples import by_request, prompt_of, reward_of
from bapo_openrlhf.training.wire.responses import PREFIX, Prefix


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


def with_prefixes(extras: Iterable[Mapping[str, Any]], prompts: Sequence[Prompt]) -> Iterator[Mapping[str, Any]]:
    """What the requests of these prompts have of their own, and the prefix of each prompt that has one."""
    for extra, prompt in zip(extras, prompts, strict=False):
        prefix = {"prefix": Prefix(np.array(prompt.prefix, dtype=np.int32))} if prompt.prefix else {}
        yield {**extra, **prefix}


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

Round = tuple[list[Experience], int, bool]
"""What OpenRLHF's `_generate_vllm` returns: samples, how many prompts were drawn, and whether the data has ended. Here
the samples are in the order of their requests; OpenRLHF has them in the order in which they were finished."""


@dataclass
class Rollout:
    """What was generated for a step, in addition to the samples that OpenRLHF's loop gets.

    Attributes:
        weights_version: Number of updates behind the weights that generated it.
        hard_samples: Samples of the hard prompts that were generated together with the fresh ones: G each, in order.
        hard_prompts_left: Hard prompts that it did not take along.
        added_seconds: Time that the rollout waited for hard prompts after its fresh prompts were done.
        passed_over: Number of prompts that were drawn and not generated for.
        asked: Number of prompts that were generated for; with partial rollouts, those whose groups are complete.
        exhausted: Whether it has the last prompts of an epoch.
        seconds: Time that it took.
        numbers: Other metrics of it.
    """

    weights_version: int = 0
    hard_samples: Sequence[Experience] = ()
    hard_prompts_left: Sequence[Prompt] = ()
    added_seconds: float = 0.0
    passed_over: int = 0
    asked: int = 0
    exhausted: bool = False
    seconds: float = 0.0
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass
class Draft:
    """A rollout while it is generated. It goes through OpenRLHF's functions together with the `Ask` of fresh prompts.

    Attributes:
        step: Trainer step of the rollout.
        rollout: What there is of it so far.
        hard_requests: Ray's references to the responses to its hard prompts; None until these are sent.
        samples: Samples that OpenRLHF must not see while it generates, because it expects at most a rollout batch.
    """

    step: int
    rollout: Rollout
    hard_requests: list[Any] | None = None
    samples: list[Experience] = field(default_factory=list)


class AdaptedSamplesGenerator(DispatchingGenerator):
    """OpenRLHF's generator, which keeps behaviour log-probs and can re-evaluate hard prompts.

    Hard prompts are re-evaluated together with the fresh prompts of a step if the engines hold today's weights then.
    That needs no weight sync and fills the engines better. Otherwise `reevaluate` generates for them afterwards.

    Args:
        method: Chooses prompts, names hard prompts, and says how many responses it wants.
        state: Where the run is.
        rollout_weights: The weights in the engines.
        reward_model: Gives samples their rewards if they have none, while the engines rest.

    Attributes:
        rollout: The rollout of the samples that OpenRLHF's loop got last.
        hard_prompts_left: Hard prompts that no rollout has taken along yet. They go with the next one.
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
        method: Method,
        state: RunState,
        rollout_weights: RolloutWeights,
        reward_model: RewardModel,
        **kwargs: Any,
    ) -> None:
        super().__init__(strategy=strategy, **kwargs)
        self.method, self.state = method, state
        self.rollout_weights, self.reward_model = rollout_weights, reward_model
        self.reward_range = self.args.adapt.rewards() or UNIT
        self.rng_after_first_draw: torch.Tensor | None = None
        self.rollout = Rollout()
        self.hard_prompts_left: list[Prompt] = []
        self.evaluated = self.evaluation_failed = 0

    def _hard_prompts(self, draft: Draft) -> Sequence[Prompt]:
        """The hard prompts that a rollout takes along. They are asked for once, when its fresh prompts have been sent.

        If the engines do not hold today's weights, there are none: all are re-evaluated by themselves.
        """
        prompts, rollout = self.method.begin_step(draft.step), draft.rollout
        if rollout.weights_version == draft.step:
            return prompts
        rollout.hard_prompts_left = [*rollout.hard_prompts_left, *prompts]
        return []

    @extends(SamplesGenerator)
    def _dispatch_prompts_to_vllm(
        self, prompts: list[str], labels: list, *, ask: Ask, draft: Draft | None = None, **kwargs: Any
    ) -> list:
        """Send prompts to the engines, and then the hard prompts of the rollout."""
        train = self.args.train
        requests = ask.requests(train.seed if train.full_determinism_enable else None)
        refs = super()._dispatch_prompts_to_vllm(prompts, labels, requests=requests, **kwargs)
        if draft is not None and draft.hard_requests is None:
            kwargs = {name: kwargs[name] for name in kwargs if name not in ("images", "n_samples_per_prompt")}
            hard = Ask(self.HARD_KIND, draft.step)
            draft.hard_requests = self._send_prompts(self._hard_prompts(draft), ask=hard, **kwargs)
        return refs

    def _send_prompts(self, prompts: Sequence[Prompt], *, ask: Ask, **kwargs: Any) -> list[Any]:
        """Send these prompts to the engines. Returns Ray's references."""
        columns = [[getattr(prompt, name) for prompt in prompts] for name in ("text", "label", "images")]
        texts, labels, images = columns
        ask = replace(ask, extras=with_prefixes(ask.extras, prompts))
        return self._dispatch_prompts_to_vllm(texts, labels, images=images, ask=ask, **kwargs) if prompts else []

    @extends(SamplesGenerator)
    def _process_response_into_experience(self, response: dict[str, Any], **kwargs: Any) -> Experience:
        """Make a sample of a response. A reward that is not a finite number becomes None."""
        reward, score = reward_of(response.get("reward")), reward_of(response.get("scores"))
        if reward is None or score is None:
            score = reward  # OpenRLHF does the same if there is no score
        sample = super()._process_response_into_experience(response | {"reward": reward, "scores": score}, **kwargs)
        sample.index = [response["number"]]  # only to sort the samples; a batch gives them other positions
        if response.get(PREFIX):
            sample.info[PREFIX] = torch.tensor([response[PREFIX]])
        return sample

    @extends(SamplesGenerator)
    def _generate_vllm(
        self, dataloader_iter: Any, num_prompts: int, *, draft: Draft | None = None, **kwargs: Any
    ) -> Any:
        """Generate for prompts of the data, and collect the samples of the hard prompts that went with them."""
        if draft is None:
            return self._generate_prompts(dataloader_iter, num_prompts, **kwargs)
        generated = self._generate_fresh(dataloader_iter, num_prompts, draft=draft, **kwargs)
        start = time.perf_counter()
        # Collect them here, because OpenRLHF puts the engines to sleep after this.
        draft.rollout.hard_samples = self._collect(draft.hard_requests or [], **kwargs)
        draft.rollout.added_seconds = time.perf_counter() - start
        return generated

    def _generate_prompts(self, dataloader_iter: Any, num_prompts: int, **kwargs: Any) -> Round:
        """Generate for the next prompts of the data."""
        samples, *rest = super()._generate_vllm(dataloader_iter=dataloader_iter, num_prompts=num_prompts, **kwargs)
        return sorted(samples, key=lambda sample: sample.index), *rest

    def _generate_fresh(
        self, dataloader_iter: Any, num_prompts: int, *, ask: Ask, draft: Draft, **kwargs: Any
    ) -> Round:
        """Generate for the next fresh prompts of the data, which are chosen first if there are more."""
        passed_over, ended, method = 0, False, self.method
        if method.candidates > 1:
            choose = partial(method.choose_prompts, draft.step)
            chosen = chosen_prompts(dataloader_iter, num_prompts, method.candidates, choose)
            dataloader_iter, passed_over, ended = chosen
            draft.rollout.passed_over += passed_over
        first = {} if method.first_responses is None else {"n_samples_per_prompt": method.first_responses}
        options = {"ask": ask, "draft": draft, **kwargs, **first}
        samples, consumed, exhausted = self._generate_prompts(dataloader_iter, num_prompts, **options)
        if first:
            samples = self._generate_more(samples, ask, **kwargs)
        return samples, consumed + passed_over, exhausted or ended

    def _generate_more(self, samples: list[Experience], ask: Ask, **kwargs: Any) -> list[Experience]:
        """The samples, and more to the prompts for which the method asks, in stages. They are in the order of prompts.

        Raises:
            ValueError: The method asks for more than G responses to a prompt.
        """
        most = self.args.rollout.n_samples_per_prompt
        for stage in itertools.count(1):
            groups = [group for group in by_request(samples) if all(one.rewards is not None for one in group)]
            rewards = [exact_rewards([float(one.rewards[0]) for one in group], self.reward_range) for group in groups]
            counts = list(self.method.more_responses(rewards))
            sizes = [len(group) + count for group, count in zip(groups, counts, strict=True)]
            if max(sizes, default=0) > most or min(counts, default=0) < 0:
                raise ValueError(f"groups of {sizes} responses were asked for; each may have at most {most}")
            if not any(counts):
                return samples
            refs = []
            for count in sorted(set(counts) - {0}):
                asked = [group[0] for group, wanted in zip(groups, counts, strict=True) if wanted == count]
                more = Ask(f"{ask.kind} {stage}", ask.step, iter([one.index[0] for one in asked]))
                options = {"ask": more, **kwargs, "n_samples_per_prompt": count}
                refs += self._send_prompts(list(map(prompt_of, asked)), **options)
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
        self.rollout = Rollout(self.rollout_weights.weights_version, hard_prompts_left=self.hard_prompts_left)
        samples = self._generate_rollout(Draft(self.state.step, self.rollout), **kwargs)
        self.hard_prompts_left = [] if samples[0] else self.hard_prompts_left
        self.reward_model.score([*samples[0], *self.rollout.hard_samples])
        return samples

    @torch.no_grad()
    def _generate_rollout(self, draft: Draft, **kwargs: Any) -> Samples:
        """What OpenRLHF's loop gets for a trainer step. The draft gets what else there is of the rollout."""
        start, rollout = time.perf_counter(), draft.rollout
        if self.rng_after_first_draw is not None:
            # Creating the iterator consumes random numbers. The original run did so before the checkpoint, so create
            # it first, then restore the generator.
            self._dataloader_iter, self._sample_buffer = iter(self.prompts_dataloader), []
            torch.set_rng_state(self.rng_after_first_draw)
            self.rng_after_first_draw = None
        ask = Ask("fresh", draft.step)
        samples, rate, drawn, exhausted = super().generate_samples(ask=ask, draft=draft, **kwargs)
        samples = [*samples, *draft.samples]
        rollout.asked = len(by_request(samples)) + len(by_request(rollout.hard_samples))
        rollout.exhausted, rollout.seconds = exhausted, time.perf_counter() - start
        return samples, rate, drawn, exhausted

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
        samples = super().generate_eval_samples(ask=Ask("evaluation", self.state.step), **kwargs)
        self.reward_model.score(samples)
        groups = by_request(samples, kwargs["n_samples_per_prompt"])
        usable = usable_groups(groups)
        self.evaluated, self.evaluation_failed = len(groups), len(groups) - len(usable)
        return list(itertools.chain(*usable))

    @torch.no_grad()
    def reevaluate(self, prompts: Sequence[Prompt], kind: str = "reevaluated", **kwargs: Any) -> list[Experience]:
        """Samples of given prompts from the weights that the engines hold now: G each, in order."""
        if self.args.vllm.enable_sleep:
            batch_vllm_engine_call(self.vllm_engines, "wake_up")
        samples = self._collect(self._send_prompts(prompts, ask=Ask(kind, self.state.step), **kwargs), **kwargs)
        if self.args.vllm.enable_sleep:
            batch_vllm_engine_call(self.vllm_engines, "sleep")
        self.reward_model.score(samples)
        return samples
