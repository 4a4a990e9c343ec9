"""A tokenizer counts and renders as OpenRLHF's does, here and in a process of its own."""

import json
import os
import pickle
import subprocess
import sys
from multiprocessing import active_children

import pytest

from bapo_openrlhf import machine
from bapo_openrlhf.cpu import stack as cpu
from bapo_openrlhf.data import prompts
from bapo_openrlhf.data.tokenizer import Tokenizer, tokenizer_process
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.host import module_of

pytestmark = pytest.mark.usefixtures("keep_environment")

TEXTS = ["", "1+1", " two  words\n", "é 好 🙂", "<s>x</s>"]
CODE = """
import torch
from transformers import PreTrainedTokenizerFast

class Own(PreTrainedTokenizerFast):
    slow_tokenizer_class = torch.nn.Module
"""


@pytest.mark.parametrize("load", [Tokenizer, tokenizer_process])
def test_it_is_the_one_of_openrlhf(load, tokenizer_folder):
    theirs = module_of("utils/utils.py").get_tokenizer(str(tokenizer_folder), None, "left", use_fast=True)
    ours = load(str(tokenizer_folder), True)
    assert ours.lengths(TEXTS) == [len(theirs(text, add_special_tokens=False).input_ids) for text in TEXTS]
    messages, options = [{"role": "user", "content": "1?"}], {"tokenize": False, "add_generation_prompt": True}
    assert ours.apply_chat_template(messages, **options) == theirs.apply_chat_template(messages, **options)
    assert ours.has_chat_template() and ours.image_token() is None


def test_its_process_ends_with_it(tokenizer_folder):
    before = active_children()
    render = prompts.Renderer("model", str(tokenizer_folder), template=None, chat=False, quick=True)
    assert len(active_children()) == len(before) + 1 and render.tokenizer.lengths(["1+1"]) == [3]
    del render
    assert active_children() == before


def test_one_with_code_of_its_own_may_need_torch(tokenizer_folder):
    file = tokenizer_folder / "tokenizer_config.json"
    fields = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "tokenization_own.Own"]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    (tokenizer_folder / "tokenization_own.py").write_text(CODE)
    assert tokenizer_process(str(tokenizer_folder), True).lengths(["1+1"]) == [3]


def test_errors_reach_this_process(tokenizer_folder):
    (tokenizer_folder / "chat_template.jinja").write_text("{{ raise_exception('no system') }}")
    render = prompts.Renderer("model", str(tokenizer_folder), template=None, chat=True, quick=True)
    with pytest.raises(Exception, match="no system"):
        render([{"role": "system", "content": "x"}])
    (tokenizer_folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"^model is .*; its tokenizer cannot be loaded: [^\n]+$"):
        prompts.Renderer("model", str(tokenizer_folder), template=None, chat=False, quick=True)


def test_only_a_run_to_come_takes_another_process(monkeypatch, tokenizer_folder, check):
    calls = []
    monkeypatch.setattr(prompts, "tokenizer_process", lambda *what: calls.append(what) or Tokenizer(*what))
    name, model = check.write(".jsonl", [{"q": "1?", "a": "x"}]), str(tokenizer_folder)
    check(name, ahead=False, actor__model_name_or_path=model)
    assert not calls
    check(name, ahead=True, actor__model_name_or_path=model)
    assert calls == [(model, True)]


def test_a_process_that_loads_it_apart_imports_no_torch(tokenizer_folder):
    """Neither do prompts that are their rows' texts. Importing torch takes longer than all else that `check` does."""
    script = (
        "import sys\nfrom bapo_openrlhf.data.prompts import Renderer\n"
        f"render = Renderer('model', {str(tokenizer_folder)!r}, template=None, chat=False, quick=True)\n"
        "print(render.tokenizer.lengths([render('1+1')]), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[3]", "False"]


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
