"""When the rollout engines get the actor's weights (Algorithm 1, lines 3-5, 13), as pure arithmetic on steps.

Steps count from 0. The weights of step t are those after t updates. The rollout policy of step t is the actor of step
t - t mod v.
"""

ROUNDS = 4  # of generation in a step at most, with dynamic filtering: as in the paper's runs of DAPO (Fig. 9)


def due(step: int, every: int) -> bool:
    """Whether something that happens every `every` steps happens in `step`. Never in step 0, or if `every` is 0."""
    return every > 0 and step > 0 and step % every == 0


def rollout_step(step: int, delay: int) -> int:
    """The step whose weights generate fresh groups in `step`. `delay` is v, the steps between two syncs.

    If it is `step` itself, the engines get the actor's weights before the rollouts that are generated in `step`.
    """
    return step - step % delay


def sync_age(weights_version: int, step: int, delay: int) -> int:
    """Syncs of the rollout engines since the weights of `weights_version`: multiples of v in (weights_version, step].

    It is 0 for groups of the engines' present weights, and for re-evaluated ones since the last sync. `delay` is v.
    """
    return step // delay - weights_version // delay
