"""The words for the sources of a batch and for what becomes of a generated group.

Fields of `Batch`, metric names (`groups/fresh`) and the files of a run use these words as they are. They are defined
only here. The module imports nothing, so that reading a record needs no numpy.
"""

from typing import Literal, get_args

Source = Literal["fresh", "reevaluated", "replayed", "prefixed"]
SOURCES: tuple[Source, ...] = get_args(Source)  # X1, X2 and X3 of Definition 3.1, and groups with a prefix


def shown_sources(counts: dict[str, float]) -> list[Source]:
    """The sources that a page shows, by the number of groups of each: the last one only if it has any."""
    return [source for source in SOURCES if source != "prefixed" or counts.get(source)]


# What can become of a group in the step that generates it. Each is a field of Batch, except FAILED: a failed group
# lacks a reward, or has behaviour log-probs that are not finite, so it never reaches a batch.
STATES = (
    "fresh", "reevaluated", "prefixed", "filtered", "unimproved", "solved", "unsteered", "demonstration", "cut",
    "too_far", "nonfinite",
)  # fmt: skip
TRAINED = STATES[:3]  # those that the step trains on
FAILED = "failed"
ENDS = (*STATES[len(TRAINED) :], FAILED)  # those of groups that no batch has
DROPPED = "dropped"  # state of a response whose group is trained on without it
EARLIER = ("replayed", "unused")  # fields of Batch with groups of earlier steps, whose state was counted then
REASONS = ("none_right", "all_right", "by_draw")  # why a group is filtered
