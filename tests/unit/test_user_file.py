"""Files of the user's own: loaded in the same way everywhere, with errors that name a line."""

import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bapo_openrlhf import user_file
from bapo_openrlhf.data import reading, sources
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.flags.files import settings_of
from bapo_openrlhf.flags.paths import check_read
from bapo_openrlhf.launch import preflight

VERDICT = """
from __future__ import annotations
import dataclasses

@dataclasses.dataclass
class Verdict:
    right: bool
    kind: dataclasses.KW_ONLY
    why: str = ""

def reward_func(queries, prompts, labels, **kwargs):
    return {"rewards": [float(Verdict(True, why="so").right)]}
"""


@pytest.mark.parametrize("name", ["a b.c-d.py", "ü.py"])
def test_dataclasses_postponed_annotations_and_pickle(tmp_path, name):
    (tmp_path / name).write_text(VERDICT)
    module = user_file.load("f", tmp_path / name)
    verdict = module.Verdict(True, why="so")
    assert pickle.loads(pickle.dumps(verdict)) == verdict and module.reward_func([""], [""], [""]) == {"rewards": [1.0]}


def test_a_link_to_a_file_of_another_ending(tmp_path):
    (tmp_path / "5f3a").write_text("value = 3\n")
    (tmp_path / "reward.py").symlink_to(tmp_path / "5f3a")
    module = user_file.load("f", tmp_path / "reward.py")
    assert module.value == 3 and module.__file__ == str(tmp_path / "5f3a")


def test_the_name_of_a_module_depends_on_its_path_alone(tmp_path):
    """So it is the same in each process, and two files of one name do not replace each other."""
    for folder, value in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "reward.py").write_text(f"value = {value}\n")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    one, two = (user_file.load("f", tmp_path / folder / "reward.py") for folder in "ab")
    assert (one.value, two.value) == (1, 2) and user_file.load("f", tmp_path / "link" / ".." / "a" / "reward.py") is one
    words = "import sys, pathlib; from bapo_openrlhf.user_file import load; print(load('f', pathlib.Path(sys.argv[1])))"
    told = subprocess.check_output([sys.executable, "-c", words, tmp_path / "a" / "reward.py"], text=True)
    assert told.strip() == str(one)


# (source, what the error says, its line; None if the file has none)
BROKEN = {
    "syntax": ("x = 1\ndef broken(:\n", "SyntaxError: ", 2),
    "import": ("\n\nimport no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'", 3),
    "deeper": ("def f():\n    g()\n\ndef g():\n    {}['a']\n\nf()\n", "KeyError: 'a'", 5),
    "in a library": ("import json\njson.loads('{')\n", "JSONDecodeError: ", 2),
    "of a text": ("import ast\n\nast.parse('1 +')\n", "SyntaxError: ", 3),
    "exit": ("import sys\nsys.exit('no')\n", "SystemExit: no", 2),
    "no text": ("class E(Exception):\n    def __str__(self): raise ValueError\nraise E\n", "E: its message cannot", 3),
    "null byte": ("x = '\0'\n", "SyntaxError: ", None),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_error_names_file_and_line(tmp_path, name):
    source, says, line = BROKEN[name]
    path = tmp_path / "mine.py"
    path.write_text(source)
    with pytest.raises(ConfigError) as caught:
        user_file.load("adapt.method", path)
    text = str(caught.value)
    assert text.startswith(f"adapt.method {path} cannot be imported: {says}") and "\n" not in text
    assert line is None or text.endswith(f"({path}:{line})")
    path.write_text("value = 1\n")  # it is tried again, from its new text
    path.touch()
    sys.path_importer_cache.clear()
    assert user_file.load("adapt.method", path).value == 1


@pytest.mark.parametrize("text", ["{seed: 1, seed: 2}", "seed: 1\n'seed': 2", "a: {seed: 1, b: 2, seed: 1}"])
def test_equal_keys_are_refused(tmp_path, text):
    (tmp_path / "a.yaml").write_text(text)
    for as_text in user_file.LOADERS:
        with pytest.raises(ConfigError, match=r"^study .*a.yaml, line [12]: seed "):
            user_file.read_yaml("study", tmp_path / "a.yaml", as_text=as_text)


def test_keys_that_an_anchor_adds_may_be_there(tmp_path):
    (tmp_path / "a.yaml").write_text("a: {b: &b {x: 1}}\nc: {d: &d {<<: *b, x: 2}}\ne: {<<: *d, x: 3}")
    wanted = {"a": {"b": {"x": 1}}, "c": {"d": {"x": 2}}, "e": {"x": 3}}
    assert user_file.read_yaml("study", tmp_path / "a.yaml") == wanted


def test_a_value_that_is_none_is_refused_in_one_line_and_a_date_is_a_text(tmp_path):
    for text in ("!!int x", "9" * 5000):
        (tmp_path / "a.yaml").write_text(f"a: {text}")
        with pytest.raises(ConfigError, match=r"^study .*a.yaml is not valid YAML: .+$"):
            user_file.read_yaml("study", tmp_path / "a.yaml")
    (tmp_path / "a.yaml").write_text("[1, 1.10, 1.0e-6, true, null, 2024-02-30, 2024-02-29]")
    assert user_file.read_yaml("study", tmp_path / "a.yaml") == [1, 1.1, 1e-6, True, None, "2024-02-30", "2024-02-29"]


def test_what_the_operating_system_does_not_say(monkeypatch):
    def fail(path, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", fail)
    calls = [
        lambda: user_file.is_dir("f", Path("x")),
        lambda: user_file.load("f", Path("x")),
        lambda: preflight.check_model("f", "x"),
        lambda: sources.sources(sources.SourceFlags("f", "x", {})),
    ]
    assert check_read(SimpleNamespace(data=SimpleNamespace(prompt_dataset="x"))) is None
    with pytest.raises(ConfigError, match=r"^f cannot be read: IsADirectoryError: "):
        [*reading.rows_of("f", Path(__file__).parent)]
    for call in calls:
        with pytest.raises(ConfigError, match=r"^f is x; it cannot be read: Permission denied$"):
            call()


def test_a_home_folder_that_is_not_there():
    for call, path in ((user_file.load, Path("~no_such_user/x")), (preflight.check_model, "~no_such_user/x")):
        with pytest.raises(ConfigError, match=r"^f is ~no_such_user/x; .*no home folder"):
            call("f", path)
    with pytest.raises(ConfigError, match=r"^config ~no_such_user/x .*no home folder"):
        list(settings_of("~no_such_user/x"))


@pytest.mark.parametrize(("beside", "line", "found"), [
    ("helper.py", "import helper", "PYTHONPATH={}"),
    ("helper/__init__.py", "from helper.inner import f", "PYTHONPATH={}"),
    ("helper.py", "from . import helper", "PYTHONPATH"),
    ("helper.py", "import other", ""),
])  # fmt: skip
def test_a_module_beside_the_file(tmp_path, beside, line, found):
    (tmp_path / beside).parent.mkdir(exist_ok=True)
    (tmp_path / beside).touch()
    (tmp_path / "mine.py").write_text(f"{line}\n")
    with pytest.raises(ConfigError) as caught:
        user_file.load("f", tmp_path / "mine.py")
    end = str(caught.value).partition(f"({tmp_path}/mine.py:1)")[2]
    assert found.format(tmp_path) in end and bool(found) == bool(end)
