"""OpenRLHF's PPO trainer with batch adaptation.

OpenRLHF's `fit` generates (Algorithm 1, line 6), calls `train_step`, and saves. `train_step` reads from top to bottom:
hard prompts generated again -> groups -> batch -> log-probs -> review -> experience -> update -> sync -> account. The
hooks of OpenRLHF stand below it.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import ray
from openrlhf.trainer.ppo_utils.experience import Experience

from bapo_openrlhf.adapt.batch import Batch, without_silent
from bapo_openrlhf.adapt.corrections import learning_rate_factor
from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.adapt.review import Review
from bapo_openrlhf.flags.checked import signal_between
from bapo_openrlhf.flags.rule import Flags
from bapo_openrlhf.flags.sizes import actor_steps, batch_arithmetic
from bapo_openrlhf.host import extends
from bapo_openrlhf.training.trainer.accounts import StepAccounts
from bapo_openrlhf.training.trainer.checkpoints import WholeCheckpoints
from bapo_openrlhf.training.trainer.critic import CRITIC_ONLY, TOKENS, CriticTraining
from bapo_openrlhf.training.trainer.dealing import skipped_samples
from bapo_openrlhf.training.trainer.demonstrations import Demonstrations, Solutions
from bapo_openrlhf.training.trainer.experience import BatchExperience, ExperienceMaker, origins_of
from bapo_openrlhf.training.trainer.fresh import InParts, OneRound, Rounds, TrainingPrompts
from bapo_openrlhf.training.trainer.generator import Generator, RewardModel
from bapo_openrlhf.training.trainer.mended_trainer import Base, MendedTrainer
from bapo_openrlhf.training.trainer.probe import GradientProbe
from bapo_openrlhf.training.trainer.proof import Proof
from bapo_openrlhf.training.trainer.rollout import Rollout
from bapo_openrlhf.training.trainer.rollout_weights import RolloutWeights
from bapo_openrlhf.training.wire.packing import is_demonstration

MOVES = {"actor_lr", "demonstrations/cross_entropy"}  # metrics of a step whose update moved the actor


class AdaptedPPOTrainer(MendedTrainer):
    """OpenRLHF's trainer on batches that a method makes of fresh, re-evaluated and replayed groups."""

    def __init__(self, *arguments: Any, **kwargs: Any) -> None:
        """Make what the hooks and `train_step` call. Each part gets what it needs, and knows no trainer."""
        super().__init__(*arguments, **kwargs)
        args, adapt, state, self.ledger = self.args, self.args.adapt, self.state, Ledger()
        actor, critic, pad = self.actor_model_group, self.critic_model_group, self.tokenizer.pad_token_id
        state.reward_range = adapt.rewards()
        self.arithmetic = batch_arithmetic(args)
        self.method = adapt.make_method(self.arithmetic, args.train.seed, signal_between(args))
        self.prompts_dataloader = data = TrainingPrompts(self.prompts_dataloader)
        delay, sleep = adapt.rollout_delay, args.vllm.enable_sleep
        self.rollout_weights = RolloutWeights(self.vllm_engines, actor, delay, sleep=sleep)
        self.reward_model = RewardModel(args, self.reward_model_group, state=state, pad=pad)
        self.samples_generator = generator = Generator(
            self.calls, evaluation=self.eval_dataloader, fresh=fresh_of(self), method=self.method, state=state,
            rollout_weights=self.rollout_weights, reward_model=self.reward_model, before_samples=self.begin,
            steps_ahead=Flags.of(args).ahead,
        )  # fmt: skip
        name = f"{args.actor.model_name_or_path} at temperature {args.rollout.temperature:g}"
        self.experience_maker = maker = ExperienceMaker(
            args, actor, critic, self.reference_model_group, kl_ctl=self.kl_ctl, pad=pad, reference_name=name
        )
        self.proof = Proof(args, state=state, warn=self.recorder.warn, actor=actor)
        shared = {"state": state, "recorder": self.recorder}
        layer = {"method": self.method, "ledger": self.ledger}
        self.accounts = StepAccounts(
            args, **shared, **layer, failed_calls=self.calls.failures_text, arithmetic=self.arithmetic
        )
        workers = {"actor": actor, "critic": critic} if critic else {"actor": actor}
        self.checkpoints = WholeCheckpoints(args, **shared, **layer, generator=generator, loader=data, workers=workers)
        self.probe = GradientProbe(
            args, **shared, generator=generator, generate_kwargs=self.generate_kwargs, maker=maker, data=data.dataset,
            actor=actor,
        )  # fmt: skip
        self.method.solutions = solutions = Solutions.of(args, self.strategy, data.dataset, self.tokenizer)
        self.demonstrations = Demonstrations(args, state=state, actor=actor, solutions=solutions)
        self.critic_training = CriticTraining(
            args, state=state, maker=maker, critic=critic, accounts=self.accounts, train=self.ppo_train
        )

    # ── One step of Algorithm 1 ──

    @extends(Base)
    def train_step(self, rollout_samples: list[Rollout], global_step: int) -> tuple[dict, int]:
        """Lines 7 to 19 of Algorithm 1, on the rollout that line 6 generated. It is the only one in the list.

        Raises:
            ValueError: The method made a batch that is larger than its capacity.
        """
        state, step, (rollout,) = self.state, self.state.step, rollout_samples
        generator = self.samples_generator
        # Lines 12-15: generate hard prompts again with today's weights, unless a rollout takes them along.
        hard_prompts, later_prompts = generator.hard_prompts(rollout)
        hard, timing = generator.reevaluate(hard_prompts, self.generate_kwargs)
        if generator.steps_ahead:
            # Line 6 of a later step.
            generator.rollouts.ask(step + generator.steps_ahead, later_prompts, self.generate_kwargs)
        # Line 7: groups of responses with rewards and log-probs.
        generated = self.accounts.enter(rollout, hard)
        critic_metrics = self.critic_training.pretrain(generated.fresh)
        # Lines 11, 16 and 17: X1, X2 and X3 become the batch. Lines 8, 9 and 19: what later steps need is stored.
        state.phase = "making the batch"
        with timed(timing, "timing/adapt"):
            self.method.unanswered([group.prompt for group in generated.failed if group.source != "fresh"])
            batch = self.method.build_batch(step, generated.fresh, generated.reevaluated)
        self.accounts.require_capacity(batch)
        batch = without_silent(batch) if self.args.adapt.skip_zero_advantage else batch
        # Today's log-probs and values. Groups leave whose log-probs are not finite or too far from today's.
        state.phase, start = "making experience", time.perf_counter()
        passed = self.experience_maker.forward(origins_of(batch, state.weights_since))
        reviewed = self.accounts.review(batch, passed)
        state.gap = reviewed.gap
        self.proof.check_gap()
        # What line 18 needs: importance ratios and the KL target (Eq. 3, 4), and advantages (Eq. 2).
        experience = self.experience_maker.finish(passed, reviewed.kept) if reviewed.kept else None
        tokens = critic_metrics.get(TOKENS, 0)
        critic_metrics |= self.critic_training.make(generated, reviewed.batch, experience, tokens=tokens)
        seconds = time.perf_counter() - start
        self.method.observe_distances(step, reviewed.distances)
        # Line 18: the update.
        status = self._update(reviewed, experience, global_step)
        # Lines 3-5 of the next step: the engines get the new weights at multiples of v.
        start = time.perf_counter()
        self._sync(reviewed.rollout_shift)
        state.weights_since = state.step if MOVES & status.keys() else state.weights_since
        timing["timing/broadcast"] = time.perf_counter() - start
        if "timing/ppo_train" in status:
            timing["timing/make_experience"] = seconds
        # Every group that was generated ends in exactly one counted state.
        status |= critic_metrics | timing | self.demonstrations.metrics(reviewed.batch)
        status |= self.accounts.settle(step, generated, rollout, reviewed)
        status["reevaluation/added_seconds"] = rollout.added_seconds + timing.get("timing/reevaluation", 0.0)
        return status | generator.metrics() | self.reward_model.metrics(), global_step + 1

    def _update(self, reviewed: Review, experience: BatchExperience | None, global_step: int) -> dict[str, Any]:
        """The update on the experience of the batch and X4, and then the fine-tuning that the batch asks for."""
        demonstrations = self.demonstrations.beside(reviewed.batch, experience)
        self.actor_model_group.skipped, filler = skipped_samples(reviewed.batch, self.args)
        if experience is None:
            return self._update_without_groups(reviewed.batch, demonstrations or filler, global_step)
        metrics = self.accounts.before_update(reviewed, experience) | self.probe.measure(reviewed, experience)
        metrics |= scale_learning_rate(self, experience) if self.args.adapt.scale_learning_rate else {}
        self.proof.before_update(experience)
        status = self._train_on([*experience.samples, *demonstrations], global_step)
        self.proof.after_update(status)
        with timed(status, "timing/ppo_train"):
            metrics |= self.demonstrations.fine_tune(reviewed.batch)
        return status | metrics

    def _train_on(self, samples: list[Experience], global_step: int) -> dict[str, Any]:
        """Deal a batch to actor and critic, and train them, as OpenRLHF's `train_step` does. Returns the metrics."""
        numbers = self._compute_rollout_stats([sample for sample in samples if not is_demonstration(sample)])
        text = self.tokenizer.decode(samples[0].sequences[0], skip_special_tokens=True)
        numbers["generated_samples"] = [text, samples[0].info["reward"][0].item()]  # which OpenRLHF logs
        critic = None if self.critic_training.send() else self.critic_model_group
        ray.get([ref for model in (self.actor_model_group, critic) if model for ref in model.take(samples)])
        with timed(numbers, "timing/ppo_train"):
            status = self.ppo_train(global_step)
        if "kl" in status:
            self.kl_ctl.update(status["kl"], self.args.rollout.batch_size * self.args.rollout.n_samples_per_prompt)
        return status | numbers

    def _update_without_groups(self, batch: Batch, samples: list[Any], global_step: int) -> dict[str, Any]:
        """The update on worked solutions or a filler, or of the critic on what it has, if there is any of these."""
        status = dict[str, Any]()
        if samples:
            ray.get(self.actor_model_group.take(samples))
        if self.critic_training.send():
            with timed(status, "timing/ppo_train"):
                status |= self.ppo_train(CRITIC_ONLY)
        elif samples or batch.fine_tuned:
            with timed(status, "timing/ppo_train"):
                status |= self.ppo_train(global_step) if samples else {}
                status |= self.demonstrations.fine_tune(batch)
        if not MOVES & status.keys():
            self.recorder.warn(global_step + 1, "skipped", "the batch is empty, so the update is skipped")
            status["skipped_update"] = 1
        return status

    def _sync(self, rollout_shift: float) -> None:
        """Count the step, also one without an update, so that v and m stay. Sync the engines if it is time."""
        self.state.phase, limit = "syncing weights", self.args.adapt.max_shift_rollout
        self.state.step += 1
        self.rollout_weights.follow(self.state.step, early=limit is not None and rollout_shift > limit)
        self.state.phase = "finishing the step"

    # ── OpenRLHF's hooks ──

    @extends(Base)
    def get_max_steps(self) -> int:
        """Number of optimizer steps that the learning-rate schedule spans."""
        return actor_steps(self.args, len(self.prompts_dataloader), self.method.candidates)

    @extends(Base)
    def fit(self, global_step: int = 0) -> int | None:
        """Train, and return what `MendedTrainer.fit` does. The engines start with the weights of step 0.

        Raises:
            RuntimeError: The run failed. The message names the step and the phase.
        """
        with self.state.named_in_errors():
            self.rollout_weights.set_up(self.args.ds.lora)
            return super().fit(global_step)

    @extends(Base)
    def broadcast_to_vllm(self) -> None:
        """Do nothing, although OpenRLHF calls this at a resume, which syncs by itself."""

    @extends(Base)
    def evaluate(self, global_step: int, **generate_kwargs: Any) -> dict:
        """Evaluate today's policy as OpenRLHF does, and record the result.

        Raises:
            RuntimeError: More of its groups gave no reward than --adapt.max_failed_share allows.
        """
        self.state.phase, generator = "evaluating", self.samples_generator
        with self.rollout_weights.synced_to(self.state.step, next_rollout=self.state.step):
            numbers: dict[str, Any] = super().evaluate(global_step, **generate_kwargs)
            if failed := generator.evaluation_failed:
                numbers["eval_failed"] = failed
                what = "of the evaluation gave no reward, so its numbers are of the others"
                self.accounts.check_unusable(global_step, "failed evaluation", failed, generator.evaluated, what)
            self.recorder.add_evaluation(global_step, numbers)
        return numbers

    @extends(Base)
    def init_checkpoint_states(self) -> dict[str, Any]:
        """Restore OpenRLHF's state and the state of the layer."""
        states: dict[str, Any] = super().init_checkpoint_states()
        self.checkpoints.resume(states)
        return states

    @contextmanager
    def saving(self, tag: str, client_states: dict[str, Any]) -> Iterator[None]:
        """Make the checkpoint whole that OpenRLHF saves in the block."""
        with super().saving(tag, client_states), self.checkpoints.whole(tag, client_states):
            yield

    @extends(Base)
    def save_best_checkpoint(self, eval_metrics: dict, global_step: int, client_states: Any = None) -> None:
        """Save as OpenRLHF does if the evaluation is the best so far. A saved checkpoint is made whole."""
        key = self._detect_eval_metric_key(eval_metrics) if eval_metrics else None
        is_best = key is not None and eval_metrics[key] > self.best_eval_metric_value
        with self.saving(f"best_global_step{global_step}", client_states) if is_best else nullcontext():
            super().save_best_checkpoint(eval_metrics, global_step, client_states)


@contextmanager
def timed(timing: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds that the block takes to `timing[name]`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        timing[name] = timing.get(name, 0.0) + time.perf_counter() - start


def scale_learning_rate(trainer: AdaptedPPOTrainer, experience: BatchExperience) -> dict[str, float]:
    """Send the factor of this step to the actor (`--adapt.scale_learning_rate`). Returns its metric."""
    on_policy = [origin.on_policy for origin in experience.origins]  # their ratio starts at 1
    full = trainer.arithmetic.full_samples(len(on_policy))
    factor = learning_rate_factor(np.where(on_policy, 0.0, experience.log_ratios), full)
    ray.get(trainer.actor_model_group.async_run_method(method_name="scale_learning_rate", factor=factor))
    return {"importance/learning_rate_factor": factor}


def fresh_of(trainer: AdaptedPPOTrainer) -> OneRound:
    """How the rollouts of a run ask for fresh prompts: in parts of responses, in several rounds, or once."""
    options = trainer.args, trainer.method, trainer.prompts_dataloader
    if trainer.args.adapt.partial_rollout_tokens is not None:
        return InParts(*options)
    between = signal_between(trainer.args)
    return OneRound(*options) if between is None else Rounds(*options, between=between)


AdaptedPPOTrainerActor = ray.remote(AdaptedPPOTrainer)
