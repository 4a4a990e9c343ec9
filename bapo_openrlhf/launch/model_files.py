"""The weights of a model folder, as far as their files say before they are loaded."""

import json
import math
import re
from collections import ChainMap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from bapo_openrlhf.errors import ConfigError

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
FORMS = (INDEX, WHOLE, "pytorch_model.bin", "pytorch_model.bin.index.json")  # one of them is in each model folder
# Weights that transformers does not load, and what makes a model folder of them.
OTHERS = {
    "adapter_model.*": "they are those of an adapter: merge it into its model, and save the result",
    "*.gguf": "they are in GGUF: `bapo-openrlhf model FILE.gguf DIR` makes a model folder of them",
    "*.distcp": "they are parts of a checkpoint, which is no model",
}
POSITIONS = ("max_position_embeddings", "n_positions")  # of today's models, and of GPT-2
SCALED_ALREADY = ("su", "longrope", "llama3")  # scalings that POSITIONS includes
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # of models that are named as Llama's
LAYER = re.compile(r"model\.layers\.(\d+)\.")
Shapes = Mapping[str, list[int]]  # of tensors, by name
ALL_LINEAR = "all-linear"  # what PEFT takes for all matrices, if it is no list
EMBEDDING = re.compile(r"(^|\.)(\w*embed\w*|wte|wpe)$")


def read_json(path: Path) -> Any:
    """The content of a JSON file; None if there is none that can be read."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def config_of(model: str, folder: Path) -> dict[str, Any]:
    """The content of a model's config.json.

    Args:
        model: Flag and value. Errors begin with them.

    Raises:
        ConfigError: It cannot be read, or is no object.
    """
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    except ValueError:
        raise ConfigError(f"{model}; its config.json is not valid JSON") from None
    except OSError as error:
        raise ConfigError(f"{model}; its config.json cannot be read: {error.strerror}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{model}; its config.json must be an object, and is {json.dumps(config)[:100]}")
    return config


def tensors_of(flag: str, folder: Path) -> dict[str, list[int]]:
    """Shapes of the tensors in a folder's safetensors files; none if the weights are in a .bin file.

    Args:
        flag: The flag that names the folder. Errors name it.

    Raises:
        ConfigError: There are no weights, one of their files is missing, or it is no whole safetensors file.
    """
    if not any((folder / name).is_file() for name in FORMS):
        why = next((why for pattern, why in OTHERS.items() if any(folder.glob(pattern))), "there is no such file")
        raise ConfigError(f"{flag} is {folder}; its weights must be in {WHOLE}, or in parts with {INDEX}, but {why}")
    index = read_json(folder / INDEX)
    names = sorted({*index["weight_map"].values()}) if index else [WHOLE] if (folder / WHOLE).is_file() else []
    return dict(ChainMap(*(_shapes(flag, folder, name) for name in names)))


def check_weights(flag: str, folder: Path, config: Mapping[str, Any], shapes: Shapes, *, generates: bool) -> None:
    """Check that a model can be trained, and that its weights are those of its config.json.

    Names of weights are only known for models that are named as Llama's are, such as Qwen's.

    Args:
        flag: The flag that names the folder.
        shapes: Those of its weights; none if they are not known.
        generates: Whether it has to generate text, so that it needs a head over the vocabulary.

    Raises:
        ConfigError: The message names the folder, what it has, and what it must have.
    """

    def refuse(says: str) -> None:
        raise ConfigError(f"{flag} is {folder}; {says}")

    if "model_type" not in config:
        refuse("its config.json has no model_type, which transformers needs")
    if quantized := (config.get("quantization_config") or {}).get("quant_method"):
        refuse(
            f"its weights are quantized ({quantized}), and a model that is trained must have weights in bf16 or float32"
        )
    kinds = [kind for kind in config.get("architectures") or () if kind.endswith("ForSequenceClassification")]
    if generates and kinds:
        refuse(f"it is a {kinds[0]}, which generates no text; it must be a causal language model")
    if EMBEDDINGS not in shapes:
        return
    layers = {int(found[1]) for name in shapes if (found := LAYER.match(name))}
    if missing := sorted(set(range(config.get("num_hidden_layers", 0))) - layers):
        refuse(f"it has no weights of layer {missing[0]}, and num_hidden_layers of its config.json is "
               f"{config['num_hidden_layers']}")  # fmt: skip
    said, found = [config.get("vocab_size"), config.get("hidden_size")], shapes[EMBEDDINGS]
    if None not in said and said != found:
        refuse(f"vocab_size and hidden_size of its config.json are {said}, and its embeddings are {found}")
    if generates and config.get("tie_word_embeddings") is False and HEAD not in shapes:
        refuse(f"it has no weights {HEAD}, the head over the vocabulary, and tie_word_embeddings is false")


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


def check_adapters(model: str, targets: Sequence[str], config: Mapping[str, Any], shapes: Shapes) -> None:
    """Check that each of `ds.lora.target_modules` is the end of the name of a matrix of a model, as PEFT compares them.

    Args:
        model: The flag and the folder.
        targets: The flag's names; "all-linear" without the flag.
        shapes: Those of the model's weights; none if they are not known.

    Raises:
        ConfigError: One is not, or its matrix is also that of the embeddings. The message names those that may be.
    """
    tied = config.get("tie_word_embeddings") or (EMBEDDINGS in shapes and HEAD not in shapes)
    if "lm_head" in targets and tied:
        raise ConfigError(
            f"ds.lora.target_modules is {' '.join(targets)}; lm_head must not be among them, because in {model} it is "
            "the matrix of the embeddings (tie_word_embeddings), and its adapter must not change these in the engines"
        )
    if targets == ALL_LINEAR or not shapes:
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


def _shapes(flag: str, folder: Path, name: str) -> Shapes:
    """Shapes of the tensors of a safetensors file, by their names."""
    path, shapes = folder / name, {}
    if not path.is_file():
        raise ConfigError(f"{flag} is {folder}; {INDEX} names the file {name}, which is not there")
    with suppress(SafetensorError), safe_open(path, "np") as file:
        shapes = {tensor: file.get_slice(tensor).get_shape() for tensor in file.keys()}  # noqa: SIM118
    if not shapes:
        raise ConfigError(
            f"{flag} is {folder}; {name} has {path.stat().st_size} bytes and is no whole safetensors file; if git made "
            "it, `git lfs pull` gets the weights"
        )
    return shapes
