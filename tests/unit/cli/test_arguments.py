"""Flags, YAML files and presets, compared with OpenRLHF's own script, which is run from its installed file."""

import argparse
import importlib.util
import itertools
import sys
import textwrap
from dataclasses import fields, replace
from datetime import datetime
from fractions import Fraction as F
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml

from bapo_openrlhf import host
from bapo_openrlhf.adapt.arithmetic import BatchArithmetic
from bapo_openrlhf.adapt.thresholds import Interval
from bapo_openrlhf.cli import arguments, main
from bapo_openrlhf.cli.parser import is_switch, parse_words
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.flags import config
from bapo_openrlhf.flags.config import AdaptConfig, RunConfig, VerifierConfig
from bapo_openrlhf.flags.files import dotted
from bapo_openrlhf.flags.ranges import check_ranges
from bapo_openrlhf.methods import BAPO
from bapo_openrlhf.methods.registry import METHODS as METHODS_BY_NAME

ROOT = Path(__file__).resolve().parents[3]
# OpenRLHF's defaults ask for 8 actor GPUs and one response a prompt; `run_name` is the run's name here.
MODEL = ["--actor.model_name_or_path", "m", "--reward.remote_url", "r.py", "--logger.wandb.run_name", "run"]
PRESETS = sorted((ROOT / "configs").glob("*.yaml"))
METHODS = sorted((ROOT / "configs" / "methods").glob("*.yaml"))
GROUPS = [*MODEL, "--rollout.n_samples_per_prompt", "8"]
ESTIMATOR = "algo.advantage.estimator"


@pytest.fixture
def yaml_file(tmp_path):
    def write(text: str, name: str = "config.yaml") -> str:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return str(path)

    return write


def parse(*words: str) -> SimpleNamespace:
    return arguments.parse([*GROUPS, *words])


@pytest.fixture
def parse_files(yaml_file):
    """With the files 0.yaml, 1.yaml, ..., which have these texts, and more words."""

    def given(*texts: str, more=()) -> SimpleNamespace:
        paths = [yaml_file(text, f"{number}.yaml") for number, text in enumerate(texts)]
        return parse(*["--config"][: len(paths)], *paths, *more)

    return given


def openrlhf_itself(argv: list[str], monkeypatch) -> tuple[argparse.ArgumentParser, SimpleNamespace | None]:
    """Run the block `if __name__ == "__main__":` of OpenRLHF's script, with a `train` that notes its input."""
    package = Path(importlib.util.find_spec("openrlhf").origin).parent
    block = (package / "cli" / "train_ppo_ray.py").read_text(encoding="utf-8").split('if __name__ == "__main__":\n')[1]
    nested = ModuleType("openrlhf.utils.config")
    exec((package / "utils" / "config.py").read_text(encoding="utf-8"), nested.__dict__)
    trained = []
    names = {"argparse": argparse, "datetime": datetime, "train": trained.append}
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "openrlhf.utils.config", nested)
        patch.setattr(sys, "argv", ["train_ppo_ray.py", *argv])
        exec(textwrap.dedent(block), names)
    return names["parser"], trained[0]


COMMAND_LINES = [
    MODEL,
    [*GROUPS, "--algo.advantage.estimator", "rloo", "--algo.kl.use_loss", "--algo.kl.estimator", "k3"],
    [*MODEL, "--critic.model_name_or_path", "c", "--actor.eps_clip_low_high", "0.2", "0.28"],
    [*MODEL, "--train.async_enable", "--rollout.vllm_generate_batch_size", "2048", "--vllm.num_engines", "2"],
    [*MODEL, "--train.agent_func_path", "agent.py", "--data.input_template", "Q: {}"],
    [*MODEL[:2], *MODEL[4:], "--reward.model_name_or_path", "a,b", "--vllm.enable_sleep"],
    [*MODEL, "--actor.muon.no_nesterov", "--ds.lora.target_modules", "q", "k", "--reward.clip_range", "-5", "5"],
    [*MODEL, "--train.bat", "64"],  # argparse takes a unique beginning of a flag
]


class TestOpenRLHFsCommandLine:
    @pytest.mark.parametrize("argv", COMMAND_LINES, ids=lambda argv: " ".join(argv[2:])[:60])
    def test_parses_to_what_openrlhf_makes_of_it(self, argv, monkeypatch):
        _, theirs = openrlhf_itself(argv, monkeypatch)
        ours = arguments.parse(argv)
        assert (ours.algorithm, ours.config) == (None, None)
        assert ours.adapt == AdaptConfig() and not ours.adapt.enabled
        assert ours.run == RunConfig(faster=["none"]) and ours.verifier == VerifierConfig()
        added = {"algorithm", "config", "adapt", "verifier", "run"}
        values = {key: value for key, value in config.flags_of(ours).items() if key.partition(".")[0] not in added}
        others = {"ckpt.output_dir": "runs/default/model", "ckpt.path": "runs/default/checkpoints"}  # not OpenRLHF's
        assert values == config.flags_of(theirs) | others | {"data.solution_key": None}

    def test_loggers_take_the_name_of_the_run(self):
        words = [*MODEL[:4], "--run.name", "seed_7", "--data.prompt_dataset", "d.jsonl"]
        assert arguments.parse(words).logger.wandb.run_name == "seed_7"
        assert arguments.parse([*words, "--logger.wandb.run_name", "mine"]).logger.wandb.run_name == "mine"

    def test_every_flag_is_still_there_and_means_the_same(self, monkeypatch):
        theirs, _ = openrlhf_itself(MODEL, monkeypatch)
        known = arguments.build_parser("prog")._option_string_actions
        for name, action in theirs._option_string_actions.items():
            for attribute in ("dest", "nargs", "const", "type", "choices", "help", "required"):
                assert getattr(known[name], attribute) == getattr(action, attribute), (name, attribute)


class TestAlgorithm:
    @pytest.mark.parametrize("name", ["ba_ppo", "bapo_grpo", "ppo", "grpo"])
    def test_stands_for_an_advantage_path_and_a_method(self, name, yaml_file):
        estimator, critic = ("group_norm", None) if "grpo" in name else ("gae", "m")
        method = "bapo" if name.startswith("ba") else "none"
        for words in (["--algorithm", name], ["--config", yaml_file(f"algorithm: {name}")]):
            args = parse(*words)
            assert (args.algorithm, args.algo.advantage.estimator, args.adapt.method) == (name, estimator, method)
            assert (args.critic.model_name_or_path, args.adapt.enabled) == (critic, method != "none")

    def test_unknown(self, yaml_file):
        for words in (["--algorithm", "bapo"], ["--config", yaml_file("algorithm: bapo")]):
            with pytest.raises(ConfigError, match=r"^algorithm is 'bapo'; .*did you mean bapo_grpo or ba_ppo\?"):
                parse(*words)


def test_a_file_for_a_method_names_no_task():
    path = str(ROOT / "configs" / "methods" / "mopps.yaml")
    with pytest.raises(ConfigError, match=f"^reward.remote_url is not set; .*--config .*quickstart.yaml {path}$"):
        arguments.parse(["--config", path])


class TestOutputs:
    def test_follow_the_name_of_the_run(self, yaml_file):
        path = yaml_file("run: {name: x, dir: d}\nckpt: {save_steps: 3, path: null}")
        args = parse("--config", path, "--run.name", "y")
        assert (args.ckpt.output_dir, args.ckpt.path) == ("d/y/model", "d/y/checkpoints")
        args = parse("--config", path, yaml_file("ckpt: {path: p}", "later.yaml"), "--ckpt.output_dir", "./ckpt")
        assert (args.ckpt.output_dir, args.ckpt.path) == ("./ckpt", "p")

    def test_of_no_preset_are_given(self):
        for path in PRESETS:
            assert arguments.parse(["--config", str(path)]).run.name == path.stem
            flags = config.flags_of(arguments.parse(["--config", str(path), "--run.name", "other"]))
            assert [name for name, value in flags.items() if isinstance(value, str) and path.stem in value] == [], path


@pytest.mark.parametrize("number", ["-1e-6", "-1E+3", "-.5e2", "-2.", "-3"])
def test_a_negative_number_is_no_flag(number):
    assert parse("--reward.clip_range", number, "1e3").reward.clip_range == [float(number), 1000.0]


class TestYaml:
    def test_equals_the_same_words_on_the_command_line(self, yaml_file):
        path = yaml_file(
            "algorithm: ba_ppo\nadapt: {c2: [1/8, 3/8], c3: 5/8, c1: 0.125, replay_steps: 0, ratio: decoupled}\n"
            "reward.clip_range: [-5, 5]\ntrain: {colocate_all: true, async_enable: false}\n"
            "actor: {eps_clip: 0.3, adam.lr: 3.0e-6}"
        )
        words = (
            "--algorithm ba_ppo --adapt.c2 1/8 3/8 --adapt.c3 5/8 --adapt.c1 0.125 --adapt.replay_steps 0 "
            "--adapt.ratio decoupled --reward.clip_range -5 5 --actor.eps_clip 0.3 --actor.adam.lr 3e-6"
        )
        by_yaml, by_words = parse("--config", path), parse(*words.split(), "--train.colocate_all")
        by_yaml.config = None
        assert config.flags_of(by_yaml) == config.flags_of(by_words)
        assert by_yaml.adapt.c2 == ["1/8", "3/8"] and by_yaml.adapt.c3 == ["5/8"]

    @pytest.mark.parametrize(("text", "named"), [
        ("adapt: {bufer_size: 1}", r"config.yaml: unknown flag adapt.bufer_size; did you mean adapt.buffer_size\?"),
        ("adapt.buffer: 3", r"unknown flag adapt.buffer; did you mean adapt.buffer_size\?"),  # no beginnings
        ("algoritm: grpo", r"unknown flag algoritm; did you mean algorithm\?"),
        ("runs:\n", "unknown flag runs"),
        ("run: {nam: }", "unknown flag run.nam"),
        ("train: {colocate_all: 1}", "train.colocate_all is '1'"),
        ("train: {colocate_all: null}", "train.colocate_all is None"),
        ("actor.adam.lr: 1e-6x", "config.yaml: actor.adam.lr is '1e-6x'"),
        ("reward: reward.py", "config.yaml: reward is 'reward.py'.*remote_url"),
        ("algo.kl: 0.1", "config.yaml: algo.kl is '0.1'.*init_coef"),
        ("adapt: {options: {x: 1}}", "config.yaml: adapt.options holds x: 1"),
        ("adapt: {filter: best}", "config.yaml: argument --adapt.filter: invalid choice: 'best'"),
        ("adapt: {c2: []}", "--adapt.c2: expected"),
        ("train: {batch_size: [1, 2]}", r"train.batch_size is \['1', '2'\]"),
        ("reward.clip_range: [1, x]", "config.yaml: reward.clip_range is 'x'; it must be a number"),
        ("reward.clip_range: [1]", "config.yaml: argument --reward.clip_range: expected"),
        ("config: other.yaml", "config.yaml: a config file cannot name another"),
        ("- a", "config.yaml must hold flags"),
        ("a: [1", "config.yaml is not valid YAML"),
    ])  # fmt: skip
    def test_what_a_file_cannot_say(self, yaml_file, text, named):
        with pytest.raises(ConfigError, match=named):
            parse("--config", yaml_file(text))

    def test_missing_file_and_folder(self, tmp_path):
        for path in (tmp_path / "none.yaml", tmp_path):
            with pytest.raises(ConfigError, match=f"config {path} cannot be read"):
                parse("--config", str(path))

    @pytest.mark.parametrize("text", ["", "# run: {name: a}\n", "run:\n", "run:\n#  name: a\nactor: {adam: }\n", "{}"])
    def test_a_file_or_a_section_without_a_flag(self, parse_files, text):
        args = parse_files("run.name: mine", text)
        assert args.run.name == "mine" and args.chosen == parse_files("run.name: mine").chosen


class TestPrecedence:
    OF_BOUND = f"algorithm: ba_ppo\n{ESTIMATOR}: gae\nadapt.method: bapo_bound\ndata.prompt_dataset: d"

    @pytest.mark.parametrize(
        ("texts", "words", "estimator", "method"),
        [
            ([], f"--adapt.method bapo --{ESTIMATOR} rloo", "rloo", "bapo"),
            ([f"{ESTIMATOR}: rloo\nadapt.method: bapo"], "", "rloo", "bapo"),
            ([f"algorithm: grpo\n{ESTIMATOR}: rloo"], "", "rloo", "none"),
            ([f"{ESTIMATOR}: gae"], "--algorithm grpo", "group_norm", "none"),
            ([], "--algorithm ba_ppo --adapt.method bapo_bound", "gae", "bapo_bound"),
            (["adapt: {method: bapo_bound}"], "--algorithm bapo_grpo", "group_norm", "bapo_bound"),
            ([f"algorithm: bapo_grpo\n{ESTIMATOR}: dr_grpo"], f"--{ESTIMATOR} rloo --adapt.method bapo_bound", "rloo",
             "bapo_bound"),
            # the file of a task, and an algorithm after it
            ([OF_BOUND, "algorithm: grpo"], "", "group_norm", "none"),
            ([OF_BOUND, f"algorithm: bapo_grpo\n{ESTIMATOR}: rloo"], "", "rloo", "bapo_bound"),
            ([OF_BOUND, "algorithm: grpo"], "--algorithm bapo_grpo", "group_norm", "bapo_bound"),
        ],
    )  # fmt: skip
    def test_of_the_algorithm(self, parse_files, texts, words, estimator, method):
        args = parse_files(*texts, more=words.split())
        assert (args.algo.advantage.estimator, args.adapt.method) == (estimator, method)
        assert args.adapt.enabled is (method != "none")


class TestThresholds:
    @pytest.mark.parametrize(("words", "named"), [
        ("--adapt.c2 3/8 --adapt.c3 2/8", r"adapt\.c2 LOW is 3/8 and adapt\.c3 LOW is 1/4"),
        ("--adapt.c2 1/8 6/8", r"adapt\.c2 HIGH is 3/4 and adapt\.c3 HIGH is 5/8"),
        ("--adapt.c2 4/8 1/8", r"adapt\.c2 is 4/8 1/8"),
        ("--adapt.c2 0 1/8 2/8", r"adapt\.c2 has 3 values"),
        ("--adapt.c3 1/2 1.01", r"adapt\.c3 is 1\.01"),
        ("--adapt.c2=-0.1", r"adapt\.c2 is -0\.1"),
        ("--adapt.c1 8/8", r"adapt\.c1 is 1"),
        ("--adapt.c1 1/0", r"adapt\.c1: '1/0'"),
        ("--adapt.c3 1/2 nan", r"adapt\.c3: 'nan'"),
        ("--adapt.reward_range 2 0", r"adapt\.reward_range is \['2', '0'\]"),
    ])  # fmt: skip
    def test_refused(self, words, named):
        with pytest.raises(ConfigError, match=named):
            parse("--adapt.method", "bapo", *words.split())
        parse(*words.split())  # not looked at without batch adaptation


NAN, INF = float("nan"), float("inf")
# By what `errors.ALLOWED` calls a range: values at its ends, and values beyond them.
LIMITS = {
    "at least 0": ([0], [-1]),
    "at least 1": ([1], [0, -1]),
    "at least 2": ([2], [1, 0]),
    "above 0": ([1e-9], [0.0, -0.1, NAN]),
    "finite and at least 0": ([0.0], [-0.1, INF, NAN]),
    "finite and above 0": ([1e-9], [0.0, -0.1, INF, NAN]),
    "in [0, 1]": ([0.0, 1.0], [-0.1, 1.1, NAN]),
    "in (0, 1]": ([1e-9, 1.0], [0.0, 1.1, NAN]),
    "in (0, 1)": ([1e-9, 0.9], [0.0, 1.0, NAN]),
}
NUMBERS = {
    f"{group}.{item.name}": item
    for group, kind in config.GROUPS.items()
    for item in fields(kind)
    if item.metadata["argument"].get("type")
}


@pytest.mark.parametrize("flag", NUMBERS)
def test_every_number_has_a_range(flag):
    rule = NUMBERS[flag].metadata["allowed"]
    allowed, refused = LIMITS[rule]
    for value in (*allowed, NUMBERS[flag].default):
        check_ranges({flag: value}, {flag: rule})
    for value in refused:
        with pytest.raises(ConfigError, match=f"{flag} is {value}; "):
            # Without a method there are the limits of verifier and record, too.
            parse(f"--{flag}={value}", *["--adapt.method=bapo"] * flag.startswith("adapt."))


class TestMakeMethod:
    ARITHMETIC = BatchArithmetic(
        group_size=6, capacity=40, rollout_groups=32, train_batch=48, ranks={"actor": 4}, micro_train=3
    )

    def test_each_field_lands_in_its_place(self):
        same = {
            "filter": "gaussian", "gaussian_mean": 0.4, "gaussian_std": 0.3, "threshold_direction": "text", "eps": 1e-5,
            "buffer_size": 11, "replay_steps": 13, "reevaluate_every": 15, "max_reevaluated_prompts": 16,
        }  # fmt: skip
        adapt = AdaptConfig(method="bapo", batch_size=40, c1="1/6", c2=["0.1", "3/6"], c3=["2/3"], **same)
        method = adapt.make_method(self.ARITHMETIC, seed=7)
        c2, c3 = Interval(F(1, 10), F(1, 2)), Interval(F(2, 3), F(2, 3))
        wanted = BAPO(capacity=40, group_size=6, seed=7, c1=F(1, 6), c2=c2, c3=c3, **same)
        assert isinstance(method, BAPO)
        names = [field.name for field in fields(BAPO)]
        assert [getattr(method, name) for name in names] == [getattr(wanted, name) for name in names]

    def test_a_reevaluation_has_half_of_a_rollout_batch_unless_said_otherwise(self):
        for prompts, most in ((9, 4), (1, 1)):
            arithmetic = replace(self.ARITHMETIC, rollout_groups=prompts)
            assert AdaptConfig(method="bapo").make_method(arithmetic, seed=0).max_reevaluated_prompts == most


@pytest.mark.parametrize(("flag", "all_of_them"), [("--help", False), ("--help-all", True)])
def test_the_help_has_all_flags_of_ours_and_those_of_openrlhf_if_asked(capsys, flag, all_of_them):
    with pytest.raises(SystemExit):
        main.run(["train", flag])
    shown = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  --")}
    ours = {f"--{group}.{item.name}" for group, kind in config.GROUPS.items() for item in fields(kind)}
    theirs = {name for name in host.build_parser()._option_string_actions if name.startswith("--")} - {"--help"}
    assert shown == ours | {"--algorithm", "--config", "--help-all"} | (theirs if all_of_them else set())


class TestCommands:
    @pytest.mark.parametrize("argv", [[], ["--help"]])
    def test_help_lists_the_commands(self, argv, capsys):
        assert main.run(argv) == 0
        shown = capsys.readouterr().out
        assert all(name in shown for name in main.COMMANDS)

    def test_an_unknown_one_is_an_error_of_one_line(self, capsys):
        assert main.run(["trian"]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and "'trian'" in err


class TestSeveralFiles:
    def test_a_later_one_wins_and_the_command_line_over_all(self, parse_files):
        first = "adapt: {buffer_size: 3, c1: 1/4, c2: [1/8, 1/2], c3: [1/2, 5/8], replay_steps: 2}"
        second = "adapt.buffer_size: 4\nadapt.c2: 3/8\nadapt.replay_steps: 5"
        adapt = parse_files(first, second, more=["--adapt.replay_steps=6", "--adapt.c3=5/8"]).adapt
        assert (adapt.buffer_size, adapt.c1, adapt.c2, adapt.c3) == (4, "1/4", ["3/8"], ["5/8"])
        assert adapt.replay_steps == 6
        again = parse_files("adapt.buffer_size: 4", first, "adapt.c1: 1/8").adapt
        assert (again.buffer_size, again.c1) == (3, "1/8")

    def test_may_be_named_one_by_one_and_in_any_place(self, yaml_file):
        first, second = (yaml_file(f"adapt: {{buffer_size: {size}, c1: 0}}", f"{size}.yaml") for size in (3, 4))
        adapt = parse("--config", first, "--adapt.c1", "1/2", "--config", second).adapt
        assert (adapt.buffer_size, adapt.c1) == (4, "1/2")

    def test_a_switch_is_undone_and_a_value_taken_back(self, parse_files):
        first = "train.colocate_all: true\nadapt.buffer_size: 3\nactor.muon.nesterov: false"
        second = "train: {colocate_all: false}\nadapt.buffer_size: null\nactor.muon.nesterov: true"
        args = parse_files(first, second)
        assert (args.train.colocate_all, args.actor.muon.nesterov) == (False, True)
        assert args.adapt.buffer_size == AdaptConfig().buffer_size


class TestFilesThatDisagree:
    """About the method: a run would be taken for one of a method that it does not use."""

    TASK = "algorithm: bapo_grpo\ndata.prompt_dataset: d"
    BOTH = "algorithm: grpo\nadapt.method: bapo"

    @pytest.mark.parametrize(
        ("texts", "words", "named"),
        [
            ([BOTH], "", "algorithm grpo (0.yaml) and adapt.method bapo (0.yaml)"),
            ([TASK, BOTH], "", "algorithm grpo (1.yaml) and adapt.method bapo (1.yaml)"),
            ([BOTH, TASK.replace("bapo_", "")], "", "algorithm grpo (1.yaml) and adapt.method bapo (0.yaml)"),
            (["algorithm: grpo\nalgo.advantage.estimator: gae", "algorithm: grpo"], "",
             "algorithm grpo and algo.advantage.estimator gae"),
            ([TASK, "adapt.method: mopps", "adapt: {method: dots}"], "",
             "adapt.method is mopps in 1.yaml and dots in 2.yaml; a run has one method"),
            ([TASK, "adapt.method: mopps"], "--algorithm grpo", "grpo (--algorithm) and adapt.method mopps (1.yaml)"),
            ([TASK, "adapt.method: mopps", "algorithm: grpo"], "", "grpo (2.yaml) and adapt.method mopps (1.yaml)"),
            ([], "--algorithm bapo_grpo --adapt.method none", "algorithm bapo_grpo and adapt.method none"),
            (["adapt.buffer_size: 1", "adapt.bufer_size: 3", "adapt.buffer_size: 2"], "",
             "1.yaml: unknown flag adapt.bufer_size"),
        ],
    )  # fmt: skip
    def test_are_named(self, parse_files, tmp_path, texts, words, named):
        with pytest.raises(ConfigError) as error:
            parse_files(*texts, more=words.split())
        assert named in str(error.value).replace(f"{tmp_path}/", "")

    def test_two_variants_of_one_method_and_the_command_line_over_all_files(self, parse_files):
        adapt = parse_files(self.TASK, "adapt: {method: bapo, c1: 1/4}", "adapt: {method: bapo, eps: 1}").adapt
        assert (adapt.method, adapt.c1, adapt.eps) == ("bapo", "1/4", 1.0)
        files = (self.TASK, "adapt.method: mopps", "adapt.method: dots")
        assert parse_files(*files, more=["--adapt.method", "repo"]).adapt.method == "repo"
        assert not parse_files(*files, more=["--adapt.method", "none", "--algorithm", "grpo"]).adapt.enabled


class TestChosenFlags:
    TASK = "algorithm: bapo_grpo\ndata.prompt_dataset: d\nadapt.c1: 1/4"

    @pytest.mark.parametrize(("more", "words", "of_the_file"), [
        ("", [], True),
        ("", ["--algorithm", "bapo_grpo"], True),
        ("", ["--algorithm", "grpo"], False),
        ("", ["--algorithm", "ba_ppo"], False),
        ("", ["--adapt.method", "mopps"], False),
        ("\nadapt.method: mopps", ["--adapt.method", "mopps"], True),
        ("\nadapt.method: mopps", ["--adapt.method", "dots"], False),
    ])  # fmt: skip
    def test_those_of_a_file_for_another_are_left_out(self, yaml_file, more, words, of_the_file):
        chosen = parse("--config", yaml_file(self.TASK + more), *words, "--adapt.eps", "1e-6").chosen
        assert [name in chosen for name in ("adapt.c1", "adapt.eps", "adapt.c2")] == [of_the_file, True, False]

    def test_a_file_of_flags_only(self, yaml_file):
        for words in ([], ["--algorithm", "grpo"]):
            assert "adapt.c1" in parse("--config", yaml_file("adapt: {c1: 1/4, c2: null}"), *words).chosen


class TestSwitches:
    @pytest.mark.parametrize(("on", "off"), [("true", "false"), ("on", "off")])
    def test_on_and_off_over_a_file(self, parse_files, on, off):
        flag, more = "--train.colocate_all", ["--vllm.num_engines", "8"]
        for words in ([f"{flag}={on}"], [flag, on], [flag]):
            assert parse(*words, *more).train.colocate_all is True
            assert parse(*words, *more, flag, off).train.colocate_all is False
        words = ["--ds.packing_samples", off, f"--actor.muon.nesterov={off}"]
        args = parse_files("ds.packing_samples: true\nactor.muon.nesterov: true", more=words)
        assert (args.ds.packing_samples, args.actor.muon.nesterov) == (False, False)
        assert parse("--actor.muon.no_nesterov", off).actor.muon.nesterov is True

    @pytest.mark.parametrize("word", ["maybe", "0", "null", ""])
    def test_anything_else_is_refused(self, word):
        for words in ([f"--ds.packing_samples={word}"], ["--ds.packing_samples", word]):
            with pytest.raises(ConfigError, match=f"^--ds.packing_samples is '{word}'"):
                parse(*words)

    def test_each_switch_of_the_table(self):
        parser = arguments.build_parser("")
        for action in filter(is_switch, parser._actions):
            for word in ("true", "false"):
                result = parse_words(parser, [action.option_strings[0], word])
                assert getattr(result, action.dest) is ((word == "true") == action.const)


NOT_THE_PAPERS = ("quickstart", "math_one_gpu")
TABLE_3 = {
    "rollout.n_samples_per_prompt": 8, "rollout.batch_size": 256, "rollout.temperature": 1.0, "rollout.top_p": 1.0,
    "train.num_episodes": 3, "train.seed": 42, "train.batch_size": 64 * 8,  # samples of a mini-batch of 64 groups
    "actor.adam.lr": 1e-6, "actor.entropy_coef": 0.001, "algo.kl.init_coef": 0.001, "algo.advantage.lambd": 1.0,
}  # fmt: skip
RESPONSES = {"ba_ppo": 4096, "countdown": 3584, "geometry": 2048, "math": 8192}  # tokens, by a part of the name
CORRECTIONS = sorted((ROOT / "configs" / "corrections").glob("*.yaml"))
# What another algorithm or method brings with it.
FOLLOWS = {"config", "algorithm", "algo.advantage.estimator", "adapt.method", "critic.model_name_or_path",
           "rollout.vllm_generate_batch_size", "run.faster"}  # fmt: skip


def files_over_presets():
    """Without the slow ones, each file is laid over one preset, and each preset is under some files."""
    for (number, path), (place, preset) in itertools.product(enumerate(METHODS + CORRECTIONS), enumerate(PRESETS)):
        marks = () if number % len(PRESETS) == place else pytest.mark.slow
        yield pytest.param(path, preset, marks=marks, id=f"{path.stem} {preset.stem}")


def laid_over(file: str, *words: str, base: str = "countdown/train.yaml") -> SimpleNamespace:
    return arguments.parse(["--config", str(ROOT / "configs" / base), str(ROOT / "configs" / file), *words])


# What the sources of the methods say. The configuration of Countdown has v = 2, an entropy bonus and a KL penalty.
OF_TODAYS_POLICY = ("ar3po", "arpo", "bounded_staleness", "dots", "exgrpo", "filter_only", "freshness", "luffy",
                    "mopps", "partial_rollouts", "pods", "popo", "prompt_replay", "relift", "remix", "repo",
                    "rollout_replay")  # fmt: skip
DAPO = {"actor.eps_clip_low_high": [0.2, 0.28], "actor.entropy_coef": None, "actor.loss_agg_mode": "token-mean",
        "algo.kl.init_coef": 0}  # fmt: skip
NUMBERS_OF_SOURCES = {
    **{name: {"adapt.rollout_delay": 1} for name in OF_TODAYS_POLICY},
    "bapo_authors_code": {"actor.dual_clip": 10, "actor.entropy_coef": None, "algo.kl.init_coef": 0},
    "bapo_fixed_thresholds": {"adapt.c2": ["3/8"], "adapt.c3": ["4/8"]},
    "bapo_mini_test": {"adapt.c1": "0", "adapt.c2": ["1/2"], "adapt.c3": ["1/2"]},
    "dapo": DAPO,
    "dapo_with_buffer": DAPO,
    "dots": {"adapt.rollout_delay": 1, "adapt.ratio": "decoupled"},
    "grpo_delayed": {"adapt.rollout_delay": 5},
    "remix": {"adapt.rollout_delay": 1, "adapt.replay_steps": 2, "adapt.ratio": "decoupled", "train.max_epochs": 2},
    "skip_two_updates": {"adapt.rollout_delay": 1, "adapt.skip_zero_advantage": True, "actor.entropy_coef": None,
                         "algo.kl.init_coef": 0},
}  # fmt: skip


class TestMethodFiles:
    @pytest.mark.parametrize("name", NUMBERS_OF_SOURCES)
    def test_have_the_numbers_of_their_sources(self, name):
        file = f"methods/{name}.yaml"
        names_one = "algorithm:" in (ROOT / "configs" / file).read_text(encoding="utf-8")
        words = [] if names_one else ["--algorithm", "bapo_grpo"]
        flags = config.flags_of(laid_over(file, *words, "--data.solution_key", "solution"))
        assert {flag: flags[flag] for flag in NUMBERS_OF_SOURCES[name]} == NUMBERS_OF_SOURCES[name]

    @pytest.mark.parametrize(("path", "preset"), files_over_presets())
    def test_change_what_they_name_and_nothing_else(self, path, preset):
        named = dict(dotted(yaml.safe_load(path.read_text(encoding="utf-8"))))
        size = [] if "train.batch_size" in named else ["--train.batch_size=256"]  # Their sizes are for the quickstart.
        base = config.flags_of(arguments.parse(["--config", str(preset), *size]))
        flags = config.flags_of(arguments.parse(["--config", str(preset), str(path), *size]))
        assert {name for name in base if base[name] != flags[name]} <= named.keys() | FOLLOWS
        for name, value in named.items():
            assert flags[name] in (value, [value], str(value)), name

    def test_each_method_has_one(self):
        assert {*METHODS_BY_NAME} - {"bapo"} <= {path.stem for path in METHODS}

    def test_two_updates_a_rollout(self):
        args = laid_over("methods/skip_two_updates.yaml")
        assert args.rollout.batch_size * args.rollout.n_samples_per_prompt == 2 * args.train.batch_size

    @pytest.mark.parametrize(
        ("name", "flags", "text"),
        [
            ("dapo", {"reward.overlong_buffer_len": 4}, "the quickstart's 48"),
            ("dapo_with_buffer", {"reward.overlong_buffer_len": 4}, "the quickstart's 48"),
            ("partial_rollouts", {"adapt.partial_rollout_tokens": 16}, "the quickstart's 48"),
            ("repo", {"train.num_episodes": 1, "adapt.options": ["warm_up=8"], "rollout.n_samples_per_prompt": 8},
             "The quickstart needs `--train.num_episodes 2`"),
        ],
    )  # fmt: skip
    def test_what_a_file_says_of_the_quickstart(self, name, flags, text):
        actual = config.flags_of(laid_over(f"methods/{name}.yaml", base="quickstart.yaml"))
        assert (flags | {"rollout.max_new_tokens": 48}).items() <= actual.items()
        assert text in (ROOT / "configs" / "methods" / f"{name}.yaml").read_text(encoding="utf-8")

    def test_shares_of_the_batch_are_those_of_the_methods(self):
        half = dict.fromkeys(("dots", "repo", "exgrpo", "freshness", "prompt_replay"), F(1, 2))
        for name, share in (half | {"remix": F(3, 5), "rollout_replay": F(2, 3)}).items():
            args = laid_over(f"methods/{name}.yaml")
            assert F(args.rollout.batch_size, args.adapt.batch_size) == share, name


class TestPresets:
    @pytest.mark.parametrize("path", [p for p in PRESETS if p.stem not in NOT_THE_PAPERS], ids=lambda path: path.stem)
    def test_holds_table_3(self, path):
        args = arguments.parse(["--config", str(path)])
        wanted = TABLE_3 | ({"train.num_episodes": 30} if "geometry" in path.stem else {})  # Table 2
        assert wanted.items() <= config.flags_of(args).items()
        adapt = args.adapt
        assert adapt.thresholds() == (F(1, 8), Interval(F(1, 8), F(4, 8)), Interval(F(2, 8), F(5, 8)))
        assert (adapt.rollout_delay, adapt.reevaluate_every) == (5, 5)
        assert adapt.most_reevaluated(args.rollout.batch_size) == 128
        assert (adapt.gaussian_mean, adapt.gaussian_std, adapt.filter) == (0.5, 0.2, "range")
        longest_prompt = 512 if "countdown" in path.stem else 2048  # Qwen2.5-Math takes 4096 tokens in all
        assert args.data.max_len - args.rollout.max_new_tokens == longest_prompt
        assert args.ckpt.save_steps % adapt.rollout_delay == 0
        assert args.rollout.max_new_tokens == next(most for part, most in RESPONSES.items() if part in path.stem)
        assert adapt.buffer_size == (64 if path.stem.startswith("ba_ppo") else 256)
        assert path.stem.startswith(args.algorithm) and adapt.method == "bapo"
