"""What the flags of the critic path may not be together with."""

from typing import Any

from bapo_openrlhf.flags.rule import Rule


def _of_a_critic(flag: str, default: Any) -> Rule:
    return Rule(flag, lambda f: f[flag] != default and not (f.adapted and f.critic),
                "{it}; it needs a critic and batch adaptation (--algorithm ba_ppo), and algo.advantage.estimator is "
                "{f[algo.advantage.estimator]} with adapt.method {f[adapt.method]}")  # fmt: skip


CRITIC = [
    _of_a_critic("adapt.critic_lambd", None),
    _of_a_critic("adapt.length_adaptive_lambd", None),
    _of_a_critic("adapt.critic_groups", "batch"),
    _of_a_critic("adapt.critic_baseline", "critic"),
    _of_a_critic("adapt.value_pretraining", 0),
    Rule("adapt.length_adaptive_lambd",
         lambda f: f["adapt.length_adaptive_lambd"] is not None and f["algo.advantage.lambd"] != 1,
         "{it}, and algo.advantage.lambd is {f[algo.advantage.lambd]:g}; it must be 1, because only one of them can be "
         "the lambda of the advantages"),
    Rule("adapt.critic_baseline", lambda f: f["adapt.critic_baseline"] != "critic" and f["algo.advantage.gamma"] != 1,
         "{it}, and algo.advantage.gamma is {f[algo.advantage.gamma]:g}; it must be 1, because a mean of rewards is no "
         "baseline of discounted returns"),
]  # fmt: skip
