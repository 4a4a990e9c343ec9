"""The review of a run's batches with the limits of the run."""

from types import SimpleNamespace

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.review import Review, review
from bapo_openrlhf.adapt.shift import Gap
from bapo_openrlhf.training.trainer.experience import ForwardPass
from bapo_openrlhf.training.trainer.run_state import RunState
from bapo_openrlhf.training.trainer.unusable_groups import UnusableGroups


class Reviewer:
    """Reviews batches, one after the other."""

    def __init__(self, args: SimpleNamespace, *, state: RunState, unusable: UnusableGroups) -> None:
        self.state, self.unusable = state, unusable
        adapt = args.adapt
        self.limits = {"max_shift_fresh": adapt.max_shift_fresh, "max_shift_replayed": adapt.max_shift_replayed}

    def review(self, batch: Batch, passed: ForwardPass, gap: Gap) -> Review:
        """The review of a batch that has passed today's models.

        Raises:
            RuntimeError: Too many of its groups have log-probs that are not finite.
        """
        step, since = self.state.step, self.state.weights_since
        reviewed = review(batch, passed.log_ratios, passed.sums, step, gap, since=since, **self.limits)
        what = "have log-probs under today's policy that are not finite"
        self.unusable.check(step + 1, "nonfinite", reviewed.nonfinite, len(batch), what)
        return reviewed
