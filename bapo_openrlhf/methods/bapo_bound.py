"""BAPO with replay by the terms of Theorem 3.2 (arXiv 2602.20722), from measured distances instead of c2 and c3."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from bapo_openrlhf.adapt.filters import has_signal
from bapo_openrlhf.adapt.group import Group
from bapo_openrlhf.adapt.metric import declare
from bapo_openrlhf.adapt.theory import bound_term, k1, stability_constant
from bapo_openrlhf.adapt.thresholds import Interval
from bapo_openrlhf.methods.bapo import BAPO, C2, C3
from bapo_openrlhf.methods.base import option


@dataclass(eq=False, kw_only=True)
class BoundBAPO(BAPO):
    """BAPO that replays the groups with the largest terms of Theorem 3.2, by their measured TV distances.

    It has no c2 and c3. A term is taken at the policy that the step starts from, with sigma_g from the group's own
    rewards (Eq. 36):

        L_g = S_g - 2 K_g TV_g - 2 TV_g = -2 TV_g / sigma_g,    K_g = (1 - sigma_g) / sigma_g
        TV_g = min(1, d_g + max(0, D(a) - D(a_g)))

    S_g is taken as 0, its expectation at pi_t = alpha. d_g was measured last, at the age a_g in steps (both are 0 if
    nothing was), and a is the age today. D(a) is the mean of all distances that were measured at age a, or on the line
    from 0 at age 0 through the nearest mean. Groups since which the actor may not have moved do not count in it: those
    that are newer than all groups with a distance above 0. Of equal terms, the higher variance comes first, then the
    newer policy. Groups with L_g < `least` are not replayed, even if room stays empty. Any group with signal may be in
    X2 (TV = 0) or stored for X3. A prompt in X2 stays in the hard buffer if its mean is at most c1: c1 only says which
    prompts are hard.

    Deviations: the paper states the theorem and replays by c2, c3 and age; nothing in it acts on a distance. Each group
    has its own K, and not the largest of its source. `--adapt.replay_steps` still limits the age: raise it to let only
    the distance decide. A distance is sampled from G responses, so groups whose distance was found too small by chance
    are preferred. `tv/replayed` above `bound/tv_predicted` shows by how much.

    Args:
        least: Least term of a group that is replayed, at most 0. -inf means no limit.
    """

    USE = "Use it to limit replay by how far the policy has moved, instead of by c2 and c3."
    SOURCE = "this project, after arXiv 2602.20722, Theorem 3.2"
    STATE: ClassVar[tuple[str, ...]] = ("rng", "hard", "replay", "prefixes", "last", "sums")
    METRICS = (
        *(metric for metric in BAPO.METRICS if "threshold" not in metric.name),
        *declare("""
            bound/below_least | groups | Groups below the bound | | Stored groups that may be \
                replayed, with a term below `least`.
            bound/tv_predicted | 0 to 1 | Predicted distance | Eq. 10 | Mean predicted TV distance of what is replayed.
        """),
    )
    improved = replayable = staticmethod(has_signal)

    # It does not read these fields of BAPO, so nothing can set them.
    c2: Interval = field(init=False, default=C2)
    c3: Interval = field(init=False, default=C3)
    threshold_direction: str = field(init=False, default="eq8")
    # A term below -1 says nothing, because with rewards in [0, 1] no policy loses more than 1.
    least: float = option(-1.0, "at most 0")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.last: list[tuple[int, int, float]] = []  # uid, a_g and d_g of stored groups
        self.sums: list[tuple[int, int, float]] = []  # age, and number and sum of the distances measured at it
        self._drawn: dict[str, float] = {}

    def mean_distance(self, age: int) -> float:
        """D(age), see the class. It is 0 as long as nothing is measured."""
        near, number, total = min(self.sums, key=lambda row: (abs(row[0] - age), row[0]), default=(1, 1, 0.0))
        return total / number * age / near

    def draw_replay(self, count: int, accept: Callable[[Group], bool]) -> list[Group]:
        """The stored groups with the largest terms, see the class."""
        last, rows = {uid: (age, distance) for uid, age, distance in self.last}, []
        for group in filter(accept, self.replay):
            last_age, distance = last.get(group.uid, (0, 0.0))
            growth = self.mean_distance(self.step - group.weights_version) - self.mean_distance(last_age)
            tv = min(1.0, distance + max(0.0, growth))
            term = bound_term(0.0, stability_constant(float(group.variance), self.eps), tv)
            rows.append((term, group.variance, group.weights_version, group.uid, tv, group))
        candidates = sorted((row for row in rows if row[0] >= self.least), reverse=True)
        self._drawn = {"bound/below_least": len(rows) - len(candidates)}
        if replay_rows := candidates[:count]:
            self._drawn["bound/tv_predicted"] = sum(tv for *_, tv, _ in replay_rows) / len(replay_rows)
        return [group for *_, group in replay_rows]

    def observe_distances(self, step: int, distances: Mapping[Group, float]) -> None:
        """Learn from all groups of the batch, and keep the distances of those that are stored. At age 0 it is 0."""
        last, sums = ({row[0]: row for row in rows} for rows in (self.last, self.sums))
        # With --critic.freezing_steps groups get older while the actor does not move. A distance may also be 0 although
        # it has moved: if today's policy makes all responses of the group more probable.
        moved = max((group.weights_version for group, distance in distances.items() if distance), default=-1)
        for group, distance in distances.items():
            if age := step - group.weights_version:
                last[group.uid] = group.uid, age, distance
                if group.weights_version <= moved:
                    _, number, total = sums.get(age, (age, 0, 0.0))
                    sums[age] = age, number + 1, total + distance
        self.last, self.sums = [last[g.uid] for g in self.replay if g.uid in last], list(sums.values())

    def constants(self) -> tuple[float, float, float]:
        """K1 for all sources, because each takes any group with signal (Eq. 11)."""
        return (k1(self.group_size, self.eps),) * 3

    def metrics(self) -> dict[str, float]:
        """BAPO's numbers without those of c2 and c3, and its own."""
        return {name: number for name, number in (super().metrics() | self._drawn).items() if "threshold" not in name}
