"""What flags about the updates on a batch cannot be combined with."""

from collections.abc import Callable
from typing import Any

from bapo_openrlhf.flags.rule import Rule


def _of_tokens(flag: str) -> Rule:
    return Rule(flag, lambda f: f.adapted and f[flag] is not None
                and (f["adapt.ratio"], f["actor.policy_loss_type"]) != ("behaviour", "ppo"),
                "{it}; it needs adapt.ratio behaviour and actor.policy_loss_type ppo, because it is about the ratio "
                "pi/alpha of each token")  # fmt: skip


def _with_gate(flag: str, broken: Callable[[Any], Any], allowed: str) -> Rule:
    return Rule(flag, lambda f: f.adapted and f["adapt.reuse_gate"] is not None and broken(f[flag]),
                "{it}; with adapt.reuse_gate {f[adapt.reuse_gate]} it must be " + allowed)  # fmt: skip


UPDATES = [
    *map(_of_tokens, ("adapt.max_second_moment", "adapt.veto_ratio")),
    _with_gate("train.max_epochs", lambda uses: uses < 2, "at least 2, because the first use never ends early"),
    _with_gate("ds.lora.rank", lambda rank: rank > 0, "0, because an adapter leaves the output head as it is"),
    _with_gate("actor.optim", lambda name: name == "muon",
               "adam, because DeepSpeed moves Muon's momentum before it calls the optimizer"),
    _with_gate("ds.tensor_parallel_size", lambda size: size > 1,
               "1, because the gradient of a divided output head is not added up"),
]  # fmt: skip
