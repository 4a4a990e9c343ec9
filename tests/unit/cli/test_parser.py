"""Flags that are not there, and what their users meant."""

import os
import subprocess
import sys

import pytest

from bapo_openrlhf.cli import arguments, main
from bapo_openrlhf.cli.parser import ALIASES, did_you_mean
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.flags.config import ALGORITHMS

# What users of TRL, verl and older versions of OpenRLHF type, typing errors, and the flags that do it here.
MEANT = {
    "--lr": "--actor.adam.lr",
    "--learning-rate": "--actor.adam.lr",
    "--actor.lr": "--actor.adam.lr",  # argparse says that this is the beginning of several flags
    "--model_name_or_path": "--actor.model_name_or_path or --reward.model_name_or_path or --critic.model_name_or_path",
    "--data": "--data.prompt_dataset",
    "--batch_size": "--train.batch_size or --adapt.batch_size or --rollout.batch_size",
    "--num_generations": "--rollout.n_samples_per_prompt",
    "--adapt.bufer_size": "--adapt.buffer_size",
    "--lora_rank": "--ds.lora.rank",
    "--actor_num_gpus_per_node": "--actor.num_gpus_per_node",
    "--Train.Seed": "--train.seed",
}


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as error:
        arguments.parse(["--actor.model_name_or_path", "m", "--reward.remote_url", "r.py", *words])
    return str(error.value)


@pytest.mark.parametrize("typed", MEANT)
@pytest.mark.parametrize("form", ["two words", "one word"])
def test_an_unknown_flag_is_an_error_with_the_right_name(typed, form):
    said = refusal(typed, "1") if form == "two words" else refusal(f"{typed}=1")
    start, _, end = said.partition("; did you mean ")
    assert start == f"unknown flag {typed}" and end.endswith("?")
    assert sorted(end[:-1].split(" or ")) == sorted(MEANT[typed].split(" or "))


def test_aliases_name_flags_and_no_flag_has_such_a_name():
    known = {name[2:] for name in arguments.build_parser("prog")._option_string_actions}
    meant = {name for alias in ALIASES.values() for name in alias.split(" or ")}
    assert meant - known == set(ALIASES["bapo"].split(" or ")) < set(ALGORITHMS)
    # an ending that flags have is found without an alias
    assert {name.rpartition(".")[2] for name in known} & set(ALIASES) == {"lr", "dataset"}  # also eval.dataset


def test_nothing_like_it_and_an_algorithm_in_the_letters_of_the_paper():
    assert refusal("--zzzzzz", "1") == "unknown flag --zzzzzz"
    assert did_you_mean("a\nb", [*ALGORITHMS]) == ""
    assert did_you_mean("BA-PPO", ALGORITHMS) == "; did you mean ba_ppo?"


def test_a_word_too_many():
    assert refusal("--train.batch_size", "1", "-2").startswith("unexpected word '-2'; the flag before it")
    assert refusal("x.yaml").startswith("unexpected word 'x.yaml'; did you mean --config x.yaml?")


@pytest.mark.parametrize(("words", "end"), [
    ("study --config x.yaml --onlyreport", "; did you mean --only-report?\n"),
    ("plan --lr 1", "; did you mean --actor.adam.lr?\n"),
    ("watch my run --once", "a name with spaces must be in quotes\n"),
])  # fmt: skip
def test_other_commands_have_it_too(words, end, capsys):
    assert main.run(words.split()) == 2
    assert capsys.readouterr().err.endswith(end)


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("bapo_openrlhf.cli.methods.main", interrupted)
    assert main.run(["methods"]) == 130
    assert capsys.readouterr().err == "bapo-openrlhf methods was stopped by Ctrl-C\n"


@pytest.mark.parametrize("words", ["--algorithm dapo", "--algorithm mopps", "--adapt.method dapo"])
def test_the_name_of_a_file_of_flags(words):
    """dapo is only a file, and mopps a method, too."""
    name = words.split()[-1]
    says = f"{name} is a file of flags: name configs/methods/{name}.yaml "
    assert says in refusal("--rollout.n_samples_per_prompt=8", *words.split())


@pytest.mark.parametrize(("shell", "text", "status", "output"), [
    (" | head -c 1; exit ${PIPESTATUS[0]}", "x" * 10**6, 1, ("x", "")),  # the reader has gone
    (" >&- 2>&-", "x", 0, ("", "")),
    (" >/dev/full", "x", 1, ("", "error: No space left on device\n")),
    ("", "█", 0, ("?\n", "")),  # the terminal lacks the character
])  # fmt: skip
def test_a_command_without_a_place_for_its_output(shell, text, status, output):
    shown = f"lambda words: print({text[0]!r} * {len(text)}) or 0"
    code = f"from bapo_openrlhf.cli import main; main.run = {shown}; main.main()"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    words = ["bash", "-c", f'"$0" -c "$1"{shell}', sys.executable, code]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert (done.returncode, (done.stdout, done.stderr)) == (status, output)


def test_a_working_folder_that_was_deleted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert main.run(["methods"]) == 2
    assert capsys.readouterr().err == "error: the working folder has been deleted; change to one that is there\n"
