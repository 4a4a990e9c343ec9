"""Files, folders, parts and several data sets at once are read as a run reads them, or refused."""

import gzip
import os
import re
import shutil
from pathlib import Path

import pytest
from data_sets import KINDS, as_dataset, dump

from bapo_openrlhf.data.sources import ENDINGS
from bapo_openrlhf.host import file_of

ROWS = [{"q": f"{number}?", "a": f"<{number}>"} for number in range(6)]


def test_the_endings_are_openrlhfs():
    (line,) = re.findall(r"elif ext in (\[.*\]):", file_of("datasets/utils.py").read_text())
    assert line == str(list(ENDINGS)).replace("'", '"')


class TestFiles:
    @pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zip", "a.txt", "a.JSONL", "a"])
    def test_with_other_endings(self, check, name):
        file = check.file(name, gzip.compress(dump(ROWS).encode()))
        assert check.refusal(file).startswith(f"data.prompt_dataset is {file}; ")

    @pytest.mark.parametrize(
        "name", [*(f"/no/such{ending}" for ending in ENDINGS), "/no/such", "./none", "none here", "a/b/c"]
    )
    def test_missing(self, check, name):
        assert f"data.prompt_dataset is {name}; there is no such file" in check.refusal(name)

    @pytest.mark.parametrize(("name", "mark"), [("a,b.jsonl", ","), ("a@b.jsonl", "@")])
    def test_a_file_whose_name_openrlhf_splits(self, check, name, mark):
        file = check.file(name, dump([{"q": "x", "a": "y"}]).encode())
        assert f"; the file's name has {mark!r}" in check.refusal(file)

    @pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
    @pytest.mark.parametrize(("encoding", "line"), [("latin1", 3), ("utf-16", 1)])
    def test_another_encoding(self, check, name, encoding, line):
        plain = "q,a\nx,y\n" if name == "a.csv" else dump([{"q": "x", "a": "y"}] * 2)
        file = check.file(name, (plain + ("é,2\n" if name == "a.csv" else '{"q": "é", "a": "2"}\n')).encode(encoding))
        text = check.refusal(file)
        assert text.startswith(f"line {line}: no valid UTF-8 (") and f"`iconv -f {encoding} -t utf-8`" in text

    @pytest.mark.parametrize("names", ["{},", ",{}", "{},,{}", "{}, ", ","])
    def test_an_empty_name(self, check, names):
        names = names.replace("{}", check.file("a.jsonl", dump(ROWS)))
        assert check.refusal(names).startswith(f"data.prompt_dataset is {names}; ")

    def test_utf_8_with_its_mark(self, check):
        assert check(check.file("a.jsonl", dump(ROWS).encode("utf-8-sig"))).prompts == 6

    @pytest.mark.parametrize(("names", "text", "says"), [
        ("a.jsonl a.json", '{"q": "1", "a": "1"}\n\n{"q": "2", "a"\n', "line 3: no valid JSON"),
        ("a.jsonl a.json", '{"q": "1", "a": "1"}\n{"q": "2", "a": ' + "9" * 5000 + "}", "line 2: no valid JSON (Exc"),
        ("a.jsonl a.json", '{"q": "1", "a": "1"}\n[1]\n', "line 2: must be a JSON object, is list"),
        ("a.json", f'[{{"q": "1", "a": {"9" * 5000}}}]', ": no valid JSON (Exceeds the limit"),
        ("a.json", '{"q": ["1", "2"], "a": ["3", "4"]}', "row 1: q is ['1', '2']; "),  # one object of columns
        ("a.parquet a.arrow", "no such thing", "cannot be read: "),
    ])  # fmt: skip
    def test_that_hold_something_else(self, check, names, text, says):
        for name in names.split():
            assert check.refusal(check.file(name, text)).startswith(says), name

    @pytest.mark.parametrize(("column", "value"), [("q", "x \ud800"), ("a", {"x": ["\udfff"]})])
    def test_half_of_a_surrogate_pair(self, check, column, value):
        """Blank lines are no rows."""
        rows = [{"q": "😀", "a": {}} for _ in range(24)]
        rows[23][column] = value
        assert check.refusal(check.file("a.jsonl", "\n" + dump(rows))).startswith(f"row 24: {column} is ")

    @pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
    @pytest.mark.parametrize("text", ["", "\n\n  \n"])
    def test_empty(self, check, name, text):
        text = check.refusal(check.file(name, text))
        assert text.startswith("has no rows") or (name == "a.json" and "no valid JSON" in text)

    @pytest.mark.parametrize("kind", KINDS)
    def test_one_that_replaces_another_with_its_time(self, check, kind):
        """As from an archive with fixed times. `datasets` keeps rows by path and time."""
        place = check.folder / f"data{kind}"
        for label in ("old", "new"):
            if place.is_dir():
                shutil.rmtree(place)
            Path(check.write(kind, [row | {"a": label} for row in ROWS])).rename(place)
            for file in [place, *place.rglob("*")]:
                os.utime(file, (1.7e9, 1.7e9))
            assert check(str(place)).problem == ("0?", label)

    def test_equal_rows_are_kept_once(self, check):
        first, same = (check.write(kind, ROWS) for kind in (".jsonl", ".json"))
        kept = {str(check(name).kept["data.prompt_dataset"]).rpartition("-")[2] for name in (first, same, first)}
        assert len(kept) == 1 and len(list((check.folder / "kept").iterdir())) == 2
        assert not check.trained(check.write(".jsonl", ROWS[1:]))[0]["q"].startswith("0")


class TestFolders:
    def test_saved_with_several_parts(self, check):
        import datasets

        parts = {"train": as_dataset(ROWS), "test": as_dataset(ROWS[:2])}
        datasets.DatasetDict(parts).save_to_disk(check.folder / "saved")
        name = str(check.folder / "saved")
        assert check(name).prompts == 6
        assert check(name, data__prompt_split="test").prompts == 2
        text = check.refusal(name, data__prompt_split="dev")
        assert text.startswith("data.prompt_split is dev; ") and "train, test" in text

    def test_files_of_a_folder_by_part(self, check):
        (check.folder / "rows" / "inner").mkdir(parents=True)
        check.file("rows/train.jsonl", dump(ROWS))
        check.file("rows/test.csv", "q,a\n1,2\n")
        check.file("rows/inner/train.jsonl", dump(ROWS[:3]))
        assert check(f"{check.folder / 'rows'}@inner").prompts == 3

    def test_files_of_two_kinds(self, check):
        """OpenRLHF reads only one of the kinds."""
        (check.folder / "rows").mkdir()
        check.file("rows/a.jsonl", dump(ROWS))
        check.file("rows/README.md", "some rows")
        name = str(check.folder / "rows")
        assert not check(name).warnings
        as_dataset(ROWS).to_parquet(check.folder / "rows" / "b.parquet")
        data = check(name)
        (warning,) = data.warnings
        assert data.prompts == 6
        assert warning.endswith((str(check.folder / "rows" / "a.jsonl"), str(check.folder / "rows" / "b.parquet")))

    def test_without_anything_to_read(self, check):
        (check.folder / "empty").mkdir()
        assert check.refusal(str(check.folder / "empty")).startswith("cannot be read: ")


class TestSeveral:
    def test_with_probabilities(self, check):
        import datasets

        first, second = check.write(".parquet", ROWS), check.write(".parquet", ROWS[:2])
        expected = datasets.interleave_datasets(
            [as_dataset(ROWS), as_dataset(ROWS[:2])], [0.25, 0.75], seed=7, stopping_strategy="all_exhausted"
        )
        trained = check.trained(f"{first},{second}", data__prompt_probs="0.25,0.75", train__seed=7)
        assert [row["q"] for row in trained] == expected["q"][:] and len(expected) > 8

    def test_as_many_as_a_limit_allows(self, check):
        first, second = check.write(".jsonl", [*ROWS, {"q": "", "a": "x"}]), check.write(" saved", ROWS)
        assert check(f"{first},{second}", data__max_samples=4).prompts == 4
        assert "row 7" in check.refusal(f"{first},{second}", data__max_samples=9)


class TestNumbersOfAnEvaluation:
    """ckpt.best_metric_key, by which OpenRLHF saves the best checkpoint."""

    NAMED = ({"q": "1?", "a": "x", "datasource": "one"}, {"q": "2?", "a": "y", "datasource": "two"})
    OTHERS = "eval_response_length_mean, eval_truncated_rate, eval_num_samples"

    @pytest.mark.parametrize("kind", [".jsonl", ".parquet"])
    @pytest.mark.parametrize(("rows", "sources"), [(ROWS, ["default"]), (NAMED, ["one", "two"])])
    def test_another_name_is_refused(self, check, kind, rows, sources):
        train, evaluated = check.write(".jsonl", ROWS), check.write(kind, rows)
        flags = {"eval__dataset": evaluated, "eval__n_samples_per_prompt": 4, "ckpt__best_metric_key": "eval_accuracy"}
        ends = ("pass1", "pass4", "response_length_mean", "truncated_rate")
        names = [f"eval_{source}_{end}" for source in sources for end in ends]
        text = check.refusal(train, **flags)
        assert text.startswith("ckpt.best_metric_key is eval_accuracy; ")
        assert text.endswith(f": {', '.join(names)}, {self.OTHERS}")
        for key in ("", "none", *names, *self.OTHERS.split(", ")):
            check(train, **(flags | {"ckpt__best_metric_key": key}))


class TestElsewhere:
    @pytest.mark.parametrize("name", ["org/data", "org/data.v1", "data", "org/data@train"])
    def test_nothing_is_downloaded_ahead(self, check, name, monkeypatch):
        """A folder of the owner's name changes nothing."""
        monkeypatch.chdir(check.folder)
        (check.folder / "org").mkdir()
        assert "; there is no such file" in check.refusal("org/data.jsonl.gz")
        result = check(name)
        assert (result.prompts, result.problem) == (None, None)
        (warning,) = result.warnings
        assert warning.startswith(f"data.prompt_dataset is {name}; ")

    def test_the_rows_beside_it_are_looked_at(self, check):
        assert "row 1: q is ''" in check.refusal("org/data," + check.write(".jsonl", [{"q": "", "a": "x"}]))

    def test_a_run_asks_the_hub(self, check, monkeypatch):
        """Without a network, this takes half a minute and ends so, too."""
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
        assert check.refusal("no-such-owner/no-such-data", ahead=False).startswith("cannot be read: ")
