"""The paper's table as data, and this run next to it."""

import csv
from pathlib import Path

import numpy as np
import pytest

from bapo_openrlhf.tasks import get_task
from bapo_openrlhf.workbench.evaluation import results, store
from bapo_openrlhf.workbench.evaluation.problems import (
    COLUMNS,
    Benchmark,
    BenchmarkProblem,
    Request,
    Sampling,
    titles,
)
from bapo_openrlhf.workbench.pages.table import Table, show


def test_the_paper_has_all_its_rows_and_printed_averages_are_the_means_but_for_two():
    """This checks the digits of all numbers. The paper prints those two averages."""
    assert [len(block.rows) for block in results.BLOCKS] == [8, 10, 10]
    assert all(len(row.values) == len(block.benchmarks) for block in results.BLOCKS for row in block.rows)
    rows = [row for block in results.BLOCKS for row in block.rows]
    odd = [(row.method, row.average) for row in rows if abs(np.mean(row.values) - row.average) > 0.011]
    assert odd == [("DeepSeek R1 Distill Qwen 1.5B", 48.90), ("+GRPO (v = 5) (Mroueh et al., 2025)", 51.57)]


def test_columns_are_the_tasks_benchmarks():
    """Names and titles agree in the same order. The paper's table shortens two titles with a point."""
    for task, block in zip(("math", "countdown", "geometry"), results.BLOCKS, strict=True):
        titles = [(name, part.title) for name, part in get_task(task).benchmarks.items()]
        assert titles == [(name, head.removesuffix(".")) for name, head in block.benchmarks.items()]


@pytest.fixture
def write_table(tmp_path):
    """A function that writes rows with so many solved responses of 4, and returns the content of results.json."""

    def write(right, *, in_file=None, too_long=(), rows=None, generator=None):
        benchmarks = []
        for benchmark, counts in right.items():
            problems = tuple(BenchmarkProblem(f"{benchmark}-{i}", f"text {i}", "7") for i in range(len(counts)))
            for problem, count in zip(problems, counts, strict=True):
                row = {
                    "id": problem.id, "input": problem.input, "prompt": f"<user>{problem.input}",
                    "scores": [1.0] * count + [0.0] * (4 - count), "failures": [None] * 4, "answers": None,
                    "tokens": [10, 20, 30, 41], "truncated": [False, False, False, True],
                }  # fmt: skip
                store.append_row(tmp_path, benchmark, row | (rows or {}))
            title, of_file = titles().get(benchmark, benchmark), (Path("f"), "0", Path("r"))
            size = in_file or len(counts)
            benchmarks.append(Benchmark(benchmark, title, *of_file, problems, size, COLUMNS, generator))
        request = Request("some/model", "mine", list(right), tmp_path, Sampling(4, 1.0, 1.0, -1, 8192, 42), [1, 4])
        settings = {"model": {"path": "some/model"}, "sampling": {"runs": 4, "seed": 42}}
        return results.write(request, benchmarks, settings, list(too_long))

    return write


def test_a_block_has_the_papers_rows_then_this_run(write_table):
    table, metrics = results.tables(write_table({"aime24": [4, 0, 1], "math500": [4, 4]}))
    ours = ["paper", "+BAPO (Ours)", "38.54", "72.74", "89.18", "29.55", "50.06", "56.01", "733k", "off"]
    assert table.head[2:5] == ["AIME24", "AMC", "MATH500"] and table.rows[7] == ours
    row = table.rows[-1]
    assert row == ["this run", "mine", "41.67 [0.00, 100.00]", "-", "100.00 [100.00, 100.00]"] + ["-"] * 5
    cells = {row[0]: row[1:] for row in metrics.rows}
    assert metrics.head == ["", "AIME24", "MATH500"] and cells["pass@4"][0] == "66.67 [0.00, 100.00]"
    assert cells["truncated"][0] == "25.00 [25.00, 25.00]" and cells["tokens"] == ["25.2", "25.2"]
    assert cells["problems"] == ["3", "2"] and cells["unjudged"] == ["0", "0"]


def test_average_is_there_when_all_of_the_block_was_run(write_table):
    result = write_table({"cd34": [4, 0], "cd4": [4, 4], "geo3k_val": [2]})
    planning, geometry, _ = results.tables(result)
    assert planning.rows[-1][-1].startswith("75.00 [")  # each benchmark weighs the same
    assert geometry.rows[-1][-1] == "-" and list(result["averages"]) == ["Planning"]


def test_benchmarks_are_resampled_independently(write_table):
    """Two equal benchmarks have an interval narrower by the square root of two. Their draws are independent."""
    result = write_table({"cd34": [0, 4] * 60, "cd4": [0, 4] * 60})
    one = result["benchmarks"]["cd34"]["metrics"]["avg@4"]
    both = result["averages"]["Planning"]
    assert (both["high"] - both["low"]) / (one["high"] - one["low"]) == pytest.approx(2**-0.5, abs=0.05)
    assert one["high"] - one["low"] == pytest.approx(2 * 1.96 * 50 / 120**0.5, rel=0.05)


NOTES = {
    "only the first 2 of 30 problems": {"in_file": 30},
    "1 problems are left out, too long for the model": {"in_file": 3, "too_long": [("aime24", "x")]},
    "4 of 8 responses unjudged, counted as wrong": {"rows": {"failures": [None, "timeout", None, "crashed"]}},
    "prompts are the problems' text as it is": {"rows": {"prompt": "q", "input": "q"}},
    "generated problems (drawn), not the paper's": {"generator": "drawn"},
}


@pytest.mark.parametrize("note", NOTES)
def test_what_a_reader_must_know_is_below_each_table_and_nothing_else(write_table, note):
    result = write_table({"aime24": [4, 0]}, **NOTES[note])
    for table in results.tables(result):
        (said,) = [line for line in table.notes if line.startswith("AIME24: ")]
        assert note in said


def test_csv_has_a_line_for_each_number(write_table, tmp_path):
    write_table({"cd34": [4, 0], "cd4": [4, 4], "own": [1]})
    with (tmp_path / "results.csv").open() as file:
        lines = list(csv.DictReader(file))
    of_paper = [line for line in lines if line["source"] == "paper"]
    assert len(of_paper) == 30  # the block that was run, averages included
    bapo = {"base": "Qwen2.5 Math 7B", "method": "+BAPO (Ours)", "benchmark": "cd4", "metric": "avg@32"}
    (line,) = [line for line in of_paper if bapo.items() <= line.items()]
    assert (line["value"], line["low"], line["runs"]) == ("57.13", "", "32")
    mine = {(line["benchmark"], line["metric"]): line for line in lines if line["source"] == "this run"}
    assert (mine["cd34", "avg@4"]["value"], mine["cd34", "avg@4"]["problems"]) == ("50", "2")
    assert mine["Planning average", "avg@4"]["value"] == "75" and mine["own", "tokens"]["value"] == "25.25"
    assert len(mine) == 3 * 5 + 1


def test_markdown_has_the_tables_and_how_it_was_made(write_table, tmp_path):
    result = write_table({"aime24": [4, 0]})
    text = (tmp_path / "results.md").read_text()
    assert all(table.markdown() in text for table in results.tables(result))
    assert f"`{result['command']}`" in text and "- seed: 42" in text


def test_names_of_users_are_no_markup(capsys):
    show([Table.of(["", "A"], [["[bold]name[/x]", "1.00 [0.00, 2.00]"]], "[red]T", notes=["[note]"])], "[last]")
    printed = capsys.readouterr().out
    for text in ("[red]T", "[bold]name[/x]", "[0.00, 2.00]", "  [note]", "[last]"):
        assert text in printed
