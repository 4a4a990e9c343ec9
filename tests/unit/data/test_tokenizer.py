"""A tokenizer counts and renders as OpenRLHF's does."""

import os
import pickle
import subprocess
import sys

import pytest

from bapo_openrlhf import machine
from bapo_openrlhf.cpu import stack as cpu
from bapo_openrlhf.data import prompts
from bapo_openrlhf.data.tokenizer import Tokenizer
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.host import module_of

pytestmark = pytest.mark.usefixtures("keep_environment")

TEXTS = ["", "1+1", " two  words\n", "é 好 🙂", "<s>x</s>"]


def test_it_is_the_one_of_openrlhf(tokenizer_folder):
    theirs = module_of("utils/utils.py").get_tokenizer(str(tokenizer_folder), None, "left", use_fast=True)
    ours = Tokenizer(str(tokenizer_folder), True)
    assert ours.lengths(TEXTS) == [len(theirs(text, add_special_tokens=False).input_ids) for text in TEXTS]
    messages, options = [{"role": "user", "content": "1?"}], {"tokenize": False, "add_generation_prompt": True}
    assert ours.apply_chat_template(messages, **options) == theirs.apply_chat_template(messages, **options)
    assert ours.has_chat_template() and ours.image_token() is None


def test_errors_of_a_template_and_of_a_damaged_file(tokenizer_folder):
    (tokenizer_folder / "chat_template.jinja").write_text("{{ raise_exception('no system') }}")
    render = prompts.Renderer("model", str(tokenizer_folder), template=None, chat=True)
    with pytest.raises(Exception, match="no system"):
        render([{"role": "system", "content": "x"}])
    (tokenizer_folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"^model is .*; its tokenizer cannot be loaded: [^\n]+$"):
        prompts.Renderer("model", str(tokenizer_folder), template=None, chat=False)


def test_a_run_on_the_cpu_does_not_ask_the_hub(check):
    """Rows are read first, which loads the hub's library. Without a network it would try again for two minutes."""
    name = check.write(".jsonl", [{"q": "1?", "a": "x"}])
    script = (
        "import pathlib, pickle, sys\nfrom bapo_openrlhf.data.check import check_data\n"
        f"folder = pathlib.Path({str(check.folder / 'kept')!r})\n"
        "check_data(pickle.load(sys.stdin.buffer), folder, ahead=False, without=(), takes=None)"
    )
    args = check.args(data__prompt_dataset=name, actor__model_name_or_path="no-such-owner/no-such-model")
    environment = {key: value for key, value in os.environ.items() if not key.endswith("_OFFLINE")} | {cpu.SWITCH: "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], input=pickle.dumps(args), env=environment, capture_output=True, timeout=300
    )
    *_, last = done.stderr.decode().splitlines()
    assert "model; its tokenizer cannot be loaded (HF_HUB_OFFLINE is set): " in last and b"Retrying" not in done.stderr


@pytest.mark.parametrize(("offline", "says"), [(True, " (HF_HUB_OFFLINE is set)"), (False, "")])
def test_whether_the_hub_is_asked_is_what_its_library_understands(monkeypatch, offline, says):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    assert machine.offline() == says


@pytest.mark.parametrize("text", ["1+1", "{} \\boxed{x}", "<image>?"])
def test_a_prompt_without_a_template_is_what_openrlhf_makes_of_it(text, tokenizer_folder):
    render = prompts.Renderer("model", str(tokenizer_folder), template=None, chat=False)
    assert render(text) == prompts.fill(text, None, None)
