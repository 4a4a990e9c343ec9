"""Stores nested plain state in two files: state.json has its structure, state.safetensors its arrays. It never pickles.

Their digests are in the manifest of the checkpoint (`checkpoint_store.CheckpointStore.check`), which is read before.
"""

import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from bapo_openrlhf.record.durable import write_atomically

JSON_FILE, TENSORS_FILE = "state.json", "state.safetensors"
FORMAT_VERSION = 3

# The types that a safetensors file can hold, by their names in numpy and torch.
INTEGERS = {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
NUMPY_DTYPES = INTEGERS | {"float16", "float32", "float64", "complex64"}
# The types that only torch has, and the numpy type that their bits are stored as.
STORED_AS = {"bfloat16": "int16", "float8_e4m3fn": "int8", "float8_e5m2": "int8"}
REFUSED = "a checkpoint holds dense arrays of safetensors' dtypes, in this machine's byte order"

# A JSON object with this key represents a value that JSON does not have: {MARK: its type, "of": its content}.
MARK = "$"

blake2b = partial(hashlib.blake2b, digest_size=32)  # 64 hexadecimal digits
NO_DIGEST = b"0" * 64


class CheckpointError(Exception):
    """A checkpoint cannot be written or used. The message names the file and the problem."""


@contextmanager
def os_errors() -> Iterator[None]:
    """Turn an OSError into a CheckpointError that names the file."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{error.filename} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {error.strerror}") from error


def save_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write `state` to FOLDER/state.json and FOLDER/state.safetensors.

    A state has dictionaries with string keys, lists, tuples, strings, integers, floats, bools, None, numpy arrays and
    scalars, and torch tensors, with safetensors' dtypes in this machine's byte order. A TypeError names the place of
    anything else, such as a subclass: `groups[3].extras.x is of type set`.
    """
    encoder = _Encoder()
    structure = json.dumps(encoder.mapping(state)).encode("ascii")
    arrays = save_arrays(encoder.arrays)
    write_atomically(folder / JSON_FILE, structure)
    write_atomically(folder / TENSORS_FILE, arrays)


@os_errors()
def load_state(folder: Path) -> dict[str, Any]:
    """Read what `save_state` wrote, with the same types and bits; a CheckpointError if a file is missing or damaged.

    Arrays are writable and in C order. Torch tensors are on the CPU and have no gradient. Only they import torch.
    """
    structure, arrays = ((folder / name).read_bytes() for name in (JSON_FILE, TENSORS_FILE))
    try:
        return _decoded(json.loads(structure), load_arrays(arrays))
    except (SafetensorError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{folder} has a damaged state: {error!r}") from error


# ── A JSON object with its digest ──


def write_document(path: Path, kind: str, body: Mapping[str, Any]) -> None:
    """Write a JSON object with its kind and a digest of its own text, in which the digest is 64 zeros."""
    head = {"format": FORMAT_VERSION, "kind": kind, "blake2b": NO_DIGEST.decode("ascii")}
    text = json.dumps(head | dict(body), allow_nan=False).encode("ascii")
    write_atomically(path, text.replace(NO_DIGEST, blake2b(text).hexdigest().encode("ascii"), 1))


@os_errors()
def read_document(path: Path, kind: str) -> dict[str, Any]:
    """Read what `write_document` wrote; a CheckpointError if it is missing, damaged, or of another kind or format."""
    raw = path.read_bytes()
    try:
        document = json.loads(raw.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged or cut short: {error}") from error
    # Kind and format are checked before the digest, because another version may compute it in another way.
    if not isinstance(document, dict) or document.get("kind") != kind:
        raise CheckpointError(f"{path} is not a {kind}")
    version = document.get("format")
    if version != FORMAT_VERSION:
        newer = isinstance(version, int) and version > FORMAT_VERSION
        writer = "was written by a newer version: " if newer else "has "
        raise CheckpointError(f"{path} {writer}format {version!r}, but this version reads {FORMAT_VERSION}")
    digest = document.get("blake2b")
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise CheckpointError(f"{path} is damaged: its digest is {digest!r}")
    if blake2b(raw.replace(digest.encode("ascii"), NO_DIGEST, 1)).hexdigest() != digest:
        raise CheckpointError(f"{path} is damaged: its digest does not match its content")
    return document


# ── State and JSON ──


class _Encoder:
    """Turns state into what JSON can hold. It collects the arrays, and JSON has their running numbers."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}  # in C order

    def mapping(self, state: Mapping[str, Any], path: str = "") -> dict[str, Any]:
        for key in state:
            if type(key) is not str:
                where = path or "the state"
                raise TypeError(
                    f"{where} has the key {key!r} of type {type(key).__name__}; a checkpoint's keys are strings"
                )
        items = {key: self.value(value, f"{path}.{key}" if path else key) for key, value in state.items()}
        return {MARK: "dict", "of": items} if MARK in state else items

    def value(self, value: Any, path: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str, int, float):
            return value
        if kind is dict:
            return self.mapping(value, path)
        if kind is list or kind is tuple:
            items = [self.value(item, f"{path}[{index}]") for index, item in enumerate(value)]
            return items if kind is list else {MARK: "tuple", "of": items}
        if isinstance(value, np.generic):
            self._check_dtype(value.dtype, path)
            return {MARK: "scalar", "of": [value.dtype.name, value.tobytes().hex()]}
        if kind is np.ndarray:
            self._check_dtype(value.dtype, path)
            return {MARK: "array", "of": self._aside(value)}
        torch = sys.modules.get("torch")  # without torch there can be no tensor
        if torch is not None and kind is torch.Tensor:
            dtype = str(value.dtype).removeprefix("torch.")
            if dtype not in NUMPY_DTYPES | STORED_AS.keys() or value.layout != torch.strided or value.is_meta:
                raise TypeError(f"{path} is a tensor of {value.dtype}, {value.layout}, on {value.device}: {REFUSED}")
            bits = value.view(getattr(torch, STORED_AS[dtype])) if dtype in STORED_AS else value
            return {MARK: "tensor", "of": [self._aside(bits.numpy(force=True)), dtype]}
        raise TypeError(f"{path} is of type {kind.__name__}, which a checkpoint cannot hold")

    def _aside(self, array: np.ndarray) -> str:
        key = str(len(self.arrays))
        self.arrays[key] = array if array.flags.c_contiguous else array.copy(order="C")
        return key

    def _check_dtype(self, dtype: np.dtype, path: str) -> None:
        if dtype.name not in NUMPY_DTYPES or not dtype.isnative:
            raise TypeError(f"{path} has dtype {dtype.str}: {REFUSED}")


def _decoded(value: Any, loaded: Mapping[str, Any]) -> Any:
    decoded = partial(_decoded, loaded=loaded)
    if isinstance(value, list):
        return [decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind, content = (value[MARK], value["of"]) if MARK in value else ("dict", value)
    if kind == "dict":
        return {key: decoded(item) for key, item in content.items()}
    if kind == "tuple":
        return tuple(decoded(item) for item in content)
    if kind == "scalar":
        dtype, bits = content
        return np.frombuffer(bytes.fromhex(bits), dtype)[0]
    if kind == "array":
        return loaded[content]
    import torch

    key, dtype = content
    tensor = torch.from_numpy(loaded[key])
    return tensor.view(getattr(torch, dtype)) if dtype in STORED_AS else tensor
