"""The small model of a smoke run: the architecture and vocabulary of another one with random weights."""

import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from bapo_openrlhf import machine
from bapo_openrlhf.errors import ConfigError, one_line
from bapo_openrlhf.record.durable import open_to_others
from bapo_openrlhf.user_file import at_home
from bapo_openrlhf.workbench.smoke.reduce import Reduction, smaller

WEIGHTS = ("*.safetensors*", "*.bin*", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx*")


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


def changed_weights(before: Path, after: Path) -> bool:
    """Whether any tensor of a saved model, or of its adapter, is another one than in the model before."""
    old, new = tensors_of(before), tensors_of(after)
    return any(
        bool((tensor != old[name]).any()) if name in old else "lora_B" in name and bool(tensor.any())
        for name, tensor in new.items()
    )


def tensors_of(folder: Path) -> dict[str, Any]:
    """The tensors of a saved model, or of its adapter. OpenRLHF writes an adapter with torch under ZeRO-3."""
    import torch
    from safetensors.torch import load_file

    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for file in folder.glob("adapter_model.bin"):
        tensors |= torch.load(file, map_location="cpu", weights_only=True)
    return tensors
