"""Groups of a step and of a run, for each algorithm. They are expected values: a share times a count."""

import math
from dataclasses import astuple, dataclass

from bapo_openrlhf.adapt.filters import UNIFORM
from bapo_openrlhf.adapt.schedule import ROUNDS
from bapo_openrlhf.workbench.planning.constants import Constants
from bapo_openrlhf.workbench.planning.workload import Algorithm, Workload


@dataclass(frozen=True)
class Groups:
    """Expected numbers of groups in one step, so they are not whole."""

    fresh: float  # generated for prompts of the data
    again: float  # generated to re-evaluate hard prompts
    x1: float  # x1, x2 and x3 are trained on, by source
    x2: float
    x3: float

    @property
    def generated(self) -> float:
        return self.fresh + self.again

    @property
    def trained(self) -> float:
        return self.x1 + self.x2 + self.x3


def kept_share(workload: Workload, constants: Constants) -> float:
    """The share of fresh groups that the fresh filter keeps (Def. 3.1, A.3), in [0, 1]; for top_p the most."""
    adapt, signal = workload.args.adapt, constants.signal_share
    shares = {
        "range": signal,
        "gaussian": signal * constants.gaussian_share,
        "uniform": UNIFORM,
        # The groups with the highest variance make up more of top_p's sum than of the groups.
        "top_p": signal * adapt.top_p_share,
        "none": 1.0,
    }
    return shares[adapt.filter]


def hard_prompts(workload: Workload, constants: Constants) -> float:
    """Number of prompts in a re-evaluation once the hard buffer has settled (Eq. 6).

    In m steps, n * m * hard_share prompts come in, and leaving_share of the tried prompts go out. If more come in than
    can go out, the buffer fills up and each re-evaluation tries as many prompts as it may.
    """
    adapt, prompts = workload.args.adapt, workload.args.rollout.batch_size
    if not adapt.reevaluate_every:
        return 0.0
    most = float(min(adapt.most_reevaluated(prompts), adapt.buffer_size))
    coming = prompts * adapt.reevaluate_every * constants.hard_share
    if constants.leaving_share <= 0:
        return most if coming else 0.0
    return min(most, coming / constants.leaving_share)


def replayable_groups(workload: Workload, constants: Constants) -> float:
    """Number of groups of the last steps that may be replayed, as far as the replay buffer has room."""
    recent = constants.replayable_share * workload.args.rollout.batch_size * workload.args.adapt.replay_steps
    return min(recent, float(workload.args.adapt.buffer_size))


def rounds(workload: Workload, constants: Constants) -> int:
    """How often a step with batch adaptation draws prompts (`training/trainer/fresh.py`)."""
    args = workload.args
    if not args.algo.dynamic_filtering_enable:
        return 1
    room = (args.adapt.batch_size or args.rollout.batch_size) - replayable_groups(workload, constants)
    informative = args.rollout.batch_size * constants.signal_share  # of a round
    return min(max(math.ceil(room / informative), 1), ROUNDS) if informative else ROUNDS


def groups_of_step(algorithm: Algorithm, workload: Workload, constants: Constants, *, reevaluates: bool) -> Groups:
    """The groups of one step, which may be one that re-evaluates hard prompts."""
    prompts = float(workload.args.rollout.batch_size)
    if algorithm.dynamic:  # It draws groups until enough of them have a signal.
        return Groups(prompts / max(constants.signal_share, 1 / prompts), 0.0, prompts, 0.0, 0.0)
    if not algorithm.adapted:
        return Groups(prompts, 0.0, prompts, 0.0, 0.0)
    again = hard_prompts(workload, constants) if reevaluates else 0.0
    fresh = prompts * rounds(workload, constants)
    x1, x2 = fresh * kept_share(workload, constants), again * constants.improved_share
    capacity = workload.args.adapt.batch_size or prompts
    share = min(1.0, capacity / (x1 + x2)) if x1 + x2 else 1.0  # Prop. A.3 decides which groups are kept.
    x1, x2 = x1 * share, x2 * share
    x3 = min(replayable_groups(workload, constants), max(capacity - x1 - x2, 0.0))
    if workload.args.adapt.skip_zero_advantage and workload.args.adapt.filter in ("uniform", "none"):
        x1 = min(x1, fresh * kept_share(workload, constants) * constants.signal_share)
    return Groups(fresh, again, x1, x2, x3)


def average_groups(algorithm: Algorithm, workload: Workload, constants: Constants) -> Groups:
    """The groups of an average step. Every m-th step re-evaluates."""
    every = workload.args.adapt.reevaluate_every if algorithm.adapted else 0
    share = 1 / every if every else 0.0
    plain, again = (groups_of_step(algorithm, workload, constants, reevaluates=whether) for whether in (False, True))
    return Groups(*((1 - share) * a + share * b for a, b in zip(astuple(plain), astuple(again), strict=True)))


def critic_groups(algorithm: Algorithm, workload: Workload, groups: Groups, steps: int) -> float:
    """Number of groups that the critic trains on in an average step of `steps`, with the passes of its pretraining."""
    if not algorithm.critic:
        return 0.0
    if not algorithm.adapted:
        return groups.trained
    adapt, frozen = workload.args.adapt, max(workload.args.critic.freezing_steps, 0)
    passes = adapt.value_pretraining * min(frozen + 1, steps) / steps
    every_step = groups.trained if adapt.critic_groups == "batch" else groups.generated + groups.x3
    return (every_step + passes * groups.fresh) * adapt.critic_epochs


def happenings(delay: int, every: int, steps: int) -> tuple[int, int, int]:
    """Numbers of syncs, of re-evaluations, and of those between two syncs in the steps 0 ... steps - 1, in closed form.

    Syncs follow each v-th update (`delay`). Re-evaluations come every m steps (`every`; 0: never), first at t = m. Only
    for those between two syncs the engines get today's weights in addition.
    """
    last = steps - 1
    again = last // every if every else 0
    both = last // math.lcm(delay, every) if every else 0
    return steps // delay, again, again - both


def rollouts(algorithm: Algorithm, workload: Workload, constants: Constants, steps: int) -> float:
    """Number of responses that a run of so many steps generates. The run's metric is `rollouts/total`."""
    fresh = groups_of_step(algorithm, workload, constants, reevaluates=False).fresh * steps
    again = groups_of_step(algorithm, workload, constants, reevaluates=True).again
    adapt = workload.args.adapt
    again *= happenings(adapt.rollout_delay, adapt.reevaluate_every if algorithm.adapted else 0, steps)[1]
    return workload.args.rollout.n_samples_per_prompt * (fresh + again)
