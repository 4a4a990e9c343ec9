"""OpenRLHF's PPO trainer and generator without batch adaptation. They train as OpenRLHF does, and keep a record."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
from openrlhf.utils.logging_utils import init_logger

from bapo_openrlhf.adapt.rewards import UNIT
from bapo_openrlhf.flags.sizes import left_over
from bapo_openrlhf.host import extends
from bapo_openrlhf.training.trainer.critic import TOKENS
from bapo_openrlhf.training.trainer.engine_calls import EngineCalls
from bapo_openrlhf.training.trainer.generated import GeneratedGroup, generated_groups
from bapo_openrlhf.training.trainer.mended_trainer import Base, MendedTrainer
from bapo_openrlhf.training.trainer.samples import answers_of

logger = init_logger(__name__)


class RecordedSamplesGenerator(SamplesGenerator):
    """OpenRLHF's generator, which sends prompts in few calls.

    It adds the samples that its dynamic filtering drops to `filtered`, in whole groups.
    """

    def __init__(
        self, *, calls: EngineCalls, filtered: list[Experience], before_samples: Callable[[], None], **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self._calls, self._filtered, self._before_samples, self.exhausted = calls, filtered, before_samples, False
        self._converted: list[Experience] = []

    @extends(SamplesGenerator)
    def generate_samples(self, **kwargs: Any) -> Any:
        """Generate the samples of a step, as OpenRLHF does."""
        self._before_samples()
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
    def _generate_vllm(self, dataloader_iter: Any, num_prompts: int, **kwargs: Any) -> Any:
        """Generate, and report the samples that OpenRLHF did not accept."""
        # OpenRLHF asks for as many prompts of an evaluation as a training step has, and waits for them before the next.
        evaluated = getattr(self, "_eval_dataloader_iter", None)
        if self._calls.few_calls and evaluated is not None and dataloader_iter is evaluated:
            num_prompts = len(self.eval_dataloader)  # OpenRLHF makes it with one prompt in each batch
        self._converted = []
        accepted, *rest = super()._generate_vllm(dataloader_iter=dataloader_iter, num_prompts=num_prompts, **kwargs)
        kept = set(map(id, accepted))
        self._filtered += [sample for sample in self._converted if id(sample) not in kept]
        return accepted, *rest

    @extends(SamplesGenerator)
    def _dispatch_prompts_to_vllm(
        self, prompts: list[str], labels: list, *, images: list | None = None, **kwargs: Any
    ) -> list:
        """Send prompts to the engines. Returns Ray's reference to the responses of each."""
        columns = {"prompt": prompts, "label": labels, "images": images or [None] * len(prompts)}
        rows = zip(*columns.values(), strict=True)
        return self._calls.send([dict(zip(columns, row, strict=True)) for row in rows], **kwargs)


class RecordedPPOTrainer(MendedTrainer):
    """OpenRLHF's trainer, which also records what each step generated."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.filtered: list[Any] = []  # samples that dynamic filtering has dropped since the last step
        shared = ("strategy", "prompts_dataloader", "eval_dataloader", "tokenizer", "vllm_engines")
        options = {"calls": self.calls, "filtered": self.filtered, "before_samples": self.begin}
        self.samples_generator = RecordedSamplesGenerator(**{name: getattr(self, name) for name in shared}, **options)

    @extends(Base)
    def fit(self, global_step: int = 0) -> int | None:
        """Train, and return what `MendedTrainer.fit` does. The record also has a last batch that was filtered whole."""
        logger.info("without batch adaptation, engine and actor are not compared, nor is the first ratio")
        stopped = super().fit(global_step)
        if self.filtered and stopped is None:  # because OpenRLHF takes no step if all groups were dropped
            step = self.recorder.step + 1
            self.recorder.record.append(step, {"skipped_update": 1, **self._counts([], step)})
        return stopped

    @extends(Base)
    def train_step(self, rollout_samples: list[Any], global_step: int) -> tuple[dict, int]:
        """Update the models on the samples, and count them as a run with batch adaptation does.

        Raises:
            RuntimeError: The reward function or its endpoint gave no reward for a response. OpenRLHF needs each.
        """
        self.state.phase = "making experience"
        missing = sum(sample.rewards is None for sample in rollout_samples)
        if missing and self.experience_maker.reward_model_group is None:
            raise RuntimeError(
                f"{missing} of {len(rollout_samples)} responses have no reward; without batch adaptation each needs "
                f"one. The log of the rollout engine has each error{self.calls.failures_text()}"
            )
        status, next_step = super().train_step(rollout_samples, global_step)
        self.state.step, self.state.phase = next_step, "finishing the step"
        status |= self._counts(rollout_samples, next_step)
        if status["reward/fresh_mean"] is None:  # only OpenRLHF knows the rewards of a reward model
            status["reward/fresh_mean"] = status["rollout/reward_mean"]
        return status, next_step

    @extends(Base)
    def broadcast_to_vllm(self) -> None:
        """Send the weights to the engines, as OpenRLHF does."""
        self.state.phase = "syncing weights"
        super().broadcast_to_vllm()

    @extends(Base)
    def evaluate(self, global_step: int, **generate_kwargs: Any) -> dict:
        """Evaluate as OpenRLHF does, and record the result."""
        self.state.phase = "evaluating"
        numbers = super().evaluate(global_step, **generate_kwargs)
        self.recorder.add_evaluation(global_step, numbers)
        return numbers

    def _counts(self, samples: Sequence[Any], step: int) -> dict[str, Any]:
        """Record what was generated since the last step, also what was filtered. Returns its metrics."""
        size, capacity = self.args.rollout.n_samples_per_prompt, self.args.rollout.batch_size
        dropped_samples, self.filtered[:] = list(self.filtered), []
        first = self.recorder.rollouts // size
        kind = {
            "source": "fresh",
            "usable": lambda answers: answers.judged,
            "reward_range": self.args.adapt.rewards() or UNIT,
        }
        groups = generated_groups(answers_of(samples, size), first_uid=first, **kind)
        filtered = generated_groups(answers_of(dropped_samples, size), first_uid=first + len(groups), **kind)
        states = {group.uid: "fresh" for group in groups} | {group.uid: "filtered" for group in filtered}
        tokens = sum(group.tokens for group in groups)
        status: dict[str, Any] = self.recorder.add_groups(step, [*groups, *filtered], states, trained=tokens)
        rewards = [float(sample.rewards[0]) for sample in (*samples, *dropped_samples) if sample.rewards is not None]
        status["reward/fresh_mean"] = float(np.mean(rewards)) if rewards else None
        status["groups/generated"] = len(groups) + len(filtered)
        status["groups/fresh"], status["groups/filtered"] = len(groups), len(filtered)
        status |= filter_reasons(filtered)
        status["groups/reevaluated"] = status["groups/replayed"] = 0
        status["groups/capacity"], status["groups/capacity_used"] = capacity, len(groups) / capacity
        status["rollouts/left_over"] = left_over(self.args, len(samples))
        if samples:
            status["length/fresh"] = tokens / len(samples)
        if self.critic_model_group is not None:
            status[TOKENS] = tokens
        return status


def filter_reasons(groups: Sequence[GeneratedGroup]) -> dict[str, int]:
    """Why dynamic filtering dropped these groups, as `monitor.composition` says it for the fresh filter."""
    equal_groups = [group for group in groups if group.mean is not None and not group.has_signal]
    right_count = sum(group.mean >= 1 for group in equal_groups)
    return {
        "filtered/none_right": len(equal_groups) - right_count,
        "filtered/all_right": right_count,
        "filtered/by_draw": len(groups) - len(equal_groups),
    }


RecordedPPOTrainerActor = ray.remote(RecordedPPOTrainer)
