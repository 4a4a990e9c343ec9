"""OpenRLHF's PPO trainer and generator without batch adaptation. They train as OpenRLHF does, and keep a record."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
from openrlhf.utils.logging_utils import init_logger

from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.adapt.rewards import UNIT
from bapo_openrlhf.flags.sizes import left_over
from bapo_openrlhf.host import extends
from bapo_openrlhf.record.run_record import METRICS, append_rows
from bapo_openrlhf.training.trainer.critic import TOKENS
from bapo_openrlhf.training.trainer.engine_calls import EngineCalls
from bapo_openrlhf.training.trainer.generated import GeneratedGroup, generated_groups
from bapo_openrlhf.training.trainer.mended_trainer import Base, MendedTrainer
from bapo_openrlhf.training.trainer.samples import Answers, generated_response

logger = init_logger(__name__)


class RecordedSamplesGenerator(SamplesGenerator):
    """OpenRLHF's generator, which sends prompts in few calls.

    It adds what it generates for a step to `accepted`, or to `filtered` if dynamic filtering drops it. The record takes
    both.
    """

    def __init__(self, *, calls: EngineCalls, before_samples: Callable[[], None], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._calls, self._before_samples, self.exhausted = calls, before_samples, False
        self.accepted, self.filtered = list[Answers](), list[Answers]()
        self._converted: list[tuple[Experience, dict[str, Any]]] = []  # those of a prompt in a row

    @extends(SamplesGenerator)
    def generate_samples(self, **kwargs: Any) -> Any:
        """Generate the samples of a step, as OpenRLHF does."""
        self._before_samples()
        samples = super().generate_samples(**kwargs)
        self.exhausted = samples[-1]
        return samples

    @extends(SamplesGenerator)
    def _process_response_into_experience(self, response: dict[str, Any], **kwargs: Any) -> Experience:
        """Make a sample of a response, and remember both."""
        sample = super()._process_response_into_experience(response, **kwargs)
        self._converted.append((sample, response))
        return sample

    @extends(SamplesGenerator)
    def _generate_vllm(self, dataloader_iter: Any, num_prompts: int, **kwargs: Any) -> Any:
        """Generate, and keep what was generated for training for the record."""
        # OpenRLHF asks for as many prompts of an evaluation as a training step has, and waits for them before the next.
        evaluates = dataloader_iter is getattr(self, "_eval_dataloader_iter", None)
        if self._calls.few_calls and evaluates:
            num_prompts = len(self.eval_dataloader)  # OpenRLHF makes it with one prompt in each batch
        accepted, *rest = super()._generate_vllm(dataloader_iter=dataloader_iter, num_prompts=num_prompts, **kwargs)
        converted, self._converted = self._converted, []
        if evaluates:
            return accepted, *rest
        size, accepted_ids = self.args.rollout.n_samples_per_prompt, set(map(id, accepted))
        for start in range(0, len(converted), size):
            (sample, answer), *_ = of_prompt = converted[start : start + size]
            prompt = Prompt(answer["prompt"], answer["label"], answer["images"] or None)
            answers = Answers(prompt, [generated_response(response, **kwargs) for _, response in of_prompt])
            (self.accepted if id(sample) in accepted_ids else self.filtered).append(answers)
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
        names = ("strategy", "prompts_dataloader", "eval_dataloader", "tokenizer", "vllm_engines")
        shared = {name: getattr(self, name) for name in names}
        self.samples_generator = RecordedSamplesGenerator(calls=self.calls, before_samples=self.begin, **shared)

    @extends(Base)
    def fit(self, global_step: int = 0) -> int | None:
        """Train, and return what `MendedTrainer.fit` does. The record also has a last batch that was filtered whole."""
        logger.info("without batch adaptation, engine and actor are not compared, nor is the first ratio")
        stopped = super().fit(global_step)
        if self.samples_generator.filtered and stopped is None:  # OpenRLHF takes no step if all groups were dropped
            step = self.recorder.step + 1
            append_rows(self.recorder.folder, METRICS, step, [{"skipped_update": 1, **self._counts(step)}])
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
        status |= self._counts(next_step)
        if self.experience_maker.reward_model_group is not None:  # only OpenRLHF knows its rewards
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

    def _counts(self, step: int) -> dict[str, Any]:
        """Record what was generated since the last step, also what was filtered. Returns its metrics."""
        size, capacity = self.args.rollout.n_samples_per_prompt, self.args.rollout.batch_size
        generator = self.samples_generator
        accepted, generator.accepted = generator.accepted, []
        dropped, generator.filtered = generator.filtered, []
        samples = len(accepted) * size
        first = self.recorder.rollouts // size
        kind = {
            "source": "fresh",
            "usable": lambda answers: answers.judged,
            "reward_range": self.args.adapt.rewards() or UNIT,
        }
        groups = generated_groups(accepted, first_uid=first, **kind)
        filtered = generated_groups(dropped, first_uid=first + len(groups), **kind)
        states = {group.uid: "fresh" for group in groups} | {group.uid: "filtered" for group in filtered}
        tokens = sum(group.tokens for group in groups)
        status: dict[str, Any] = self.recorder.add_groups(step, [*groups, *filtered], states, trained=tokens)
        rewards = [reward for each in (*accepted, *dropped) for reward in each.rewards]
        status["reward/fresh_mean"] = float(np.mean(rewards))
        status["groups/generated"] = len(groups) + len(filtered)
        status["groups/fresh"], status["groups/filtered"] = len(groups), len(filtered)
        status |= filter_reasons(filtered)
        status["groups/reevaluated"] = status["groups/replayed"] = 0
        status["groups/capacity"], status["groups/capacity_used"] = capacity, len(groups) / capacity
        status["rollouts/left_over"] = left_over(self.args, samples)
        if samples:
            status["length/fresh"] = tokens / samples
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
