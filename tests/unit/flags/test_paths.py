"""`~` in each flag that is a path, and folders that a run cannot write to."""

import argparse
import errno
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from bapo_openrlhf.cli import arguments, main
from bapo_openrlhf.cli.parser import Parser
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.flags.paths import DATA, READ, WRITTEN, check_read, check_written, expand_home, make_absolute

LOOP = os.strerror(errno.ELOOP)
REQUIRED = ["--rollout.n_samples_per_prompt=8", "--actor.model_name_or_path=m", "--reward.remote_url=r.py"]


def test_every_flag_of_a_path_is_in_the_table():
    """Its name says that it is one."""
    words = {"path", "dir", "dataset", "url"}
    parser = arguments.build_parser("")
    flags = {action.dest for action in parser._actions if action.type in (None, str) and action.const is None}
    named = {flag for flag in flags if re.split(r"[._]", flag)[-1] in words}
    assert len(named) > 5 and named <= {*WRITTEN, *READ}, named - {*WRITTEN, *READ}


@pytest.mark.parametrize(("flag", "given", "wanted"), [
    *((flag, "~/a.py:B", "/home/me/a.py:B") for flag in (*WRITTEN, *READ, "adapt.method")),
    ("data.prompt_dataset", "~/a.jsonl,b.jsonl,~/c.jsonl@train", "/home/me/a.jsonl,b.jsonl,/home/me/c.jsonl@train"),
    ("data.prompt_dataset", " ~/a.jsonl , ~/b.jsonl ", "/home/me/a.jsonl,/home/me/b.jsonl"),
    *(("data.prompt_dataset", other, other) for other in ("org/a~b", "a/~/b", None)),
])  # fmt: skip
def test_home_folder(flag, given, wanted, monkeypatch):
    """Also in each part of a list."""
    monkeypatch.setenv("HOME", "/home/me")
    flat = argparse.Namespace(**{flag: given})
    expand_home(flat)
    assert vars(flat) == {flag: wanted}


def test_flags_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run.yaml").write_text("run.dir: ~/runs\nckpt.path: ~/kept\n")
    args = arguments.parse([*REQUIRED, "--config", "~/run.yaml", "--data.prompt_dataset=~/t.jsonl", "--run.name=~"])
    assert (args.run.dir, args.ckpt.path) == (f"{tmp_path}/runs", f"{tmp_path}/kept")
    assert args.data.prompt_dataset == f"{tmp_path}/t.jsonl"
    assert args.ckpt.output_dir == f"{tmp_path}/runs/~/model" and args.run.name == "~"  # a name is no path


def test_paths_of_other_commands(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    parser = Parser("prog", "")
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(["~/a", "b", "--out=~/c"])
    assert ([*map(str, given.runs)], str(given.out)) == (["/home/me/a", "b"], "/home/me/c")


def reading(**changed):
    """Arguments of a run that reads these files. In their names, __ is a dot."""
    args = {flag: None for flag in READ} | {flag.replace("__", "."): value for flag, value in changed.items()}
    groups = {flag.split(".")[0]: SimpleNamespace() for flag in (*args, *WRITTEN)}
    for flag, value in args.items():
        setattr(groups[flag.split(".")[0]], flag.split(".")[1], value)
    return SimpleNamespace(**groups, adapt=SimpleNamespace(method="none"))


class TestAbsolute:
    """Ray's workers may have another working directory."""

    def test_a_link_stays_one(self, tmp_path, monkeypatch):
        """The hub's cache has files without endings, and OpenRLHF goes by the ending."""
        (tmp_path / "blobs").mkdir()
        (tmp_path / "blobs" / "5f3a").write_text("")
        (tmp_path / "rows.jsonl").symlink_to("blobs/5f3a")
        (tmp_path / "deep" / "er").mkdir(parents=True)
        (tmp_path / "link").symlink_to(tmp_path / "deep" / "er")
        monkeypatch.chdir(tmp_path)
        args = reading(data__prompt_dataset="rows.jsonl,link/../er@train,org/name")
        make_absolute(args)
        first, second, third = args.data.prompt_dataset.split(",")
        assert (first, third) == (f"{tmp_path}/rows.jsonl", "org/name")
        assert os.path.samefile(second.removesuffix("@train"), "deep/er")

    @pytest.mark.parametrize("name", ["me@corp", "a,b"])
    def test_of_one_file_has_any_character(self, tmp_path, monkeypatch, name):
        (tmp_path / name).write_text("")
        monkeypatch.chdir(tmp_path)
        args = reading(actor__model_name_or_path=name, train__agent_func_path=name)
        make_absolute(args)
        assert {args.actor.model_name_or_path, args.train.agent_func_path} == {f"{tmp_path}/{name}"}

    def test_of_rewards_only_files_are_paths(self, tmp_path, monkeypatch):
        """For a run with an agent, OpenRLHF sets the word."""
        for name in ("agent", "localhost:5000", "reward.py"):
            (tmp_path / name).touch()
        monkeypatch.chdir(tmp_path)
        args = reading(reward__remote_url=["agent", "localhost:5000", "reward.py"])
        make_absolute(args)
        assert args.reward.remote_url == ["agent", "localhost:5000", f"{tmp_path}/reward.py"]

    @pytest.mark.parametrize("flag", [*DATA, "reward.model_name_or_path"])
    @pytest.mark.parametrize(("folder", "mark"), [("me@corp", "@"), ("a,b", ",")])
    def test_that_openrlhf_would_split(self, tmp_path, monkeypatch, flag, folder, mark):
        (tmp_path / folder / "rows").mkdir(parents=True)
        field = flag.replace(".", "__")
        names = reading(**{field: "org/name, ./rows@part" if flag in DATA else "org/name, ./rows"})
        monkeypatch.chdir(tmp_path)
        check_read(names)  # They are not there.
        monkeypatch.chdir(tmp_path / folder / "rows")
        check_read(names)
        monkeypatch.chdir(tmp_path / folder)
        if mark == "@" and flag not in DATA:
            check_read(names)
            return
        with pytest.raises(ConfigError) as error:
            check_read(names)
        given = "./rows@part" if flag in DATA else "./rows"
        assert str(error.value).startswith(f"{flag} is {given}; ") and f"{folder}/rows has {mark!r}" in str(error.value)

    @pytest.mark.parametrize("name", ["br[1].jsonl", "what?.jsonl", "all*.jsonl"])
    def test_that_datasets_would_take_for_a_pattern(self, tmp_path, monkeypatch, name):
        (tmp_path / name).touch()
        for flag in DATA:
            with pytest.raises(ConfigError, match=rf"^{flag} is .*{re.escape(name)}; "):
                check_read(reading(**{flag.replace(".", "__"): str(tmp_path / name)}))
        check_read(reading(reward__remote_url=str(tmp_path / name)))

    @pytest.mark.parametrize("names", ["caf\udce9.py", ["r.py", "caf\udce9.py"]])
    def test_that_is_not_utf8(self, names):
        """OpenRLHF has divided the names of reward functions."""
        with pytest.raises(ConfigError, match=r"^'reward\.remote_url is caf.*UTF-8$") as error:
            check_read(reading(reward__remote_url=names))
        assert str(error.value).isascii()


def arguments_in(tmp_path, **changed):
    places = {"dir": tmp_path / "runs", "path": tmp_path / "c", "output_dir": tmp_path / "o", "tensorboard_dir": None}
    places = {name: place and str(place) for name, place in (places | changed).items()}
    run = SimpleNamespace(dir=places["dir"], name=changed.get("name", "first"))
    ckpt = SimpleNamespace(path=places["path"], output_dir=places["output_dir"])
    return SimpleNamespace(run=run, ckpt=ckpt, logger=SimpleNamespace(tensorboard_dir=places["tensorboard_dir"]))


def refusal(args):
    with pytest.raises(ConfigError) as error:
        check_written(args)
    assert "\n" not in str(error.value)
    return str(error.value)


class TestFolders:
    def test_that_are_there_or_can_be_made(self, tmp_path, monkeypatch):
        """A link may lead to a folder that is not there yet."""
        (tmp_path / "there").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "there")
        (tmp_path / "later").symlink_to(tmp_path / "none")
        monkeypatch.chdir(tmp_path)
        for place in ("there", "link", "there/new/and/newer", "link/new", "later/new", "./new", "../new"):
            check_written(arguments_in(tmp_path, dir=place))
        assert sorted(os.listdir(tmp_path)) == ["later", "link", "there"]

    @pytest.mark.parametrize("flag", [*WRITTEN, "run.name"])
    def test_of_each_flag_are_looked_at(self, tmp_path, flag):
        (tmp_path / "file").write_text("mine")
        place = {"dir": tmp_path, "name": "file"} if flag == "run.name" else {flag.partition(".")[2]: tmp_path / "file"}
        says = refusal(arguments_in(tmp_path, **place))
        assert says.startswith(f"{flag} is ") and f"{tmp_path / 'file'} is a file" in says

    @pytest.mark.parametrize(
        ("place", "named"),
        [
            ("file/far/below", "file"), ("blocked", "file"), ("loop", LOOP),
            ("n" * 256, "too long"), pytest.param("/nnnn" * 1000, "too long", id="deep"), ("~no_such/runs", "~no_such"),
            ("s3://bucket/runs", "s3:"),
        ],
    )  # fmt: skip
    def test_that_cannot_be_one(self, tmp_path, place, named):
        """The error names what is in the way."""
        (tmp_path / "file").write_text("mine")
        for link, to in (("loop", "other"), ("other", "loop"), ("blocked", "file/below")):
            (tmp_path / link).symlink_to(tmp_path / to)
        whole = place if "://" in place or place[0] in "/~" else str(tmp_path / place)
        says = refusal(arguments_in(tmp_path, dir=whole))
        assert (f"{tmp_path / 'file'} is a file" if named == "file" else named) in says

    def test_a_name_that_is_not_utf8(self, tmp_path):
        (tmp_path / os.fsdecode(b"caf\xe9")).mkdir()
        says = refusal(arguments_in(tmp_path, dir=f"{tmp_path}/caf\udce9/runs"))
        assert says.startswith("'run.dir is ") and says.isascii()


@pytest.mark.parametrize("command", ["check", "train"])
def test_both_commands_refuse_in_one_line_and_make_nothing(capsys, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    assert main.run([command, *REQUIRED, "--algorithm=bapo_grpo", "--ckpt.path=file/below"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ckpt.path is file/below; ") and err.count("\n") == 1
    assert os.listdir(tmp_path) == ["file"]
