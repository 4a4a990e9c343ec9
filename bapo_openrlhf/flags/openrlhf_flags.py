"""The flags of OpenRLHF that follow from this project's flags."""

from types import SimpleNamespace


def behaviour_kl(args: SimpleNamespace) -> float:
    """Coefficient of the KL penalty to the behaviour policy; 0 if the penalty is to the reference model."""
    is_behaviour = args.adapt.enabled and args.adapt.kl_target == "behaviour"
    return float(args.algo.kl.init_coef) if is_behaviour else 0.0


def set_openrlhf_flags(args: SimpleNamespace) -> None:
    """Set the flags of OpenRLHF through which it does what this project's flags ask for."""
    adapt = args.adapt
    if not adapt.enabled:
        return
    if adapt.kl_target == "behaviour":
        args.algo.kl.init_coef = 0.0  # above 0, OpenRLHF would load a reference model
    correction = args.algo.advantage
    if adapt.ratio == "decoupled" and correction.is_correction_level == "off":
        # The loss clips pi/prox and has the weight prox/alpha, truncated from above. OpenRLHF's token-level
        # importance-sampling correction is exactly this weight if the log-probs of alpha are the stored ones.
        correction.is_correction_level, correction.is_correction_mode = "token", "clip"
        correction.is_correction_gating = "ratio"
        correction.is_correction_threshold = [0.0, correction.is_correction_threshold[-1]]
