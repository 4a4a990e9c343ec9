"""What the value of a flag may be: a range, choices, exact numbers from 0 to 1, or an input template.

The ranges of this project's flags are in `config`.
"""

from collections.abc import Mapping
from typing import Any

from bapo_openrlhf.adapt.rewards import as_fraction
from bapo_openrlhf.adapt.thresholds import Interval
from bapo_openrlhf.errors import ALLOWED, ConfigError, one_line

MODELS = ("actor", "critic", "ref", "reward")

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
VALUES: dict[str, str | tuple[str, ...]] = {
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
    """Refuse a value that is not what its rule says, as in `VALUES`. A flag without a value passes."""
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
            text, verb = (" ".join(map(str, value)), "each") if several else (value, "it")
            raise ConfigError(f"{flag} is {text}; {verb} must be {words}" + (f", because {reason}" if reason else ""))


def unit_fraction(name: str, value: Any) -> Any:
    """A flag's value as an exact number. Raises ConfigError unless it is one in [0, 1]."""
    try:
        number = as_fraction(value)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None
    if not 0 <= number <= 1:
        raise ConfigError(f"{name} is {value}; it must be in [0, 1]")
    return number


def interval(name: str, values: Any) -> Interval:
    """A flag's values, LOW HIGH or one, as an interval. Raises ConfigError unless they are one within [0, 1]."""
    values = values if isinstance(values, (list, tuple)) else [values]
    if len(values) not in (1, 2):
        raise ConfigError(f"{name} has {len(values)} values; it takes LOW HIGH, or one fixed value")
    low, high = unit_fraction(name, values[0]), unit_fraction(name, values[-1])
    if low > high:
        raise ConfigError(f"{name} is {values[0]} {values[1]}; LOW must not be above HIGH")
    return Interval(low, high)


def check_template(flag: str, template: str | None) -> None:
    """Check that an input template has {} once. OpenRLHF leaves out one without it, or fails at the first row."""
    if template is None:
        return
    rule = "it must have {} in place of the prompt, once, and {{ and }} for braces of its own"
    if "{}" not in template:
        raise ConfigError(f"{flag} is {template!r}; {rule}")
    try:
        filled = template.format("THE PROMPT")
    except (ValueError, LookupError, AttributeError) as error:
        raise ConfigError(f"{flag} is {template!r}, which cannot be filled ({one_line(error)}); {rule}") from None
    if "THE PROMPT" not in filled:
        raise ConfigError(f"{flag} is {template!r}, which is {filled!r} with every prompt; {rule}")
