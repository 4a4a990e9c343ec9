"""Messages of a file with types are what their rows wrote, whatever keys other rows have."""

import json

import pytest
from data_sets import KINDS, as_dataset
from hypothesis import given
from hypothesis import strategies as st

from bapo_openrlhf.data.messages import as_written


def conversation(arguments):
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    return [
        {"role": "user", "content": "How much?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "user", "content": "And this?"},
    ]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != ".csv"])
def test_a_run_gets_what_the_rows_wrote(check, kind):
    conversations = [conversation(one) for one in ({"a": 0.5}, {"b": 3}, {"a": 1.0, "c": [{"d": 2}, {"e": "f"}]})]
    name = check.write(kind, [{"q": one, "a": [{"x": 1, "y": None}]} for one in conversations])
    trained = check.trained(name, data__apply_chat_template=True)
    assert repr([row["q"] for row in trained]) == repr(conversations)
    assert [row["a"] for row in trained] == [[{"x": 1, "y": None}]] * 3  # no messages


def test_a_null_that_a_text_file_has_stays(check):
    rows = [{"q": [{"role": "user", "content": "1?", "name": None}], "a": "x"}] * 2
    name = check.file("a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert list(check.trained(name, data__apply_chat_template=True)) == rows


@pytest.mark.parametrize("rows", [[{"q": "a text"}], [{"q": ["a", None]}], [{"q": {"role": None, "b": 1}}]])
def test_other_columns_stay_as_they_are(rows):
    data = as_dataset(rows)
    assert as_written(data) is data


def test_parts_of_a_message_have_only_their_own_keys():
    rows = [{"q": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]}]
    assert list(as_written(as_dataset(rows))) == rows


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 9), min_size=1), min_size=1, max_size=5))
def test_any_arguments(many):
    rows = [{"q": conversation(arguments)} for arguments in many]
    assert list(as_written(as_dataset(rows))) == rows
