"""What OpenRLHF's flags may be: a table of ranges, the flags that contradict each other, and what is only warned of.

OpenRLHF checks few values. It finds out about most others when models are loaded, at the first step, or never. Flags
of this project have their ranges in `config`, and what batch adaptation refuses is in `openrlhf_flags`.
"""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from bapo_openrlhf.errors import ALLOWED, ConfigError
from bapo_openrlhf.launch.attention import packing_flag

MODELS = ("actor", "critic", "ref", "reward")
NEEDS_GROUPS = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")
FILTERING = "algo.dynamic_filtering_enable"

# The ranges of flags: words of `ALLOWED`, with a reason after a colon if they are not plain.
RANGES = {
    "at least 1": """
        rollout.batch_size rollout.n_samples_per_prompt rollout.micro_batch_size rollout.vllm_generate_batch_size
        rollout.max_new_tokens rollout.max_tokens_per_gpu eval.n_samples_per_prompt algo.kl.horizon
        train.batch_size train.micro_batch_size train.num_episodes train.max_epochs train.max_tokens_per_gpu
        train.async_queue_size data.max_samples vllm.tensor_parallel_size ckpt.max_num logger.logging_steps
        ds.zpg ds.tensor_parallel_size ds.ring_attn_size ds.ring_attn_head_stride ds.lora.alpha
    """,
    "at least 2": "data.max_len",
    "at least 0": """
        algo.advantage.is_correction_threshold data.max_images_per_prompt data.dataloader_num_workers
        vllm.num_engines ds.lora.rank
    """,
    "at least -1": "critic.freezing_steps local_rank",
    "at least 1, or -1 for never": "eval.steps ckpt.save_steps",
    "above 0": "critic.value_clip ckpt.max_mem",
    "above 1": "actor.dual_clip",
    "in (0, 1]": "actor.eps_clip rollout.top_p vllm.gpu_memory_utilization",
    "in [0, 1]": "algo.advantage.lambd algo.advantage.gamma train.ema_beta",
    "in [0, 1)": "ds.lora.dropout",
    "in [-1, 1]": "actor.entropy_coef",
    "in [0, 3]": "ds.zero_stage",
    "in [0, 10]": "eval.temperature",
    "in [0, 4294967295]": "train.seed",
    "in [0.01, 10]: vLLM raises a lower one to 0.01, and the actor divides by it": "rollout.temperature",
    "a number": "reward.clip_range algo.dynamic_filtering_range",
    "finite and above 0": "actor.eps_clip_low_high reward.overlong_buffer_len algo.kl.target",
    "finite and at least 0": "actor.aux_loss_coef reward.overlong_penalty_factor algo.kl.init_coef",
    "finite and at most 1": "reward.stop_properly_penalty_coef",
}
# The same for flags of the actor and of the critic.
TRAINED = {
    "at least 0": "max_norm",
    "at least 1": "muon.ns_steps",
    "in (0, 1]": "adam.eps",
    "in [0, 1]": "adam.weight_decay lr_warmup_ratio min_lr_ratio",
    "in [0, 1)": "adam.lr adam.betas muon.lr muon.momentum",
}
# A schedule of transformers is left out if OpenRLHF does not give it what it needs.
SCHEDULES = (
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
    "cosine_with_min_lr", "cosine_warmup_with_min_lr",
)  # fmt: skip
# What each flag must be: a range, or the choices.
RULES: dict[str, str | tuple[str, ...]] = {
    **{f"{model}.{flag}": "at least 1" for model in MODELS for flag in ("num_nodes", "num_gpus_per_node")},
    **{
        f"{model}.{flag}": rule
        for model in ("actor", "critic")
        for rule, flags in TRAINED.items()
        for flag in flags.split()
    },
    **{flag: rule for rule, flags in RANGES.items() for flag in flags.split()},
    "actor.lr_scheduler": SCHEDULES,
    "critic.lr_scheduler": SCHEDULES,
    "vllm.sync_backend": ("nccl", "gloo", "mpi", "ucc", "xccl", "hccl"),
    "ds.param_dtype": ("bf16",),  # OpenRLHF's engines hold bfloat16, and take no other weights
    "ds.grad_accum_dtype": ("bf16", "bfloat16", "fp16", "float16", "fp32", "float32"),
}


def check_ranges(flags: Mapping[str, Any], rules: Mapping[str, str | tuple[str, ...]]) -> None:
    """Refuse a value that is not what its rule says. The rules are as in `RULES`, and a flag without a value passes.

    Raises:
        ConfigError: The message names the flag, its value and what is allowed.
    """
    for flag, rule in rules.items():
        value = flags[flag]
        if value is None:
            continue
        if isinstance(rule, tuple):
            if value not in rule:
                raise ConfigError(f"{flag} is {value}; it must be {'one of ' * (len(rule) > 1)}{', '.join(rule)}")
            continue
        words, _, reason = rule.partition(": ")
        several = isinstance(value, (list, tuple))
        if not all(map(ALLOWED[words], value if several else [value])):
            shown, verb = (" ".join(map(str, value)), "each") if several else (value, "it")
            raise ConfigError(f"{flag} is {shown}; {verb} must be {words}" + (f", because {reason}" if reason else ""))


def check_values(flags: Mapping[str, Any]) -> None:
    """Refuse a value outside its range, and flags that contradict each other.

    Args:
        flags: Values by dotted name, as they were given, before OpenRLHF completes them.

    Raises:
        ConfigError: The message names the flag, its value and what is allowed.
    """
    check_ranges(flags, RULES)
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
