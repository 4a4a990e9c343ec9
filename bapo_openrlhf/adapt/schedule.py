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
    """The phases of the rollout policy. `delay` is v, the steps between two syncs."""

    delay: int

    def sync_due(self, step: int) -> bool:
        """Whether the engines get the actor's weights before the rollouts that are generated in `step`."""
        return step % self.delay == 0

    def rollout_step(self, step: int) -> int:
        """The step whose weights generate fresh groups in `step`."""
        return step - step % self.delay
