"""A study's YAML file: what it becomes, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from study_arms import require_valid_arms

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.workbench.study.definition import Arm, Claim, Study, read_study

CONFIGS = Path(__file__).parents[3] / "configs"
WHOLE = {
    "name": "tiny",
    "config": "base.yaml",
    "prepare": [["python", "-m", "make_it"]],
    "flags": {"eval.steps": 4, "train": {"num_episodes": 2, "micro_batch_size": 8}},
    "seeds": [1, 2],
    "evaluations": ["cd34"],
    "start": 0.2,
    "targets": [0.25, 0.5],
    "parallel": 3,
    "methods": {
        "plain": {"arms": {"group": "GRPO", "critic": "PPO"}, "flags": {"adapt.method": "none", "eval.steps": 5}},
        "bapo": {"arms": {"group": "BAPO-GRPO"}, "config": ["more.yaml"]},
    },
    "claims": [{"says": "better", "source": "A.9", "better": "bapo-group", "than": "plain-group"}],
    "smoke": {"methods": ["bapo"], "flags": {"train.num_episodes": 1}},
}


@pytest.fixture
def write(tmp_path):
    """A function write(field=value, ...) that makes a file of WHOLE with changed fields. None leaves a field out."""
    for name in ("base.yaml", "more.yaml"):
        (tmp_path / name).write_text("")

    def write_study(**changed):
        content = {name: value for name, value in {**WHOLE, **changed}.items() if value is not None}
        path = tmp_path / "study.yaml"
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        return path

    return write_study


def test_a_study_that_is_like_another(write, tmp_path):
    """It has the other's fields, but those of its own. Flags are added, and methods may be chosen by name."""
    base = read_study(write())
    more = tmp_path / "more_steps.yaml"
    own = "like: study.yaml, name: longer, flags: {train: {num_episodes: 9}, eval.steps: 2}, methods: [plain]"
    more.write_text(f"{{{own}}}")
    with pytest.raises(ConfigError, match="claims: better is 'bapo-group'"):
        read_study(more)
    more.write_text(f"{{{own}, claims: []}}")
    flags = {"eval.steps": "2", "train.num_episodes": "9", "train.micro_batch_size": "8"}
    longer = replace(base, name="longer", flags=flags, claims=(), arms=base.arms[:2])
    assert read_study(more) == longer
    again = tmp_path / "once_more.yaml"  # like a file that is itself like another
    again.write_text("{like: more_steps.yaml, name: again, flags: {eval.steps: 3}}")
    assert read_study(again) == replace(longer, name="again", flags=flags | {"eval.steps": "3"})


def test_a_smoke_like_another_has_its_other_field(write, tmp_path):
    write()
    more = tmp_path / "more_steps.yaml"
    more.write_text("{like: study.yaml, name: longer, smoke: {methods: [plain]}}")
    study = read_study(more, smoke=True)
    assert ([arm.method for arm in study.arms], study.flags["train.num_episodes"]) == (["plain", "plain"], "1")
    more.write_text("{like: study.yaml, name: longer, smoke: {flags: {train.num_episodes: 5}}}")
    study = read_study(more, smoke=True)
    assert ([arm.method for arm in study.arms], study.flags["train.num_episodes"]) == (["bapo"], "5")


@pytest.mark.parametrize(("text", "message"), [
    ("like: ../study.yaml", "like is '../study.yaml'"),
    ("{like: study.yaml, methods: [plane]}", "methods has plane"),
    ("{like: study.yaml, methods: [{plain: {}}]}", "methods has {'plain': {}}; study.yaml has plain, bapo"),
    ("like: like.yaml", "like is 'like.yaml'"),
    ("like: other.yaml", "like is 'like.yaml'"),
    ("like: gone.yaml", "gone.yaml cannot be read"),
])  # fmt: skip
def test_what_a_study_cannot_be_like(write, tmp_path, text, message):
    write()
    (tmp_path / "like.yaml").write_text(text)
    (tmp_path / "other.yaml").write_text("like: like.yaml")
    with pytest.raises(ConfigError, match=message):
        read_study(tmp_path / "like.yaml")


def test_a_whole_file(write, tmp_path):
    base, more = str(tmp_path / "base.yaml"), str(tmp_path / "more.yaml")
    flags = {"eval.steps": "4", "train.num_episodes": "2", "train.micro_batch_size": "8"}
    plain = {"adapt.method": "none", "eval.steps": "5"}
    arms = (Arm("plain", "group", "GRPO", plain), Arm("plain", "critic", "PPO", plain),
            Arm("bapo", "group", "BAPO-GRPO", {}, (more,)))  # fmt: skip
    assert read_study(write()) == Study(
        "tiny", arms, (1, 2), evaluations=("cd34",), start=0.2, targets=(0.25, 0.5), config=(base,), flags=flags,
        claims=(Claim("better", "A.9", "bapo-group", "plain-group"),), prepare=(("python", "-m", "make_it"),),
        parallel=3,
    )  # fmt: skip


def test_the_words_of_a_run(write, tmp_path):
    study = read_study(write())
    base, more = str(tmp_path / "base.yaml"), str(tmp_path / "more.yaml")
    common = ["--train.num_episodes=2", "--train.micro_batch_size=8"]
    words = [study.words(arm, 7) for arm in study.arms]
    ways, end = ["--run.faster", "all"], ["--train.seed", "7"]
    plain = ["--config", base, *ways, "--eval.steps=5", *common, "--adapt.method=none", *end]
    bapo = ["--config", base, more, *ways, "--eval.steps=4", *common, *end]
    wanted = {"grpo": plain, "ppo": plain, "bapo_grpo": bapo}
    assert words == [["--algorithm", name, *others] for name, others in wanted.items()]


@pytest.mark.parametrize(
    ("value", "words"),
    [("off", ["--a.b=off"]), ("null", ["--a.b"]), ("010", ["--a.b=010"]), ("-1e-6", ["--a.b=-1e-6"]),
     ("2024-02-30", ["--a.b=2024-02-30"]), ("[1.10, 2/8, no]", ["--a.b", "1.10", "2/8", "no"])],
)  # fmt: skip
def test_a_flag_as_words(tmp_path, value, words):
    """The text of the file is the text of the command line, wherever the file has flags."""
    path, places = tmp_path / "study.yaml", ("study", "smoke", "method")
    for place in places:
        flags = {one: f"flags: {{a: {{b: {value}}}}}" if one == place else "flags: {}" for one in places}
        bapo = f"methods: {{bapo: {{arms: {{critic: BA-PPO}}, {flags['method']}}}}}"
        path.write_text(
            f"{{name: tiny, seeds: [0], {flags['study']}, {bapo}, smoke: {{methods: [bapo], {flags['smoke']}}}}}"
        )
        study = read_study(path, smoke=place == "smoke")
        first, last = ["--algorithm", "ba_ppo", "--run.faster", "all"], ["--train.seed", "0"]
        assert study.words(study.arms[0], 0) == [*first, *words, *last]


def test_seeds_by_path(write):
    runs = [(arm.name, seed) for arm, seed in read_study(write(seeds={"group": [4, 2], "critic": [2]})).runs]
    groups = ["plain-group", "bapo-group"]
    assert runs == [*((name, 2) for name in [*groups, "plain-critic"]), *((name, 4) for name in groups)]
    with pytest.raises(ConfigError, match="seeds has none for critic, and the study has the arm plain-critic"):
        read_study(write(seeds={"group": [1]}))


def test_smoke_is_the_first_seed_of_some_methods_on_each_path(write):
    study = read_study(write(), smoke=True)
    assert (study.name, study.seeds, [arm.name for arm in study.arms]) == ("tiny_smoke", (1,), ["bapo-group"])
    assert study.flags == {"eval.steps": "4", "train.num_episodes": "1", "train.micro_batch_size": "8"}
    assert study.evaluations == ("cd34",)
    smoke = {"methods": ["plain"], "evaluations": ["cd34"]}
    seeds = {"group": [1, 2], "critic": [5, 6]}
    study = read_study(write(smoke=smoke, seeds=seeds, evaluations=["cd34", "cd4"]), smoke=True)
    assert [(arm.name, seed) for arm, seed in study.runs] == [("plain-group", 1), ("plain-critic", 5)]
    assert study.evaluations == ("cd34",)


ARMS = {"group": "x"}
CLAIM = WHOLE["claims"][0]
BAD = [
    ({"sedes": [1]}, "the file has sedes"), ({"seeds": None}, "the file lacks seeds"),
    ({"methods": []}, "methods must map"), ({"name": "a/b"}, "name is 'a/b'"),
    ({"seeds": [1, 1]}, r"seeds is \[1, 1\]"), ({"seeds": [-1]}, "seeds has -1"), ({"seeds": ["x"]}, "seeds has 'x'"),
    ({"seeds": 3}, "seeds is 3"), ({"claims": [CLAIM | {"margin": "1e-2"}]}, "claims: margin is '1e-2'"),
    ({"claims": [CLAIM | {"margin": -0.5}]}, "claims: margin is -0.5"),
    ({"claims": [CLAIM | {"ratio": True}]}, "claims: ratio is True"), ({"start": 34}, "start is 34"),
    ({"start": "low"}, "start is 'low'"), ({"targets": [0.5, 0.25]}, "targets is .* must rise"),
    ({"start": True}, "start is True"), ({"parallel": 0}, "parallel is 0"),
    ({"targets": [0.0]}, "targets has 0.0"), ({"targets": [1.5]}, "targets has 1.5"),
    ({"parallel": True}, "parallel is True"), ({"evaluations": "cd34"}, "evaluations is 'cd34'"),
    ({"config": "gone.yaml"}, "config names gone.yaml"), ({"prepare": ["make it"]}, "prepare is 'make it'"),
    ({"prepare": 3}, "prepare is 3"), ({"claims": 3}, "claims is 3"),
    ({"methods": {"a-b": {"arms": ARMS}}}, "methods: a-b: "), ({"methods": {"a": {}}}, "methods: a lacks arms"),
    ({"methods": {"a": {"arms": ARMS, "flag": {}}}}, "methods: a has flag"),
    ({"methods": {"a": {"arms": {"both": "x"}}}}, "methods: a: arms is "),
    ({"methods": {"a": {"arms": ARMS, "config": "no.yaml"}}}, "methods: a: config names no.yaml"),
    ({"flags": [{"eval.steps": 4}]}, "flags must hold .*found list"),
    ({"methods": {"a": {"arms": ARMS, "flags": [{}]}}}, "methods: a: flags must hold .*found list"),
    ({"claims": [{"says": "x"}]}, "claims lacks source, better, than"),
    ({"claims": [CLAIM | {"than": "x-group"}]}, "claims: than is 'x-group'"),
    ({"claims": [CLAIM | {"measure": "x"}]}, "claims: measure is 'x'"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "message"), BAD)
def test_what_is_refused(write, changed, message):
    with pytest.raises(ConfigError, match=r"^study .*study\.yaml: " + message):
        read_study(write(**changed))


@pytest.mark.parametrize(
    ("smoke", "message"), [(None, "smoke must hold"), ({"methods": ["x"]}, "smoke: methods has x"), ({}, "smoke lacks")]
)
def test_a_smoke_that_is_refused(write, smoke, message):
    path = write(smoke=smoke)
    read_study(path)
    with pytest.raises(ConfigError, match=message):
        read_study(path, smoke=True)


def test_a_file_that_is_no_mapping(tmp_path):
    """One that is not there, or no YAML, is refused in one place: see test_arguments.py and test_user_file.py."""
    (tmp_path / "study.yaml").write_text("[]")
    with pytest.raises(ConfigError, match=r"the file must hold .*found list"):
        read_study(tmp_path / "study.yaml")


STUDIES = {"countdown": (1536, 96), "countdown_gpu": (10_000, 120)}  # prompts, and steps of a run


@pytest.mark.parametrize("path", CONFIGS.glob("studies/*.yaml"), ids=lambda path: path.stem)
def test_the_studies_that_come_with_the_project(path):
    require_valid_arms(path, *STUDIES[path.stem])


def test_the_papers_comparison_has_its_fixed_thresholds():
    """The upper ones of Table 2."""
    flags = {arm.name: arm.flags for arm in read_study(CONFIGS / "studies" / "countdown_gpu.yaml").arms}
    file = yaml.safe_load((CONFIGS / "methods" / "bapo_fixed_thresholds.yaml").read_text())["adapt"]
    assert flags["bapo_fixed-group"] == {"adapt.c2": file["c2"], "adapt.c3": file["c3"]}
