"""BAPO with prioritised replay and re-evaluation. The paper replays uniformly and re-evaluates the oldest first."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.difficulty import SuccessCounts
from bapo_openrlhf.adapt.group import Group, Prompt
from bapo_openrlhf.methods.bapo import BAPO
from bapo_openrlhf.methods.base import option

SMALL = 1e-6  # so that a group of error 0 can still be drawn


@dataclass(eq=False, kw_only=True)
class PrioritizedBAPO(BAPO):
    """BAPO with two other draws.

    Replay (X3): the groups that BAPO could replay are drawn without replacement, each with probability proportional to
    (error + 1e-6)^alpha. This is proportional prioritisation (arXiv 1511.05952, Sec. 3.3) for groups instead of
    transitions. Its importance-sampling correction (Sec. 3.4) is left out, because BAPO's uniform draw from [c2, c3] is
    not an estimate of an expectation either. A group keeps the error that it had when it was last trained on: with a
    critic the mean |value - return| over its tokens, otherwise the mean |A|. A group that was stored but not trained on
    gets the largest known error, so that it will be seen.

    Re-evaluation (X2): a success probability is drawn from the posterior Beta(a, b) of each hard prompt
    (`adapt.difficulty`, prior 1 and 1), which all groups of the prompt update. Prompts whose draw is at least c1 come
    first, the oldest of them before the others. Then come those whose draw is nearest below c1.

    Args:
        exponent: alpha of the priorities, within [0, 10]. 0 is uniform.
        decay: lam of the posterior, within [0, 1]: how much of what was seen before a prompt's last group still counts.

    Raises:
        ValueError: An option is out of its range.
    """

    NAME = "bapo_prioritized"
    SENTENCE = "BAPO that replays by the last error, and generates again by what is known of a prompt's difficulty."
    USE = "Use it if the buffers hold far more than a batch has room for."
    SOURCE = "this project, after arXiv 1511.05952"
    STATE = (*BAPO.STATE, "errors", "posteriors")

    exponent: float = option(0.6, "within [0, 10]")  # with a larger one, 1e-6 to that power is lost in rounding
    decay: float = option(0.5, "within [0, 1]")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.errors: dict[int, float] = {}  # errors of stored groups, by uid
        self.posteriors = SuccessCounts(self.decay, 1.0, 1.0)

    def draw_hard(self, count: int) -> list[Prompt]:
        """Hard prompts by their draws, see the class."""
        if count == 0:
            return []
        prompts = [entry.prompt for entry in self.hard.oldest(len(self.hard))]
        counts, _ = self.posteriors.of(prompts)
        draws = self.rng.beta(counts[:, 0], counts[:, 1])
        missing = np.maximum(float(self.c1) - draws, 0)
        return [prompts[index] for index in np.argsort(missing, kind="stable")[:count]]

    def draw_replay(self, count: int, accept: Callable[[Group], bool]) -> list[Group]:
        """Stored groups by their errors, see the class."""
        largest = max(self.errors.values(), default=1.0)

        def priority(group: Group) -> float:
            return float((self.errors.get(group.uid, largest) + SMALL) ** self.exponent)

        return self.replay.sample(count, self.rng, accept, priority)

    def build_batch(self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group]) -> Batch:
        """BAPO's batch. Everything that was generated updates the posteriors."""
        self.posteriors.update([*fresh, *reevaluated])
        return super().build_batch(step, fresh, reevaluated)

    def observe(self, step: int, errors: Mapping[int, float]) -> None:
        """Keep the errors of the stored groups."""
        known = self.errors | dict(errors)
        self.errors = {group.uid: known[group.uid] for group in self.replay if group.uid in known}

    def state_dict(self) -> dict[str, Any]:
        """The state as BAPO's, with the errors as pairs of uid and error."""
        return super().state_dict() | {"errors": [[uid, error] for uid, error in self.errors.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        errors = {int(uid): float(error) for uid, error in state.get("errors", ())}
        super().load_state_dict(state | {"errors": errors})
