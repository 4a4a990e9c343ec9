"""The words of the figures that show metrics, from the catalogue (`record/metrics.yaml`)."""

from bapo_openrlhf.adapt.metric import ALL
from bapo_openrlhf.record import metrics
from bapo_openrlhf.workbench.pages.figure import Figure

PAPER = {
    "rollouts/total": "Fig. 9", "tokens/generated_total": "Fig. 9", "entropy_loss": "Fig. 11",
    "response_length": "Fig. 11", "actor_grad_norm": "Fig. 10", "value/explained_variance": "A.9",
}  # fmt: skip
PEAKS = {"actor_grad_norm"}  # if a point stands for several steps, it is their largest value and not their mean

_CATALOGUE = {metric.name: metric for metric in metrics.all_metrics()}
_OF_METHODS = {metric.name for metric in metrics.DECLARED["other methods"]}
_OF_RUNS = {name for algorithm in ALL for name in metrics.names(algorithm, optional=True)}
OF_EVERY_RUN = {"step", "seconds"} | _OF_RUNS - _OF_METHODS  # columns of `Run.metrics`
_OTHER = "The method or the reward function reports this number."


def figure_of(metric: str, run: str = "") -> Figure:
    """A figure, without a chart, of a metric with {} for a source. Flags lose their marks: the page makes its own."""
    known = _CATALOGUE.get(metric.replace("{}", "SOURCE"))
    title, says = (known.title, known.sentence.replace("`", "")) if known else (metric, _OTHER)
    return Figure(title, says, paper=PAPER.get(metric, ""), run=run)


def unit_of(metric: str) -> str:
    known = _CATALOGUE.get(metric.replace("{}", "SOURCE"))
    if known is None:
        return ""
    return {"0 to 1": "share, 0 to 1", "": known.title.lower()}.get(known.unit, known.unit)
