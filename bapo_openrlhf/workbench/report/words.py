"""The words of the figures that show metrics. Title and sentence are those of the catalogue (`record/metrics.yaml`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bapo_openrlhf.adapt.metric import ALL
from bapo_openrlhf.record import metrics
from bapo_openrlhf.workbench.pages.figure import Figure

OLDER = "it is not recorded: the run is of an older version, or without batch adaptation"
NO_ATTEMPT = "no hard prompt was generated again, or the run is of an older version"
NO_THEORY = "without batch adaptation there is nothing to monitor, or the run is of an older version"
NO_CRITIC = "the run has no critic, or is of an older version"
OTHER = "it has no such number"


@dataclass(frozen=True)
class Words:
    """A figure's words.

    Attributes:
        title: Its title.
        says: What it shows, in one or two sentences.
        y: Label of the y axis, with its unit.
        paper: The figure of the paper that corresponds to it. "" if there is none.
        why: Why a run may lack it.
        peaks: If a point stands for several steps, whether it is their largest value. Otherwise it is their mean.
        least: The least number of steps that a point stands for. With more than one, the points have bands.
    """

    title: str
    says: str
    y: str
    paper: str = ""
    why: str = OLDER
    peaks: bool = False
    least: int = 1

    def figure(self, run: str = "", missing: Sequence[str] = ()) -> Figure:
        """A figure with these words, without a chart."""
        return Figure(self.title, self.says, paper=self.paper, run=run, missing=missing)


ROUND = 12  # steps in which the syncs go round a whole number of times if v is 2, 3, 4 or 6

CATALOGUE = {metric.name: metric for metric in metrics.all_metrics()}
_OF_METHODS = {metric.name for metric in metrics.DECLARED["other methods"]}
_OF_RUNS = {name for algorithm in ALL for name in metrics.names(algorithm, optional=True)}
OF_EVERY_RUN = {"step", "seconds"} | _OF_RUNS - _OF_METHODS  # columns of `Run.metrics`


def of_other(metric: str) -> Words:
    """The words of a metric that is not in OF_EVERY_RUN: of a method, or what a reward function returns."""
    if metric in CATALOGUE:
        return _entry(metric, CATALOGUE[metric].unit, why=OTHER)[1]
    return Words(metric, "The method or the reward function reports this number.", "", why=OTHER)


def _entry(metric: str, y: str, paper: str = "", **more: Any) -> tuple[str, Words]:
    """The words of one metric, with {} for a source. The page marks flags by itself, without the catalogue's marks."""
    declared = CATALOGUE[metric.replace("{}", "SOURCE")]
    return metric, Words(declared.title, declared.sentence.replace("`", ""), y, paper, **more)


# By metric. Two figures show several metrics, so they have words of their own.
WORDS = {
    "threshold/c2": Words(
        "Thresholds of the replay",
        "Groups with a mean from c2 to c3, the coloured area, are replayed. Both follow the average reward (Eq. 8).",
        "group mean reward",
    ),
    "staleness/replayed_steps_mean": Words(
        "Age of the replayed groups",
        "How many trainer steps ago the groups of X3 were generated.",
        "trainer steps",
        why="nothing was replayed",
    ),
} | dict(
    (
        _entry("rollouts/total", "responses", "Fig. 9"),
        _entry("tokens/generated_total", "tokens", "Fig. 9"),
        _entry("buffer/hard", "prompts"),
        _entry("buffer/replay", "groups"),
        _entry("reevaluation/improved_share", "share of attempts", why=NO_ATTEMPT),
        _entry("staleness/rollout_policy", "trainer steps", least=ROUND),
        _entry("tv/{}", "TV distance", why=NO_THEORY),
        _entry("shift/{}", "squared nats per token", why=NO_THEORY),
        _entry("theory/bound_{}", "improvement, at least", why=NO_THEORY),
        _entry("theory/bound", "improvement, at least", why=NO_THEORY),
        _entry("importance/{}_effective_share", "share of responses", why=NO_THEORY),
        _entry("entropy_loss", "nats per token", "Fig. 11"),
        _entry("response_length", "tokens", "Fig. 11"),
        _entry("actor_grad_norm", "norm", "Fig. 10", peaks=True),
        _entry("kl", "nats"),
        _entry("length/{}", "tokens"),
        _entry("clip/{}", "share of tokens"),
        _entry("advantage/{}_abs", "absolute advantage"),
        _entry("value/explained_variance", "share of the variance", "A.9", why=NO_CRITIC),
        _entry("value/{}_error", "reward", why=NO_CRITIC),
        _entry("value/{}_bias", "reward", why=NO_CRITIC),
    )
)
