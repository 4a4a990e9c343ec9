"""OpenRLHF's flags that follow from this project's flags, and the combinations that are refused."""

from types import SimpleNamespace

from bapo_openrlhf.errors import ConfigError

NOT_WITH_ADAPTATION = {
    "train.partial_rollout_enable": (
        "a response would go on with other weights after a sync, so its prompt could not be generated again from one "
        "policy, and a resumed run would not repeat it"
    ),
    "ds.use_universal_ckpt": "a checkpoint that was converted by hand has no manifest to check it by",
    "algo.dynamic_filtering_enable": "it drops groups before they are counted",
}


def check_combinations(args: SimpleNamespace) -> None:
    """Refuse flags of OpenRLHF that cannot be combined with batch adaptation.

    Raises:
        ConfigError: The message names the flags and says why they exclude each other.
    """
    adapt = args.adapt
    _check_adapters(args)
    _check_micro_batches(args)
    _check_critic(args)
    _check_probe(args)
    if not adapt.enabled:
        return
    for name, reason in NOT_WITH_ADAPTATION.items():
        group, flag = name.split(".")
        if getattr(getattr(args, group), flag):
            raise ConfigError(f"{name} cannot be combined with adapt.method {adapt.method}: {reason}")
    _check_asynchronous(args)
    if not args.reward.remote_url:
        raise ConfigError("reward.remote_url is not set; batch adaptation needs rewards at generation time")
    if adapt.returns == "vtrace" and args.algo.advantage.estimator != "gae":
        raise ConfigError(
            "adapt.returns vtrace corrects a critic's values; algo.advantage.estimator "
            f"{args.algo.advantage.estimator} has none, it must be gae"
        )
    if adapt.ratio == "decoupled" and args.actor.policy_loss_type == "gspo":
        raise ConfigError(
            "actor.policy_loss_type gspo cannot be combined with adapt.ratio decoupled: OpenRLHF's sequence-level "
            "loss has one ratio, to the behaviour policy, and no weight to truncate"
        )
    if adapt.max_second_moment is not None and (adapt.ratio, args.actor.policy_loss_type) != ("behaviour", "ppo"):
        raise ConfigError(
            f"adapt.max_second_moment is {adapt.max_second_moment}; it needs adapt.ratio behaviour and "
            "actor.policy_loss_type ppo, because it is about the ratio pi/alpha of each token"
        )


def _check_probe(args: SimpleNamespace) -> None:
    """Refuse a probe of gradients if one process does not have them whole, or if generation is ahead of training."""
    actor, every = args.actor, args.run.gradient_probe
    if not every:
        return
    for fits, name, value, allowed in (
        (args.adapt.enabled, "adapt.method", args.adapt.method, "a method of batch adaptation"),
        (actor.num_nodes * actor.num_gpus_per_node == 1, "actor.num_gpus_per_node", actor.num_gpus_per_node, "1"),
        (args.ds.zero_stage < 3, "ds.zero_stage", args.ds.zero_stage, "below 3"),
        (not args.train.async_enable, "train.async_enable", True, "False"),
        (not args.data.max_images_per_prompt, "data.max_images_per_prompt", args.data.max_images_per_prompt, "0"),
    ):
        if not fits:
            raise ConfigError(f"run.gradient_probe is {every}, and {name} is {value}; it must be {allowed} then")


def _check_micro_batches(args: SimpleNamespace) -> None:
    """Refuse a size of micro-batches that nothing would read, or a second one."""
    tokens = args.adapt.micro_batch_tokens
    if tokens is None:
        return
    if not args.adapt.enabled:
        raise ConfigError(f"adapt.micro_batch_tokens is {tokens}; it needs batch adaptation, and adapt.method is none")
    if args.train.dynamic_batch_enable:
        raise ConfigError(
            f"adapt.micro_batch_tokens is {tokens}, and train.dynamic_batch_enable is True; only one of them can make "
            "the micro-batches"
        )


def _check_critic(args: SimpleNamespace) -> None:
    """Refuse flags of the critic if there is none, or if OpenRLHF computes its returns."""
    adapt, estimator = args.adapt, args.algo.advantage.estimator
    if adapt.enabled and estimator == "gae":
        return
    for name, default in (("critic_lambd", None), ("value_pretraining", 0)):
        if (value := getattr(adapt, name)) != default:
            raise ConfigError(
                f"adapt.{name} is {value}; it needs a critic and batch adaptation (--algorithm ba_ppo), and "
                f"algo.advantage.estimator is {estimator} with adapt.method {adapt.method}"
            )


def _check_asynchronous(args: SimpleNamespace) -> None:
    """Refuse what batch adaptation cannot do while generation is ahead of training."""
    rollout, generated = args.rollout, args.rollout.vllm_generate_batch_size
    if generated and generated > rollout.batch_size:
        raise ConfigError(
            f"rollout.vllm_generate_batch_size is {generated}; with adapt.method {args.adapt.method} it must be at "
            f"most rollout.batch_size, {rollout.batch_size}: what is left over would be in no checkpoint"
        )
    if args.adapt.max_staleness is not None and not args.train.async_enable:
        raise ConfigError(f"adapt.max_staleness is {args.adapt.max_staleness}; it needs train.async_enable")


def _check_adapters(args: SimpleNamespace) -> None:
    """Refuse LoRA if the engines could not get the actor's weights."""
    if not args.ds.lora.rank:
        return
    asked = f"ds.lora.rank is {args.ds.lora.rank}; it must be 0"
    if args.train.enable_ema:
        raise ConfigError(f"{asked} with train.enable_ema: OpenRLHF's averaged model has no adapter")
    if not args.adapt.enabled:
        raise ConfigError(f"{asked} without batch adaptation: OpenRLHF's rollout engines cannot load an adapter")
    if args.ds.load_in_4bit:
        raise ConfigError(f"{asked} with ds.load_in_4bit: the engines cannot merge an adapter into packed weights")
    if args.vllm.sync_with_ray:
        raise ConfigError(f"{asked} with vllm.sync_with_ray: OpenRLHF then expects one dtype for all weights")
    if args.data.max_images_per_prompt:
        raise ConfigError(f"{asked} with data.max_images_per_prompt: for such models OpenRLHF sends only the adapter")


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
