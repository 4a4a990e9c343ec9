"""What `--adapt.skip_zero_advantage` cannot be combined with, and what it weakens."""

from bapo_openrlhf.adapt.advantage import ESTIMATORS
from bapo_openrlhf.flags.rule import Flags, Rule

SKIP = "adapt.skip_zero_advantage"
UNWHITENED = [name for name, estimator in ESTIMATORS.items() if not estimator.whitened]
# Terms of the loss or of the reward that responses without a group-relative advantage have, and that are then lost.
COEFFICIENTS = ("algo.kl.init_coef", "actor.entropy_coef", "actor.aux_loss_coef")
PENALTIES = ("reward.overlong_buffer_len", "reward.stop_properly_penalty_coef")


def _skips(f: Flags) -> bool:
    return bool(f.adapted and f[SKIP])


SKIPPING = [
    Rule("algo.advantage.estimator", lambda f: _skips(f) and f["algo.advantage.estimator"] not in UNWHITENED,
         "{it}; with adapt.skip_zero_advantage True it must be one of " + ", ".join(UNWHITENED) + ", because only "
         "with them the advantages of equal rewards are 0"),
    Rule("adapt.scale_learning_rate", lambda f: _skips(f) and f["adapt.scale_learning_rate"],
         "{it}; it must be False with adapt.skip_zero_advantage, because the factor needs the weight pi/alpha of each "
         "response"),
]  # fmt: skip


def _weakened(flag: str) -> Rule:
    return Rule(flag, lambda f: _skips(f) and (f[flag] is not None if flag in PENALTIES else f[flag]),
                "{it}, and adapt.skip_zero_advantage is True: this term is lost for the skipped responses, so that a "
                "step is not the one that trains on them")  # fmt: skip


WEAKENED = [*map(_weakened, (*COEFFICIENTS, *PENALTIES))]
