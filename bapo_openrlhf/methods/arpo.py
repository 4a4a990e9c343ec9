"""ARPO: if all responses of a prompt fail, one of them gives way to a stored success (arXiv 2505.16282).

Paper: "ARPO: End-to-End Policy Optimization for GUI Agents with Experience Replay". Details follow its authors' code
(dvlab-research/ARPO, verl/trainer, read at commit 7489ae3).
"""

from dataclasses import dataclass
from fractions import Fraction

from bapo_openrlhf.adapt.group import Group
from bapo_openrlhf.methods.base import option
from bapo_openrlhf.methods.stored_successes import StoredSuccesses


@dataclass(eq=False, kw_only=True)
class ARPO(StoredSuccesses):
    """Puts a stored success into a group whose responses all failed.

    A group has failed if the mean of its rewards and their standard deviation are low. A stored success then replaces
    its first response, as in the authors' code. Mean and deviation of the advantages are over the responses that the
    group then holds (*kept*).

    Deviations: a stored success keeps the log-probs of the policy that generated it; the authors compute them again
    with today's policy, so that its ratio begins at 1. Their scripts clip at 0.2 and 0.3 and have no KL term; these are
    OpenRLHF's flags. The thresholds are exact numbers. Whether a group has failed is said by whole rewards here, and by
    the verifier's part of them in the authors' code. This layer has nothing that is specific to agents (screenshots,
    tasks in an environment): a task is a prompt here. Only responses of the current run are stored.

    Args:
        std_below, mean_below: A group has failed if both its numbers are below these.
    """

    USE = "Use it if rewards are rare, so that most groups fail as a whole."
    SOURCE = "arXiv 2505.16282"

    std_below: Fraction = option(Fraction(1, 20), "above 0")
    mean_below: Fraction = Fraction(1, 5)

    def has_failed(self, group: Group) -> bool:
        """Whether a group is without success: its rewards are low and hardly differ."""
        return group.mean < self.mean_below and group.variance < self.std_below**2
