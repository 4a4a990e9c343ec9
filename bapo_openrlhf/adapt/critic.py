"""What the critic may learn from in a step, in addition to the batch of the actor.

The actor needs groups with a signal. The critic does not: that a group is all right or all wrong says most of what its
prompt is worth, and the filter drops just these groups.
"""

from collections.abc import Iterable

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.group import Group


def beside_batch(generated: Iterable[Group], batch: Batch) -> list[Group]:
    """What this step generated and the actor does not train on: whole groups, and what is left out of others.

    No response is in it twice, or in the batch too. Groups that turned out not to be finite are left out.
    """
    trained = {id(response) for _, group in batch.with_sources() for response in group.responses}
    broken = {group.uid for group in batch.nonfinite}
    beside = []
    for group in generated:
        places = [place for place, response in enumerate(group.responses) if id(response) not in trained]
        if places and group.uid not in broken:
            beside.append(group.keep(places, relative_to="generated"))
    return beside
