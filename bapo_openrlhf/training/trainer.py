"""OpenRLHF's PPO trainer with batch adaptation.

The trip of a group through one step: generated -> group -> filtered or stored -> batch -> log-probs -> review ->
experience -> advantage -> loss. OpenRLHF's trainer generates, and it updates the models. `train_step` does what lies
between.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.corrections import learning_rate_factor
from bapo_openrlhf.adapt.first_update import Clip, first_update
from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.adapt.ledger import Ledger, states_of
from bapo_openrlhf.adapt.monitor import composition, off_policy, replay_ages, shifts
from bapo_openrlhf.adapt.review import Review, review
from bapo_openrlhf.adapt.rewards import exact_rewards
from bapo_openrlhf.adapt.schedule import RolloutSchedule
from bapo_openrlhf.adapt.shift import Gap
from bapo_openrlhf.adapt.vocabulary import DROPPED
from bapo_openrlhf.flags.sizes import batch_arithmetic, run_steps
from bapo_openrlhf.training.ahead import AheadSamplesGenerator, SharedLoader
from bapo_openrlhf.training.contract import extends
from bapo_openrlhf.training.experience import AdaptedExperienceMaker, BatchToTrain, MadeExperience
from bapo_openrlhf.training.generated import GeneratedStep
from bapo_openrlhf.training.probe import ProbedTrainer
from bapo_openrlhf.training.recorder import Base
from bapo_openrlhf.training.rollout import AdaptedSamplesGenerator
from bapo_openrlhf.training.rollout_weights import RolloutWeights
from bapo_openrlhf.training.samples import by_request


class AdaptedPPOTrainer(ProbedTrainer):
    """OpenRLHF's trainer on batches that a method makes of fresh, re-evaluated and replayed groups.

    Attributes:
        ahead: Number of steps that generation is ahead of training; 0 in synchronous mode.
        step: Number of updates so far. The actor holds the weights of this step.
        generated: Number of groups generated so far.
        phase: What the trainer does now. The error of a run that fails names it.
        reviewed: The review of this step's batch, and with it the gap of engine and actor that was measured last.
    """

    def __init__(self, pretrain: str, strategy: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(pretrain, strategy, *args, **kwargs)
        adapt = self.args.adapt
        self.arithmetic = batch_arithmetic(self.args)
        self.method = adapt.make_method(self.arithmetic, seed=self.args.train.seed)
        evaluates = self.eval_dataloader is not None and math.isfinite(self.args.eval.steps)
        evaluate_every = int(self.args.eval.steps) if evaluates else 0
        self.ahead = adapt.steps_ahead(self.args.train)
        self.prompts_dataloader = SharedLoader(self.prompts_dataloader) if self.ahead else self.prompts_dataloader
        schedule = RolloutSchedule(
            adapt.rollout_delay, adapt.reevaluate_every, evaluate_every, self.args.run.gradient_probe, self.ahead
        )
        about = {"sleep": self.args.vllm.enable_sleep, "settle": lambda: self.samples_generator.wait()}
        self.rollout_weights = RolloutWeights(self.vllm_engines, self.actor_model_group, schedule, **about)
        self.ledger = Ledger()
        self.step = self.generated = 0
        self.phase = "starting"
        self.reviewed = Review.empty(Batch(), Gap())
        self.prompts_after_fresh: list[Prompt] = []  # hard prompts of this step that wait for today's weights
        self.samples_generator = self.generator_of(
            AheadSamplesGenerator if self.ahead else AdaptedSamplesGenerator,
            begin_step=self._begin_step,
            step=lambda: self.step,
            policy_step=lambda: self.rollout_weights.step,
            candidates=self.method.candidates,
            choose=lambda prompts, count: self.method.choose_prompts(self.step, prompts, count),
            first=self.method.first_responses,
            more=lambda rewards: self.method.more_responses([exact_rewards(own, adapt.rewards()) for own in rewards]),
        )
        self.experience_maker = AdaptedExperienceMaker(
            self.actor_model_group,
            self.critic_model_group,
            self.reward_model_group,
            self.reference_model_group,
            self.kl_ctl,
            strategy,
            self.tokenizer,
            reference=f"{self.args.actor.model_name_or_path} at temperature {self.args.rollout.temperature:g}",
        )

    @extends(Base)
    def get_max_steps(self) -> int:
        """Number of optimizer steps that the learning-rate schedule spans.

        It is the largest possible number, because a cosine would rise again after too small a number: every batch
        counts as a full one.
        """
        updates = self.arithmetic.optimizer_steps * self.args.train.max_epochs
        return run_steps(self.args, len(self.prompts_dataloader), self.method.candidates) * updates

    @extends(Base)
    def fit(self, global_step: int = 0) -> None:
        """Train. At the start the engines hold the actor's initial weights, which are those of step 0.

        Raises:
            RuntimeError: The run failed. The message names the step and the phase.
        """
        try:
            self.rollout_weights.set_up(self.args.ds.lora)
            if self.args.checked.resume_tag is None:
                self.rollout_weights.keep_if_needed()
            super().fit(global_step)
        except Exception as error:
            raise RuntimeError(f"step {self.step}, {self.phase}: {brief(error)}") from error

    @extends(Base)
    def broadcast_to_vllm(self) -> None:
        """Count the update, and sync the engines at multiples of v (Algorithm 1, lines 3-5).

        They are also synced if the actor's shift from the rollout policy was above --adapt.max_shift_rollout.
        OpenRLHF calls this after each update, and once when a run is resumed.
        """
        self.phase = "syncing weights"
        if self.resumed_engine_step is not None:
            self.resume_engines()
        else:
            self.step += 1
            limit = self.args.adapt.max_shift_rollout
            far = limit is not None and self.reviewed.rollout_shift > limit
            if self.rollout_weights.schedule.sync_due(self.step) or far:
                self.rollout_weights.sync(self.step)
                self.rollout_weights.keep_if_needed()
        self.phase = "finishing the step"

    @extends(Base)
    def evaluate(self, global_step: int, **generate_kwargs: Any) -> dict:
        """Evaluate today's policy as OpenRLHF does, and record the result."""
        self.phase = "evaluating"
        with self.rollout_weights.of_today(self.step, next_rollout=self.step):
            return super().evaluate(global_step, **generate_kwargs)

    def _begin_step(self) -> list[Prompt]:
        """The hard prompts to re-evaluate together with the fresh prompts that are generated in this step.

        If the engines do not hold today's weights, there are none: all are re-evaluated by themselves.
        """
        self.phase = "generating"
        prompts = self.method.begin_step(self.step)
        if self.rollout_weights.step == self.step:
            return prompts
        self.prompts_after_fresh += prompts
        return []

    @extends(Base)
    def train_step(self, rollout_samples: list[Any], global_step: int) -> tuple[dict, int]:
        """Algorithm 1, lines 7-18, on the samples that line 6 generated."""
        step, rollout, capacity = self.step, self.samples_generator.rollout, self.arithmetic.most_samples
        timing: dict[str, float] = {}
        along = self._begin_step() if self.ahead else []
        today = self._reevaluate(timing)
        if self.ahead:
            self.samples_generator.ask(step + self.ahead, along, **self.generate_kwargs)
        parts = [("fresh", rollout_samples, rollout.policy_step)]
        parts += [("reevaluated", rollout.hard_samples, rollout.policy_step), ("reevaluated", today, step)]
        size, staged = self.args.rollout.n_samples_per_prompt, self.method.first_responses
        made = GeneratedStep.of(
            [
                (source, by_request(samples, size if staged is None or source != "fresh" else None), policy_step)
                for source, samples, policy_step in parts
            ],
            first_uid=self.generated,
            step=step,
            reward_range=self.args.adapt.rewards(),
        )
        self.generated += len(made.recorded)
        failed = [len(group.samples) for group in made.failed]
        self.check_share(step + 1, "failed", len(failed), len(made.recorded), "gave no reward or no finite log-probs")

        pretrained = self.pretrain_critic(made.fresh)
        self.phase = "making the batch"
        with timed(timing, "timing/adapt"):
            self.method.unanswered([group.prompt for group in made.failed if group.source == "reevaluated"])
            batch = self.method.build_batch(step, made.fresh, made.reevaluated)
        if batch.responses > capacity:
            raise ValueError(
                f"{type(self.method).__name__} made a batch of {batch.responses} responses; it may hold at most "
                f"{capacity} (rollout.n_samples_per_prompt times adapt.batch_size, or rollout.batch_size)"
            )
        self.phase = "making experience"
        batch, experience, seconds = self._make_experience(batch)
        self.method.observe_distances(step, self.reviewed.distances)
        status, next_step = self._update(batch, experience, seconds, global_step)
        status |= pretrained

        counts, responses = self.ledger.settle(made.fresh + made.reevaluated, batch, failed=failed)
        if self.ledger.counts["generated"] != self.generated:
            raise RuntimeError(
                f"{self.generated} groups were generated, {self.ledger.counts['generated']} are accounted for"
            )
        status |= timing | self.method.metrics() | {f"groups/{state}": count for state, count in counts.items()}
        status["staleness/rollout_policy"] = step - rollout.policy_step
        status |= replay_ages(batch, step, self.rollout_weights.schedule.delay)
        status |= self.reviewed.gap.metrics(step)
        status |= composition(batch, capacity, len(made.reevaluated))
        status |= self.recorder.add_groups(next_step, made.recorded, states_of(batch), trained=status["tokens/trained"])
        status |= self.recorder.rewards(next_step, made.fresh)
        status |= {
            "groups/replayed": len(batch.replayed),
            "groups/unused": len(batch.unused),
            "responses/trained": batch.responses,
            "responses/replayed": sum(group.size for group in batch.replayed),
            "responses/dropped": responses[DROPPED],
            "reevaluation/added_seconds": rollout.added_seconds + timing.get("timing/reevaluation", 0.0),
            **self.samples_generator.metrics(),
        }
        return status, next_step

    def _reevaluate(self, timing: dict[str, float]) -> list[Any]:
        """Lines 12-15: samples from today's weights of the hard prompts that no rollout takes along."""
        prompts, self.prompts_after_fresh = self.prompts_after_fresh, []
        if not prompts:
            return []
        self.phase = "generating hard prompts again"
        next_rollout = self.step if self.ahead else self.step + 1
        with timed(timing, "timing/reevaluation"), self.rollout_weights.of_today(self.step, next_rollout=next_rollout):
            return self.samples_generator.reevaluate(prompts, **self.generate_kwargs)

    def _make_experience(self, batch: Batch) -> tuple[Batch, MadeExperience | None, float]:
        """The batch after its review, its experience, and the seconds it took; no experience if no group is left."""
        gap = self.reviewed.gap
        if not len(batch):
            self.reviewed = Review.empty(batch, gap)
            return batch, None, 0.0
        adapt, to_train = self.args.adapt, BatchToTrain.of(batch, self.step)
        start = time.perf_counter()
        passed = self.experience_maker.forward(to_train)
        limits = {"max_shift_fresh": adapt.max_shift_fresh, "max_shift_replayed": adapt.max_shift_replayed}
        found = self.reviewed = review(batch, passed.log_ratios, passed.sums, self.step, gap, **limits)
        what = "have log-probs under today's policy that are not finite"
        self.check_share(self.step + 1, "nonfinite", found.nonfinite, len(batch), what)
        experience = self.experience_maker.finish(passed, found.kept) if found.kept else None
        return found.batch, experience, time.perf_counter() - start

    def _update(
        self, batch: Batch, experience: MadeExperience | None, seconds: float, global_step: int
    ) -> tuple[dict, int]:
        """Line 18: OpenRLHF's update on the experience, which took so many seconds to make; no update without it."""
        if experience is None:
            # The step counts nevertheless, so that the multiples of v and m stay where they are.
            self.recorder.warn(global_step + 1, "skipped", "the batch is empty, so the update is skipped")
            self.broadcast_to_vllm()
            return {"skipped_update": 1}, global_step + 1
        step, probed, corrected = self.step, self.probe(batch, experience), self._correct(experience)
        status, next_step = super().train_step(experience.experiences, global_step)
        status["timing/make_experience"] = seconds
        status["tokens/reference_kept"] = experience.reference_kept
        status |= off_policy(batch, experience.log_ratios, self.method.constants(), self.args.adapt.eps)
        status |= shifts(batch, experience.sums, step, self.reviewed.gap)
        status |= probed | corrected
        actor = self.args.actor
        return status | first_update(experience.tokens, Clip(*actor.eps_clip_low_high, dual=actor.dual_clip)), next_step

    def _correct(self, experience: MadeExperience) -> dict[str, float]:
        """Send the factor on the learning rate to the actor. Returns metrics of the corrections."""
        done = {} if experience.masked is None else {"importance/masked_share": experience.masked}
        if self.args.adapt.scale_learning_rate:
            on_policy = [origin.on_policy for origin in experience.origins]  # their ratio starts at 1
            full = self.arithmetic.full_samples(len(on_policy))
            factor = learning_rate_factor(np.where(on_policy, 0.0, experience.log_ratios), full)
            ray.get(self.actor_model_group.async_run_method(method_name="scale_learning_rate", factor=factor))
            done["importance/learning_rate_factor"] = factor
        return done

    @extends(Base)
    def ppo_train(self, global_steps: int) -> dict:
        """OpenRLHF's optimizer steps.

        Raises:
            FloatingPointError: A gradient is not finite. The weights are spoilt, the last checkpoint is not.
        """
        self.phase = "training"
        status = super().ppo_train(global_steps)
        for name in ("actor_grad_norm", "critic_grad_norm"):
            if not math.isfinite(status.get(name, 0.0)):
                raise FloatingPointError(f"{name} is {status[name]}")
        return status


def brief(error: Exception) -> str:
    """The message of an error, without the remote traceback that Ray puts before it."""
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) and error.cause else error
    return f"{type(cause).__name__}: {str(cause).strip()}"


@contextmanager
def timed(timing: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds that the block takes to `timing[name]`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        timing[name] = timing.get(name, 0.0) + time.perf_counter() - start


AdaptedPPOTrainerActor = ray.remote(AdaptedPPOTrainer)
