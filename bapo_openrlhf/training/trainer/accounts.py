"""What becomes of the groups of a step, and the metrics that say so."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from bapo_openrlhf.adapt.arithmetic import BatchArithmetic
from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.ledger import Ledger, states_of
from bapo_openrlhf.adapt.monitor import Clip, composition, first_update, off_policy, replay_ages, shifts
from bapo_openrlhf.adapt.prefixes import by_prefix
from bapo_openrlhf.adapt.review import Review, review
from bapo_openrlhf.adapt.rewards import UNIT, Range, measured_range
from bapo_openrlhf.adapt.vocabulary import DROPPED, TRAINED
from bapo_openrlhf.methods.base import Method
from bapo_openrlhf.training.trainer.experience import BatchExperience, ForwardPass
from bapo_openrlhf.training.trainer.generated import GeneratedStep, reward_numbers
from bapo_openrlhf.training.trainer.recorder import StepRecorder
from bapo_openrlhf.training.trainer.rollout import Rollout
from bapo_openrlhf.training.trainer.run_state import RunState
from bapo_openrlhf.training.trainer.samples import Answers


@dataclass
class StepAccounts:
    """Accounts for every group that a run generates, and gives the metrics of its steps.

    It warns of groups that cannot be used, and stops a run that has so many that something must be broken.
    `failed_calls` says what went wrong in calls of the reward function or the agent.
    """

    args: SimpleNamespace
    state: RunState
    method: Method
    ledger: Ledger
    recorder: StepRecorder
    arithmetic: BatchArithmetic
    failed_calls: Callable[[], str]

    def check_unusable(self, step: int, kind: str, unusable: int, total: int, what: str) -> None:
        """Warn of the unusable groups of a step, which counts from 1.

        Raises:
            RuntimeError: Their share is larger than --adapt.max_failed_share.
        """
        if not unusable:
            return
        finding, max_share = f"{unusable} of {total} groups {what}", self.args.adapt.max_failed_share
        if unusable > max_share * total:
            raise RuntimeError(
                f"{finding}; adapt.max_failed_share is {max_share}. The log of the rollout engine has each error"
                f"{self.failed_calls()}"
            )
        self.recorder.warn(step, kind, f"{finding}, and are left out{self.failed_calls()}")

    def enter(self, rollout: Rollout, hard: Sequence[Answers]) -> GeneratedStep:
        """The groups of a step, which count from here on. Today's weights generated `hard` after the rollout.

        Raises:
            RuntimeError: Too many groups cannot be used, or the rewards have no range.
        """
        state = self.state
        if state.reward_range is None:
            state.reward_range = first_range(rollout.fresh)
        generated = GeneratedStep.of(
            [
                ("fresh", rollout.fresh, rollout.weights_version),
                ("reevaluated", rollout.hard, rollout.weights_version),
                ("reevaluated", hard, state.step),
            ],
            first_uid=self.ledger.counts["generated"],
            step=state.step,
            reward_range=state.reward_range or UNIT,  # a group has a reward if and only if there is a range
        )
        what = "gave no reward or no finite log-probs"
        self.check_unusable(state.step + 1, "failed", len(generated.failed), len(generated.recorded), what)
        return generated

    def require_capacity(self, batch: Batch) -> None:
        """Raise ValueError if a batch is larger than its capacity."""
        most = self.arithmetic.most_samples
        if batch.samples > most:
            raise ValueError(
                f"{type(self.method).__name__} made a batch of {batch.samples} responses; it may hold at most "
                f"{most} (rollout.n_samples_per_prompt times adapt.batch_size, or rollout.batch_size)"
            )

    def review(self, batch: Batch, passed: ForwardPass) -> Review:
        """The review of a batch that has passed today's models, with the limits of the run.

        Raises:
            RuntimeError: Too many of its groups have log-probs that are not finite.
        """
        state, adapt = self.state, self.args.adapt
        limits = {"max_shift_fresh": adapt.max_shift_fresh, "max_shift_replayed": adapt.max_shift_replayed}
        sums, since = passed.sums, state.weights_since
        reviewed = review(batch, passed.log_ratios, sums, state.step, state.gap, since=since, **limits)
        what = "have log-probs under today's policy that are not finite"
        self.check_unusable(state.step + 1, "nonfinite", reviewed.nonfinite, len(batch), what)
        return reviewed

    def before_update(self, reviewed: Review, experience: BatchExperience) -> dict[str, Any]:
        """Metrics of the experience of the reviewed batch, before the step's first update."""
        actor = self.args.actor
        status: dict[str, Any] = {"tokens/reference_kept": experience.reference_kept, **experience.baseline}
        if experience.masked is not None:
            status["importance/masked_share"] = experience.masked
        status |= off_policy(reviewed.batch, experience.log_ratios, self.method.constants(), self.args.adapt.eps)
        status |= shifts(reviewed.batch, experience.sums, self.state.weights_since, reviewed.gap)
        return status | first_update(experience.tokens, Clip(*actor.eps_clip_low_high, dual=actor.dual_clip))

    def settle(self, step: int, generated: GeneratedStep, rollout: Rollout, reviewed: Review) -> dict[str, Any]:
        """Enter what became of each group of a step (counted from 0), and record it. Returns the metrics.

        Raises:
            RuntimeError: A group is in no state or in several.
        """
        batch, failed = reviewed.batch, [len(group.responses) for group in generated.failed]
        uses = self.ledger.uses(batch.replayed)
        counts, responses = self.ledger.settle(generated.fresh + generated.reevaluated, batch, failed=failed)
        status: dict[str, Any] = self.method.metrics() | {f"groups/{state}": count for state, count in counts.items()}
        status["staleness/rollout_policy"] = step - rollout.weights_version
        status |= replay_ages(batch, step, self.args.adapt.rollout_delay, uses) | reviewed.gap.metrics(step)
        status["groups/capacity"] = self.arithmetic.capacity
        attempts = len(by_prefix(generated.reevaluated)[0])
        status |= composition(batch, self.arithmetic.most_samples, attempts)
        trained = status["tokens/trained"]
        status |= self.recorder.add_groups(step + 1, generated.recorded, states_of(batch), trained=trained)
        if self.args.adapt.skip_zero_advantage:
            status["responses/skipped"] = sum(group.size for group in batch.silent)
        rewards, warning = reward_numbers(generated.fresh, measured=self.args.adapt.rewards() is None)
        if warning:
            self.recorder.warn(step + 1, "reward range", warning)
        status |= rewards
        return status | {
            "groups/replayed": len(batch.replayed),
            "groups/unused": len(batch.unused),
            "responses/trained": batch.responses,
            "responses/replayed": batch.responses - sum(responses[state] for state in TRAINED),
            "responses/dropped": responses[DROPPED],
        }


def first_range(fresh: Sequence[Answers]) -> Range | None:
    """The range of the task's rewards, measured in those of the first fresh responses; None if none has a reward.

    Raises:
        RuntimeError: The rewards do not differ.
    """
    rewards = [reward for answers in fresh for reward in answers.rewards if math.isfinite(reward)]
    try:
        return measured_range(rewards) if rewards else None
    except ValueError as error:
        raise RuntimeError(
            f"adapt.reward_range is measured, and {error}; thresholds need a range, so give --adapt.reward_range LOW "
            "HIGH, the least and the greatest reward"
        ) from None
