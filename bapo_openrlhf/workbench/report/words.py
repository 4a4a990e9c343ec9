"""The words of the figures that show metrics: a title, one plain sentence, and the unit."""

from __future__ import annotations

from dataclasses import dataclass

OLDER = "it is not recorded: the run is of an older version, or without batch adaptation"
NO_ATTEMPT = "no hard prompt was generated again, or the run is of an older version"
NO_THEORY = "without batch adaptation there is nothing to monitor, or the run is of an older version"
NO_CRITIC = "the run has no critic, or is of an older version"


@dataclass(frozen=True)
class Words:
    """A figure's words.

    Attributes:
        says: What the figure shows.
        y: Title of the y axis, with its unit.
        paper: The figure of the paper that it corresponds to; empty if there is none.
        why: Why a run may lack the metric.
        peaks: Whether a point that stands for several steps is their largest value. Otherwise it is their mean.
    """

    title: str
    says: str
    y: str
    paper: str = ""
    why: str = OLDER
    peaks: bool = False


# By metric. {} stands for a source.
WORDS = {
    "rollouts/total": Words(
        "Responses generated", "Responses generated so far, re-evaluation included.", "responses", "Fig. 9"
    ),
    "tokens/generated_total": Words(
        "Tokens generated", "Generated tokens of all responses so far.", "tokens", "Fig. 9"
    ),
    "groups/capacity_used": Words(
        "Capacity used",
        "Share of a batch's capacity that was filled; below 1, a step trains on less.",
        "share of capacity",
    ),
    "buffer/hard": Words("Hard buffer", "Prompts stored because their last group failed.", "prompts"),
    "buffer/replay": Words("Replay buffer", "Groups stored for replay.", "groups"),
    "reevaluation/improved_share": Words(
        "Re-evaluated and improved",
        "Of the hard prompts generated again, the share whose new group was trained on (Eq. 6).",
        "share of attempts",
        why=NO_ATTEMPT,
    ),
    "threshold/c2": Words(
        "Thresholds of the replay",
        "Group means from c2 to c3 are replayed; both follow the average reward (Eq. 8).",
        "group mean reward",
    ),
    "staleness/replayed_steps_mean": Words(
        "Age of the replayed groups",
        "How many trainer steps ago the groups of X3 were generated.",
        "trainer steps",
        why="nothing was replayed",
    ),
    "staleness/rollout_policy": Words(
        "Age of the rollout weights",
        "How many trainer steps old the weights were that generated the fresh groups.",
        "trainer steps",
    ),
    "tv/{}": Words(
        "Distance to today's policy",
        "Sampled TV distance, the mean over a source's groups, before the update (Eq. 9, 10).",
        "TV distance",
        why=NO_THEORY,
    ),
    "theory/k1": Words(
        "Constants of the bound",
        "What a TV distance costs in the bound, by source (Eq. 11–13).",
        "K",
        why=NO_THEORY,
    ),
    "theory/bound_{}": Words(
        "Terms of the bound",
        "Each source's term of the lower bound; below 0 it promises nothing.",
        "improvement, at least",
        why=NO_THEORY,
    ),
    "theory/bound": Words(
        "The bound",
        "The terms, weighted by the sources' shares of the groups; below 0 it promises nothing.",
        "improvement, at least",
        why=NO_THEORY,
    ),
    "importance/{}_effective_share": Words(
        "Effective sample size",
        "Share of the responses that count after importance weights; 1: today's policy made them.",
        "share of responses",
        why=NO_THEORY,
    ),
    "entropy_loss": Words(
        "Entropy", "Mean entropy of the policy at the tokens trained on.", "nats per token", "Fig. 11"
    ),
    "response_length": Words("Response length", "Mean length of the responses trained on.", "tokens", "Fig. 11"),
    "actor_grad_norm": Words(
        "Gradient norm",
        "Norm of the actor's gradient; peaks are where training was unstable.",
        "norm",
        "Fig. 10",
        peaks=True,
    ),
    "kl": Words("KL divergence", "Mean KL divergence to the reference policy over the batch.", "nats"),
    "length/{}": Words("Response length by source", "Mean generated tokens of a response.", "tokens"),
    "clip/{}": Words(
        "Clipped tokens", "Share of the tokens whose PPO ratio is clipped in the first update.", "share of tokens"
    ),
    "advantage/{}_abs": Words("Advantages", "Mean absolute advantage of a token.", "absolute advantage"),
    "value/{}_error": Words(
        "Error of the critic", "Root mean square of value minus return, over the tokens.", "reward", why=NO_CRITIC
    ),
    "value/{}_bias": Words(
        "Bias of the critic",
        "Mean of value minus return; above 0, the critic expects too much.",
        "reward",
        why=NO_CRITIC,
    ),
}
