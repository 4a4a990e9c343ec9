"""Groups of a step and of a run, by method. Expectations: a share times a count stands for a random number."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bapo_openrlhf.adapt.schedule import RolloutSchedule
from bapo_openrlhf.workbench.planning.constants import Constants
from bapo_openrlhf.workbench.planning.settings import Method, Settings


@dataclass(frozen=True)
class Groups:
    """Groups of one step; of an average one they are no whole numbers.

    Attributes:
        fresh: generated for prompts of the data.
        again: hard prompts generated again.
        x1, x2, x3: trained on, by source.
    """

    fresh: float
    again: float
    x1: float
    x2: float
    x3: float

    @property
    def generated(self) -> float:
        """Fresh ones and re-evaluated ones."""
        return self.fresh + self.again

    @property
    def trained(self) -> float:
        """The batch: X1, X2, X3."""
        return self.x1 + self.x2 + self.x3

    def mixed(self, other: Groups, share: float) -> Groups:
        """The average of many steps, of which `share` are like `other`."""
        names = ("fresh", "again", "x1", "x2", "x3")
        return Groups(*((1 - share) * getattr(self, name) + share * getattr(other, name) for name in names))


def kept_share(settings: Settings, constants: Constants) -> float:
    """Share of fresh groups that the fresh filter keeps (Def. 3.1, A.3), in [0, 1]."""
    return {
        "range": constants.signal_share,
        "gaussian": constants.signal_share * constants.gaussian_share,
        "uniform": settings.uniform_fraction,
        "none": 1.0,
    }[settings.filter]


def hard_prompts(settings: Settings, constants: Constants) -> float:
    """Prompts generated again in a re-evaluation, once the hard buffer has settled (Eq. 6).

    In m steps, n m hard_share prompts come in, and leaving_share of those tried go out: where the second cannot keep
    up, the buffer is full and the most that may be tried are.
    """
    if not settings.reevaluate_every:
        return 0.0
    most = float(min(settings.max_reevaluated, settings.hard_capacity))
    coming = settings.prompts * settings.reevaluate_every * constants.hard_share
    if constants.leaving_share <= 0:
        return most if coming else 0.0
    return min(most, coming / constants.leaving_share)


def replayable_groups(settings: Settings, constants: Constants) -> float:
    """Groups that the replay buffer is expected to hold: those of the last steps that may be replayed."""
    recent = constants.replayable_share * settings.prompts * settings.replay_steps
    return min(recent, float(settings.replay_capacity))


def groups_of_step(method: Method, settings: Settings, constants: Constants, *, reevaluates: bool) -> Groups:
    """The groups of one step.

    Args:
        reevaluates: whether hard prompts are generated again in it.
    """
    prompts = float(settings.prompts)
    if method.dynamic:  # draws until as many as the batch holds have a signal
        return Groups(prompts / max(constants.signal_share, 1 / prompts), 0.0, prompts, 0.0, 0.0)
    if not method.adapted:
        return Groups(prompts, 0.0, prompts, 0.0, 0.0)
    again = hard_prompts(settings, constants) if reevaluates else 0.0
    x1, x2 = prompts * kept_share(settings, constants), again * constants.improved_share
    chosen = min(1.0, settings.capacity / (x1 + x2)) if x1 + x2 else 1.0  # Prop. A.3 decides which
    x1, x2 = x1 * chosen, x2 * chosen
    x3 = min(replayable_groups(settings, constants), max(settings.capacity - x1 - x2, 0.0))
    return Groups(prompts, again, x1, x2, x3)


def average_groups(method: Method, settings: Settings, constants: Constants) -> Groups:
    """An average step: every m-th re-evaluates."""
    every = settings.reevaluate_every if method.adapted else 0
    plain, again = (groups_of_step(method, settings, constants, reevaluates=whether) for whether in (False, True))
    return plain.mixed(again, 1 / every if every else 0.0)


@dataclass(frozen=True)
class Happenings:
    """What the schedule lets happen in the steps 0 ... steps - 1 of a run.

    Attributes:
        syncs: of the delayed rollout policy, one after each v-th update.
        reevaluations: every m steps, first at t = m.
        apart: of these, those between two syncs: the engines get today's weights for them alone.
    """

    syncs: int
    reevaluations: int
    apart: int

    @property
    def sent(self) -> int:
        """How often the actor's weights are sent to the engines."""
        return self.syncs + self.apart


def happenings(schedule: RolloutSchedule, steps: int) -> Happenings:
    """In closed form: multiples of v in 1 ... steps, of m in 1 ... steps - 1, and those of both."""
    every, last = schedule.reevaluate_every, steps - 1
    again = last // every if every else 0
    both = last // math.lcm(schedule.delay, every) if every else 0
    return Happenings(syncs=steps // schedule.delay, reevaluations=again, apart=again - both)


def keeps_delayed_weights(schedule: RolloutSchedule) -> bool:
    """Whether the engines keep a host copy of the delayed weights at some sync (`RolloutSchedule.must_keep`)."""
    period = math.lcm(schedule.delay, schedule.reevaluate_every or 1)
    period = math.lcm(period, schedule.evaluate_every or 1)
    return any(schedule.must_keep(step) for step in range(0, period + 1, schedule.delay))


def rollouts(method: Method, settings: Settings, constants: Constants, steps: int) -> float:
    """Responses that a run of so many steps generates: `rollouts/total`."""
    fresh = groups_of_step(method, settings, constants, reevaluates=False).fresh * steps
    again = groups_of_step(method, settings, constants, reevaluates=True).again
    return settings.group_size * (fresh + again * happenings(settings.schedule(method), steps).reevaluations)
