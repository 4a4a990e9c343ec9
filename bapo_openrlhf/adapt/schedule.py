"""When the rollout engines get the actor's weights (Algorithm 1, lines 3-5, 13), as pure arithmetic on steps.

Steps count from 0. The weights of step t are those after t updates. The rollout policy of step t is the actor of step
t - t mod v.
"""

from dataclasses import dataclass

ROUNDS = 4  # of generation in a step at most, with dynamic filtering: as in the paper's runs of DAPO (Fig. 9)


def due(step: int, every: int) -> bool:
    """Whether something that happens every `every` steps happens in `step`. Never in step 0, or if `every` is 0."""
    return every > 0 and step > 0 and step % every == 0


@dataclass(frozen=True)
class RolloutSchedule:
    """The phases of the rollout policy.

    Attributes:
        delay: v, steps between two syncs.
        reevaluate_every: m, steps between two re-evaluations. 0 means none.
        evaluate_every: Steps between two evaluations on held-out prompts, which use today's weights too. 0 means none.
        probe_every: Steps between two probes of gradients, which use today's weights too. 0 means none.
        ahead: Steps that generation is ahead of training. The rollout of step t is generated in step max(0, t - ahead).
    """

    delay: int
    reevaluate_every: int = 0
    evaluate_every: int = 0
    probe_every: int = 0
    ahead: int = 0

    def sync_due(self, step: int) -> bool:
        """Whether the engines get the actor's weights before the rollouts that are generated in `step`."""
        return step % self.delay == 0

    def rollout_step(self, step: int) -> int:
        """The step whose weights generate fresh groups in `step`."""
        return step - step % self.delay

    def reevaluation_due(self, step: int) -> bool:
        """Whether hard prompts are generated again in `step`, with the weights of `step`."""
        return due(step, self.reevaluate_every)

    def evaluation_due(self, step: int) -> bool:
        """Whether held-out prompts are evaluated with the weights of `step`, before its rollout."""
        return due(step, self.evaluate_every)

    def probe_due(self, step: int) -> bool:
        """Whether gradients are probed in `step`, with the weights of `step`, after its rollout."""
        return due(step, self.probe_every)

    def must_keep(self, step: int) -> bool:
        """Whether the weights synced at `step` will be needed again after others have replaced them in the engines.

        This is so if a re-evaluation, a probe or an evaluation falls strictly between this sync and the next, and a
        rollout with the delayed weights follows it. In a step, re-evaluation and probe come after the rollout of the
        step itself, but before one that is ahead.
        """
        between = range(step + 1, step + self.delay)
        before_a_rollout = between if self.ahead else between[:-1]
        again = any(self.reevaluation_due(t) or self.probe_due(t) for t in before_a_rollout)
        return again or any(map(self.evaluation_due, between))
