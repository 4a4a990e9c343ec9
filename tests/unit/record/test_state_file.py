"""State files: every value is read with its type and bits. Documents: all damage is noticed."""

import collections
import enum
import errno
import hashlib
import json
import math
import pickle
import random
import struct
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from watched_disk import let_fail, logged

from bapo_openrlhf.record import state_file
from bapo_openrlhf.record.state_file import CheckpointError, load_state, read_document, save_state, write_document

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
NUMPY_DTYPES = ["bool", *INTEGERS, "float16", "float32", "float64", "complex64"]
TORCH_DTYPES = [*NUMPY_DTYPES, "bfloat16", "float8_e4m3fn", "float8_e5m2"]


def canonical(value):
    """Convert a value to nested tuples that are equal only for the same types, order of keys and bits."""
    if isinstance(value, float) and type(value) is float:
        return "float", "nan" if math.isnan(value) else struct.pack("<d", value)
    if type(value) is dict:
        return "dict", tuple((canonical(key), canonical(item)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value).__name__, tuple(map(canonical, value))
    if isinstance(value, (np.ndarray, np.generic)):
        return type(value).__name__, value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, torch.Tensor):
        # Without numpy, because it has no bfloat16.
        bits = value.contiguous().reshape(-1).view(torch.uint8).tolist() if value.numel() else []
        return "tensor", value.dtype, value.shape, tuple(bits)
    return type(value).__name__, value


def roundtrip(state, folder):
    save_state(folder, state)
    return load_state(folder)


texts = st.text(max_size=5) | st.sampled_from(["\ud800", "x\udfff"])  # a tokenizer may decode to a lone surrogate
keys = texts | st.sampled_from(["$", "of", "dict", "state"])
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@st.composite
def arrays(draw):
    """Arrays with any bits, including NaN payloads, contiguous or not."""
    name, shape = draw(st.sampled_from(NUMPY_DTYPES)), draw(shapes)
    size = math.prod(shape) * np.dtype(name).itemsize
    raw = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8)
    array = (raw % 2 if name == "bool" else raw).view(name).reshape(shape)
    change = draw(st.sampled_from(["none", "transposed", "reversed", "strided", "Fortran"]))
    if change == "transposed":
        return array.T
    if change == "Fortran":
        return np.asfortranarray(array) if array.ndim else array
    if array.ndim and change in ("reversed", "strided"):
        return array[:: -1 if change == "reversed" else 2]
    return array


@st.composite
def tensors(draw):
    name, shape = draw(st.sampled_from(TORCH_DTYPES)), draw(shapes)
    dtype = getattr(torch, name)
    size = math.prod(shape) * dtype.itemsize
    raw = torch.tensor(list(draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
    tensor = (raw % 2 if name == "bool" else raw).view(dtype).reshape(shape)
    return tensor.transpose(0, -1) if tensor.ndim and draw(st.booleans()) else tensor


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**130), 2**130)
    | st.floats()
    | texts
    | arrays()
    | arrays().filter(lambda array: array.size).map(lambda array: array.reshape(-1)[0])
    | tensors()
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=3 * settings.default.max_examples)
@example({"a": [np.array([1, 2])[1::-2], torch.ones(1)]})  # one element with a negative stride
@given(st.dictionaries(keys, values, max_size=4))
def test_any_state_comes_back_bit_for_bit(state):
    with tempfile.TemporaryDirectory() as folder:
        assert canonical(roundtrip(state, Path(folder))) == canonical(state)


def test_arrays_that_share_memory_come_back_apart_and_writable(tmp_path):
    base, weight = np.arange(6.0), torch.arange(4.0, requires_grad=True)
    base.setflags(write=False)
    of_torch = {"t": weight, "u": weight[1:], "v": weight}
    back = roundtrip({"a": base, "b": base, "c": base[1:4], **of_torch}, tmp_path)
    back["a"][:] = -1
    assert back["b"].tolist() == [0, 1, 2, 3, 4, 5] and back["c"].tolist() == [1, 2, 3]
    assert not back["t"].requires_grad and back["t"].device.type == "cpu"
    back["t"].fill_(-1)
    assert back["u"].tolist() == [1, 2, 3] and back["v"].tolist() == [0, 1, 2, 3]


def test_lazy_conjugates_are_stored_as_what_they_are(tmp_path):
    tensor = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj()
    back = roundtrip({"a": tensor, "b": tensor.imag}, tmp_path)
    assert back["a"].tolist() == [1 - 2j, 3 + 4j] and back["b"].tolist() == [-2, 4]


def test_a_thousand_arrays_keep_their_places(tmp_path):
    state = {"groups": [{"step": n, "log_probs": np.full(n % 7, n)} for n in range(1000)]}
    assert canonical(roundtrip(state, tmp_path)) == canonical(state)


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


Pair = collections.namedtuple("Pair", "a b")


@pytest.mark.parametrize(("value", "what"), [
    ({1}, "is of type set"),
    (collections.OrderedDict(), "is of type OrderedDict"),
    (Pair(1, 2), "is of type Pair"),
    (Colour.RED, "is of type Colour"),
    (Text("x"), "is of type Text"),
    (np.array([1], ">i4"), "has dtype >i4"),
    (np.array([None]), "has dtype |O"),
    (np.ma.masked_array([1.0]), "is of type MaskedArray"),
    (torch.zeros(2, dtype=torch.complex128), "is a tensor of torch.complex128"),
    (torch.eye(2).to_sparse(), "torch.sparse_coo"),
    (torch.zeros(2, device="meta"), "on meta"),
    (torch.nn.Parameter(torch.zeros(2)), "is of type Parameter"),
    ({3: 1}, "has the key 3 of type int"),
    ({Text("x"): 1}, "has the key 'x' of type Text"),
])  # fmt: skip
def test_other_values_are_refused_by_their_place(tmp_path, value, what):
    save_state(tmp_path, {"kept": np.ones(3)})
    state = {"replay": {"groups": [0, 1, 2, {"extras": {"x": value}}]}}
    with pytest.raises(TypeError) as error:
        save_state(tmp_path, state)
    assert str(error.value).startswith("replay.groups[3].extras.x ") and what in str(error.value)
    assert load_state(tmp_path)["kept"].tolist() == [1, 1, 1]


def test_places_at_the_top_and_in_tuples(tmp_path):
    with pytest.raises(TypeError, match=r"^x is of type set"):
        save_state(tmp_path, {"x": set()})
    with pytest.raises(TypeError, match=r"^x\[1\]\[0\] is of type set"):
        save_state(tmp_path, {"x": (1, [set()])})
    with pytest.raises(TypeError, match=r"^the state has the key None of type NoneType"):
        save_state(tmp_path, {None: 1})
    assert not list(tmp_path.iterdir())


SMALL = {"a": [np.arange(3, dtype=np.int16), 0.5, "é"], "$": (2**70, math.nan), "r": np.float32(2)}
NAMES = ["state.json", "state.safetensors"]


@pytest.mark.parametrize("name", NAMES)
def test_files_that_cannot_be_read(tmp_path, name):
    save_state(tmp_path, SMALL)
    whole = (tmp_path / name).read_bytes()
    for length in range(0, len(whole), 7):
        (tmp_path / name).write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="has a damaged state"):
            load_state(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match=rf"{name} is missing"):
        load_state(tmp_path)
    (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match=rf"{name}: Is a directory"):
        load_state(tmp_path)


# ── The format, written here a second time ──

EXAMPLE = {
    "plain": [2**64, -(2**63), -0.0, "é", "\ud800", None, True],
    "tuple": {"$": "tuple", "of": [1, {"$": "tuple", "of": []}]},
    "marked": {"$": "dict", "of": {"$": 1, "x": 2}},
    "scalar": {"$": "scalar", "of": ["int16", "0201"]},
    "array": {"$": "array", "of": "0"},
    "tensor": {"$": "tensor", "of": ["1", "bfloat16"]},
}
EXAMPLE_TENSORS = {"0": ("U8", [2], b"\x01\x02"), "1": ("I16", [1, 1], b"\xc0\x3f")}  # dtype, shape and bytes
VALUE = {
    "plain": [2**64, -(2**63), -0.0, "é", "\ud800", None, True],
    "tuple": (1, ()),
    "marked": {"$": 1, "x": 2},
    "scalar": np.int16(0x0102),
    "array": np.array([1, 2], np.uint8),
    "tensor": torch.tensor([[1.5]], dtype=torch.bfloat16),
}


def test_format_3_is_read(tmp_path):
    header, data = {}, b""
    for key, (dtype, shape, raw) in EXAMPLE_TENSORS.items():
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    (tmp_path / "state.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (tmp_path / "state.json").write_text(json.dumps(EXAMPLE))
    assert canonical(load_state(tmp_path)) == canonical(VALUE)


def test_format_3_is_what_is_written(tmp_path):
    """The structure is compared word for word, the tensors like any reader of safetensors sees them."""
    save_state(tmp_path, VALUE)
    assert json.loads((tmp_path / "state.json").read_bytes()) == EXAMPLE
    raw = (tmp_path / "state.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    written = {key: (item["dtype"], item["shape"]) for key, item in header.items()}
    assert written == {key: (dtype, shape) for key, (dtype, shape, _) in EXAMPLE_TENSORS.items()}
    assert state_file.FORMAT_VERSION == 3


KIND = "a kind"


def test_a_document_is_that_of_the_format(tmp_path):
    text = json.dumps({"format": 3, "kind": KIND, "blake2b": "0" * 64, "x": "é"})
    by_hand = text.replace("0" * 64, hashlib.blake2b(text.encode(), digest_size=32).hexdigest(), 1)
    write_document(tmp_path / "written", KIND, {"x": "é"})
    assert (tmp_path / "written").read_text() == by_hand
    assert read_document(tmp_path / "written", KIND)["x"] == "é"


def test_bytes_of_a_document_changed_at_random(tmp_path):
    path = tmp_path / "document"
    write_document(path, KIND, {"x": [1, 2.5, "é"]})
    whole = path.read_bytes()
    rng = random.Random(0)
    for place in range(len(whole)):
        for changed in (rng.choice(b' 09af"{}[],.\n\x00\xff'), whole[place] ^ 1 << place % 7):
            path.write_bytes(whole[:place] + bytes([changed]) + whole[place + 1 :])
            if changed != whole[place]:
                with pytest.raises(CheckpointError, match="document"):
                    read_document(path, KIND)
        path.write_bytes(whole[:place])
        with pytest.raises(CheckpointError, match="document"):
            read_document(path, KIND)


@pytest.mark.parametrize(("text", "message"), [
    ("", "is damaged or cut short"),
    ("[1]", "is not a"),
    ('{"kind": "another", "format": 3}', "is not a"),
    ("[" * 100_000, "is damaged or cut short"),
    ('{"kind": "a kind"}', "has format None"),
    ('{"kind": "a kind", "format": 9, "blake2b": "another way"}', "newer version"),
    ('{"kind": "a kind", "format": 3}', "its digest is None"),
    ('{"kind": "a kind", "format": 3, "blake2b": ""}', "its digest is ''"),
])  # fmt: skip
def test_other_files_versions_and_kinds(tmp_path, text, message):
    (tmp_path / "document").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_document(tmp_path / "document", KIND)


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    save_state(tmp_path, {"a": np.ones(2), "b": torch.ones(2, dtype=torch.bfloat16), "c": np.float32(1)})

    def trap(*_args, **_kwargs):
        raise AssertionError("unpickled")

    for module in (pickle, sys.modules["_pickle"]):
        for name in ("load", "loads", "Unpickler"):
            monkeypatch.setattr(module, name, trap)
    monkeypatch.setattr(torch, "load", trap)
    monkeypatch.setattr(np, "load", trap)
    assert load_state(tmp_path)["b"].tolist() == [1, 1]
    for name in NAMES:
        (tmp_path / name).write_bytes(pickle.dumps(SMALL))
        with pytest.raises(CheckpointError):
            load_state(tmp_path)
        save_state(tmp_path, SMALL)


def test_a_file_is_durable_before_it_has_its_name(tmp_path, monkeypatch):
    """A power cut cannot change the order: content, then name, then folder entry."""
    log = logged(monkeypatch, "fsync", "replace")
    save_state(tmp_path, SMALL)
    expected = []
    for name in NAMES:
        unfinished = f".{name}.unfinished"
        expected += [("fsync", unfinished), ("replace", unfinished, name), ("fsync", tmp_path.name)]
    assert log == expected


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_an_error_of_the_system_names_the_file_and_leaves_the_old_one(tmp_path, monkeypatch, name, function):
    save_state(tmp_path, {"a": np.zeros(2)})
    before = (tmp_path / name).read_bytes()
    let_fail(monkeypatch, function, errno.ENOSPC, lambda path: name in path)
    with pytest.raises(OSError) as error:
        save_state(tmp_path, {"a": np.ones(2)})
    assert error.value.errno == errno.ENOSPC and error.value.filename == str(tmp_path / name)
    assert str(tmp_path / name) in str(error.value)
    assert (tmp_path / name).read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == NAMES
