"""halves_design.md: half of a group's responses are trained on, and one of its halves is probed later.

With `--adapt.method research/halves.py:Halves --adapt.replay_steps 7 --run.gradient_probe 8`, the responses in even
places of a group with an even number are trained on in its own step. The responses to a prompt are draws of one policy,
so that it makes no difference which half this is. In the steps of the probe, half of each stored group is in X3, and
the number of the group says which (`kind`). Then all of them are forgotten.

    PYTHONPATH=research bapo-openrlhf study --config research/studies/halves.yaml  # the four runs
    python research/halves_shares.py --runs runs/studies/halves  # keeps their records, and writes results/halves/
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

from held_out import HeldOut

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.group import Group

Kind = Literal["same", "other", "apart"]


def kind(uid: int) -> Kind:
    """What is probed of the group with this number.

    same: the half that was trained on. other: the half that was not, of a group whose other half was. apart: half of a
    group of which nothing was trained on.
    """
    return ("same", "apart", "other", "apart")[uid % 4]  # type: ignore[return-value]


def half(group: Group, place: int) -> Group:
    """The responses in the even places of a group (0) or in the odd ones (1), with the advantages of all of them."""
    return group.keep(range(place, group.size, 2), relative_to="generated")


class Halves(HeldOut):
    """`HeldOut` that trains on half of the responses of a group, and probes half of each."""

    NAME: ClassVar[str] = "halves"
    related_to_generated = True

    def build_batch(self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group]) -> Batch:
        """The batch of `HeldOut` with the even places of each fresh group. The stored groups are whole."""
        batch = super().build_batch(step, fresh, reevaluated)
        batch.fresh = [half(group, 0) for group in batch.fresh]
        return batch

    def draw_replay(self, count: int, accept: Callable[[Group], bool]) -> list[Group]:
        """In the steps of the probe half of each stored group."""
        return [half(group, int(kind(group.uid) == "other")) for group in super().draw_replay(count, accept)]
