"""What this project's flags mean for OpenRLHF."""

import math
from types import SimpleNamespace

from bapo_openrlhf.adapt.filters import Between
from bapo_openrlhf.adapt.rewards import UNIT, as_fraction


def has_reference(args: SimpleNamespace) -> bool:
    """Whether the run has a reference model. A KL penalty to the behaviour policy needs none."""
    to_behaviour = args.adapt.enabled and args.adapt.kl_target == "behaviour"
    return bool(args.algo.kl.init_coef > 0 and not to_behaviour)


def signal_between(args: SimpleNamespace) -> Between | None:
    """Group mean rewards, mapped to [0, 1], that a group with a signal is between; None without dynamic filtering."""
    if not args.algo.dynamic_filtering_enable:
        return None
    low, high = args.adapt.rewards() or UNIT
    least, most = (
        end if math.isinf(end) else (as_fraction(end) - low) / (high - low) for end in args.algo.dynamic_filtering_range
    )
    return least, most


def set_openrlhf_flags(args: SimpleNamespace) -> None:
    """Set the flags of OpenRLHF through which it does what this project's flags ask for."""
    adapt = args.adapt
    if not adapt.enabled:
        return
    correction = args.algo.advantage
    if adapt.ratio == "decoupled" and correction.is_correction_level == "off":
        # The loss clips pi/prox and has the weight prox/alpha, truncated from above. OpenRLHF's token-level
        # importance-sampling correction is exactly this weight if the log-probs of alpha are the stored ones.
        correction.is_correction_level, correction.is_correction_mode = "token", "clip"
        correction.is_correction_gating = "ratio"
        correction.is_correction_threshold = [0.0, correction.is_correction_threshold[-1]]
