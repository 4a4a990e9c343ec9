"""What a file has is what OpenRLHF's own function gives a run: in each kind of file, column and place."""

import json
import math
from datetime import datetime
from decimal import Decimal

import pytest
from data_sets import KINDS, TEXT_KINDS, TYPED_KINDS, Checks, dump
from hypothesis import given, settings
from hypothesis import strategies as st

DATES = ["2024-01-01", "2024-01-02"]


def rows(*labels):
    return [{"q": f"{number}?", "a": label} for number, label in enumerate(labels)]


class TestText:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("column", ["q", "a"])
    def test_that_looks_like_something_else_stays(self, check, kind, column):
        """datasets#2799: dates."""
        texts = [*DATES, "007", "1.50", "1e5", " 1", "1_000.0", "None", "null", "nan", "True", '"', "[1]"]
        written = [{"q": "x", "a": "y"} | {column: text} for text in texts]
        assert [row[column] for row in check.trained(check.write(kind, written))] == texts

    @pytest.mark.parametrize("kind", TEXT_KINDS)
    def test_among_numbers_is_refused(self, check, kind):
        """datasets#6460."""
        text = check.refusal(check.write(kind, rows(7, "0", 1, "2")))
        assert text.startswith("row 2: a is '0', a text, and in ") and "(2 rows are so)" in text
        assert ", row 1 it is 7" in text


@pytest.mark.parametrize("labels", [(True, 1), ("a", 1), (1, 2.5), ([1], {"x": 1}), ("a", ["a"])])
def test_labels_of_two_types_are_refused(check, labels):
    assert check.refusal(check.write(".jsonl", rows(*labels))).startswith("row 2: a is ")
    first, second = (check.write(".jsonl", rows(label)) for label in labels)
    assert f"{second}, row 1: a is " in check.refusal(f"{first},{second}")


def test_columns_that_are_not_used_may_have_several(check):
    first, second = (check.write(".jsonl", [{"q": "x", "a": "y", "b": value}] * 2) for value in (1, "0"))
    assert check(f"{first}, {second}").prompts == 4


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text("01x-é\u2028\"\\", max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("xy"), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip


@settings(max_examples=40)
@given(
    labels=st.lists(values.filter(lambda value: value is not None), min_size=1, max_size=4).filter(
        lambda labels: len({*map(type, labels)}) == 1
    ),
    as_list=st.booleans(),
)
def test_any_label_is_what_the_file_has(run_args, tmp_path_factory, labels, as_list):
    """Also nested numbers with all their digits, and objects with different keys."""
    check = Checks(run_args, tmp_path_factory.mktemp("labels"))
    name = check.file("a.json", json.dumps(rows(*labels)) if as_list else dump(rows(*labels)))
    # A text of both, in which 1, 1.0, True and "1" differ.
    assert repr([row["a"] for row in check.trained(name)]) == repr(labels)


class TestCsv:
    @pytest.mark.parametrize(("text", "says"), [
        ("q,a\nx,1,2\ny,3,4\n", "line 2: "),
        ("q,a\nx\ny,3,4\n", "line 2: "),
        ("q,a,a\n1,x,y\n", "line 1: the column 'a' is there twice; "),
        ("q,a\nx,y\n\n,\nz,w\n", "row 2: q is ''; "),  # only a line without commas is no row
    ])  # fmt: skip
    def test_cells_that_are_no_row(self, check, text, says):
        assert check.refusal(check.file("a.csv", text)).startswith(says)

    def test_quotes_and_line_ends(self, check):
        name = check.file("a.csv", 'q,a\r\n"1, or\n""2""?",x\r\n\r\n"\x0b\u2028?",y\r\n')
        assert [row["q"] for row in check.trained(name)] == ['1, or\n"2"?', "\x0b\u2028?"]

    def test_columns_without_a_name_are_not_read(self, check):
        assert [row["a"] for row in check.trained(check.file("b.csv", "q,a,,\n1,x,,\n"))] == ["x"]


class TestLabels:
    @pytest.mark.parametrize(("kinds", "labels", "says"), [
        ([kind for kind in KINDS if kind != ".csv"], ("a", "b", None), "row 3: a is null or not there; "),
        ([".parquet"], (0.5, math.nan), "row 2: a is nan; "),  # as pandas writes a number that is missing
        *(([".parquet", " saved"], [value], "row 1: a is ") for value in (datetime(2024, 1, 1), Decimal("1.5"), b"x")),
    ])  # fmt: skip
    def test_that_are_no_values(self, check, kinds, labels, says):
        for kind in kinds:
            assert check.refusal(check.write(kind, rows(*labels))).startswith(says), kind

    def test_without_label_key_the_column_may_be_anything(self, check):
        data = check(check.write(".jsonl", rows(None, 1)), data__label_key=None)
        (warning,) = data.warnings
        assert data.prompts == 2 and "data.label_key is not set" in warning and warning.endswith("q, a")

    @pytest.mark.parametrize(("labels", "warned"), [(["", ""], 1), (["", "x"], 0)])
    def test_that_are_all_empty(self, check, labels, warned):
        assert len(check(check.write(".jsonl", rows(*labels))).warnings) == warned
        assert not check(check.write(".jsonl", rows(*labels)), reward__remote_url=None).warnings  # a model judges

    @pytest.mark.parametrize("kind", TYPED_KINDS)
    @pytest.mark.parametrize("label", ["", 0, False, [], {"x": [1], "y": None}, 0.57])
    def test_that_have_a_type(self, check, kind, label):
        assert repr(check(check.write(kind, rows(label, label))).problem[1]) == repr(label)


@pytest.mark.parametrize("kind", KINDS)
def test_columns_that_are_missing(check, kind):
    text = check.refusal(check.write(kind, rows("x")), data__input_key="question", data__label_key="answer")
    assert text.splitlines()[0] == "row 1: no column 'question' (data.input_key); it has q, a"
    assert text.splitlines()[1].endswith(", row 1: no column 'answer' (data.label_key); it has q, a")
