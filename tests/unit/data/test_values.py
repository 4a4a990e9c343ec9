"""Labels and prompts are those of the file, or the row is refused: in each kind of file, column and place."""

from __future__ import annotations

import json
import math
from datetime import datetime
from decimal import Decimal

import pytest
from data_sets import KINDS, TEXT_KINDS, TYPED_KINDS, dump
from hypothesis import given, settings
from hypothesis import strategies as st


def rows(*labels):
    return [{"q": f"{number}?", "a": label} for number, label in enumerate(labels)]


def loaded(name, kind="json"):
    """What `datasets` itself reads."""
    import datasets

    return list(datasets.load_dataset(kind, data_files=name, split="train"))


class TestDates:
    """datasets#2799: texts that look like dates."""

    @pytest.mark.parametrize("kind", TEXT_KINDS)
    @pytest.mark.parametrize("column", ["q", "a"])
    def test_a_reader_that_guesses_makes_dates_of_them(self, check, kind, column):
        rows_of_dates = [{"q": "x", "a": "y"} | {column: f"2024-01-0{number}"} for number in range(1, 5)]
        text = check.refusal(check.write(kind, rows_of_dates))
        assert text.startswith(f"row 1: {column} is '2024-01-01', and OpenRLHF's reader makes datetime.datetime(2024,")
        assert ".parquet" in text and text.endswith("(4 rows are so)")

    @pytest.mark.parametrize("kind", [*TYPED_KINDS, ".csv"])
    def test_where_a_column_has_a_type_they_stay_texts(self, check, kind):
        assert check(check.write(kind, rows("2024-01-01", "2024-01-02"))).problem[1] == "2024-01-01"

    def test_among_other_texts_they_stay_texts(self, check):
        assert check(check.write(".jsonl", rows("2024-01-01", "soon"))).problem[1] == "2024-01-01"


class TestMixedTypes:
    """datasets#6460: texts and numbers in one column."""

    @pytest.mark.parametrize("kind", TEXT_KINDS)
    def test_the_first_row_that_changes_is_named(self, check, kind):
        text = check.refusal(check.write(kind, rows(7, "0", 1, "2")))
        assert text.startswith("row 2: a is '0', and OpenRLHF's reader makes 0 of it") and "(2 rows are so)" in text

    @pytest.mark.parametrize(
        ("labels", "row", "was", "read"),
        [
            ((1, 2.5), 1, "1", "1.0"),
            ((2**70, 1), 1, str(2**70), "1.18"),
            (([1], ["0"]), 2, "['0']", "[0]"),
            (({"x": 1}, {"x": "0"}), 2, "{'x': '0'}", "{'x': 0}"),
        ],
    )
    def test_other_columns_that_change(self, check, labels, row, was, read):
        text = check.refusal(check.write(".jsonl", rows(*labels)))
        assert text.startswith(f"row {row}: a is {was}, and OpenRLHF's reader makes {read}")

    @pytest.mark.parametrize("labels", [(True, 1), ("a", 1), ([1], []), ([1], ["a"]), ({"x": 1}, {"y": "a"})])
    def test_what_does_not_change_passes(self, check, labels):
        name = check.write(".jsonl", rows(*labels))
        assert [row["a"] for row in loaded(name)] == list(labels)
        assert check(name).prompts == 2

    def test_columns_that_are_not_used_may_change(self, check):
        other = [{"q": "x", "a": "y", "b": value} for value in ("2024-01-01", "2024-01-02")]
        assert check(check.write(".jsonl", other)).prompts == 2
        mixed = [{"q": "x", "a": "y", "b": value} for value in (1, "0")]
        assert check(check.write(".jsonl", mixed)).prompts == 2


values = st.recursive(
    st.one_of(
        st.booleans(),
        st.integers(-3, 3),
        st.sampled_from([2**62, 2**63, 2**64, 0.5, 1.0, 1e300]),
        st.sampled_from(["", "0", "1", "-1", "true", "null", "2024-01-01", "2024-01-01T10:00:00", "1.5", "x", "é"]),
    ),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("xy"), inner, max_size=2),
    max_leaves=3,
)


@settings(max_examples=3 * settings.default.max_examples)
@given(labels=st.lists(values, min_size=1, max_size=4), as_list=st.booleans())
def test_a_label_is_that_of_the_file_or_refused(run_args, tmp_path_factory, labels, as_list):
    """Of whatever JSON has: what `datasets` reads is compared with the file, once here and once by the check."""
    from data_sets import Checks

    check = Checks(run_args, tmp_path_factory.mktemp("labels"))
    labelled = rows(*labels)
    name = check.file("a.json", json.dumps(labelled) if as_list else dump(labelled))
    try:
        read = loaded(name)
    except Exception:
        check.refusal(name)
        return
    # A text of both, in which 1, 1.0, True and "1" differ.
    if repr([row["a"] for row in read]) == repr(labels):
        assert check(name).prompts == len(labels)
    else:
        assert "OpenRLHF's reader makes" in check.refusal(name)


class TestCsv:
    """A CSV file has only texts: a cell is what is written there, or the row is refused."""

    @pytest.mark.parametrize("cell", ["007", "1.50", "1e5", "+1", " 1", "1_000.0", "NA", "None", "null", "nan"])
    def test_a_cell_that_is_read_as_something_else(self, check, cell):
        name = check.file("a.csv", f"q,a\nx,{cell}\n")
        (row,) = loaded(name, "csv")
        text = check.refusal(name) if row["a"] is None or str(row["a"]) != cell else check(name).problem[1]
        assert text == cell or text.startswith(f"row 1: a is {cell!r}, and OpenRLHF's reader makes {row['a']!r} of it")

    @pytest.mark.parametrize(("cells", "label"), [(["1", "2"], 1), (["True", "False"], True), (["1/2", "a,b"], "1/2")])
    def test_a_cell_that_stays(self, check, cells, label):
        assert check(check.write(".csv", rows(*cells))).problem[1] == label

    def test_numbers_and_an_empty_cell(self, check):
        assert "reader makes 1.0 of it" in check.refusal(check.file("a.csv", "q,a\nx,1\ny,\n"))

    def test_lines_with_other_numbers_of_cells(self, check):
        assert "line 2: 3 cells for 2 columns" in check.refusal(check.file("a.csv", "q,a\nx,1,2\ny,3,4\n"))

    def test_quotes_and_line_ends(self, check):
        name = check.file("a.csv", 'q,a\r\n"1, or\n""2""?",x\r\n\r\n"\x0b\u2028?",y\r\n')
        assert check(name).prompts == 2
        assert check(name).problem[0] == '1, or\n"2"?'


class TestLabels:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("place", [1, 3])
    def test_null(self, check, kind, place):
        labels = ["a", "b", "c"]
        labels[place - 1] = None
        text = check.refusal(check.write(kind, rows(*labels)))
        assert text.startswith(f"row {place}: a is null; it must have a value")

    def test_nan(self, check):
        """As pandas writes a number that is missing."""
        text = check.refusal(check.write(".parquet", rows(0.5, math.nan)))
        assert text.startswith("row 2: a is nan; it must have a value")

    @pytest.mark.parametrize("kind", [".parquet", " saved"])
    @pytest.mark.parametrize("label", [datetime(2024, 1, 1), Decimal("1.5"), b"x"])
    def test_what_cannot_be_sent_to_the_reward_processes(self, check, kind, label):
        text = check.refusal(check.write(kind, rows(label)))
        assert text.startswith("row 1: a is ") and "which cannot be sent to a reward function (Object of type" in text

    def test_without_label_key_the_column_may_be_anything(self, check):
        data = check(check.write(".jsonl", rows(None, 1)), data__label_key=None)
        (warning,) = data.warnings
        assert data.prompts == 2
        assert "data.label_key is not set, so that the reward function gets the empty text as each label" in warning
        assert warning.endswith("the columns are q, a")

    @pytest.mark.parametrize(("labels", "warned"), [(["", ""], 1), (["", "x"], 0)])
    def test_that_are_all_empty(self, check, labels, warned):
        assert len(check(check.write(".jsonl", rows(*labels))).warnings) == warned
        assert not check(check.write(".jsonl", rows(*labels)), reward__remote_url=None).warnings  # a model judges

    @pytest.mark.parametrize("label", ["", 0, False, [], {"x": [1]}, 0.5])
    def test_what_can(self, check, label):
        assert check(check.write(".parquet", rows(label, label))).problem[1] == label


class TestColumns:
    @pytest.mark.parametrize("kind", TEXT_KINDS)
    def test_missing_in_one_row(self, check, kind):
        uneven = [{"q": "1", "a": "1"}, {"q": "2", "b": "2"}]
        assert check.refusal(check.write(kind, uneven)) == "row 2: no column 'a' (data.label_key); it has q, b"

    @pytest.mark.parametrize("kind", KINDS)
    def test_missing_in_all_rows(self, check, kind):
        name = check.write(kind, rows("x"))
        text = check.refusal(name, data__input_key="question", data__label_key="answer")
        assert text.splitlines()[0] == "row 1: no column 'question' (data.input_key); it has q, a"
        assert text.splitlines()[1].endswith(", row 1: no column 'answer' (data.label_key); it has q, a")
