"""Limits of where batch adaptation paid in the study of docs/results.md. `check` and `watch` compare a run with them.

The module imports nothing, so that looking at a run needs no numpy.
"""

MOST_X2 = 0.5  # responses of X2 for each response of the rollouts: twice as many cost 7 points
FARTHEST_TV = 0.04  # TV distance of replayed groups: beyond it, they point less than half as far as fresh ones
