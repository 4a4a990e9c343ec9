"""OpenRLHF's PPO trainer with batch adaptation.

A group's trip through one step: generated -> group -> filtered or stored -> batch -> experience -> advantage -> loss.
OpenRLHF's trainer does the first and the last three; `train_step` puts the others between them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from openrlhf.trainer.ppo_trainer import PPOTrainer
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call

from bapo_openrlhf.adapt.advantage import group_relative_advantages
from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.group import Group, mean_reward
from bapo_openrlhf.adapt.schedule import RolloutSchedule
from bapo_openrlhf.adapt.theory import bound_term, sampled_tv
from bapo_openrlhf.arithmetic import batch_arithmetic
from bapo_openrlhf.integration.experience import AdaptedExperienceMaker, SampleOrigin
from bapo_openrlhf.integration.pinned import plain_class
from bapo_openrlhf.integration.rollout import AdaptedSamplesGenerator
from bapo_openrlhf.integration.samples import groups_of, samples_of
from bapo_openrlhf.run.record import RunRecord


class RecordedPPOTrainer(plain_class(PPOTrainer)):
    """OpenRLHF's trainer as it is, which also writes one line a step to DIR/NAME/metrics.jsonl."""

    def __init__(self, pretrain: str, strategy: Any, *args: Any, **kwargs: Any) -> None:
        # OpenRLHF leaves this process unseeded, and with it the order of the prompts.
        torch.manual_seed(strategy.args.train.seed)
        super().__init__(pretrain, strategy, *args, **kwargs)
        self.record = RunRecord(Path(strategy.args.run.dir) / strategy.args.run.name)
        self.rollouts = 0  # responses generated so far

    def train_step(self, rollout_samples: list[Any], global_step: int) -> tuple[dict, int]:
        """One update on what was generated; the counts of a run without batch adaptation."""
        status, next_step = super().train_step(rollout_samples, global_step)
        size = self.args.rollout.n_samples_per_prompt
        self.rollouts += len(rollout_samples)
        status["reward/fresh_mean"] = float(np.mean([float(sample.rewards[0]) for sample in rollout_samples]))
        status["groups/generated"] = status["groups/fresh"] = len(rollout_samples) // size
        status["groups/reevaluated"] = status["groups/replayed"] = 0
        status["groups/capacity"] = self.args.rollout.batch_size
        status["rollouts/total"] = self.rollouts
        return status, next_step

    def save_logs_and_checkpoints(
        self, global_step: int, logs_dict: dict | None = None, client_states: Any = None
    ) -> None:
        """OpenRLHF's loggers and checkpoints, and the local record."""
        numbers = {key: value for key, value in (logs_dict or {}).items() if isinstance(value, (int, float))}
        self.record.append(global_step, numbers)
        super().save_logs_and_checkpoints(global_step, logs_dict, client_states)


class AdaptedPPOTrainer(RecordedPPOTrainer):
    """OpenRLHF's trainer on batches that a method makes of fresh, re-evaluated and replayed groups."""

    def __init__(self, pretrain: str, strategy: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(pretrain, strategy, *args, **kwargs)
        adapt = self.args.adapt
        if adapt.kl_target == "behaviour":
            self.kl_ctl.value = adapt.kl_coef
        self.arithmetic = batch_arithmetic(self.args, adapt.batch_size or self.args.rollout.batch_size)
        self.method = adapt.make_method(self.arithmetic, seed=self.args.train.seed)
        evaluates = self.eval_dataloader is not None and math.isfinite(self.args.eval.steps)
        self.schedule = RolloutSchedule(
            delay=adapt.rollout_delay,
            reevaluate_every=adapt.reevaluate_every,
            evaluate_every=int(self.args.eval.steps) if evaluates else 0,
        )
        self.step = 0  # updates done; the actor holds the weights of this step
        self.engine_step = 0  # updates behind the weights that the rollout engines hold
        self.generated = 0  # groups generated so far
        self.samples_generator = AdaptedSamplesGenerator(
            strategy=strategy,
            prompts_dataloader=self.prompts_dataloader,
            eval_dataloader=self.eval_dataloader,
            tokenizer=self.tokenizer,
            vllm_engines=self.vllm_engines,
        )
        self.experience_maker = AdaptedExperienceMaker(
            self.actor_model_group,
            self.critic_model_group,
            self.reward_model_group,
            self.reference_model_group,
            self.kl_ctl,
            strategy,
            self.tokenizer,
            arithmetic=self.arithmetic,
        )

    def get_max_steps(self) -> int:
        """Optimizer steps that the learning-rate schedule spans: those of full batches; smaller batches take fewer."""
        train_steps = (
            math.ceil(len(self.prompts_dataloader) / self.args.rollout.batch_size) * self.args.train.num_episodes
        )
        return train_steps * self.arithmetic.optimizer_steps(self.arithmetic.capacity) * self.args.train.max_epochs

    # ── Rollout policy: which weights the engines hold ──

    def fit(self, global_step: int = 0) -> None:
        """Train. The engines start with the actor's initial weights, which are those of step 0."""
        self._keep_if_needed()
        super().fit(global_step)

    def broadcast_to_vllm(self) -> None:
        """Called by OpenRLHF after each update: sync at multiples of v only (Algorithm 1, lines 3-5)."""
        self.step += 1
        if self.schedule.sync_due(self.step):
            self._sync_engines()
            self._keep_if_needed()

    def _keep_if_needed(self) -> None:
        """Have the actor keep today's weights, where the engines will be given others before the next sync."""
        if self.schedule.must_keep(self.step):
            ray.get(self.actor_model_group.async_run_method(method_name="keep_rollout_weights"))

    def _sync_engines(self) -> None:
        super().broadcast_to_vllm()
        self.engine_step = self.step

    def _restore_engines(self, step: int) -> None:
        """Give the engines the kept weights of `step` back."""
        if self.args.vllm.enable_sleep:
            batch_vllm_engine_call(self.vllm_engines, "wake_up", tags=["weights"])
        ray.get(self.actor_model_group.async_run_method(method_name="broadcast_rollout_weights"))
        self.engine_step = step

    @contextmanager
    def _engines_hold_today(self, *, next_rollout: int) -> Iterator[None]:
        """Today's weights in the engines during the block, then those that the rollout of `next_rollout` needs."""
        delayed = self.engine_step
        if delayed != self.step:
            self._sync_engines()
        yield
        if self.engine_step != delayed and not self.schedule.sync_due(next_rollout):
            self._restore_engines(delayed)

    def evaluate(self, global_step: int, **generate_kwargs: Any) -> dict:
        """OpenRLHF's evaluation, always of today's policy."""
        with self._engines_hold_today(next_rollout=self.step):
            return super().evaluate(global_step, **generate_kwargs)

    # ── One step ──

    def train_step(self, rollout_samples: list[Any], global_step: int) -> tuple[dict, int]:
        """Algorithm 1, lines 7-18, on what line 6 generated."""
        step = self.step
        timing = {}
        with timed(timing, "timing/adapt"):
            hard_prompts = self.method.begin_step(step)
            fresh = self._groups(rollout_samples, self.engine_step)
        with timed(timing, "timing/reevaluation"):
            reevaluated = self._reevaluate(hard_prompts)
        with timed(timing, "timing/adapt"):
            batch = self.method.build_batch(step, fresh, reevaluated)
            if len(batch) % self.arithmetic.quantum:
                raise ValueError(
                    f"{type(self.method).__name__} made a batch of {len(batch)} groups; the ranks can share "
                    f"multiples of {self.arithmetic.quantum}, and OpenRLHF would drop the rest"
                )
            samples = samples_of([group for _, group in batch.with_sources()])
            self.experience_maker.origins = [
                SampleOrigin(source, group.is_on_policy(step))
                for source, group in batch.with_sources()
                for _ in group.responses
            ]
        if samples:
            # OpenRLHF's own step, past the counting of RecordedPPOTrainer, which knows no other source than fresh.
            status, next_step = super(RecordedPPOTrainer, self).train_step(samples, global_step)
            status.update(self._off_policy_metrics(batch))
        else:
            # Nothing to learn from: no update, but the step counts, so that v and m keep their phase.
            self.broadcast_to_vllm()
            status, next_step = {"skipped_update": 1}, global_step + 1
        status.update(timing)
        status.update(self.method.metrics())
        self.rollouts += sum(group.size for group in fresh) + sum(group.size for group in reevaluated)
        status["reward/fresh_mean"] = float(mean_reward(fresh))
        status["rollouts/total"] = self.rollouts
        status["staleness/rollout_policy"] = step - self.schedule.rollout_step(step)
        return status, next_step

    def _groups(self, samples: Sequence[Any], policy_step: int) -> list[Group]:
        size = self.args.rollout.n_samples_per_prompt
        groups = groups_of(samples, size, first_uid=self.generated, step=self.step, policy_step=policy_step)
        self.generated += len(groups)
        return groups

    def _reevaluate(self, prompts: Sequence[Any]) -> list[Group]:
        """Line 14: generate the hard prompts again with today's weights."""
        if not prompts:
            return []
        with self._engines_hold_today(next_rollout=self.step + 1):
            samples = self.samples_generator.generate_again(prompts, **self.generate_kwargs)
            return self._groups(samples, self.engine_step)

    def _off_policy_metrics(self, batch: Batch) -> dict[str, float]:
        """Distances to today's policy by source, and the terms of Theorem 3.2."""
        log_ratios = self.experience_maker.log_ratios
        metrics: dict[str, float] = {}
        constants = dict(zip(("fresh", "reevaluated", "replayed"), self.method.constants(), strict=True))
        metrics |= {
            "theory/k1": constants["fresh"],
            "theory/k2": constants["reevaluated"],
            "theory/k3": constants["replayed"],
        }
        start = 0
        for source, groups in (
            ("fresh", batch.fresh),
            ("reevaluated", batch.reevaluated),
            ("replayed", batch.replayed),
        ):
            if not groups:
                continue
            advantages = np.concatenate([normalised(group, self.args.adapt.eps) for group in groups])
            log_ratio = log_ratios[start : start + len(advantages)]
            start += len(advantages)
            ratios = np.exp(np.clip(log_ratio, -20, 20))
            tv = sampled_tv(log_ratio)
            surrogate = float(np.mean(ratios * advantages))
            metrics[f"tv/{source}"] = tv
            metrics[f"importance/{source}_mean"] = float(np.mean(ratios))
            metrics[f"theory/bound_{source}"] = bound_term(surrogate, constants[source], tv)
        return metrics


def normalised(group: Group, eps: float) -> np.ndarray:
    """A_alpha(x, y) of Eq. 23, (G,): Eq. 2 for one group."""
    return group_relative_advantages(np.array([[float(reward) for reward in group.rewards]]), eps)[0]


@contextmanager
def timed(timing: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds of the block to `timing[name]`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        timing[name] = timing.get(name, 0.0) + time.perf_counter() - start


RecordedPPOTrainerActor = ray.remote(RecordedPPOTrainer)
AdaptedPPOTrainerActor = ray.remote(AdaptedPPOTrainer)
