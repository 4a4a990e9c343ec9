"""This project's flags as OpenRLHF's, where OpenRLHF already has the mechanism; combinations that are refused."""

from __future__ import annotations

from types import SimpleNamespace

from bapo_openrlhf.errors import ConfigError


def prepare_adaptation(args: SimpleNamespace) -> None:
    """Turn this project's flags into OpenRLHF's where OpenRLHF already has the mechanism.

    Raises:
        ConfigError: a flag of OpenRLHF that batch adaptation, or a profile, cannot be combined with.
    """
    adapt = args.adapt
    if args.run.profile_steps and args.train.async_enable:
        raise ConfigError(
            f"run.profile_steps is {args.run.profile_steps}; with train.async_enable it must be 0: OpenRLHF's "
            "asynchronous trainer keeps no record, and its steps overlap"
        )
    if not adapt.enabled:
        return
    refused = {
        "train.async_enable": (
            args.train.async_enable,
            "its generator runs ahead of the trainer and syncs weights by its own rule, so neither the rollout policy "
            "of a step (v) nor the step of a re-evaluation (m) is defined",
        ),
        "ds.use_universal_ckpt": (
            args.ds.use_universal_ckpt,
            "a checkpoint that was converted by hand has no manifest to check it by",
        ),
        "algo.dynamic_filtering_enable": (
            args.algo.dynamic_filtering_enable,
            "it drops groups before they are counted",
        ),
    }
    for name, (is_on, reason) in refused.items():
        if is_on:
            raise ConfigError(f"{name} cannot be combined with adapt.method {adapt.method}: {reason}")
    if not args.reward.remote_url:
        raise ConfigError("reward.remote_url is not set; batch adaptation needs rewards at generation time")
    if adapt.returns == "vtrace" and args.algo.advantage.estimator != "gae":
        raise ConfigError(
            "adapt.returns vtrace corrects a critic's values; algo.advantage.estimator "
            f"{args.algo.advantage.estimator} has none, it must be gae"
        )
    if adapt.kl_target == "behaviour":
        # OpenRLHF builds a reference model when its coefficient is above 0.
        adapt.kl_coef, args.algo.kl.init_coef = args.algo.kl.init_coef, 0.0
    if adapt.ratio == "decoupled":
        if args.actor.policy_loss_type == "gspo":
            raise ConfigError(
                "actor.policy_loss_type gspo cannot be combined with adapt.ratio decoupled: OpenRLHF's sequence-level "
                "loss has one ratio, to the behaviour policy, and no weight to truncate"
            )
        # Clip on pi/prox, weight prox/alpha truncated from above: OpenRLHF's token-level IS correction does just that
        # when alpha's log-probs are the stored ones.
        correction = args.algo.advantage
        correction.is_correction_level, correction.is_correction_mode = "token", "clip"
        correction.is_correction_gating = "ratio"
        correction.is_correction_threshold = [0.0, adapt.max_importance_weight]
