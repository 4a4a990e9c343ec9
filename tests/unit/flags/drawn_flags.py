"""Configurations drawn at random from the table of flags: what each flag may be is what its rule says.

A seed draws the same configuration in every process. `test_drawn_flags.py` checks them, and
`tests/stack/test_drawn_runs.py` starts runs of them.
"""

import argparse
import random
from collections.abc import Mapping

from bapo_openrlhf.cli import arguments
from bapo_openrlhf.cli.parser import is_switch
from bapo_openrlhf.flags import config
from bapo_openrlhf.flags.ranges import VALUES
from bapo_openrlhf.methods.registry import METHODS

Value = str | tuple[str, ...]  # the words after a flag
CHANGES = 7  # flags of a configuration that are drawn
# Values within each range, in the words of `errors.ALLOWED`. They are small, so that a run is short.
WITHIN = {
    "at least -1": "-1 0 2",
    "at least 0": "0 1 3",
    "at least 1": "1 2 3 8",
    "at least 1, or -1 for never": "-1 1 2",
    "at least 2": "2 16 32",
    "above 0": "1e-6 0.5 3",
    "above 1": "1.5 3",
    "finite and at least 0": "0 0.01 2",
    "finite and above 0": "0.01 1 4",
    "finite and at most 1": "-0.5 0 1",
    "in [0, 1]": "0 0.5 0.95 1",
    "in [0, 1)": "0 1e-4 0.9",
    "in (0, 1]": "1e-3 0.2 1",
    "in (0, 1)": "1e-4 0.2",
    "in [-1, 1]": "-0.01 0 0.01",
    "in [0, 3]": "0 1 2 3",
    "in [0, 10]": "0 1",
    "in [0.01, 10]": "0.5 1 2",
    "in [0, 4294967295]": "0 7 4294967295",
    "a number": "-1 0 0.5 2",
}
# Flags whose values are neither a range nor choices.
OTHERS: dict[str, list[Value]] = {
    "algorithm": [*config.ALGORITHMS],
    "adapt.method": [*METHODS],
    "adapt.c1": ["0", "1/8", "0.5"],
    "adapt.c2": [("1/8", "4/8"), ("3/8",), ("0",)],
    "adapt.c3": [("2/8", "5/8"), ("5/8",), ("1",)],
    "adapt.reward_range": [("0", "1"), ("-1", "1"), ("0", "4")],
    "ckpt.best_metric_key": ["none"],
    "data.solution_key": ["label"],
    "data.input_template": ["Q: {} A:"],
    "algo.advantage.is_correction_threshold": [("2",), ("0", "3"), ("0.5", "5")],
}
# What is not drawn, by reason.
NOT_DRAWN = {
    "what a machine without a GPU must have": """
        vllm.enforce_eager vllm.sync_backend ds.attn_implementation vllm.sync_with_ray vllm.enable_sleep
        ds.enable_sleep ds.packing_samples train.dynamic_batch_enable ds.ring_attn_size ds.ring_attn_head_stride
        ds.tensor_parallel_size vllm.tensor_parallel_size ds.use_liger_kernel ds.load_in_4bit ds.deepcompile
        ds.adam_offload ref.offload reward.offload ds.experts_implementation ds.zpg ds.overlap_comm
        ds.grad_accum_dtype ds.param_dtype actor.optim critic.optim
    """,
    "the size of a machine": """
        actor.num_nodes critic.num_nodes ref.num_nodes reward.num_nodes actor.num_gpus_per_node
        critic.num_gpus_per_node ref.num_gpus_per_node reward.num_gpus_per_node vllm.num_engines
        vllm.gpu_memory_utilization data.dataloader_num_workers verifier.memory_gib verifier.timeout local_rank
        train.colocate_all train.colocate_actor_ref train.colocate_critic_reward
    """,
    "names, files and services": """
        actor.model_name_or_path critic.model_name_or_path reward.model_name_or_path reward.remote_url
        train.agent_func_path data.prompt_dataset data.prompt_probs data.prompt_split eval.dataset eval.split
        eval.steps data.input_key data.label_key data.image_key data.max_images_per_prompt data.apply_chat_template
        data.disable_fast_tokenizer logger.wandb.key logger.wandb.org logger.wandb.group logger.wandb.project
        logger.wandb.run_name logger.tensorboard_dir ckpt.path ckpt.output_dir run.name run.dir use_ms
        ds.value_head_prefix ds.lora.target_modules actor.freeze_visual_encoder config adapt.options help
    """,
    "an earlier run": "ckpt.load_enable run.overwrite",
    "how long a run is": "data.max_samples train.num_episodes ckpt.save_hf critic.save_value_network",
    "a time that ends a run on a slow machine": "run.stall_timeout",
}


def kept_out() -> set[str]:
    """All flags that are not drawn."""
    return {flag for flags in NOT_DRAWN.values() for flag in flags.split()}


def ranges() -> dict[str, str]:
    """The range of each number, in the words of `errors.ALLOWED`."""
    allowed = {
        f"{prefix}.{name}": item.metadata["allowed"]
        for prefix, kind in config.GROUPS.items()
        for name, item in kind.__dataclass_fields__.items()
        if item.metadata["allowed"]
    }
    return allowed | {flag: rule.split(": ")[0] for flag, rule in VALUES.items() if isinstance(rule, str)}


def values_of(action: argparse.Action) -> list[Value]:
    """What a flag may be."""
    flag, rule = action.dest, VALUES.get(action.dest)
    if flag in OTHERS:
        return OTHERS[flag]
    if is_switch(action):
        return ["true", "false"]
    if choices := action.choices or (rule if isinstance(rule, tuple) else None):
        return [*choices]
    within = WITHIN[ranges()[flag]].split()
    if isinstance(action.nargs, int):
        return [tuple(within[start : start + action.nargs]) for start in range(len(within) - action.nargs + 1)]
    return [*within]


def table() -> dict[str, list[Value]]:
    """Each flag that can be drawn, and its values."""
    actions = {action.dest: action for action in arguments.build_parser("")._actions}
    out = {*kept_out(), argparse.SUPPRESS}
    return {flag: values_of(action) for flag, action in actions.items() if flag not in out}


def drawn(seed: int, choices: Mapping[str, list[Value]]) -> dict[str, Value]:
    """A configuration: an algorithm, and flags with values."""
    rng = random.Random(seed)
    flags = sorted(rng.sample(sorted(set(choices) - {"algorithm", "adapt.method"}), CHANGES))
    result = {"algorithm": rng.choice(choices["algorithm"]), **{flag: rng.choice(choices[flag]) for flag in flags}}
    if result["algorithm"] in ("ba_ppo", "bapo_grpo") and rng.random() < 0.3:
        result["adapt.method"] = rng.choice(choices["adapt.method"])
    return result


def words_of(flags: Mapping[str, Value]) -> list[str]:
    """The flags as words of a command line."""
    return [
        word
        for flag, value in flags.items()
        for word in ([f"--{flag}={value}"] if isinstance(value, str) else [f"--{flag}", *value])
    ]
