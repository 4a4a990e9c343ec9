"""What a smoke run changes in a configuration, with the reason for each change, and the small models that it makes.

Everything else stays as it is given. A small model has another one's architecture and vocabulary with random weights.

A smoke run has STEPS trainer steps, then it is killed and resumed for one more step. Each step takes the same prompts:
the first rollout batch of the data.
"""

import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bapo_openrlhf import machine
from bapo_openrlhf.errors import ConfigError, one_line
from bapo_openrlhf.flags.config import flags_of, with_flags
from bapo_openrlhf.flags.rule import Flags
from bapo_openrlhf.flags.sizes import blocks_of, response_tokens
from bapo_openrlhf.launch.start import ON_THE_CPU
from bapo_openrlhf.record.durable import open_to_others
from bapo_openrlhf.user_file import at_home

STEPS = 2  # before the kill
LAYERS = 2
# Widths on the CPU. vLLM's attention needs at least 32 in a head, and two heads can share one key.
WIDTHS = {
    "hidden_size": 64,
    "embed_dim": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_heads": 2,
    "head_dim": 32,
}
MOST = 2  # ranks of a model and engines on the CPU
WEIGHTS = ("*.safetensors*", "*.bin*", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx*")
PROMPTS, TOKENS, MICRO = 2, 16, 4  # prompts of a step, tokens of a response, samples of a micro-batch on the CPU

NO_GPU = "it needs a GPU"
NO_EVALUATION = "the accuracy of a random model says nothing"
OFF_ON_THE_CPU = {  # in addition to launch.start.ON_THE_CPU
    "train.dynamic_batch_enable": False,
    "ds.tensor_parallel_size": 1,
    "vllm.tensor_parallel_size": 1,
    "ds.use_liger_kernel": False,
    "ds.load_in_4bit": False,
    "ds.deepcompile": False,
}
SHORT = "the run has few steps"
SLOW = "a CPU is slow"
FIRST = "each step takes the first prompts"
ONE_MACHINE = "smoke runs on this machine"


@dataclass(frozen=True)
class Reduction:
    """One change: the name of a flag, or of a size of the model; the two values; and the reason."""

    name: str
    value: Any
    replacement: Any
    reason: str


def reductions(args: SimpleNamespace, *, cpu: bool, candidates: int = 1) -> list[Reduction]:
    """The flags that a smoke run changes. The method draws `candidates` prompts for each that it generates for."""
    flags = flags_of(args)
    changes = {**_short(args, candidates), **(_on_the_cpu(args, candidates) if cpu else {})}
    return [
        Reduction(name, flags[name], replacement, reason)
        for name, (replacement, reason) in changes.items()
        if flags.get(name) != replacement
    ]


def _short(args: SimpleNamespace, candidates: int) -> dict[str, tuple[Any, str]]:
    """Fewer steps, on one machine. Syncs and re-evaluations keep their order: together, or one between the others."""
    adapt, ckpt = args.adapt, args.ckpt
    delay = min(adapt.rollout_delay, STEPS)
    together = adapt.reevaluate_every % adapt.rollout_delay == 0
    every = min(adapt.reevaluate_every, delay if together else 1)
    changes: dict[str, tuple[Any, str]] = {f"{model}.num_nodes": (1, ONE_MACHINE) for model in Flags.of(args).loaded}
    if adapt.enabled:
        changes |= {
            "adapt.rollout_delay": (delay, f"{SHORT}, and a sync has to be among them"),
            "adapt.reevaluate_every": (every, f"{SHORT}, and a re-evaluation has to be among them"),
        }
    return changes | {
        "vllm.num_engines": (max(args.vllm.num_engines // args.actor.num_nodes, 1), ONE_MACHINE),
        "data.max_samples": (min(args.data.max_samples, args.rollout.batch_size * candidates), FIRST),
        "train.num_episodes": (STEPS + 1, SHORT),
        "eval.dataset": (None, NO_EVALUATION),
        "eval.steps": (-1, NO_EVALUATION),
        "ckpt.save_steps": (1, "there must be a checkpoint to resume from"),
        "ckpt.disable_ds": (False, "there must be a checkpoint to resume from"),
        "ckpt.load_enable": (False, "the run starts from the beginning"),
        "ckpt.max_num": (max(ckpt.max_num, STEPS), "a kill must leave a checkpoint"),
        "logger.wandb.key": (None, "the numbers of a random model belong nowhere"),
    }


def _on_the_cpu(args: SimpleNamespace, candidates: int) -> dict[str, tuple[Any, str]]:
    changes = {name: (value, NO_GPU) for name, value in {**ON_THE_CPU, **OFF_ON_THE_CPU}.items()}
    few = "a CPU carries few processes"
    ranks = {}
    for name in Flags.of(args).loaded:
        model = getattr(args, name)
        ranks[name] = min(model.num_nodes * model.num_gpus_per_node, MOST)
        changes[f"{name}.num_gpus_per_node"] = (ranks[name], few)
    engines = min(args.vllm.num_engines * args.vllm.tensor_parallel_size, MOST)
    prompts, group = min(args.rollout.batch_size, PROMPTS), args.rollout.n_samples_per_prompt
    samples = prompts * group
    trained = [ranks[name] for name in ("actor", "critic") if name in ranks]
    micro = min(args.train.micro_batch_size, MICRO, max(samples // max(trained), 1))
    unit = math.lcm(*trained) * micro
    tokens = min(response_tokens(args), TOKENS)
    if (budget := args.adapt.partial_rollout_tokens) is not None:
        changes["adapt.partial_rollout_tokens"] = (min(budget, TOKENS // 2), "responses are short")
    prompt_tokens = args.data.max_len - (args.rollout.max_new_tokens or 0)  # for the prompt
    return changes | {
        "vllm.num_engines": (engines, few),
        "ds.zpg": (min(args.ds.zpg, ranks["actor"]), few),
        "rollout.batch_size": (prompts, SLOW),
        "rollout.vllm_generate_batch_size": (prompts, SLOW),
        "data.max_samples": (min(args.data.max_samples, prompts * candidates), FIRST),
        "rollout.micro_batch_size": (min(args.rollout.micro_batch_size, MICRO, max(samples // MOST, 1)), SLOW),
        "train.batch_size": (max(min(args.train.batch_size, samples // 2) // unit * unit, unit), SLOW),
        "train.micro_batch_size": (micro, SLOW),
        "rollout.max_new_tokens": (tokens, SLOW),
        "data.max_len": (
            min(args.data.max_len, prompt_tokens + tokens),
            f"{SLOW}; the room for the prompt is the same",
        ),
        "reward.overlong_buffer_len": (None, "responses are short"),
    }


def settings(args: SimpleNamespace, defaults: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The whole configuration as one YAML file of `train` holds it: each flag that is not as its default."""
    flags = {name: value for name, value in flags_of(args).items() if name in defaults and name != "config"}
    if args.reward.remote_url:
        flags["reward.remote_url"] = ",".join(args.reward.remote_url)
    if args.train.agent_func_path:
        del flags["reward.remote_url"]  # OpenRLHF sets it
    flags |= changes
    return {name: _plain(value) for name, value in flags.items() if _plain(value) != _plain(defaults[name])}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def gpus_needed(args: SimpleNamespace, changes: Iterable[Reduction]) -> int:
    """GPUs that the smoke run takes, with its changes."""
    flags = Flags.of(args)
    reduced = with_flags(args, {change.name: change.replacement for change in changes})
    blocks = blocks_of(reduced, critic=flags.critic, reference="ref" in flags.loaded)
    return sum(block.gpus for block in blocks.values())


# ── the small models ──


def source_folder(flag: str, name: str) -> Path:
    """A local folder with a model's configuration and tokenizer. From the hub everything but the weights is loaded."""
    folder = at_home(name)
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, ignore_patterns=list(WEIGHTS)))
    except Exception as error:
        raise ConfigError(
            f"{flag} is {name}; it is not a folder, and the model hub cannot be read ({one_line(error)[:120]}). smoke "
            f"needs only config.json and the tokenizer, not the weights: give a folder that has them with --{flag}"
        ) from None


def make_small_model(name: str, source: Path, folder: Path, *, cpu: bool, scores: bool = False) -> list[Reduction]:
    """Write a model with the files of `source`, but two layers and random weights; return the sizes that are smaller.

    On a CPU widths shrink, too. `scores` says that it is a reward model. The weights are in bfloat16, as a run's.
    """
    machine.prepare()

    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=True)
    except Exception as error:
        raise ConfigError(f"model {name}: its config.json cannot be read: {one_line(error)}") from None
    text, vision = config.get_text_config(), getattr(config, "vision_config", None)
    changes = list(smaller("model", text, cpu=cpu))
    if vision is not None:
        changes += smaller("vision", vision, cpu=cpu, hidden=text.hidden_size)
    kind = transformers.AutoModelForImageTextToText if vision is not None else transformers.AutoModelForCausalLM
    if scores:
        kind, config.num_labels = transformers.AutoModelForSequenceClassification, 1
    torch.manual_seed(0)
    model = kind.from_config(config, dtype=torch.bfloat16)
    folder.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and not any(fnmatch(file.name, pattern) for pattern in WEIGHTS):
            shutil.copyfile(file, folder / file.name)
    model.save_pretrained(folder)
    open_to_others(folder)
    return changes


def smaller(name: str, part: Any, *, cpu: bool, hidden: int | None = None) -> Iterator[Reduction]:
    """Make part of a model's configuration smaller, in place. `hidden` is the width of the text that it feeds."""
    depths = {"num_hidden_layers": LAYERS, "depth": LAYERS}
    heads = getattr(part, "num_attention_heads", None)
    head = getattr(part, "head_dim", None) or (part.hidden_size // heads if heads else None)
    for size, most in (depths | WIDTHS if cpu else depths).items():
        value = getattr(part, size, None)
        if value is not None and value > most:
            setattr(part, size, most)
            yield Reduction(f"{name} {size}", value, most, "more layers are the same again" if size in depths else SLOW)
    keys = getattr(part, "num_key_value_heads", None)
    if cpu and keys is not None and heads is not None:
        part.num_key_value_heads = part.num_attention_heads if keys == heads else 1
        if keys != part.num_key_value_heads:
            yield Reduction(f"{name} num_key_value_heads", keys, part.num_key_value_heads, SLOW)
    rope = getattr(part, "rope_parameters", None) or {}
    if cpu and head and "mrope_section" in rope:  # positions of time, height and width; they fill half a head
        new_head = getattr(part, "head_dim", None) or part.hidden_size // part.num_attention_heads
        part.rope_parameters = rope | {"mrope_section": [count * new_head // head for count in rope["mrope_section"]]}
    if getattr(part, "layer_types", None):
        part.layer_types = part.layer_types[:LAYERS]
    for indexes in [key for key in vars(part) if key.endswith("_indexes")]:  # layers with full attention, say
        setattr(part, indexes, [index for index in getattr(part, indexes) if index < LAYERS] or [LAYERS - 1])
    if hidden is not None and hasattr(part, "out_hidden_size"):
        part.out_hidden_size = hidden
