"""Reward of the stack tests: a response is right with a chance of LABEL in 8, decided by its text.

The chance does not depend on the model. Processors round differently, so another machine samples other tokens, and
groups must have rewards of every spread there, too.
"""

import zlib


def reward_func(queries, prompts, labels, **kwargs):
    (query,), (label,) = queries, labels
    reward = float(zlib.crc32(query.encode()) % 8 < int(label))
    return {"rewards": reward, "scores": reward, "extra_logs": {"length": float(len(query))}}
