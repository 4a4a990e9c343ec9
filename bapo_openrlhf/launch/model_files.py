"""The weights of a model folder, as far as their files say before they are loaded."""

import json
from pathlib import Path
from typing import Any

from bapo_openrlhf.errors import ConfigError

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
LENGTH = 8  # bytes in front of the header, which have its length


def read_json(path: Path) -> Any:
    """The content of a JSON file; None if there is none that can be read."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def tensors_of(flag: str, folder: Path) -> set[str]:
    """Names of the tensors in a folder's safetensors files; none if the weights are in another form, or not here.

    Args:
        flag: The flag that names the folder. Errors name it.

    Raises:
        ConfigError: A file of the weights is missing, or it is no whole safetensors file.
    """
    index = read_json(folder / INDEX)
    names = sorted({*index["weight_map"].values()}) if index else [WHOLE] if (folder / WHOLE).is_file() else []
    return {tensor for name in names for tensor in _header(flag, folder, name)} - {"__metadata__"}


def _header(flag: str, folder: Path, name: str) -> dict[str, Any]:
    """What a safetensors file says of its tensors, by their names."""
    path = folder / name
    if not path.is_file():
        raise ConfigError(f"{flag} is {folder}; {INDEX} names the file {name}, which is not there")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH), "little")
        try:
            header = json.loads(file.read(length)) if LENGTH + length <= size else {}
        except ValueError:
            header = {}
    ends = [entry["data_offsets"][1] for tensor, entry in header.items() if tensor != "__metadata__"]
    if not header or LENGTH + length + max(ends, default=0) > size:
        raise ConfigError(
            f"{flag} is {folder}; {name} has {size} bytes and is no whole safetensors file; if git made it, `git lfs "
            "pull` gets the weights"
        )
    return header
