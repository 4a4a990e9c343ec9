"""Flags, YAML files and presets, compared with OpenRLHF's own script, which is run from its installed file."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import re
import subprocess
import sys
import textwrap
from dataclasses import fields, replace
from datetime import datetime
from fractions import Fraction as F
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import yaml

from bapo_openrlhf import host
from bapo_openrlhf.adapt.advantage import GROUP_ESTIMATORS
from bapo_openrlhf.adapt.arithmetic import BatchArithmetic
from bapo_openrlhf.adapt.thresholds import Interval
from bapo_openrlhf.cli import arguments, main
from bapo_openrlhf.cli.parser import is_switch, parse_words
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.flags import config
from bapo_openrlhf.flags.config import AdaptConfig, RunConfig, VerifierConfig, check_numbers
from bapo_openrlhf.methods import BAPO
from bapo_openrlhf.methods.registry import METHODS as METHODS_BY_NAME

ROOT = Path(__file__).resolve().parents[3]
# OpenRLHF's defaults ask for 8 actor GPUs and one response a prompt; `run_name` is the run's name here.
MODEL = ["--actor.model_name_or_path", "m", "--reward.remote_url", "r.py", "--logger.wandb.run_name", "run"]
METHODS = sorted((ROOT / "configs" / "methods").glob("*.yaml"))
GROUPS = [*MODEL, "--rollout.n_samples_per_prompt", "8"]


def flags_in(node, prefix=""):
    """The flags of a YAML file by dotted name."""
    for key, value in node.items():
        if isinstance(value, dict):
            yield from flags_in(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@pytest.fixture
def yaml_file(tmp_path):
    """Writes a YAML text to a file and returns its path."""

    def write(text: str, name: str = "config.yaml") -> str:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return str(path)

    return write


def parse(*words: str) -> SimpleNamespace:
    return arguments.parse([*GROUPS, *words])


def flat(node: SimpleNamespace, prefix: str = "") -> dict[str, object]:
    """Each value of a nested namespace by dotted name."""
    values = {}
    for key, value in vars(node).items():
        if isinstance(value, SimpleNamespace):
            values |= flat(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = value
    return values


# --- OpenRLHF's own command line -------------------------------------------------------------------------------------


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


OUTPUTS = {"ckpt.output_dir": "runs/default/model", "ckpt.path": "runs/default/checkpoints"}  # not OpenRLHF's
COMMAND_LINES = [
    MODEL,
    [*GROUPS, "--algo.advantage.estimator", "group_norm"],
    [*GROUPS, "--algo.advantage.estimator", "rloo", "--algo.kl.use_loss", "--algo.kl.estimator", "k3"],
    [*MODEL, "--critic.model_name_or_path", "c", "--actor.eps_clip_low_high", "0.2", "0.28"],
    [*MODEL, "--algo.advantage.is_correction_level", "token", "--algo.advantage.is_correction_threshold", "3"],
    [*MODEL, "--train.async_enable", "--rollout.vllm_generate_batch_size", "2048", "--vllm.num_engines", "2"],
    [*MODEL, "--vllm.num_engines", "4", "--train.dynamic_batch_enable"],
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
        assert {key: value for key, value in flat(ours).items() if key not in added} == flat(theirs) | OUTPUTS | {
            "data.solution_key": None
        }

    def test_a_flag_of_ours_among_theirs(self):
        words = [*MODEL[:4], "--data.prompt_dataset", "d.jsonl", "--data.solution_key", "worked"]
        data = arguments.parse(words).data
        assert (data.prompt_dataset, data.solution_key, data.input_key) == ("d.jsonl", "worked", "input")

    def test_loggers_take_the_name_of_the_run(self):
        """OpenRLHF would name both ppo_ and the time of day."""
        words = [*MODEL[:4], "--run.name", "seed_7", "--data.prompt_dataset", "d.jsonl"]
        assert arguments.parse(words).logger.wandb.run_name == "seed_7"
        assert arguments.parse([*words, "--logger.wandb.run_name", "mine"]).logger.wandb.run_name == "mine"

    def test_every_flag_is_still_there_and_means_the_same(self, monkeypatch):
        theirs, _ = openrlhf_itself(MODEL, monkeypatch)
        ours = arguments.build_parser("prog")
        known = ours._option_string_actions
        assert len(theirs._option_string_actions) > 150
        for name, action in theirs._option_string_actions.items():
            for attribute in ("dest", "nargs", "const", "type", "choices", "help", "required"):
                assert getattr(known[name], attribute) == getattr(action, attribute), (name, attribute)
            assert type(known[name]) is type(action)
            if name[2:] not in ("logger.wandb.run_name", *OUTPUTS):
                assert known[name].default == action.default, name
        added = set(known) - set(theirs._option_string_actions)
        groups = {"--help-all", "--config", "--algorithm", "--adapt", "--data", "--verifier", "--run"}
        assert {name.split(".")[0] for name in added} == groups

    @pytest.mark.parametrize(
        ("words", "text"),
        [
            (["--algo.advantage.estimator", "group_norm"], "n_samples_per_prompt > 1"),
            (["--train.partial_rollout_enable"], "requires --train.async_enable"),
            (["--rollout.batch_size", "128", "--rollout.micro_batch_size", "32"], "number of sample batches"),
        ],
    )
    def test_its_assertions_arrive_as_config_errors(self, words, text, monkeypatch):
        with pytest.raises(AssertionError, match=text):
            openrlhf_itself([*MODEL, *words], monkeypatch)
        monkeypatch.setattr(arguments, "check_values", lambda flags: None)  # it refuses them first
        with pytest.raises(ConfigError, match=f"OpenRLHF refuses this configuration: .*{text}"):
            arguments.parse([*MODEL, *words])

    @pytest.mark.parametrize(
        ("words", "text"),
        [
            (["--no.such.flag", "1"], "unknown flag --no.such.flag$"),
            (["--train.batch_size", "many"], "train.batch_size is 'many'; it must be a whole number"),
            (["--adapt.filter", "best"], "--adapt.filter: invalid choice: 'best'"),
            (["--adapt.method"], "--adapt.method: expected one argument"),
        ],
    )
    def test_bad_words_are_config_errors_that_name_the_flag(self, words, text):
        with pytest.raises(ConfigError, match=text):
            parse(*words)


# --- --algorithm ------------------------------------------------------------------------------------------------------


class TestAlgorithm:
    @pytest.mark.parametrize(
        ("name", "estimator", "method", "critic"),
        [
            ("ba_ppo", "gae", "bapo", "m"),
            ("bapo_grpo", "group_norm", "bapo", None),
            ("ppo", "gae", "none", "m"),
            ("grpo", "group_norm", "none", None),
        ],
    )
    @pytest.mark.parametrize("by", ["command line", "YAML"])
    def test_stands_for_an_advantage_path_and_a_method(self, name, estimator, method, critic, by, yaml_file):
        args = (
            parse("--algorithm", name) if by == "command line" else parse("--config", yaml_file(f"algorithm: {name}"))
        )
        assert (args.algorithm, args.algo.advantage.estimator, args.adapt.method) == (name, estimator, method)
        assert args.critic.model_name_or_path == critic
        assert args.adapt.enabled is (method != "none")

    @pytest.mark.parametrize("name", ["grpo", "bapo_grpo"])
    @pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
    def test_any_group_estimator_may_be_asked_for(self, name, estimator):
        assert parse("--algorithm", name, "--algo.advantage.estimator", estimator).algo.advantage.estimator == estimator

    @pytest.mark.parametrize(
        ("name", "estimator"), [("ba_ppo", "group_norm"), ("ppo", "rloo"), ("grpo", "gae"), ("bapo_grpo", "reinforce")]
    )
    def test_contradicting_estimator(self, name, estimator):
        with pytest.raises(ConfigError, match=f"algorithm {name} and algo.advantage.estimator {estimator} contradict"):
            parse("--algorithm", name, "--algo.advantage.estimator", estimator)

    @pytest.mark.parametrize(
        ("name", "method", "text"),
        [
            ("ppo", "bapo", "has no batch adaptation"),
            ("grpo", "bapo_bound", "has no batch adaptation"),
            ("ba_ppo", "none", "needs batch adaptation"),
            ("bapo_grpo", "none", "needs batch adaptation"),
        ],
    )
    def test_contradicting_method(self, name, method, text):
        with pytest.raises(ConfigError, match=f"algorithm {name} and adapt.method {method} contradict.*{text}"):
            parse("--algorithm", name, "--adapt.method", method)

    def test_any_method_is_one_of_batch_adaptation(self, yaml_file):
        assert parse("--algorithm", "ba_ppo", "--adapt.method", "bapo_bound").adapt.method == "bapo_bound"
        path = yaml_file("adapt: {method: bapo_bound}")
        assert parse("--config", path, "--algorithm", "bapo_grpo").adapt.method == "bapo_bound"

    def test_unknown(self, yaml_file):
        says = (
            r"^algorithm is 'bapo'; it must be one of ba_ppo, bapo_grpo, ppo, grpo; did you mean bapo_grpo or ba_ppo\?"
        )
        for words in (["--algorithm", "bapo"], ["--config", yaml_file("algorithm: bapo")]):
            with pytest.raises(ConfigError, match=says):
                parse(*words)

    def test_method_without_algorithm_keeps_openrlhfs_estimator(self):
        args = parse("--adapt.method", "bapo", "--algo.advantage.estimator", "rloo")
        assert (args.algorithm, args.algo.advantage.estimator, args.adapt.enabled) == (None, "rloo", True)


# --- YAML -------------------------------------------------------------------------------------------------------------


class TestRewards:
    @pytest.mark.parametrize("name", config.ALGORITHMS)
    def test_must_come_from_somewhere(self, name):
        with pytest.raises(ConfigError, match=r"reward\.remote_url is not set; it must be a \.py file"):
            arguments.parse(["--actor.model_name_or_path", "m", "--algorithm", name])

    @pytest.mark.parametrize("flag", ["reward.remote_url", "reward.model_name_or_path", "train.agent_func_path"])
    def test_from_anywhere(self, flag):
        words = ["--actor.model_name_or_path", "m", "--rollout.n_samples_per_prompt", "8"]
        arguments.parse([*words, "--algorithm", "ppo", f"--{flag}", "r.py"])

    def test_a_file_for_a_method_names_no_task(self):
        path = str(ROOT / "configs" / "methods" / "mopps.yaml")
        says = "name the file of a task before it, as in --config configs/quickstart.yaml"
        with pytest.raises(ConfigError, match=f"^reward.remote_url is not set; .*{says} {path}$"):
            arguments.parse(["--config", path])
        with pytest.raises(ConfigError, match=r"are not set either\)$"):  # here only the rewards are missing
            arguments.parse(["--config", path, "--actor.model_name_or_path", "m"])


class TestOutputs:
    """The folders that a run writes to follow its name, unless they are given."""

    def test_follow_the_name_of_the_run(self, yaml_file):
        path = yaml_file("run: {name: x, dir: d}\nckpt: {save_steps: 3, path: null}")
        args = parse("--config", path, "--run.name", "y")
        assert (args.ckpt.output_dir, args.ckpt.path) == ("d/y/model", "d/y/checkpoints")

    def test_are_what_was_given(self, yaml_file):
        args = parse("--config", yaml_file("ckpt: {path: p}"), "--ckpt.output_dir", "./ckpt", "--run.name", "y")
        assert (args.ckpt.output_dir, args.ckpt.path) == ("./ckpt", "p")

    def test_of_no_preset_are_given(self):
        for path in sorted((ROOT / "configs").glob("*.yaml")):
            name = arguments.parse(["--config", str(path)]).run.name
            args = arguments.parse(["--config", str(path), "--run.name", "other"])
            values = {key: value for key, value in flat(args).items() if isinstance(value, str) and name in value}
            assert values == {}, path


class TestNumbers:
    @pytest.mark.parametrize("number", ["-1e-6", "-1E+3", "-.5e2", "-2.", "-3"])
    def test_a_negative_number_is_no_flag(self, number):
        with pytest.raises(ConfigError, match=f"^actor.adam.lr is {float(number)}; it must be"):
            parse("--actor.adam.lr", number)
        assert parse("--reward.clip_range", number, "1e3").reward.clip_range == [float(number), 1000.0]

    @pytest.mark.parametrize("seed", [-1, 2**32])
    def test_a_seed_that_numpy_does_not_take(self, seed):
        with pytest.raises(ValueError):
            np.random.RandomState(seed)
        with pytest.raises(ConfigError, match=f"^train.seed is {seed}; it must be in \\[0, 4294967295\\]$"):
            parse(f"--train.seed={seed}")
        np.random.RandomState(4294967295)
        assert parse("--train.seed", "4294967295").train.seed == 4294967295


class TestYaml:
    def test_nested_and_dotted_keys(self, yaml_file):
        path = yaml_file(
            """
            actor.adam.lr: 3.0e-6
            actor: {eps_clip: 0.3, adam.eps: 1.0e-7}
            rollout:
              batch_size: 32
            adapt:
              buffer_size: 17
            run.name: mine
            """
        )
        args = parse("--config", path)
        assert (args.actor.adam.lr, args.actor.adam.eps, args.actor.eps_clip) == (3e-6, 1e-7, 0.3)
        assert (args.rollout.batch_size, args.adapt.buffer_size, args.run.name) == (32, 17, "mine")

    def test_equals_the_same_words_on_the_command_line(self, yaml_file):
        path = yaml_file(
            """
            algorithm: ba_ppo
            adapt: {c2: [1/8, 3/8], c3: 5/8, c1: 0.125, replay_steps: 0, ratio: decoupled}
            reward.clip_range: [-5, 5]
            train: {colocate_all: true, async_enable: false}
            """
        )
        words = ["--algorithm", "ba_ppo", "--adapt.c2", "1/8", "3/8", "--adapt.c3", "5/8", "--adapt.c1", "0.125"]
        words += ["--adapt.replay_steps", "0", "--adapt.ratio", "decoupled", "--reward.clip_range", "-5", "5"]
        by_yaml, by_words = parse("--config", path), parse(*words, "--train.colocate_all")
        by_yaml.config = None
        assert flat(by_yaml) == flat(by_words)
        assert by_yaml.adapt == by_words.adapt and by_yaml.adapt.c2 == ["1/8", "3/8"] and by_yaml.adapt.c3 == ["5/8"]

    def test_booleans(self, yaml_file):
        args = parse("--config", yaml_file("train: {colocate_all: true, enable_ema: false}\nds.packing_samples: false"))
        assert (args.train.colocate_all, args.train.enable_ema, args.ds.packing_samples) == (True, False, False)

    def test_null_is_the_default(self, yaml_file):
        path = yaml_file("adapt: {batch_size: null, c2: ~, buffer_size: null}\nrollout.max_new_tokens:")
        args = parse("--config", path)
        assert (args.adapt.batch_size, args.adapt.c2, args.adapt.buffer_size) == (None, None, 256)
        assert args.rollout.max_new_tokens is None

    @pytest.mark.parametrize("value", ["1", "on_off", "[true]", "null"])
    def test_a_boolean_flag_takes_nothing_else(self, yaml_file, value):
        with pytest.raises(ConfigError, match=r"train\.colocate_all is .*; it must be true or false"):
            parse("--config", yaml_file(f"train: {{colocate_all: {value}}}"))

    @pytest.mark.parametrize(
        ("text", "flag", "near"),
        [
            ("adapt: {bufer_size: 1}", "adapt.bufer_size", "adapt.buffer_size"),
            ("train.batchsize: 1", "train.batchsize", "train.batch_size"),
            ("algoritm: grpo", "algoritm", "algorithm"),
        ],
    )
    def test_unknown_key_with_a_suggestion(self, yaml_file, text, flag, near):
        path = yaml_file(text)
        with pytest.raises(ConfigError) as error:
            parse("--config", path)
        assert str(error.value) == f"config {path}: unknown flag {flag}; did you mean {near}?"

    def test_a_beginning_of_a_flag_is_not_enough(self, yaml_file):
        with pytest.raises(ConfigError, match=r"unknown flag adapt.buffer; did you mean adapt.buffer_size"):
            parse("--config", yaml_file("adapt.buffer: 3"))

    def test_a_file_names_no_other(self, yaml_file):
        with pytest.raises(ConfigError, match="cannot name another"):
            parse("--config", yaml_file("config: other.yaml"))

    @pytest.mark.parametrize(
        ("text", "error"),
        [
            ("adapt: {rollout_delay: soon}", "config.yaml: adapt.rollout_delay is 'soon'; it must be a whole number"),
            ("actor.adam.lr: 1e-6x", "config.yaml: actor.adam.lr is '1e-6x'; it must be a number"),
            (
                "reward: reward.py",
                "config.yaml: reward is 'reward.py'; it must hold flags, each with its value: .*remote_url",
            ),
            ("algo.kl: 0.1", "config.yaml: algo.kl is '0.1'; it must hold flags, each with its value: .*init_coef"),
            (
                "adapt: {options: {x: 1}}",
                "config.yaml: adapt.options holds x: 1; it must be a value, or a list of values",
            ),
            ("adapt: {filter: best}", "--adapt.filter: invalid choice: 'best'"),
            ("adapt: {c2: []}", "--adapt.c2: expected at least one argument"),
            ("adapt: {batch_size: true}", "config.yaml: adapt.batch_size is 'true'; it must be a whole number"),
            ("train: {batch_size: [1, 2]}", r"train.batch_size is \['1', '2'\]; it must be one value and not a list"),
            ("reward.clip_range: [1]", "--reward.clip_range: expected 2 arguments"),
        ],
    )
    def test_types_and_choices_are_those_of_the_flags(self, yaml_file, text, error):
        with pytest.raises(ConfigError, match=error):
            parse("--config", yaml_file(text))

    def test_missing_file_and_folder(self, tmp_path):
        for path in (tmp_path / "none.yaml", tmp_path):
            with pytest.raises(ConfigError, match=f"config {path} cannot be read"):
                parse("--config", str(path))

    @pytest.mark.parametrize("text", ["a: [1", "a: b: c", "a:\n\t- 1", "a: @b"])
    def test_invalid_yaml(self, yaml_file, text):
        path = yaml_file(text)
        with pytest.raises(ConfigError, match=f"config {path} is not valid YAML"):
            parse("--config", path)

    @pytest.mark.parametrize(
        "text", ["", "# run: {name: a}\n", "---\n", "run:\n", "run:\n#  name: a\nactor: {adam: }\n", "{}"]
    )
    def test_a_file_or_a_section_without_a_flag(self, yaml_file, text):
        args = parse("--config", yaml_file("run.name: mine", "first.yaml"), yaml_file(text))
        assert args.run.name == "mine" and args.chosen == parse("--config", yaml_file("run.name: mine")).chosen

    @pytest.mark.parametrize("text", ["runs:\n", "run.names:\n", "run: {nam: }"])
    def test_an_empty_section_of_no_flag(self, yaml_file, text):
        with pytest.raises(ConfigError, match=r"unknown flag run"):
            parse("--config", yaml_file(text))

    @pytest.mark.parametrize(("text", "kind"), [("- a", "list"), ("word", "str"), ("3", "str")])
    def test_not_a_mapping(self, yaml_file, text, kind):
        with pytest.raises(ConfigError, match=f"must hold flags as `name: value`; found {kind}"):
            parse("--config", yaml_file(text))

    def test_false_turns_a_flag_off_that_is_on_by_default(self, yaml_file):
        assert parse("--config", yaml_file("actor.muon.nesterov: false")).actor.muon.nesterov is False

    def test_flags_that_turn_something_off(self, yaml_file):
        assert parse("--config", yaml_file("actor.muon.no_nesterov: true")).actor.muon.nesterov is False


class TestPrecedence:
    def test_command_line_over_yaml(self, yaml_file):
        path = yaml_file("adapt: {buffer_size: 1, c2: [0, 1/8], rollout_delay: 7}\ntrain.colocate_all: false")
        for words in (["--config", path, "--adapt.buffer_size", "2"], ["--adapt.buffer_size", "2", "--config", path]):
            args = parse(*words, "--adapt.c2", "1/8", "--train.colocate_all")
            assert (args.adapt.buffer_size, args.adapt.c2, args.adapt.rollout_delay) == (2, ["1/8"], 7)
            assert args.train.colocate_all is True

    def test_algorithm_over_yaml(self, yaml_file):
        path = yaml_file("algo.advantage.estimator: gae\nadapt.buffer_size: 9")
        args = parse("--config", path, "--algorithm", "grpo")
        assert (args.algo.advantage.estimator, args.adapt.method) == ("group_norm", "none")
        assert args.adapt.buffer_size == 9

    def test_a_variant_of_the_algorithm_in_the_same_file_is_kept(self, yaml_file):
        args = parse("--config", yaml_file("algorithm: grpo\nalgo.advantage.estimator: rloo"))
        assert args.algo.advantage.estimator == "rloo"

    def test_a_contradiction_in_one_file_is_refused(self, yaml_file):
        with pytest.raises(ConfigError, match="contradict"):
            parse("--config", yaml_file("algorithm: grpo\nalgo.advantage.estimator: gae"))

    def test_command_line_over_algorithm(self, yaml_file):
        path = yaml_file("algorithm: bapo_grpo\nalgo.advantage.estimator: dr_grpo")
        words = ["--algo.advantage.estimator", "rloo", "--adapt.method", "bapo_bound"]
        args = parse("--config", path, *words)
        assert (args.algo.advantage.estimator, args.adapt.method) == ("rloo", "bapo_bound")

    def test_no_algorithm_leaves_yaml_alone(self, yaml_file):
        args = parse("--config", yaml_file("algo.advantage.estimator: rloo\nadapt.method: bapo"))
        assert (args.algo.advantage.estimator, args.adapt.method) == ("rloo", "bapo")


# --- --adapt.* --------------------------------------------------------------------------------------------------------


class TestThresholds:
    def test_defaults_are_table_3(self):
        assert AdaptConfig().thresholds() == (F(1, 8), Interval(F(1, 8), F(4, 8)), Interval(F(2, 8), F(5, 8)))

    def test_one_value_is_fixed(self):
        adapt = parse("--adapt.method", "bapo", "--adapt.c2", "0.3", "--adapt.c3", "2/3", "--adapt.c1", "0").adapt
        assert adapt.thresholds() == (F(0), Interval(F(3, 10), F(3, 10)), Interval(F(2, 3), F(2, 3)))

    def test_mini_test_overrules_the_thresholds_of_a_preset(self, yaml_file):
        path = yaml_file("algorithm: bapo_grpo\nadapt: {c1: 1/4, c2: [1/8, 4/8], c3: [2/8, 5/8]}")
        adapt = parse("--config", path, "configs/methods/bapo_mini_test.yaml").adapt
        assert adapt.thresholds() == (F(0), Interval(F(1, 2), F(1, 2)), Interval(F(1, 2), F(1, 2)))

    @pytest.mark.parametrize(
        ("words", "text"),
        [
            (["--adapt.c2", "3/8", "--adapt.c3", "2/8"], r"adapt\.c2 LOW is 3/8 and adapt\.c3 LOW is 1/4"),
            (["--adapt.c2", "1/8", "6/8"], r"adapt\.c2 HIGH is 3/4 and adapt\.c3 HIGH is 5/8"),
            (["--adapt.c2", "3/8", "4/8"], r"adapt\.c2 LOW is 3/8 and adapt\.c3 LOW is 1/4"),
            (["--adapt.c2", "4/8", "1/8"], r"adapt\.c2 is 4/8 1/8; LOW must not be above HIGH"),
            (["--adapt.c3", "0.9", "0.8"], r"adapt\.c3 is 0\.9 0\.8; LOW must not be above HIGH"),
            (["--adapt.c1", "1"], r"adapt\.c1 is 1; it must be below 1"),
            (["--adapt.c1", "8/8"], r"adapt\.c1 is 1; it must be below 1"),
            (["--adapt.c1", "1/0"], r"adapt\.c1: '1/0' is not a number"),
            (["--adapt.c2", "abc"], r"adapt\.c2: 'abc' is not a number"),
            (["--adapt.c3", "1/2", "nan"], r"adapt\.c3: 'nan' is not a number"),
            (["--adapt.c3", "inf"], r"adapt\.c3: 'inf' is not a number"),
            (["--adapt.c2", "0", "1/8", "2/8"], r"adapt\.c2 has 3 values; it takes LOW HIGH, or one fixed value"),
            (["--adapt.c3", "1/2", "1.01"], r"adapt\.c3 is 1\.01; it must be in \[0, 1\]"),
            (["--adapt.reward_range", "2", "0"], r"adapt\.reward_range is \['2', '0'\]; it must be two numbers"),
            (["--adapt.reward_range", "1", "1"], r"adapt\.reward_range is .*; it must be two numbers LOW HIGH"),
            (["--adapt.reward_range", "0", "x"], r"adapt\.reward_range is .*; it must be two numbers LOW HIGH"),
            (["--adapt.c1=-1/8"], r"adapt\.c1 is -1/8; it must be in \[0, 1\]"),
            (["--adapt.c2=-0.1"], r"adapt\.c2 is -0\.1; it must be in \[0, 1\]"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_refused(self, words, text):
        with pytest.raises(ConfigError, match=text):
            parse("--adapt.method", "bapo", *words)
        parse(*words)  # not looked at without batch adaptation

    @pytest.mark.parametrize(
        "words", [["--adapt.c2", "1/2", "--adapt.c3", "1/2"], ["--adapt.c2", "0", "--adapt.c3", "0", "1"]]
    )
    def test_equal_ends_are_allowed(self, words):
        parse("--adapt.method", "bapo", *words)


RANGES = [
    # field, allowed, refused, what the message says
    ("buffer_size", [1, 256], [0, -1], "at least 1"),
    ("micro_batch_tokens", [1, 8192], [0, -1], "at least 1"),
    ("replay_steps", [0, 3], [-1], "at least 0"),
    ("rollout_delay", [1, 5], [0, -5], "at least 1"),
    ("reevaluate_every", [0, 5], [-1], "at least 0"),
    ("max_reevaluated_prompts", [None, 1], [0, -1], "at least 1"),
    ("batch_size", [None, 1], [0, -1], "at least 1"),
    ("gaussian_std", [1e-9, 3.0], [0.0, -0.1, float("nan")], "above 0"),
    ("veto_ratio", [None, 1e-4, 0.9], [0.0, -0.1, 1.0, float("nan")], r"in \(0, 1\)"),
    ("reuse_gate", [None, 0.0, 0.5], [-0.1, float("nan"), float("inf")], "finite and at least 0"),
    ("reuse_gate_window", [2, 20], [1, 0], "at least 2"),
    ("top_p_share", [1e-9, 0.9, 1.0], [0.0, -0.1, 1.1, float("nan")], r"in \(0, 1\]"),
    ("max_second_moment", [None, 1e-9, 0.04], [0.0, -1.0, float("nan"), float("inf")], "finite and above 0"),
    ("eps", [1e-12], [0.0, -1e-6, float("nan")], "above 0"),
    ("gaussian_mean", [0.0, 0.5, 1.0], [-0.1, 1.1, float("nan")], r"in \[0, 1\]"),
    ("max_failed_share", [0.0, 0.5, 1.0], [-0.1, 1.1, float("nan")], r"in \[0, 1\]"),
    ("max_gap", [1e-9, 0.02, 5.0], [0.0, -0.1, float("inf"), float("nan")], "finite and above 0"),
    ("critic_lambd", [None, 0.0, 0.95, 1.0], [-0.1, 1.1, float("nan")], r"in \[0, 1\]"),
    ("length_adaptive_lambd", [None, 0.05, 2.0], [0.0, -0.05, float("inf"), float("nan")], "finite and above 0"),
    ("value_pretraining", [0, 4], [-1], "at least 0"),
    ("max_staleness", [None, 0, 4], [-1], "at least 0"),
    ("partial_rollout_tokens", [None, 1, 4096], [0, -1], "at least 1"),
    ("max_shift_rollout", [None, 0.0, 0.3, 7.0], [-0.1, float("inf"), float("nan")], "finite and at least 0"),
    ("max_shift_fresh", [None, 0.0, 0.3, 7.0], [-0.1, float("inf"), float("nan")], "finite and at least 0"),
    ("max_shift_replayed", [None, 0.0, 0.3, 7.0], [-0.1, float("inf"), float("nan")], "finite and at least 0"),
]
VERIFIER_RANGES = [
    ("processes", [0, 1, 64], [-1], "at least 0"),
    ("timeout", [1e-3, 60.0], [0.0, -1.0, float("nan"), float("inf")], "above 0"),
    ("memory_gib", [0.1, 4.0], [0.0, -1.0, float("nan"), float("inf")], "above 0"),
]


def numbers(kind: type) -> set[str]:
    """The flags of a group that take a number."""
    return {item.name for item in fields(kind) if item.metadata["argument"].get("type")}


class TestRanges:
    @pytest.mark.parametrize(("name", "allowed", "refused", "text"), RANGES, ids=[row[0] for row in RANGES])
    def test_limits(self, name, allowed, refused, text):
        for value in allowed:
            AdaptConfig(method="bapo", **{name: value}).check()
        for value in refused:
            with pytest.raises(ConfigError, match=rf"adapt\.{name} is {value}; it must be {text}"):
                AdaptConfig(method="bapo", **{name: value}).check()
            with pytest.raises(ConfigError, match=rf"adapt\.{name} is {value}; it must be {text}"):
                parse("--adapt.method", "bapo", f"--adapt.{name}={value}")

    @pytest.mark.parametrize(
        ("name", "allowed", "refused", "text"), VERIFIER_RANGES, ids=[row[0] for row in VERIFIER_RANGES]
    )
    def test_limits_of_the_verifier(self, name, allowed, refused, text):
        for value in allowed:
            check_numbers("verifier", VerifierConfig(**{name: value}))
            parse("--adapt.method", "bapo", f"--verifier.{name}={value}")
        for value in refused:
            with pytest.raises(ConfigError, match=rf"verifier\.{name} is {value}; it must be .*{text}"):
                check_numbers("verifier", VerifierConfig(**{name: value}))
            with pytest.raises(ConfigError, match=rf"verifier\.{name} is {value}; it must be .*{text}"):
                parse("--adapt.method", "bapo", f"--verifier.{name}={value}")
            with pytest.raises(ConfigError, match=rf"verifier\.{name} is {value}; it must be .*{text}"):
                parse(f"--verifier.{name}={value}")  # plain OpenRLHF has these limits too

    def test_every_number_has_a_range(self):
        assert numbers(AdaptConfig) == {row[0] for row in RANGES}
        assert numbers(VerifierConfig) == {row[0] for row in VERIFIER_RANGES}


class TestMakeMethod:
    ARITHMETIC = BatchArithmetic(
        group_size=6, capacity=40, rollout_groups=32, train_batch=48, ranks={"actor": 4}, micro_train=3
    )

    def test_each_field_lands_in_its_place(self):
        adapt = AdaptConfig(
            method="bapo",
            batch_size=40,
            filter="gaussian",
            gaussian_mean=0.4,
            gaussian_std=0.3,
            c1="1/6",
            c2=["0.1", "3/6"],
            c3=["2/3"],
            threshold_direction="text",
            buffer_size=11,
            replay_steps=13,
            rollout_delay=14,
            reevaluate_every=15,
            max_reevaluated_prompts=16,
            eps=1e-5,
        )
        method = adapt.make_method(self.ARITHMETIC, seed=7)
        assert isinstance(method, BAPO)
        wanted = BAPO(
            capacity=40,
            group_size=6,
            seed=7,
            filter="gaussian",
            gaussian_mean=0.4,
            gaussian_std=0.3,
            c1=F(1, 6),
            c2=Interval(F(1, 10), F(1, 2)),
            c3=Interval(F(2, 3), F(2, 3)),
            threshold_direction="text",
            buffer_size=11,
            replay_steps=13,
            reevaluate_every=15,
            max_reevaluated_prompts=16,
            eps=1e-5,
        )
        names = [field.name for field in fields(BAPO)]
        assert [getattr(method, name) for name in names] == [getattr(wanted, name) for name in names]

    def test_seed(self):
        draws = [AdaptConfig(method="bapo").make_method(self.ARITHMETIC, seed=seed).rng.random() for seed in (7, 7, 8)]
        assert draws[0] == draws[1] != draws[2]

    @pytest.mark.parametrize(("prompts", "most"), [(256, 128), (9, 4), (1, 1)])
    def test_a_reevaluation_has_half_of_a_rollout_batch_unless_said_otherwise(self, prompts, most):
        arithmetic = replace(self.ARITHMETIC, rollout_groups=prompts)
        method = AdaptConfig(method="bapo").make_method(arithmetic, seed=0)
        said = AdaptConfig(method="bapo", max_reevaluated_prompts=7).make_method(arithmetic, seed=0)
        assert (method.max_reevaluated_prompts, said.max_reevaluated_prompts) == (most, 7)


def test_defaults_are_table_3():
    adapt = parse().adapt
    assert (adapt.c1, adapt.c2, adapt.c3) == ("1/8", None, None)  # None: TestThresholds
    assert (adapt.buffer_size, adapt.rollout_delay, adapt.reevaluate_every, adapt.replay_steps) == (256, 5, 5, 3)
    assert (adapt.max_reevaluated_prompts, adapt.gaussian_mean, adapt.gaussian_std) == (None, 0.5, 0.2)
    assert (adapt.filter, adapt.threshold_direction) == ("range", "eq8")
    assert (adapt.ratio, adapt.kl_target, adapt.method) == ("behaviour", "reference", "none")
    assert adapt.batch_size is None
    # nothing is dropped and nothing is corrected unless asked for
    assert (adapt.max_shift_fresh, adapt.max_shift_replayed) == (None, None)
    assert (adapt.returns, adapt.max_second_moment, adapt.scale_learning_rate) == ("gae", None, False)
    assert adapt.skip_zero_advantage is False
    assert (adapt.veto_ratio, adapt.reuse_gate, adapt.max_failed_share) == (None, None, 0.5)
    assert VerifierConfig() == VerifierConfig(processes=4, timeout=60.0, memory_gib=4.0)
    assert RunConfig() == RunConfig(name="default", dir="runs", logs="full")


# --- help and commands ------------------------------------------------------------------------------------------------

# About running a method, not about the method: no paper has a word for these.
UNMARKED = {
    "adapt": {"max_failed_share", "micro_batch_tokens"},
    "data": set(),
    "verifier": numbers(VerifierConfig) | {"send_responses"},
    "run": {
        "name",
        "dir",
        "logs",
        "overwrite",
        "answer_chars",
        "gradient_probe",
        "faster",
        "grace_seconds",
        "stall_timeout",
    },
}


class TestHelp:
    def test_every_flag_of_the_method_says_its_symbol_or_source(self):
        parser = arguments.build_parser("prog")
        for item in fields(AdaptConfig):
            action, meta = parser._option_string_actions[f"--adapt.{item.name}"], item.metadata
            words, _, text = (action.help % vars(action)).partition(" [")
            marks = [mark for mark in (meta["symbol"], meta["source"]) if mark]
            assert bool(marks) is (item.name not in UNMARKED["adapt"]), item.name
            assert len(words) > 10 and all(mark in text for mark in marks), item.name

    @pytest.mark.parametrize("group", list(UNMARKED))
    def test_other_flags_claim_none_and_say_what_they_do(self, group):
        parser = arguments.build_parser("prog")
        kind = config.GROUPS[group]
        for item in fields(kind):
            if item.name in UNMARKED[group]:
                assert not item.metadata["symbol"] and not item.metadata["source"]
                words = parser._option_string_actions[f"--{group}.{item.name}"].help
                assert words.startswith(item.metadata["help"])
                told = "; default: " if item.default is None else f"(default: {item.default})"
                assert item.default is False or told in words

    def test_whole_help_prints_every_flag_of_ours(self, capsys):
        with pytest.raises(SystemExit) as left:
            main.run(["train", "--help"])
        assert left.value.code == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert shown.startswith("usage: bapo-openrlhf train")
        assert "uniform (a random 0.6 of them)" in shown and "60 %" not in shown
        flags = [f"--{group}.{item.name}" for group, kind in config.GROUPS.items() for item in fields(kind)]
        assert len(flags) > 30
        for name in [*flags, "--algorithm", "--config"]:
            assert name in shown
        theirs = {name for name in host.build_parser()._option_string_actions if name.startswith("--")}
        assert len([name for name in theirs if re.search(rf"{name}\b", shown)]) < 20  # in words about ours

    def test_help_all_has_ours_first(self, capsys):
        with pytest.raises(SystemExit) as left:
            main.run(["train", "--help-all"])
        assert left.value.code == 0
        lines = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  --")]
        known = arguments.build_parser("prog")._option_string_actions
        assert set(lines) == {name for name in known if name.startswith("--")} - {"--help"}
        theirs = [name in host.build_parser()._option_string_actions for name in lines]
        assert theirs == sorted(theirs)


class TestCommands:
    @pytest.mark.parametrize("argv", [[], ["-h"], ["--help"]])
    def test_help_lists_the_commands(self, argv, capsys):
        assert main.run(argv) == 0
        out, err = capsys.readouterr()
        assert out.startswith("usage: bapo-openrlhf COMMAND") and err == ""
        assert all(name in out for name in main.COMMANDS)

    def test_unknown_command(self, capsys):
        assert main.run(["trian"]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        assert "unknown command 'trian'" in err and "train" in err and "check" in err

    def test_config_error_is_one_line_and_status_2(self, capsys):
        assert main.run(["train", *GROUPS, "--algorithm", "dapo"]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and err.startswith("error: ") and "'dapo'" in err

    def test_as_a_process(self):
        def run(*words: str) -> subprocess.CompletedProcess:
            code = "from bapo_openrlhf.cli.main import main; main()"
            return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=ROOT)

        shown = run("--help")
        assert (shown.returncode, shown.stderr) == (0, "") and "train" in shown.stdout
        refused = run("trian")
        assert refused.returncode == 2 and refused.stdout == "" and len(refused.stderr.splitlines()) == 1


# --- several files ----------------------------------------------------------------------------------------------------


class TestSeveralFiles:
    def parse(self, yaml_file, *texts, more=()):
        paths = [yaml_file(text, f"{number}.yaml") for number, text in enumerate(texts)]
        return parse("--config", *paths, *more)

    def test_a_later_one_wins_and_the_command_line_over_all(self, yaml_file):
        first = "adapt: {buffer_size: 3, c1: 1/4, c2: [1/8, 1/2], replay_steps: 2}"
        adapt = self.parse(
            yaml_file,
            first,
            "adapt.buffer_size: 4\nadapt.c2: 3/8\nadapt.replay_steps: 5",
            more=["--adapt.replay_steps=6"],
        ).adapt
        assert (adapt.buffer_size, adapt.c1, adapt.c2, adapt.replay_steps) == (4, "1/4", ["3/8"], 6)
        again = self.parse(yaml_file, "adapt.buffer_size: 4", first, "adapt.c1: 1/8").adapt
        assert (again.buffer_size, again.c1) == (3, "1/8")

    def test_may_be_named_one_by_one(self, yaml_file):
        first, second = yaml_file("adapt.buffer_size: 3", "a.yaml"), yaml_file("adapt.buffer_size: 4", "b.yaml")
        assert parse("--config", first, "--config", second).adapt.buffer_size == 4
        assert parse("--config", second, "--config", first).adapt.buffer_size == 3

    def test_a_switch_is_undone_and_a_value_taken_back(self, yaml_file):
        first = "train.colocate_all: true\nadapt.buffer_size: 3\nactor.muon.nesterov: false"
        args = self.parse(yaml_file, first, "train: {colocate_all: false}\nadapt.buffer_size: null\n"
                          "actor.muon.nesterov: true")  # fmt: skip
        assert (args.train.colocate_all, args.actor.muon.nesterov) == (False, True)
        assert args.adapt.buffer_size == AdaptConfig().buffer_size

    def test_a_later_algorithm_overrules_the_file_of_a_task_written_for_another(self, yaml_file):
        first = "algorithm: ba_ppo\nalgo.advantage.estimator: gae\nadapt.method: bapo_bound\ndata.prompt_dataset: d"
        args = self.parse(yaml_file, first, "algorithm: grpo")
        assert (args.algorithm, args.algo.advantage.estimator, args.adapt.method) == ("grpo", "group_norm", "none")
        args = self.parse(yaml_file, first, "algorithm: bapo_grpo\nalgo.advantage.estimator: rloo")
        assert (args.algo.advantage.estimator, args.adapt.method) == ("rloo", "bapo_bound")
        args = self.parse(yaml_file, first, "algorithm: grpo", more=["--algorithm", "bapo_grpo"])
        assert (args.algo.advantage.estimator, args.adapt.method) == ("group_norm", "bapo_bound")

    def test_one_algorithm_twice_still_contradicts_its_file(self, yaml_file):
        with pytest.raises(ConfigError, match="contradict each other"):
            self.parse(yaml_file, "algorithm: grpo\nalgo.advantage.estimator: gae", "algorithm: grpo")

    @pytest.mark.parametrize("wrong", [0, 1])
    def test_an_error_names_its_own_file(self, yaml_file, wrong):
        texts = ["adapt.buffer_size: 1", "adapt.buffer_size: 2"]
        texts[wrong] += "\nadapt.bufer_size: 3"
        with pytest.raises(ConfigError, match=rf"{wrong}\.yaml: unknown flag adapt\.bufer_size; did you mean"):
            self.parse(yaml_file, *texts)
        with pytest.raises(ConfigError, match=r"config none\.yaml cannot be read"):
            parse("--config", yaml_file("adapt.buffer_size: 1"), "none.yaml")


OF_A_METHOD = [path for path in METHODS if "adapt.method" in dict(flags_in(yaml.safe_load(path.read_text())))]


class TestFilesThatDisagree:
    """About the method: a run would be taken for one of a method that it does not use."""

    TASK = "algorithm: bapo_grpo\ndata.prompt_dataset: d"

    def refusal(self, yaml_file, *texts, more=()):
        paths = [yaml_file(text, f"{number}.yaml") for number, text in enumerate(texts)]
        with pytest.raises(ConfigError) as error:
            parse("--config", *paths, *more)
        return str(error.value), paths

    def test_one_file_or_two_with_the_same_lines(self, yaml_file):
        second = "algorithm: grpo\nadapt.method: bapo"
        for texts in ([second], [self.TASK, second], [second, self.TASK.replace("bapo_", "")]):
            says, paths = self.refusal(yaml_file, *texts)
            assert "adapt.method bapo" in says and "algorithm grpo" in says and "contradict each other" in says
            assert paths[texts.index(second)] in says

    def test_two_methods_files(self, yaml_file):
        says, paths = self.refusal(yaml_file, self.TASK, "adapt.method: mopps", "adapt: {method: dots}")
        assert says.startswith(f"adapt.method is mopps in {paths[1]} and dots in {paths[2]}; a run has one method: ")
        paths = [yaml_file(f"adapt.method: bapo\nadapt.{flag}", f"{flag[:2]}.yaml") for flag in ("c1: 1/4", "eps: 1")]
        adapt = parse("--config", yaml_file(self.TASK), *paths).adapt  # two variants of one method
        assert (adapt.method, adapt.c1, adapt.eps) == ("bapo", "1/4", 1.0)

    @pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
    @pytest.mark.parametrize("path", OF_A_METHOD, ids=lambda p: p.stem)
    def test_a_methods_file_with_a_plain_algorithm(self, yaml_file, path, algorithm):
        task = yaml_file(self.TASK)
        for words in (["--algorithm", algorithm], ["--config", yaml_file(f"algorithm: {algorithm}", "plain.yaml")]):
            with pytest.raises(ConfigError) as error:
                parse("--config", task, str(path), *words)
            assert f"algorithm {algorithm} ({words[-1] if 'config' in words[0] else '--algorithm'})" in str(error.value)
            assert str(path) in str(error.value)

    def test_the_command_line_overrules_all_files(self, yaml_file):
        paths = [yaml_file(self.TASK), yaml_file("adapt.method: mopps", "m.yaml"), yaml_file("adapt.method: dots", "d")]
        assert parse("--config", *paths, "--adapt.method", "repo").adapt.method == "repo"
        assert not parse("--config", *paths, "--adapt.method", "none", "--algorithm", "grpo").adapt.enabled


class TestChosenFlags:
    """Which flags were meant for the algorithm and the method of the run."""

    TASK = "algorithm: bapo_grpo\ndata.prompt_dataset: d\nadapt.c1: 1/4"

    @pytest.mark.parametrize(
        ("more", "words", "of_the_file"),
        [
            ("", [], True),
            ("", ["--algorithm", "bapo_grpo"], True),
            ("", ["--algorithm", "grpo"], False),
            ("", ["--algorithm", "ba_ppo"], False),
            ("", ["--adapt.method", "mopps"], False),
            ("\nadapt.method: mopps", ["--adapt.method", "mopps"], True),
            ("\nadapt.method: mopps", ["--adapt.method", "dots"], False),
        ],
    )
    def test_those_of_a_file_for_another_are_left_out(self, yaml_file, more, words, of_the_file):
        args = parse("--config", yaml_file(self.TASK + more), *words, "--adapt.eps", "1e-6")
        assert ("adapt.c1" in args.chosen, "adapt.eps" in args.chosen, "adapt.c2" in args.chosen) == (
            of_the_file, True, False)  # fmt: skip

    def test_a_file_of_flags_only(self, yaml_file):
        for words in ([], ["--algorithm", "grpo"]):
            assert "adapt.c1" in parse("--config", yaml_file("adapt: {c1: 1/4, c2: null}"), *words).chosen

    def test_they_are_no_flag(self, yaml_file):
        assert "chosen" not in config.flags_of(parse("--adapt.c1", "1/4"))


class TestSwitches:
    """A switch takes a value as in YAML, on the command line too."""

    @pytest.mark.parametrize("word", ["true", "True", "yes", "on"])
    @pytest.mark.parametrize("joined", [True, False])
    def test_on(self, word, joined):
        words = [f"--train.colocate_all={word}"] if joined else ["--train.colocate_all", word]
        more = ["--vllm.num_engines", "8"]
        assert parse(*words, *more).train.colocate_all is True
        assert parse(*words, *more, "--train.colocate_all", "false").train.colocate_all is False
        assert parse("--train.colocate_all", *more).train.colocate_all is True

    @pytest.mark.parametrize("word", ["false", "False", "no", "off"])
    def test_off_over_a_file(self, yaml_file, word):
        path = yaml_file("ds.packing_samples: true\nactor.muon.nesterov: true")
        args = parse("--config", path, "--ds.packing_samples", word, f"--actor.muon.nesterov={word}")
        assert (args.ds.packing_samples, args.actor.muon.nesterov) == (False, False)
        assert parse("--actor.muon.no_nesterov", word).actor.muon.nesterov is True

    @pytest.mark.parametrize("word", ["maybe", "0", "1", "null", ""])
    def test_anything_else_is_refused(self, word):
        for words in ([f"--ds.packing_samples={word}"], ["--ds.packing_samples", word]):
            with pytest.raises(ConfigError, match=f"^--ds.packing_samples is '{word}'; it must be true or false$"):
                parse(*words)

    def test_each_switch_of_the_table(self):
        parser = arguments.build_parser("")
        switches = [action for action in parser._actions if is_switch(action)]
        assert len(switches) > 30
        for action in switches:
            for word in ("true", "false"):
                result = parse_words(parser, [action.option_strings[0], word])
                assert getattr(result, action.dest) is ((word == "true") == action.const)


# --- presets ----------------------------------------------------------------------------------------------------------

PRESETS = sorted((ROOT / "configs").glob("*.yaml"))
NOT_THE_PAPERS = ("quickstart", "bapo_grpo_math_one_gpu")
TABLE_3 = {
    "rollout.n_samples_per_prompt": 8,
    "rollout.batch_size": 256,
    "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
    "train.num_episodes": 3,
    "train.seed": 42,
    "train.batch_size": 64 * 8,  # samples of a mini-batch of 64 groups
    "actor.adam.lr": 1e-6,
    "actor.entropy_coef": 0.001,
    "algo.kl.init_coef": 0.001,
    "algo.advantage.lambd": 1.0,
}


CORRECTIONS = sorted((ROOT / "configs" / "corrections").glob("*.yaml"))
# What another algorithm or method brings with it.
FOLLOWS = {"config", "algorithm", "algo.advantage.estimator", "adapt.method", "critic.model_name_or_path",
           "rollout.vllm_generate_batch_size", "run.faster"}  # fmt: skip


def files_over_presets():
    """Without the slow ones, each file is laid over one preset, and each preset is under some files."""
    for (number, path), (place, preset) in itertools.product(enumerate(METHODS + CORRECTIONS), enumerate(PRESETS)):
        marks = () if number % len(PRESETS) == place else pytest.mark.slow
        yield pytest.param(path, preset, marks=marks, id=f"{path.stem} {preset.stem}")


# What the sources of the methods say. The quickstart has v = 2 and an entropy bonus.
OF_TODAYS_POLICY = ("ar3po", "arpo", "bounded_staleness", "dots", "exgrpo", "filter_only", "freshness", "luffy",
                    "mopps", "partial_rollouts", "pods", "popo", "prompt_replay", "relift", "remix", "repo",
                    "rollout_replay", "skip_two_updates")  # fmt: skip
DAPO = {
    "actor.eps_clip_low_high": [0.2, 0.28],
    "actor.entropy_coef": None,
    "actor.loss_agg_mode": "token-mean",
    "algo.kl.init_coef": 0,
}
NUMBERS_OF_SOURCES = {
    **{name: {"adapt.rollout_delay": 1} for name in OF_TODAYS_POLICY},
    "bapo_authors_code": {"actor.dual_clip": 10, "actor.entropy_coef": None, "algo.kl.init_coef": 0},
    "bapo_fixed_thresholds": {"adapt.c2": ["3/8"], "adapt.c3": ["4/8"]},
    "dapo": DAPO,
    "dapo_with_buffer": DAPO,
    "dots": {"adapt.rollout_delay": 1, "adapt.ratio": "decoupled"},
    "grpo_delayed": {"adapt.rollout_delay": 5},
    "remix": {"adapt.rollout_delay": 1, "adapt.replay_steps": 2, "adapt.ratio": "decoupled", "train.max_epochs": 2},
}


class TestMethodFiles:
    @pytest.mark.parametrize("name", NUMBERS_OF_SOURCES)
    def test_have_the_numbers_of_their_sources(self, name):
        files = [str(ROOT / "configs" / file) for file in ("quickstart.yaml", f"methods/{name}.yaml")]
        algorithm = [] if "algorithm:" in Path(files[1]).read_text(encoding="utf-8") else ["--algorithm", "bapo_grpo"]
        flags = config.flags_of(arguments.parse(["--config", *files, *algorithm, "--data.solution_key", "solution"]))
        assert {flag: flags[flag] for flag in NUMBERS_OF_SOURCES[name]} == NUMBERS_OF_SOURCES[name]

    @pytest.mark.parametrize(("path", "preset"), files_over_presets())
    def test_change_what_they_name_and_nothing_else(self, path, preset):
        named = dict(flags_in(yaml.safe_load(path.read_text(encoding="utf-8"))))
        size = [] if "train.batch_size" in named else ["--train.batch_size=256"]  # Their sizes are for the quickstart.
        base = config.flags_of(arguments.parse(["--config", str(preset), *size]))
        laid_over = config.flags_of(arguments.parse(["--config", str(preset), str(path), *size]))
        changed = {name for name in base if base[name] != laid_over[name]}
        assert changed <= named.keys() | FOLLOWS
        for name, value in named.items():
            got = laid_over[name]
            assert got == value or got == [value] or got == str(value), name

    def test_there_are_as_many_as_methods_and_more(self):
        assert {*METHODS_BY_NAME} - {"bapo"} <= {path.stem for path in METHODS} and len(METHODS) >= 11

    def test_two_updates_a_rollout(self):
        files = [str(ROOT / "configs" / file) for file in ("quickstart.yaml", "methods/skip_two_updates.yaml")]
        args = arguments.parse(["--config", *files])
        assert args.rollout.batch_size * args.rollout.n_samples_per_prompt == 2 * args.train.batch_size
        assert args.adapt.skip_zero_advantage and args.actor.entropy_coef is None and args.algo.kl.init_coef == 0

    def test_shares_of_the_batch_are_those_of_the_methods(self):
        def sizes(name):
            args = arguments.parse(["--config", *(str(ROOT / "configs" / file) for file in ("quickstart.yaml", name))])
            return F(args.rollout.batch_size, args.adapt.batch_size)

        for name in ("dots", "repo", "exgrpo", "freshness", "prompt_replay"):
            assert sizes(f"methods/{name}.yaml") == F(1, 2)
        assert sizes("methods/remix.yaml") == F(3, 5)
        assert sizes("methods/rollout_replay.yaml") == F(2, 3)


class TestPresets:
    @pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
    def test_parses(self, path):
        args = arguments.parse(["--config", str(path)])
        assert args.algorithm in ("ba_ppo", "bapo_grpo") and args.adapt.method == "bapo"
        assert args.run.name == path.stem

    @pytest.mark.parametrize("path", [p for p in PRESETS if p.stem not in NOT_THE_PAPERS], ids=lambda path: path.stem)
    def test_holds_table_3(self, path):
        args = arguments.parse(["--config", str(path)])
        values = flat(args)
        geometry, countdown = "geometry" in path.stem, "countdown" in path.stem
        # Table 2: 30 epochs of Geometry3K
        wanted = TABLE_3 | ({"train.num_episodes": 30} if geometry else {})
        assert {name: values[name] for name in TABLE_3} == wanted
        adapt = args.adapt
        assert adapt.thresholds() == (F(1, 8), Interval(F(1, 8), F(4, 8)), Interval(F(2, 8), F(5, 8)))
        assert (adapt.rollout_delay, adapt.reevaluate_every) == (5, 5)
        assert adapt.most_reevaluated(args.rollout.batch_size) == 128
        assert (adapt.gaussian_mean, adapt.gaussian_std, adapt.filter) == (0.5, 0.2, "range")
        longest_prompt = 512 if countdown else 2048  # Qwen2.5-Math takes 4096 tokens in all
        assert args.data.max_len - args.rollout.max_new_tokens == longest_prompt
        assert args.ckpt.save_steps % adapt.rollout_delay == 0

    @pytest.mark.parametrize(
        ("name", "algorithm", "model", "critic", "buffer", "response"),
        [
            ("ba_ppo_qwen3_4b", "ba_ppo", "Qwen/Qwen3-4B", "Qwen/Qwen3-4B", 64, 4096),
            ("bapo_grpo_math_qwen3_8b", "bapo_grpo", "Qwen/Qwen3-8B", None, 256, 8192),
            (
                "bapo_grpo_math_r1_distill_qwen_1.5b",
                "bapo_grpo",
                "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
                None,
                256,
                8192,
            ),
            ("bapo_grpo_countdown_qwen2.5_math_1.5b", "bapo_grpo", "Qwen/Qwen2.5-Math-1.5B", None, 256, 3584),
            ("bapo_grpo_countdown_qwen2.5_math_7b", "bapo_grpo", "Qwen/Qwen2.5-Math-7B", None, 256, 3584),
            ("bapo_grpo_geometry_qwen2.5_vl_3b", "bapo_grpo", "Qwen/Qwen2.5-VL-3B-Instruct", None, 256, 2048),
            ("bapo_grpo_geometry_qwen2.5_vl_7b", "bapo_grpo", "Qwen/Qwen2.5-VL-7B-Instruct", None, 256, 2048),
        ],
    )
    def test_models_and_lengths(self, name, algorithm, model, critic, buffer, response):
        args = arguments.parse(["--config", str(ROOT / "configs" / f"{name}.yaml")])
        assert (args.algorithm, args.actor.model_name_or_path, args.critic.model_name_or_path) == (
            algorithm,
            model,
            critic,
        )
        assert (args.adapt.buffer_size, args.rollout.max_new_tokens) == (buffer, response)

    def test_numbers_with_an_exponent_are_numbers(self):
        # YAML 1.1 reads 1e-6 as a word, and argparse would still take it: the files should not depend on that.
        def words(node):
            for value in node.values():
                yield from words(value) if isinstance(value, dict) else [value]

        for path in PRESETS:
            for value in words(yaml.safe_load(path.read_text(encoding="utf-8"))):
                assert not (isinstance(value, str) and value[:1].isdigit() and "e-" in value), (path, value)
