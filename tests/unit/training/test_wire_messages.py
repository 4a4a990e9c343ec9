"""Messages of a file with types are what their rows wrote: training, `check` and `evaluate` read them so."""

from __future__ import annotations

import json
from types import SimpleNamespace

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_openrlhf.data.reading import read
from bapo_openrlhf.data.sources import Request
from bapo_openrlhf.host import module_of
from bapo_openrlhf.training.wire.messages import blending


def conversation(arguments):
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    return [
        {"role": "user", "content": "How much?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3"},
    ]


CONVERSATIONS = [conversation(one) for one in ({"a": 1}, {"b": 3}, {"a": 1, "c": [{"d": 2}, {"e": "f"}]})]
CONVERSATIONS.append([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}])


@pytest.fixture(params=[".jsonl", ".parquet", ""])
def path(request, tmp_path):
    """A file, or a data set that `datasets` has saved. The last conversation is in a file of its own."""
    rows = [{"input": one, "label": [{"x": 1, "y": None}]} for one in CONVERSATIONS[:3]]
    path = tmp_path / f"data{request.param}"
    if request.param == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        made = datasets.Dataset.from_list(rows)
        made.to_parquet(path) if request.param else made.save_to_disk(path)
    return path


def test_each_reader_gives_what_the_rows_wrote(path):
    strategy = SimpleNamespace(args=SimpleNamespace(use_ms=False), print=lambda *_: None, is_rank_0=lambda: False)
    blended = blending(module_of("datasets/utils.py").blending_datasets, ("input", None))
    trained = blended(str(path), None, strategy, dataset_split="train").select(range(3))
    assert [row["input"] for row in trained] == CONVERSATIONS[:3]
    assert [row["label"] for row in trained] == [[{"x": 1, "y": None}]] * 3  # another column
    (part,) = read(Request("f", str(path), {"f": "input", "l": "label"}), download=False).parts
    assert [row["input"] for row in part.values(["input", "label"])] == CONVERSATIONS[:3]
    assert [row["label"] for row in part.values(["label"])] == [[{"x": 1, "y": None}]] * 3


def test_parts_of_a_message_have_only_their_own_keys(tmp_path):
    datasets.Dataset.from_list([{"input": CONVERSATIONS[3]}]).to_parquet(tmp_path / "a.parquet")
    (part,) = read(Request("f", str(tmp_path / "a.parquet"), {"f": "input"}), download=False).parts
    assert [row["input"] for row in part.values(["input"])] == CONVERSATIONS[3:]


def test_a_null_that_a_text_file_has_stays(tmp_path):
    """Its reader gives the column a type if all rows have the same keys."""
    rows = [{"input": [{"role": "user", "content": "1?", "name": None}]}] * 2
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (part,) = read(Request("f", str(tmp_path / "a.jsonl"), {"f": "input"}), download=False).parts
    assert isinstance(part.rows.features["input"].feature, dict)
    assert list(part.values(["input"])) == rows


@pytest.mark.parametrize("rows", [[{"input": "a text"}], [{"input": ["a", None]}], [{"input": {"a": None, "b": 1}}]])
def test_other_columns_stay_as_they_are(rows):
    data = datasets.Dataset.from_list(rows)
    assert blending(lambda: data, ("input",))() is data


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 9), min_size=1), min_size=1, max_size=5))
def test_any_arguments(many):
    """Those that a row did not write are gone, whatever other rows have."""
    data = datasets.Dataset.from_list([{"input": conversation(arguments)} for arguments in many])
    read_again = [row["input"] for row in blending(lambda: data, ("input",))()]
    assert read_again == [conversation(arguments) for arguments in many]
