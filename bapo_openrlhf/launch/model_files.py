"""The one reader of a model folder: which files its weights are in, and what they and its config.json say."""

import json
import math
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from safetensors import SafetensorError, safe_open

from bapo_openrlhf.errors import ConfigError, one_line
from bapo_openrlhf.user_file import at_home

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
FORMS = (WHOLE, INDEX, BIN, BIN_INDEX)  # transformers loads the first one that is there
ADAPTER = "adapter_config.json"
OF_TRAINING = ("training_args.bin", "optimizer.bin")  # of transformers' trainer; vLLM leaves them out
# Weights that transformers does not load, and what makes a model folder of them.
OTHERS = {
    "adapter_model.*": "they are those of an adapter: merge it into its model, and save the result",
    "*.gguf": "they are in GGUF: `bapo-openrlhf model FILE.gguf DIR` makes a model folder of them",
    "*.distcp": "they are parts of a checkpoint, which is no model",
}
POSITIONS = ("max_position_embeddings", "n_positions")  # of today's models, and of GPT-2
SCALED_ALREADY = ("su", "longrope", "llama3")  # scalings that POSITIONS includes
Shapes = Mapping[str, Sequence[int]]  # of tensors, by name
ALL_LINEAR = "all-linear"  # what PEFT takes for all matrices, if it is no list
EMBEDDING = re.compile(r"(^|\.)(\w*embed\w*|wte|wpe)$")


def read_json(path: Path) -> Any:
    """The content of a JSON file; None if there is none that can be read."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def config_of(model: str, folder: Path) -> dict[str, Any]:
    """The content of a model's config.json. Errors begin with `model`, which is flag and value."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    except ValueError:
        raise ConfigError(f"{model}; its config.json is not valid JSON") from None
    except OSError as error:
        raise ConfigError(f"{model}; its config.json cannot be read: {error.strerror}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{model}; its config.json must be an object, and is {json.dumps(config)[:100]}")
    return config


def weight_files(model: str, folder: Path) -> list[Path]:
    """The files of a folder's weights, which are the same for transformers and for vLLM. Errors begin with `model`.

    transformers loads the first of FORMS that is there. vLLM loads all safetensors files that the index names, without
    an index all of them, and all .bin files only if there is none. So they would load different weights of two sets.
    """

    def fault(reason: str) -> ConfigError:
        return ConfigError(f"{model}; {reason}")

    form = next((name for name in FORMS if (folder / name).is_file()), None)
    if form is None:
        why = next((why for pattern, why in OTHERS.items() if any(folder.glob(pattern))), "there is no such file")
        raise fault(f"its weights must be in {WHOLE}, or in parts with {INDEX}, but {why}")
    if (folder / ADAPTER).is_file():
        raise fault(
            f"it has weights and the adapter of {ADAPTER}, and transformers would load the model that the adapter was "
            f"made for; move {ADAPTER} and adapter_model.* away"
        )
    ending = ".bin" if form in (BIN, BIN_INDEX) else ".safetensors"
    files = {form} if form in (WHOLE, BIN) else _indexed(model, folder, form)
    if missing_files := sorted(name for name in files if not (folder / name).is_file()):
        raise fault(f"{form} names the file {missing_files[0]}, which is not there")
    engines = {path.name for path in folder.glob(f"*{ending}")} - {*OF_TRAINING}
    if ending == ".safetensors" and (folder / INDEX).is_file():
        engines &= _indexed(model, folder, INDEX)
    if engines != files:
        raise fault(
            f"it has two sets of weights: transformers loads {few(sorted(files))}, and vLLM "
            f"{few(sorted(engines)) or 'none of them'}; leave only one set in the folder"
        )
    if ending == ".safetensors":
        for name in files:
            headers(model, folder / name)
    return [folder / name for name in sorted(files)]


def headers(model: str, path: Path) -> dict[str, tuple[str, list[int]]]:
    """Type and shape of each tensor of a safetensors file, by name."""
    try:
        with safe_open(path, "np") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            types_and_shapes = {name: (part.get_dtype(), part.get_shape()) for name, part in parts.items()}
    except SafetensorError:
        types_and_shapes = {}
    if not types_and_shapes:
        raise ConfigError(
            f"{model}; {path.name} has {path.stat().st_size} bytes and is no whole safetensors file; "
            "if git made it, `git lfs pull` gets the weights"
        )
    return types_and_shapes


def shapes_of(model: str, folder: Path) -> dict[str, list[int]]:
    """Shapes of the tensors of a folder's weights, by name. Files of pickles need torch, so this may import it."""
    shapes: dict[str, list[int]] = {}
    for path in weight_files(model, folder):
        if path.suffix == ".safetensors":
            shapes |= {name: shape for name, (_, shape) in headers(model, path).items()}
            continue
        import torch

        try:
            tensors = torch.load(path, map_location="meta", weights_only=True, mmap=zipfile.is_zipfile(path))
            shapes |= {name: list(tensor.shape) for name, tensor in tensors.items()}
        except Exception as error:  # of pickle, zip or torch
            raise ConfigError(f"{model}; {path.name} cannot be read: {one_line(error)}") from None
    return shapes


def _indexed(model: str, folder: Path, name: str) -> set[str]:
    index = read_json(folder / name)
    parts = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(parts, dict) or not parts:
        raise ConfigError(
            f"{model}; {name} must be an object whose weight_map says the file of each tensor; if git made "
            "it, `git lfs pull` gets it"
        )
    return {*parts.values()}


def few(names: Sequence[str]) -> str:
    """The names of at most four things, and how many there are besides."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def positions_of(config: Mapping[str, Any]) -> float:
    """The longest sequence that vLLM generates with a model, in tokens; infinite if its config.json does not say it."""
    most = next((config[name] for name in POSITIONS if config.get(name)), math.inf)
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    factor = 1.0
    for part in scaling.values() if all(isinstance(part, dict) for part in scaling.values()) else [scaling]:
        kind = part.get("rope_type", part.get("type", "default"))
        if kind not in SCALED_ALREADY and "gemma3" not in config.get("model_type", ""):
            factor = part.get("factor") or factor
            if kind == "yarn":
                most = part.get("original_max_position_embeddings", most)
    return float(most * factor)


def check_adapters(model: str, targets: Sequence[str], shapes: Shapes, *, tied: bool) -> None:
    """Check that each of `ds.lora.target_modules` is the end of the name of a model's matrix, as PEFT compares them."""
    if "lm_head" in targets and tied:
        raise ConfigError(
            f"ds.lora.target_modules is {' '.join(targets)}; lm_head must not be among them, because in {model} it is "
            "the matrix of the embeddings (tie_word_embeddings), and its adapter must not change these in the engines"
        )
    if targets == ALL_LINEAR:
        return
    matrices = {name for name, shape in shapes.items() if name.endswith(".weight") and len(shape) == 2}
    names = {name for name in (matrix.removesuffix(".weight") for matrix in matrices) if not EMBEDDING.search(name)}
    names.add("lm_head")
    for target in targets or ("nothing",):
        if not any(f".{name}".endswith(f".{target}") for name in names):
            spaces = "; there are spaces between names, and no commas" if "," in target else ""
            ends = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
            raise ConfigError(
                f"ds.lora.target_modules is {' '.join(targets)}; {target} is no matrix of {model}, which has {ends}: "
                f"give some of them, or leave the flag out for all{spaces}"
            )


def check_same_tokens(args: SimpleNamespace, flag: str, name: str, whole_config: Mapping[str, Any]) -> None:
    """Check that a model folder reads the actor's tokens and has an embedding for each position, if the actor is here.

    `whole_config` is the content of the folder's config.json.
    """
    actor = at_home(args.actor.model_name_or_path)
    if not actor.is_dir():
        return
    config = whole_config.get("text_config") or whole_config
    actor_tokens, model_tokens = _tokens_of(actor), _tokens_of(at_home(name))
    as_actor = f"as in actor.model_name_or_path {args.actor.model_name_or_path}, because it reads the actor's tokens"
    for number, token in actor_tokens.items() if model_tokens else ():
        if model_tokens.get(number) != token:
            raise ConfigError(
                f"{flag} is {name}; its token {number} is {model_tokens.get(number)!r}, and it must be {token!r} "
                f"{as_actor}. A reward server may have other tokens (docs/rewards.md)"
            )
    size, most = config.get("vocab_size"), max(actor_tokens, default=-1)
    if size is not None and most >= size:
        raise ConfigError(
            f"{flag} is {name}; vocab_size in its config.json is {size}, and it must be at least {most + 1} to have "
            f"the token {actor_tokens[most]!r} {as_actor}"
        )
    if args.data.max_len > positions_of(config):
        raise ConfigError(
            f"data.max_len is {args.data.max_len}; it must be at most {positions_of(config):g}, the positions of "
            f"{flag} {name}"
        )


def _tokens_of(folder: Path) -> dict[int, str]:
    tokenizer = read_json(folder / "tokenizer.json")
    if not tokenizer:
        return {}
    vocabulary = tokenizer["model"]["vocab"]  # numbers by token, or in a unigram model pairs of token and score
    numbers = vocabulary if isinstance(vocabulary, dict) else {token: n for n, (token, _) in enumerate(vocabulary)}
    added = {one["id"]: one["content"] for one in tokenizer.get("added_tokens", [])}
    return {number: token for token, number in numbers.items()} | added
