"""What a run was begun with, and what of it may change: every flag, and the content of what flags name."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bapo_openrlhf.cli import arguments
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.flags.config import flags_of
from bapo_openrlhf.launch import settings as module
from bapo_openrlhf.launch.settings import changes, is_mended, settings_of

ROOT = Path(__file__).parents[3]
WORDS = [
    "--algorithm=ba_ppo", "--actor.model_name_or_path=hub/actor", "--critic.model_name_or_path=hub/critic",
    "--reward.remote_url=reward.py", "--rollout.n_samples_per_prompt=4", "--vllm.num_engines=1",
    "--data.prompt_dataset=hub/data", "--critic.num_gpus_per_node=8",
]  # fmt: skip


def parse(*words: str) -> SimpleNamespace:
    return arguments.parse([*WORDS, *words])


FLAGS = flags_of(parse())
# By what their values are compared: the content of files, or a product.
NAMED = {
    "actor.model_name_or_path", "critic.model_name_or_path", "reward.model_name_or_path", "data.prompt_dataset",
    "reward.remote_url", "train.agent_func_path", "adapt.method",
}  # fmt: skip
NUMBERS = {f"{model}.num_{of}" for model in ("actor", "critic") for of in ("nodes", "gpus_per_node")}


def another(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1 if value < float("inf") else 1.0
    if isinstance(value, (list, tuple)):
        return [*value, "x"]
    return f"{value}x"


def put(args: SimpleNamespace, flag: str, value) -> None:
    *path, last = flag.split(".")
    for name in path:
        args = getattr(args, name)
    setattr(args, last, value)


@pytest.mark.parametrize("flag", sorted(FLAGS))
def test_each_flag_is_compared(flag):
    """Unless it says where files are, or how flags were given."""
    before, args = settings_of(parse(), 8), parse()
    assert changes(before, json.loads(json.dumps(before))) == {}
    value = another(FLAGS[flag])
    put(args, flag, value)
    actual = changes(before, settings_of(args, 8))
    if flag.startswith(("run.", "ckpt.", "logger.")) or flag in ("config", "local_rank"):
        assert actual == {}
    elif flag in NAMED:
        assert list(actual) == [flag]
    elif flag in NUMBERS:
        model, nodes = flag.split(".")[0], value if flag.endswith("nodes") else 1
        gpus = value if flag.endswith("gpus_per_node") else 8
        assert actual == {f"{model}.num_nodes x {model}.num_gpus_per_node": ("8", str(nodes * gpus))}
    else:
        wanted = json.loads(json.dumps([FLAGS[flag], value]))
        assert list(actual) == [flag] and [json.loads(json.dumps(one)) for one in actual[flag]] == wanted


def test_flags_that_only_one_version_has_say_nothing():
    before, now = settings_of(parse(), 8), settings_of(parse(), 8)
    old = {name: value for name, value in before["config"].items() if name != "adapt.eps"} | {"adapt.gone": 1}
    assert changes({**before, "config": old}, now) == {}
    assert changes({"config": old}, now) == {}  # a record of before there were inputs


def test_rows_are_compared_if_both_know_their_number():
    words = "--data.prompt_dataset=org/data"
    known, fewer, unknown = (settings_of(parse(words), rows) for rows in (7473, 8, None))
    other = settings_of(parse("--data.prompt_dataset=org/other"), None)
    assert changes(known, unknown) == changes(unknown, known) == {}
    assert changes(known, fewer) == {"data.prompt_dataset": ("7473 rows, org/data", "8 rows, org/data")}
    assert changes(known, other) == {"data.prompt_dataset": ("org/data", "org/other")}


class Files:
    """A folder with one of each kind of file that a run reads, and the settings of a run that reads them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for model in ("actor", "critic"):
            for name, content in (("config.json", b"{}"), ("model.safetensors", bytes(range(256)) * 16)):
                self.write(f"{model}/{name}", content + model.encode())
        for place in OF_FILE:
            if "model_name" not in OF_FILE[place]:
                self.write(place, place.encode() * 50)

    def write(self, place: str, content: bytes) -> None:
        (self.folder / place).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / place).write_bytes(content)

    def settings(self, **flags):
        args = parse()
        data = ",".join(str(self.folder / name) for name in ("rows.jsonl", "rows.csv", "rows@split"))
        paths = {
            "actor.model_name_or_path": self.folder / "actor", "critic.model_name_or_path": self.folder / "critic",
            "data.prompt_dataset": data, "train.agent_func_path": self.folder / "agent.py",
            "adapt.method": f"{self.folder}/m.py:Mine",
        }  # fmt: skip
        for flag, value in paths.items():
            put(args, flag, str(value))
        args.reward.remote_url = [str(self.folder / "reward.py")]
        for flag, value in flags.items():
            put(args, flag.replace("__", "."), value)
        return settings_of(args, 20)


OF_FILE = {
    "actor/config.json": "actor.model_name_or_path", "actor/model.safetensors": "actor.model_name_or_path",
    "critic/config.json": "critic.model_name_or_path", "critic/model.safetensors": "critic.model_name_or_path",
    "rows.jsonl": "data.prompt_dataset", "rows.csv": "data.prompt_dataset", "rows/a.parquet": "data.prompt_dataset",
    "rows/split/b.arrow": "data.prompt_dataset", "reward.py": "reward.remote_url", "agent.py": "train.agent_func_path",
    "m.py": "adapt.method",
}  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(place=st.sampled_from(sorted(OF_FILE)), data=st.data())
def test_any_change_of_a_file_is_one_of_its_flag(tmp_path_factory, place, data):
    """A byte, an end that is missing or added, another name in a folder, a file that is gone."""
    files = Files(tmp_path_factory.mktemp("files"))
    before, path = files.settings(), files.folder / place
    content = path.read_bytes()
    kinds = ["byte", "shorter", "longer", *(["renamed", "gone"] if "/" in place else [])]
    kind, at = data.draw(st.sampled_from(kinds)), data.draw(st.integers(0, len(content) - 1))
    if kind == "byte":
        path.write_bytes(content[:at] + bytes([content[at] ^ data.draw(st.integers(1, 255))]) + content[at + 1 :])
    elif kind in ("shorter", "longer"):
        path.write_bytes(content[:at] if kind == "shorter" else content + content[: at + 1])
    else:
        path.rename(files.folder / f"{place}.x" if kind == "renamed" else files.folder / "elsewhere")
    result = changes(before, files.settings())
    assert list(result) == [OF_FILE[place]]
    rows = "20 rows, blake2b D, blake2b D, blake2b D@split"
    said = {"data.prompt_dataset": rows, "adapt.method": "blake2b D:Mine"}.get(OF_FILE[place], "blake2b D")
    assert [re.sub("[0-9a-f]{16}", "D", text) for text in result[OF_FILE[place]]] == [said, said]


def test_files_may_be_moved(tmp_path):
    before = Files(tmp_path / "a").settings()
    shutil.move(tmp_path / "a", tmp_path / "b")
    there = Files.__new__(Files)
    there.folder = tmp_path / "b"
    assert changes(before, there.settings()) == {}


@pytest.mark.parametrize("flag", ["actor.model_name_or_path", "reward.remote_url"])
def test_only_a_data_set_has_a_folder_after_an_at(tmp_path, flag):
    """The content counts of a folder with an @ in its name, and not that of its neighbour."""
    for name in ("it", "it@v2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file.py").write_text("1")
    place = tmp_path / "it@v2" if flag in module.MODELS else tmp_path / "it@v2" / "file.py"
    before = module._known(flag, str(place))
    assert before.startswith("blake2b ") and "@" not in before
    (tmp_path / "it@v2" / "file.py").write_text("22")
    assert module._known(flag, str(place)) != before


def test_the_word_for_an_agent_is_no_folder(tmp_path, monkeypatch):
    """OpenRLHF writes it into `reward.remote_url`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent").mkdir()
    assert module._known("reward.remote_url", "agent") == "agent"


def test_what_is_not_content(tmp_path):
    """Caches of `datasets`, hidden files, and the checkpoints in a model's folder."""
    files = Files(tmp_path)
    before = files.settings()
    for place in ("rows/cache-1.arrow", "rows/split/cache-2.arrow", "rows/.lock", "actor/.lock", "actor/step_5/x.bin"):
        files.write(place, b"new")
    assert changes(before, files.settings()) == {}


def test_the_size_and_the_ends_of_a_models_large_file(tmp_path, monkeypatch):
    files = Files(tmp_path)
    monkeypatch.setattr(module, "END", 100)
    path = tmp_path / "actor/model.safetensors"
    content, before = path.read_bytes(), files.settings()
    for at in (0, 99, len(content) - 100, len(content) - 1):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert list(changes(before, files.settings())) == ["actor.model_name_or_path"], at
    path.write_bytes(content[:200] + content[201:])
    assert list(changes(before, files.settings())) == ["actor.model_name_or_path"]


def test_a_file_that_cannot_be_read(tmp_path, monkeypatch):
    files = Files(tmp_path)

    def refuse(path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match=f"^actor.model_name_or_path is {tmp_path}/actor; .*: Permission"):
        files.settings()


MENDED = {
    ("reward.remote_url", "blake2b 01", "blake2b 02"): True,
    ("reward.remote_url", "http://a:1/x", "http://b:1/x"): True,
    ("reward.remote_url", "http://a, https://b", "http://c, http://d"): True,
    ("reward.remote_url", "http://a, http://b", "http://c"): False,
    ("reward.remote_url", "blake2b 01", "http://b"): False,
    ("reward.remote_url", "blake2b 01", None): False,
    ("train.agent_func_path", "blake2b 01", "blake2b 02"): True,
    ("adapt.method", "blake2b 01:A", "blake2b 02:A"): True,
    ("adapt.method", "blake2b 01:A", "blake2b 01:B"): False,
    ("adapt.method", "bapo", "arpo"): False,
    ("actor.model_name_or_path", "blake2b 01", "blake2b 02"): False,
}


@pytest.mark.parametrize(("change", "mended"), MENDED.items(), ids=lambda value: str(value))
def test_code_may_be_mended(change, mended):
    assert is_mended(*change) is mended


def test_the_page_has_the_list():
    page = (ROOT / "docs/reliability.md").read_text()
    section = page.partition("## What may change on a resume\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", section, re.M)[2:]
    listed = {what: flags_among(re.findall("`([^`]+)`", flags)) for what, flags in rows}
    assert listed == {what: flags_among(flags) for what, flags in module.MAY_CHANGE.items()}
    assert all(f"`{flag}`" in section for flag in module.CODE)
    assert all(flags_among([name]) for name in (*sum(module.MAY_CHANGE.values(), ()), *module.CODE))


def flags_among(names) -> set[str]:
    return {flag for flag in FLAGS if module.is_one_of(flag, tuple(names))}
