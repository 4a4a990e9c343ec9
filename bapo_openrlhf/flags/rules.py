"""What flags may not be together, and what is only warned of.

OpenRLHF checks few values. It finds out about most others when models are loaded, at the first step, or never.
"""

import argparse
from collections.abc import Iterator, Mapping
from itertools import chain
from types import SimpleNamespace
from typing import Any

from bapo_openrlhf.adapt.arithmetic import BatchArithmetic, batch_arithmetic
from bapo_openrlhf.adapt.findings import MOST_X2
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.flags.attention import packing_flag
from bapo_openrlhf.flags.ranges import MODELS, VALUES, check_ranges
from bapo_openrlhf.methods import Method

NEEDS_GROUPS = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")
FILTERING = "algo.dynamic_filtering_enable"
NO_CRITIC = "OpenRLHF has no critic for images: use --algorithm bapo_grpo, or grpo"


def check_values(flags: Mapping[str, Any]) -> None:
    """Refuse a value outside its range, and flags that contradict each other.

    Args:
        flags: Values by dotted name, as they were given, before OpenRLHF completes them.

    Raises:
        ConfigError: The message names the flag, its value and what is allowed.
    """
    check_ranges(flags, VALUES)
    contradiction = next(chain(_sizes(flags), _options(flags), _placement(flags)), None)
    if contradiction is not None:
        raise ConfigError(contradiction)


def _sizes(f: Mapping[str, Any]) -> Iterator[str]:
    size, batch = f["rollout.n_samples_per_prompt"], f["rollout.batch_size"]
    estimator, filtering = f["algo.advantage.estimator"], f["algo.dynamic_filtering_enable"]
    if size < 2 and (filtering or estimator in NEEDS_GROUPS):
        needed_by = f"algo.advantage.estimator {estimator}" if estimator in NEEDS_GROUPS else FILTERING
        yield f"rollout.n_samples_per_prompt is {size}; it must be at least 2 with {needed_by}"
    trained = max(batch, f["adapt.batch_size"] or 0) if f["adapt.method"] != "none" else batch
    if f["train.batch_size"] > trained * size:
        yield (
            f"train.batch_size is {f['train.batch_size']}; it must be at most {trained * size} = {trained} prompts of "
            f"a batch x rollout.n_samples_per_prompt {size}"
        )
    passes = batch * size // f["rollout.micro_batch_size"]
    ranks = _gpus(f, "actor") // f["ds.ring_attn_size"] // f["ds.tensor_parallel_size"]
    if passes < ranks:
        yield (
            f"rollout.micro_batch_size is {f['rollout.micro_batch_size']}; it must be smaller: {batch * size} samples "
            f"make {passes} of this size, and each of the {ranks} actor ranks needs one"
        )
    tokens, longest = f["adapt.micro_batch_tokens"], f["data.max_len"]
    if tokens is not None and 0 < tokens < longest:
        yield f"adapt.micro_batch_tokens is {tokens}; it must be at least data.max_len {longest}, the longest sample"
    generated = f["rollout.vllm_generate_batch_size"] or batch
    if generated > batch and not f["train.async_enable"]:
        yield (
            f"rollout.vllm_generate_batch_size is {generated}; it must be at most rollout.batch_size {batch} without "
            "train.async_enable"
        )
    most, response, overlong = f["data.max_len"], f["rollout.max_new_tokens"], f["reward.overlong_buffer_len"]
    if response is not None and response >= most:
        yield f"rollout.max_new_tokens is {response}; it must be below data.max_len {most} = prompt + response"
    if overlong is not None and overlong > (response or most):
        yield f"reward.overlong_buffer_len is {overlong}; it must be at most {response or most}, the longest response"


def _options(f: Mapping[str, Any]) -> Iterator[str]:
    name = f["run.name"]
    if name.strip() in ("", ".", "..") or "/" in name or not name.isprintable():
        yield f"run.name is {name!r}; it must be the name of one folder, not empty and without /"
    limits = f["algo.advantage.is_correction_threshold"]
    threshold = f"algo.advantage.is_correction_threshold is {' '.join(map(str, limits))}"
    if len(limits) > 2 or limits[0] > limits[-1]:
        yield f"{threshold}; it must be HIGH, or LOW HIGH with LOW below HIGH"
    level, gating = f["algo.advantage.is_correction_level"], f["algo.advantage.is_correction_gating"]
    if f["algo.advantage.is_correction_mode"] == "clip" and (level == "seq" or gating != "ratio"):
        yield (
            f"algo.advantage.is_correction_mode is clip; it must be mask with is_correction_level {level} and "
            f"is_correction_gating {gating}: only the ratio of a token can be clipped"
        )
    if level != "off" and gating != "ratio" and len(limits) == 2 and limits[0] > 0:
        yield f"{threshold}; it must be one HIGH with algo.advantage.is_correction_gating {gating}"
    for flag in ("reward.clip_range", "algo.dynamic_filtering_range"):
        low, high = f[flag]
        if low >= high:
            yield f"{flag} is {low} {high}; it must be LOW HIGH with LOW below HIGH"
    low = (f["actor.eps_clip_low_high"] or [0])[0]
    if low > 1:
        yield f"actor.eps_clip_low_high is {low} for LOW; it must be in (0, 1], because the ratio is above 0"
    for flag in (FILTERING, "eval.dataset"):
        if f[flag] and not (f["reward.remote_url"] or f["train.agent_func_path"]):
            yield (
                f"{flag} is {f[flag]}; it needs reward.remote_url or train.agent_func_path, because a reward model "
                "gives its rewards later"
            )
    if f["eval.steps"] > 0 and not f["eval.dataset"]:
        yield f"eval.steps is {f['eval.steps']}; it must be -1 without eval.dataset: there is nothing to evaluate on"
    shares, count = f["data.prompt_probs"], (f["data.prompt_dataset"] or "").count(",") + 1
    if shares is not None and not _are_shares(shares, count):
        yield (
            f"data.prompt_probs is {shares}; it must be numbers above 0 with commas, one for each of {count} data sets "
            "in data.prompt_dataset, of sum 1"
        )
    if f["ds.use_liger_kernel"] and f["data.max_images_per_prompt"] > 0:
        yield (
            "ds.use_liger_kernel is True; it must be False with data.max_images_per_prompt "
            f"{f['data.max_images_per_prompt']}, because Liger has no models with vision"
        )
    if f["train.async_enable"] and f["vllm.enable_sleep"] and f["train.colocate_all"]:
        yield "vllm.enable_sleep is True; it must be False with train.async_enable, because the engines never rest"
    if f["ds.enable_sleep"] and not f["ds.zero_stage"]:
        yield (
            "ds.zero_stage is 0; it must be in [1, 3] with ds.enable_sleep, because DeepSpeed moves only the states of "
            "a ZeRO optimizer to the host"
        )
    if f["train.partial_rollout_enable"] and not f["train.async_enable"]:
        yield "train.partial_rollout_enable is True; it needs train.async_enable"


def _placement(f: Mapping[str, Any]) -> Iterator[str]:
    """What OpenRLHF's placement of models on GPUs refuses, in part only when a run starts."""
    engines, parallel = f["vllm.num_engines"] or 0, f["vllm.tensor_parallel_size"]
    ring, tensor = f["ds.ring_attn_size"], f["ds.tensor_parallel_size"]
    if not engines and (flag := packing_flag(f)):
        yield f"{flag} is {f[flag]}; it packs samples and so needs engines, and vllm.num_engines is {engines}"
    everything, models, actor = f["train.colocate_all"], _loaded(f), _gpus(f, "actor")
    for model in models:
        count = _gpus(f, model)
        if count % (ring * tensor):
            yield (
                f"{_shape(f, model)}; its GPUs must be a multiple of {ring * tensor} = ds.ring_attn_size {ring} x "
                f"ds.tensor_parallel_size {tensor}"
            )
        if everything and count > actor:
            yield f"{_shape(f, model)}; with train.colocate_all it must be at most the actor's {actor}"
    # OpenRLHF compares the critic with the reward model even if no reward model is loaded.
    together = [("train.colocate_all", "actor", "ref"), ("train.colocate_actor_ref", "actor", "ref")]
    for flag, one, other in (*together, ("train.colocate_critic_reward", "critic", "reward")):
        same = all(f[f"{one}.{size}"] == f[f"{other}.{size}"] for size in ("num_nodes", "num_gpus_per_node"))
        if f[flag] and not same and one in models and (other in models or other == "reward"):
            yield f"{_shape(f, one)}, and {_shape(f, other)}; they must be the same with {flag}"
    if everything and not f["train.async_enable"] and engines and actor != engines * parallel:
        yield (
            f"vllm.num_engines is {engines}; with train.colocate_all, vllm.num_engines x vllm.tensor_parallel_size "
            f"{parallel} must be the actor's GPUs, {actor} = actor.num_nodes {f['actor.num_nodes']} x "
            f"actor.num_gpus_per_node {f['actor.num_gpus_per_node']}"
        )


def _are_shares(text: str, count: int) -> bool:
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        return False
    return len(shares) == count and all(share > 0 for share in shares) and abs(sum(shares) - 1) < 1e-6


def _loaded(f: Mapping[str, Any]) -> list[str]:
    """The models that OpenRLHF loads beside the engines."""
    to_behaviour = f["adapt.method"] != "none" and f["adapt.kl_target"] == "behaviour"
    loaded = {
        "actor": True,
        "critic": f["algo.advantage.estimator"] == "gae",
        "ref": f["algo.kl.init_coef"] > 0 and not to_behaviour,
        "reward": not (f["reward.remote_url"] or f["train.agent_func_path"]),
    }
    return [model for model in MODELS if loaded[model]]


def _gpus(f: Mapping[str, Any], model: str) -> int:
    return int(f[f"{model}.num_nodes"] * f[f"{model}.num_gpus_per_node"])


def _shape(f: Mapping[str, Any], model: str) -> str:
    nodes, gpus = f[f"{model}.num_nodes"], f[f"{model}.num_gpus_per_node"]
    return f"{model}.num_gpus_per_node is {gpus}" + (f" (on {nodes} nodes)" if nodes > 1 else "")


def warnings_of(f: Mapping[str, Any]) -> list[str]:
    """What may be meant, but is seldom what a user wants, a sentence each.

    Args:
        f: Values by dotted name.
    """
    found = [_learning(f, model) for model in ("actor", "critic") if model in _loaded(f)]
    adapted, top_p, temperature = f["adapt.method"] != "none", f["rollout.top_p"], f["rollout.temperature"]
    frozen, entropy = f["critic.freezing_steps"], f["actor.entropy_coef"]
    if top_p < 1 and (adapted or f["algo.advantage.is_correction_level"] != "off"):
        found.append(
            f"rollout.top_p is {top_p:g}: the engines' log-probs (alpha) are of the truncated distribution, but the "
            f"actor's (pi) are of the whole vocabulary. So pi/alpha starts between {top_p:g} and 1 without any "
            "staleness; only 1 avoids it"
        )
    if temperature > 2:
        found.append(f"rollout.temperature is {temperature:g}: responses are nearly random; 1 is usual")
    if entropy is not None and entropy < 0:
        found.append(f"actor.entropy_coef is {entropy:g}: a negative coefficient makes the policy less random")
    if frozen >= 0 and not adapted:
        found.append(
            f"critic.freezing_steps is {frozen}: without batch adaptation, OpenRLHF keeps the batches of the frozen "
            f"steps, so the actor's first update is on {frozen + 2} batches"
        )
    if f["eval.dataset"] and f["eval.steps"] == -1:
        found.append(f"eval.dataset is {f['eval.dataset']}, but eval.steps is -1: it is never evaluated")
    return [text for text in found if text]


def _learning(f: Mapping[str, Any], model: str) -> str:
    rate, norm = f[f"{model}.adam.lr"], f[f"{model}.max_norm"]
    if rate == 0:
        return f"{model}.adam.lr is 0: the {model} does not learn"
    if rate > 0.01:
        return f"{model}.adam.lr is {rate:g}, which is very high; 1e-6 is usual, and a tiny model may take 1e-3"
    return f"{model}.max_norm is 0: gradients are not clipped" if norm == 0 else ""


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


def check_batch(args: SimpleNamespace) -> BatchArithmetic:
    """Check that group size, batch sizes and ranks fit together."""
    if (args.vllm.num_engines or 0) < 1:
        raise ConfigError(f"vllm.num_engines is {args.vllm.num_engines}; it must be at least 1")
    arithmetic = batch_arithmetic(args)
    for model in ("actor", "critic"):
        step = arithmetic.ranks.get(model, 0) * arithmetic.micro_train
        if step and arithmetic.train_batch % step:
            raise ConfigError(
                f"train.batch_size is {arithmetic.train_batch}; it must be a multiple of {step} = {model} ranks "
                f"{arithmetic.ranks[model]} x train.micro_batch_size {arithmetic.micro_train}"
            )
    if args.adapt.enabled and arithmetic.group_size < 2:
        raise ConfigError(
            f"rollout.n_samples_per_prompt is {arithmetic.group_size}; batch adaptation needs groups of at least 2"
        )
    return arithmetic


def check_method(method: Method | None, args: SimpleNamespace) -> list[str]:
    """Refuse what a method cannot be combined with. Returns warnings, a sentence each."""
    if method is None:
        return []
    if args.train.async_enable and (method.candidates > 1 or not method.asynchronous):
        raise ConfigError(
            f"train.async_enable cannot be combined with adapt.method {args.adapt.method}: what it generates "
            "depends on results that would not be there yet"
        )
    if method.related_to_generated and args.algo.advantage.estimator != "gae":
        _check_no_penalties(args)
    return _large_x2(method.max_reevaluated_prompts, args) if hasattr(method, "max_reevaluated_prompts") else []


def _check_no_penalties(args: SimpleNamespace) -> None:
    """Refuse length penalties, because those of responses that are not trained on would not be known."""
    for name in ("overlong_buffer_len", "stop_properly_penalty_coef"):
        if (value := getattr(args.reward, name)) is not None:
            raise ConfigError(
                f"reward.{name} is {value}; with adapt.method {args.adapt.method} it must not be set, because "
                "advantages are relative to responses that are not trained on, and their penalties are not known"
            )


def _large_x2(most: int, args: SimpleNamespace) -> list[str]:
    """A warning if more hard prompts may be generated again than has paid in a study."""
    every, fresh = args.adapt.reevaluate_every, args.adapt.reevaluate_every * args.rollout.batch_size
    if not fresh or most <= MOST_X2 * fresh:
        return []
    return [
        f"adapt.max_reevaluated_prompts is {most} and adapt.reevaluate_every is {every}: X2 may generate "
        f"{most / fresh:.0%} as many responses as the rollouts, which is more than {MOST_X2:.0%}. In our study 25% "
        "cost 2.6 points of accuracy for the same number of responses"
    ]


def check_checkpoints(args: SimpleNamespace) -> None:
    """Check that there is an older checkpoint to use if a crash interrupts the writing of a new one."""
    ckpt = args.ckpt
    if args.adapt.enabled and ckpt.save_steps > 0 and not ckpt.disable_ds and ckpt.max_num < 2:
        raise ConfigError(
            f"ckpt.max_num is {ckpt.max_num}; it must be at least 2: OpenRLHF deletes the oldest checkpoint before it "
            "writes a new one"
        )


def check_images(flat: argparse.Namespace) -> None:
    """Check that the flags of a run with images fit together.

    Call this before OpenRLHF's own checks. They refuse packing with images, but may switch packing on afterwards.

    Raises:
        ConfigError: The message names the flags.
    """
    values = vars(flat)
    images = values["data.max_images_per_prompt"]
    if images < 1:
        return
    asked = f"data.max_images_per_prompt is {images}"
    if values["algo.advantage.estimator"] == "gae":
        algorithm = f" (algorithm {flat.algorithm})" if flat.algorithm else ""
        raise ConfigError(f"{asked}, and algo.advantage.estimator gae{algorithm} needs a critic; {NO_CRITIC}")
    if flag := packing_flag(values):
        raise ConfigError(f"{asked}, and {flag} packs samples; images and packed samples cannot be combined")
