"""OpenRLHF's PPO trainer with batch adaptation.

A group's trip through one step: generated -> group -> filtered or stored -> batch -> experience -> advantage -> loss.
OpenRLHF's trainer does the first and the last three; `train_step` puts the others between them.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from openrlhf.trainer.ppo_trainer import PPOTrainer
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call
from openrlhf.utils.logging_utils import init_logger

from bapo_openrlhf.adapt.arithmetic import batch_arithmetic, epoch_steps, in_parts
from bapo_openrlhf.adapt.batch import Batch, drop
from bapo_openrlhf.adapt.first_update import Clip, first_update
from bapo_openrlhf.adapt.group import Group, Prompt, mean_reward
from bapo_openrlhf.adapt.ledger import FAILED, Ledger, states_of
from bapo_openrlhf.adapt.monitor import composition, off_policy, staleness
from bapo_openrlhf.adapt.schedule import RolloutSchedule
from bapo_openrlhf.adapt.staleness import beyond, group_tv, nonfinite
from bapo_openrlhf.launch.preflight import read_traces
from bapo_openrlhf.methods import Method
from bapo_openrlhf.record.answers import PromptStates
from bapo_openrlhf.record.run_record import RunRecord, read_answers, read_metrics
from bapo_openrlhf.training.checkpoints import WholeCheckpoints
from bapo_openrlhf.training.contract import plain_class
from bapo_openrlhf.training.dealing import dealt_batches
from bapo_openrlhf.training.experience import AdaptedExperienceMaker, NothingToTrain, SampleOrigin
from bapo_openrlhf.training.profiling import Profile
from bapo_openrlhf.training.recorded import GeneratedGroup, answers_of, filter_reasons, generated_groups, has_reward
from bapo_openrlhf.training.rollout import (
    AdaptedSamplesGenerator,
    RecordedSamplesGenerator,
    is_usable,
    usable_groups,
)
from bapo_openrlhf.training.samples import groups_of, samples_of
from bapo_openrlhf.training.traces import tokens_of

logger = init_logger(__name__)

DEATH_NOTICE = 10.0  # seconds in which Ray says that a process has died


class RecordedPPOTrainer(plain_class(PPOTrainer)):
    """OpenRLHF's trainer as it is, which also keeps the run's record in DIR/NAME (`run.record`)."""

    def __init__(self, pretrain: str, strategy: Any, *args: Any, **kwargs: Any) -> None:
        # OpenRLHF leaves this process unseeded, and with it the order of the prompts.
        torch.manual_seed(strategy.args.train.seed)
        super().__init__(pretrain, strategy, *args, **kwargs)
        self.folder = Path(strategy.args.run.dir) / strategy.args.run.name
        self.record = RunRecord(self.folder)
        self.prompt_states = PromptStates()
        self.rollouts = 0  # responses generated so far
        self.tokens = {"generated": 0, "trained": 0}  # so far
        self.recorded_step = 0  # last step that the record has
        self.filtered: list[Any] = []  # responses that dynamic filtering dropped, and that are in no step yet
        groups = {
            "actor": self.actor_model_group,
            "critic": self.critic_model_group,
            "reference": self.reference_model_group,
            "reward": self.reward_model_group,
        }
        self.profile = Profile(self.folder, self.args.run.profile_steps, groups, self.traced_engines())
        self.samples_generator = RecordedSamplesGenerator(
            strategy=strategy,
            prompts_dataloader=self.prompts_dataloader,
            eval_dataloader=self.eval_dataloader,
            tokenizer=self.tokenizer,
            vllm_engines=self.vllm_engines,
            filtered=self.filtered,
        )

    def traced_engines(self) -> Sequence[Any]:
        """Rollout engines that a profile can trace: OpenRLHF's own cannot be."""
        return []

    def init_checkpoint_states(self) -> dict[str, Any]:
        """OpenRLHF's; the record goes on where the checkpoint was written."""
        states = super().init_checkpoint_states()
        if states["global_step"]:
            self.recorded_step = states["global_step"]
            self.record = RunRecord(self.folder, resume_from=self.recorded_step + 1)
            self.prompt_states = PromptStates(read_answers(self.folder))
            last = (read_metrics(self.folder) or [{}])[-1]
            self.rollouts = last.get("rollouts/total", 0)
            self.tokens = {kind: last.get(f"tokens/{kind}_total", 0) for kind in self.tokens}
        return states

    def fit(self, global_step: int = 0) -> None:
        """Train. Where the data ends in a batch that was filtered whole, OpenRLHF takes no step: a row counts it."""
        super().fit(global_step)
        self.profile.finish()
        if self.filtered:
            step = self.recorded_step + 1
            self.record.append(step, {"skipped_update": 1, **self._counts([], step)})

    def train_step(self, rollout_samples: list[Any], global_step: int) -> tuple[dict, int]:
        """One update on what was generated; the counts of a run without batch adaptation."""
        status, next_step = super().train_step(rollout_samples, global_step)
        status |= self._counts(rollout_samples, next_step)
        if status["reward/fresh_mean"] is None:  # a reward model's are known to OpenRLHF alone
            status["reward/fresh_mean"] = status["rollout/reward_mean"]
        return status, next_step

    def _counts(self, trained: Sequence[Any], step: int) -> dict[str, Any]:
        """Record what was generated since the last step, and count it.

        Args:
            trained: samples of the batch; what dynamic filtering dropped is in `self.filtered`.
            step: OpenRLHF's count of it, from 1.
        """
        size, capacity = self.args.rollout.n_samples_per_prompt, self.args.rollout.batch_size
        dropped, self.filtered[:] = list(self.filtered), []
        first = self.rollouts // size
        groups = generated_groups(trained, size, source="fresh", first_uid=first, usable=has_reward)
        filtered = generated_groups(dropped, size, source="fresh", first_uid=first + len(groups), usable=has_reward)
        states = {group.uid: "fresh" for group in groups} | {group.uid: "filtered" for group in filtered}
        tokens = sum(group.tokens for group in groups)
        status: dict[str, Any] = self._record_groups(step, [*groups, *filtered], states, trained=tokens)
        rewards = [float(sample.rewards[0]) for sample in (*trained, *dropped) if sample.rewards is not None]
        status["reward/fresh_mean"] = float(np.mean(rewards)) if rewards else None
        status["groups/generated"] = len(groups) + len(filtered)
        status["groups/fresh"], status["groups/filtered"] = len(groups), len(filtered)
        status |= filter_reasons(filtered)
        status["groups/reevaluated"] = status["groups/replayed"] = 0
        status["groups/capacity"], status["groups/capacity_used"] = capacity, len(groups) / capacity
        status["rollouts/left_over"] = self.left_over(len(trained))
        if trained:
            status["length/fresh"] = tokens / len(trained)
        self.recorded_step = step
        return status

    def left_over(self, samples: int) -> int:
        """Samples of a batch of this size that OpenRLHF does not train on, for they fill no micro-batch."""
        return batch_arithmetic(self.args).left_over(samples, dynamic=self.args.train.dynamic_batch_enable)

    def _record_groups(
        self, step: int, groups: Sequence[GeneratedGroup], states: Mapping[int, str], *, trained: int
    ) -> dict[str, int]:
        """Write down what a step generated; returns how much that was.

        Args:
            step: OpenRLHF's count of it, from 1.
            groups: all that were generated.
            states: of each group, by uid; those that are not in it failed.
            trained: tokens that were trained on.
        """
        self.record.append_groups(step, [group.row(states.get(group.uid, FAILED)) for group in groups])
        if chars := self.args.run.answer_chars:
            self.record.append_answers(step, answers_of(groups, self.prompt_states, self.tokenizer, chars))
        rollouts, generated = sum(len(group.samples) for group in groups), sum(group.tokens for group in groups)
        self.rollouts += rollouts
        self.tokens["generated"] += generated
        self.tokens["trained"] += trained
        return {
            "rollouts/step": rollouts,
            "rollouts/total": self.rollouts,
            "tokens/generated": generated,
            "tokens/trained": trained,
            "tokens/generated_total": self.tokens["generated"],
            "tokens/trained_total": self.tokens["trained"],
        }

    def evaluate(self, global_step: int, **generate_kwargs: Any) -> dict:
        """OpenRLHF's evaluation during training, also written down."""
        numbers = super().evaluate(global_step, **generate_kwargs)
        self.record.append_evaluation(global_step, numbers)
        return numbers

    def save_logs_and_checkpoints(
        self, global_step: int, logs_dict: dict | None = None, client_states: Any = None
    ) -> None:
        """OpenRLHF's loggers and checkpoints, and the local record."""
        numbers = {key: value for key, value in (logs_dict or {}).items() if isinstance(value, (int, float))}
        self.record.append(global_step, numbers)
        super().save_logs_and_checkpoints(global_step, logs_dict, client_states)
        self.profile.step_ended()


class AdaptedPPOTrainer(WholeCheckpoints, RecordedPPOTrainer):
    """OpenRLHF's trainer on batches that a method makes of fresh, re-evaluated and replayed groups."""

    def __init__(self, pretrain: str, strategy: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(pretrain, strategy, *args, **kwargs)
        adapt = self.args.adapt
        if adapt.kl_target == "behaviour":
            self.kl_ctl.value = self.args.checked.kl_coef
        self.arithmetic = batch_arithmetic(self.args)
        self.method = adapt.make_method(self.arithmetic, seed=self.args.train.seed)
        if self.method.traces is not None:
            known = {text for _, text, *_ in self.prompts_dataloader.dataset}
            self.method.take_traces(tokens_of(read_traces(self.method.traces), known, self.tokenizer, self.args))
        evaluates = self.eval_dataloader is not None and math.isfinite(self.args.eval.steps)
        self.schedule = RolloutSchedule(
            delay=adapt.rollout_delay,
            reevaluate_every=adapt.reevaluate_every,
            evaluate_every=int(self.args.eval.steps) if evaluates else 0,
        )
        self.ledger = Ledger()
        self.step = 0  # updates done; the actor holds the weights of this step
        self.engine_step = 0  # updates behind the weights that the rollout engines hold
        self.generated = 0  # groups generated so far
        self.phase = "starting"  # for the message when the run fails
        self.rollout_tv = 0.0  # of this step's fresh groups: from the policy that generated them to today's
        self.batch = Batch()
        self._hard_prompts: list[Prompt] = []
        self._along = False  # whether they are generated together with the fresh prompts
        self.open_checkpoints()
        self.samples_generator = AdaptedSamplesGenerator(
            strategy=strategy,
            prompts_dataloader=self.prompts_dataloader,
            eval_dataloader=self.eval_dataloader,
            tokenizer=self.tokenizer,
            vllm_engines=self.vllm_engines,
            along=self._begin_step,
            step=lambda: self.step,
            candidates=self.method.candidates,
            choose=lambda prompts, count: self.method.choose_prompts(self.step, prompts, count),
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
            review=self._review,
        )

    def traced_engines(self) -> Sequence[Any]:
        """All."""
        return self.vllm_engines

    def get_max_steps(self) -> int:
        """Optimizer steps that the learning-rate schedule spans: the most there can be, or a cosine would rise again.

        Those of full batches; smaller batches take fewer. And one a step for a method that fine-tunes.
        """
        epoch = epoch_steps(self.args, len(self.prompts_dataloader), self.method.candidates)
        train_steps = epoch * self.args.train.num_episodes
        updates = self.arithmetic.optimizer_steps(self.arithmetic.capacity) * self.args.train.max_epochs
        finetunes = type(self.method).demonstrations is not Method.demonstrations
        return train_steps * (updates + finetunes)

    def fit(self, global_step: int = 0) -> None:
        """Train. The engines start with the actor's initial weights, which are those of step 0.

        Raises:
            RuntimeError: naming the step and the phase in which the run failed.
        """
        try:
            ray.get([engine.isolate_rewards.remote(self.args.verifier) for engine in self.vllm_engines])
            self._engines_live = [engine.live.remote() for engine in self.vllm_engines]
            if self.method.traces is not None:
                ray.get(self.actor_model_group.async_run_method(method_name="shape_traces", gamma=self.method.shaping))
            if self.args.checked.resume_tag is None:
                self._keep_if_needed()
            super().fit(global_step)
        except Exception as error:
            raise RuntimeError(f"step {self.step}, {self.phase}: {brief(error)}") from error

    # ── Rollout policy: which weights the engines hold ──

    def broadcast_to_vllm(self) -> None:
        """Called by OpenRLHF after each update: sync at multiples of v only (Algorithm 1, lines 3-5).

        And before that, where the rollout policy was further from the actor than --adapt.max_tv_rollout allows.
        """
        self.phase = "syncing weights"
        if self.resumed_engine_step is not None:
            self.resume_engines()  # once at the start of a resumed run: no update was made
        else:
            self.step += 1
            limit = self.args.adapt.max_tv_rollout
            if self.schedule.sync_due(self.step) or (limit is not None and self.rollout_tv > limit):
                self.method.policy_moved(self.rollout_tv)
                self._sync_engines()
                self._keep_if_needed()
        self.phase = "finishing the step"

    def _engines(self, method: str, *args: Any, engines: Sequence[Any] | None = None) -> None:
        """Call a method of the rollout engines (default: of all), with their weights awake."""
        engines = self.vllm_engines if engines is None else engines
        if self.args.vllm.enable_sleep:
            batch_vllm_engine_call(engines, "wake_up", tags=["weights"])
        batch_vllm_engine_call(engines, method, *args)

    def _keep_if_needed(self) -> None:
        """Have the engines keep the weights they hold, where they will be given others before the next sync."""
        if self.schedule.must_keep(self.engine_step):
            self._engines("keep_weights")

    def _sync_engines(self) -> None:
        """OpenRLHF's weight sync; the engines hold today's weights then."""
        if self.args.vllm.enable_sleep:
            batch_vllm_engine_call(self.vllm_engines, "wake_up", tags=["weights"])
        pending = self.actor_model_group.async_run_method(method_name="broadcast_to_vllm")
        while pending:
            # The actor's collective would wait for an engine that died in it: OpenRLHF asks the engines afterwards.
            done, _ = ray.wait([*pending, *self._engines_live], num_returns=1)
            try:
                ray.get(done)
            except ray.exceptions.RayTaskError:
                # An engine that dies breaks the collective, which may be heard of first: its death is the reason.
                ray.get(ray.wait(self._engines_live, num_returns=1, timeout=DEATH_NOTICE)[0])
                raise
            pending = [ref for ref in pending if ref not in done]
        batch_vllm_engine_call(self.vllm_engines, "forget_caches")
        self.engine_step = self.step

    @contextmanager
    def _engines_hold_today(self, *, next_rollout: int) -> Iterator[None]:
        """Today's weights in the engines during the block, then those that the rollout of `next_rollout` needs."""
        delayed = self.engine_step
        if delayed != self.step:
            self._sync_engines()
        yield
        if self.engine_step != delayed and not self.schedule.sync_due(next_rollout):
            self._engines("restore_weights")
            self.engine_step = delayed

    def evaluate(self, global_step: int, **generate_kwargs: Any) -> dict:
        """OpenRLHF's evaluation, always of today's policy."""
        self.phase = "evaluating"
        with self._engines_hold_today(next_rollout=self.step):
            return super().evaluate(global_step, **generate_kwargs)

    # ── One step ──

    def _begin_step(self) -> list[Prompt]:
        """Called when the fresh prompts of a step are dispatched: hard prompts to generate together with them.

        That takes no weight sync, and fills the engines better, where the rollout policy is today's.
        """
        self.phase = "generating"
        self._hard_prompts = self.method.begin_step(self.step)
        self._along = self.engine_step == self.step
        return self._hard_prompts if self._along else []

    def train_step(self, rollout_samples: list[Any], global_step: int) -> tuple[dict, int]:
        """Algorithm 1, lines 7-18, on what line 6 generated."""
        step, rollout_step = self.step, self.engine_step
        self.rollout_tv = 0.0
        timing: dict[str, float] = {}
        start = self.generated
        fresh = self._groups(rollout_samples, rollout_step)
        again, added = self._reevaluated(timing)
        reevaluated = self._groups(again, step)
        failed = self.generated - start - len(fresh) - len(reevaluated)
        self._check_share(failed, self.generated - start, "gave no reward or no finite log-probs")
        self.phase = "making the batch"
        with timed(timing, "timing/adapt"):
            self.batch = self.method.build_batch(step, fresh, reevaluated)
            if len(self.batch) > self.arithmetic.capacity:
                raise ValueError(
                    f"{type(self.method).__name__} made a batch of {len(self.batch)} groups; it may hold at most "
                    f"{self.arithmetic.capacity} (adapt.batch_size, or rollout.batch_size)"
                )
        status, next_step = self._update(global_step)
        counts = self.ledger.settle(fresh + reevaluated, self.batch, failed=failed)
        if self.ledger.counts["generated"] != self.generated:
            raise RuntimeError(
                f"{self.generated} groups were generated, {self.ledger.counts['generated']} are accounted for"
            )
        status |= timing | self.method.metrics() | {f"groups/{state}": count for state, count in counts.items()}
        status |= {"staleness/rollout_policy": step - rollout_step} | staleness(self.batch, step, self.schedule.delay)
        size = self.args.rollout.n_samples_per_prompt
        made = generated_groups(rollout_samples, size, source="fresh", first_uid=start, usable=is_usable)
        made += generated_groups(again, size, source="reevaluated", first_uid=start + len(made), usable=is_usable)
        status |= composition(self.batch, self.arithmetic.capacity, len(reevaluated))
        status |= self._record_groups(next_step, made, states_of(self.batch), trained=status["tokens/trained"])
        status["groups/replayed"] = len(self.batch.replayed)
        status["groups/unused"] = len(self.batch.unused)
        mean = mean_reward(fresh)
        status["reward/fresh_mean"] = math.nan if mean is None else float(mean)
        status["reevaluation/added_seconds"] = added
        status["prompts/passed_over"] = self.samples_generator.passed_over
        return status, next_step

    def _groups(self, samples: Sequence[Any], policy_step: int) -> list[Group]:
        """The samples as groups; those with a response that has no reward are left out."""
        size = self.args.rollout.n_samples_per_prompt
        usable = usable_groups(samples, size)
        groups = groups_of(usable, size, first_uid=self.generated, step=self.step, policy_step=policy_step)
        self.generated += len(samples) // size
        return groups

    def _check_share(self, unusable: int, total: int, what: str) -> None:
        """Raise RuntimeError where so many groups cannot be used that something is broken."""
        share = self.args.adapt.max_failed_share
        if unusable > share * total:
            kinds: Counter[str] = Counter()
            for counts in ray.get([engine.reward_failures.remote() for engine in self.vllm_engines]):
                kinds.update(counts)
            calls = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
            raise RuntimeError(
                f"{unusable} of {total} groups {what}; adapt.max_failed_share is {share}"
                + (f". Failed calls of the reward function so far: {calls}" if calls else "")
                + ". The log of the rollout engine has each error"
            )

    def _reevaluated(self, timing: dict[str, float]) -> tuple[list[Any], float]:
        """Line 14: samples of the hard prompts from today's weights, and the seconds that this adds to the step."""
        prompts, self._hard_prompts = self._hard_prompts, []
        if not prompts:
            return [], 0.0
        if self._along:
            return self.samples_generator.taken_along(), self.samples_generator.waited
        self.phase = "generating hard prompts again"
        with timed(timing, "timing/reevaluation"), self._engines_hold_today(next_rollout=self.step + 1):
            samples = self.samples_generator.generate_again(prompts, **self.generate_kwargs)
        return samples, timing["timing/reevaluation"]

    def _update(self, global_step: int) -> tuple[dict, int]:
        """Lines 17-18: OpenRLHF's update on the batch; none where nothing is in it."""
        grouped = self.batch.with_sources()
        self.experience_maker.origins = [
            SampleOrigin(source, group.policy_step_of(response) == self.step, response.external)
            for source, group in grouped
            for response in group.responses
        ]
        self.experience_maker.responses = [response for _, group in grouped for response in group.responses]
        self.phase = "making experience"
        try:
            if not grouped:
                raise NothingToTrain
            # OpenRLHF's own step, past the counting of RecordedPPOTrainer, which knows no other source than fresh.
            status, next_step = super(RecordedPPOTrainer, self).train_step(
                samples_of([group for _, group in grouped]), global_step
            )
        except NothingToTrain:
            # The step counts all the same, so that v and m keep their phase.
            logger.warning(f"step {self.step}: the batch is empty, the update is skipped")
            status = self._finetune()
            self.broadcast_to_vllm()
            return status | {"skipped_update": 1}, global_step + 1
        trained = (group.uid for _, group in self.batch.with_sources())  # without those that a limit took out
        self.method.observe(self.step - 1, dict(zip(trained, self.experience_maker.errors.tolist(), strict=True)))
        status["tokens/reference_kept"] = self.experience_maker.reference_kept
        log_ratios, eps = self.experience_maker.log_ratios, self.args.adapt.eps
        status |= off_policy(self.batch, log_ratios, self.method.constants(), eps)
        actor = self.args.actor
        clip = Clip(*actor.eps_clip_low_high, dual=actor.dual_clip)
        return status | first_update(self.experience_maker.tokens, clip), next_step

    def _review(self, log_ratios: np.ndarray) -> list[int]:
        """Take groups out of the batch that must not be trained on; returns the positions of the samples that stay.

        In a fresh group with responses of several policies, each response's part of the distance is that to its own.

        Args:
            log_ratios: of all samples of the batch, (N,).
        """
        adapt, size = self.args.adapt, self.args.rollout.n_samples_per_prompt
        groups = [group for _, group in self.batch.with_sources()]
        broken = {group.uid for group, bad in zip(groups, nonfinite(log_ratios, size), strict=True) if bad}
        self._check_share(len(broken), len(groups), "have log-probs under today's policy that are not finite")
        # On-policy, what the engine and the actor differ by is rounding: no distance between policies.
        today = [group.policy_step_of(response) == self.step for group in groups for response in group.responses]
        external = np.array([response.external for group in groups for response in group.responses], dtype=bool)
        tv = group_tv(np.where(today, 0.0, log_ratios), size, external)
        distances = dict(zip((group.uid for group in groups), tv, strict=True))
        fresh = {group.uid: distances[group.uid] for group in self.batch.fresh}
        known = [distances[group.uid] for group in self.batch.fresh if group.uid not in broken]
        self.rollout_tv = float(np.mean(known)) if known else 0.0
        replayed = {group.uid: distances[group.uid] for group in self.batch.replayed}
        too_far = beyond(fresh, adapt.max_tv_fresh) | beyond(replayed, adapt.max_tv_replayed)
        if too_far or broken:
            self.batch = drop(self.batch, too_far=too_far, nonfinite=broken)
        kept = {group.uid for _, group in self.batch.with_sources()}
        return [
            position * size + row for position, group in enumerate(groups) if group.uid in kept for row in range(size)
        ]

    def ppo_train(self, global_steps: int) -> dict:
        """OpenRLHF's optimizer steps, then one of fine-tuning where the method has demonstrations.

        Raises:
            FloatingPointError: a gradient was not finite: the weights are spoilt, the last checkpoint's are not.
        """
        self.phase = "training"
        status = super().ppo_train(global_steps)
        for name in ("actor_grad_norm", "critic_grad_norm"):
            if not math.isfinite(status.get(name, 0.0)):
                raise FloatingPointError(f"{name} is {status[name]}")
        return status | self._finetune()

    def _finetune(self) -> dict[str, float]:
        """One optimizer step of the actor on the demonstrations that the method names for this step."""
        samples = samples_of(self.method.demonstrations(self.step))
        if not samples:
            return {}
        self.phase = "fine-tuning"
        ranks, micro = self.arithmetic.ranks["actor"], self.arithmetic.micro_train
        tokens = sum(int(sample.action_mask.sum()) for sample in samples)
        batches = dealt_batches(
            samples,
            ranks,
            lambda lengths, shares: [in_parts(share, micro) for share in shares],
            self.tokenizer.pad_token_id,
        )
        group, sleeps = self.actor_model_group, self.args.ds.enable_sleep
        if sleeps:
            ray.get(group.async_run_method(method_name="reload_states"))
        refs = group.async_run_method_batch(
            method_name="finetune",
            demonstrations=batches,
            tokens=[tokens] * ranks,
            ranks=[ranks] * ranks,
            weight=[self.method.finetune_weight] * ranks,
        )
        parts = ray.get(refs)[:: len(refs) // ranks]  # the ranks of a tensor-parallel or ring group have the same
        if sleeps:
            ray.get(group.async_run_method(method_name="offload_states"))
        return {"finetune/demonstrations": len(samples), "finetune/loss": sum(part for (part,) in parts)}


def brief(error: Exception) -> str:
    """What an error says, without the remote traceback that Ray puts before it."""
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) and error.cause else error
    return f"{type(cause).__name__}: {str(cause).strip()}"


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
