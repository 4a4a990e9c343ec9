"""Limits that the study of docs/results.md found. `check` and `watch` compare a run with them.

FARTHEST_SHIFT was found with replayed groups, which had been trained on before. Groups that had not are worth half of a
fresh one up to a TV distance of 0.16. The module imports nothing, so that looking at a run needs no numpy.
"""

MOST_X2 = 0.2  # responses of X2 for each response of the rollouts: 0.25 cost 2.6 points, and 1 cost 7
MOST_USES = 1  # earlier steps that trained on a replayed group: after one, its gradient points less far than without
# Shifts, found with responses of 62 tokens on average:
FARTHEST_SHIFT = 1.3e-4  # shift on replayed groups: beyond it, they point less than half as far as fresh ones
STALEST_SHIFT = 1.1e-4  # the same of fresh groups, on average: twice as much cost 3.5 points
