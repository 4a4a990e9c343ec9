"""BAPO (arXiv 2602.20722) with X4: a hard prompt that keeps failing is shown its worked solution."""

from collections.abc import Sequence
from dataclasses import dataclass

from bapo_openrlhf.adapt.batch import Batch, Demonstration
from bapo_openrlhf.adapt.group import Group
from bapo_openrlhf.adapt.prefixes import by_prefix
from bapo_openrlhf.methods import bapo
from bapo_openrlhf.methods.base import option


@dataclass(eq=False, kw_only=True)
class DemonstratingBAPO(bapo.BAPO):
    """BAPO that shows a hard prompt its worked solution after several re-evaluations have failed.

    A re-evaluation fails if its group is still too hard (`unimproved`). The K-th group in a row that fails is in the
    state `demonstration`, and the batch trains on the worked solution of its prompt (X4), with LUFFY's loss
    (`adapt.corrections.shaped`). Its advantage is relative to the rewards of the group and its own. The group's own
    responses are not trained on. The prompt stays in the hard buffer, and its failures are counted from 0 again.

    X4 takes places of the batch before X1, X2 and X3. If it fills the batch, the others wait for their next failure.

    Args:
        failures: K, at least 1.
    """

    USE = "Use it if the data has worked solutions, and many hard prompts never improve."
    SOURCE = "this project, after arXiv 2602.20722"
    demonstrates = True
    STATE = (*bapo.BAPO.STATE, "failed")

    failures: int = option(3, "at least 1")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.failed: dict[str, int] = {}  # failed re-evaluations in a row, by prompt id
        self.solution_uids: set[int] = set()  # uids of the groups of this step whose prompts are shown their solutions

    def build_batch(self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group]) -> Batch:
        """The batch of BAPO in the room that X4 leaves, and X4."""
        self.solution_uids = self._count(reevaluated)
        batch = super().build_batch(step, fresh, reevaluated)
        batch.demonstration = [group for group in batch.unimproved if group.uid in self.solution_uids]
        batch.unimproved = [group for group in batch.unimproved if group.uid not in self.solution_uids]
        batch.demonstrations = [Demonstration.of(group) for group in batch.demonstration]
        return batch

    def room(self) -> int:
        """What X4 leaves."""
        return self.max_responses - len(self.solution_uids)

    def _count(self, reevaluated: Sequence[Group]) -> set[int]:
        """Count the failures of re-evaluated prompts. Returns the uids of the groups whose solution is shown now."""
        uids = set[int]()
        self.failed = dict(self.failed)  # a state that was taken before stays as it is
        for group in by_prefix(reevaluated)[0]:
            name = group.prompt.id
            count = self.failed.pop(name, 0) + 1
            if self.improved(group) or group.mean > self.c1 or name not in self.solutions:
                continue
            if count >= self.failures and len(uids) < self.max_responses:
                uids.add(group.uid)
            else:
                self.failed[name] = count
        return uids
