"""Agents that `check` refuses by name, or lets play: the same files as a run loads them."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from bapo_openrlhf import user_file
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.launch import apart
from bapo_openrlhf.launch.episode import ANSWER, TURNS, check_agent

PROBLEM = ("2+2=", "4")
AGENT = """from __future__ import annotations
import dataclasses
import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

@dataclasses.dataclass
class Verdict:
    right: bool
    kind: dataclasses.KW_ONLY

class AgentInstance(AgentInstanceBase):
    def __init__(self):
        self.turn = 0

    async def reset(self, states):
        return {RESET}

    async def step(self, states):
        self.turn += 1
        return {STEP}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""
STEP_LINE = 18
GOOD = {"rewards": "torch.tensor(0.5)", "environment_feedback": "' again '", "done": "self.turn == 2"}


def source(reset="states", **step):
    """An agent with these values in what its `step` returns; None leaves a key out."""
    values = {key: value for key, value in (GOOD | step).items() if value is not None}
    return AGENT.replace("{RESET}", reset).replace(
        "{STEP}", ", ".join(f"{k!r}: {v}" for k, v in values.items()).join("{}")
    )


def returning(value):
    return AGENT.replace("{RESET}", "states").replace("{STEP}", value)


@pytest.fixture
def refusal(tmp_path):
    def check(text, problem=PROBLEM, *, model="org/model", adapted=True, **verifier):
        path = tmp_path / "my_agent.py"
        path.write_text(text)
        args = SimpleNamespace(
            train=SimpleNamespace(agent_func_path=str(path)),
            actor=SimpleNamespace(model_name_or_path=str(model)),
            rollout=SimpleNamespace(temperature=1.0, top_p=1.0, max_new_tokens=8),
            verifier=SimpleNamespace(**{"processes": 4, "timeout": 60.0} | verifier),
            adapt=SimpleNamespace(enabled=adapted),
        )
        try:
            return check_agent(args, problem)
        except ConfigError as error:
            assert str(error).startswith(f"train.agent_func_path {path}")
            assert "\n" not in str(error)
            return str(error).replace(str(path), "FILE")

    return check


# What `step` or `reset` returns instead, in whole or in part. The error names the part, and where the function begins.
RETURNED = {
    ("step", "rewards"): ["0.5", "torch.tensor(float('nan'))", "torch.zeros(2)", "None"],
    ("step", "environment_feedback"): [None, "None"],
    ("step", "done"): [None],
    ("step", "extra_logs"): ["{'a': 'x'}", "{'score': 1}", "[1]"],
    ("step", "scores"): ["'x'"],
    ("step", ""): ["None", "1.0", "{}"],
    ("reset", "observation"): ["{}", "{'observation': ''}", "{'observation': [1]}"],
    ("reset", ""): ["None"],
}


@pytest.mark.parametrize(
    ("function", "key", "value"), [(*at, value) for at, values in RETURNED.items() for value in values]
)
def test_what_an_agent_must_not_return(refusal, function, key, value):
    values = {"reset": value} if function == "reset" else {key: value}
    text = source(**values) if key or function == "reset" else returning(value)
    said = refusal(text)
    assert f"AgentInstance.{function} returned" in said and key in said
    assert f"(FILE:{STEP_LINE - 3 * (function == 'reset')})" in said


SLEEP = "__import__('asyncio').sleep"
ASKED = "[states['sampling_params'].clone()][0]"  # of vLLM; an agent may read and change it
# A whole file, and what the error names.
FILES = {
    "syntax": ("def broken(:\n", "(FILE:1)"),
    "no executor": ("class Agent: pass\n", "AgentExecutor"),
    "another class": ("class AgentExecutor: pass\n", "AgentExecutor"),
    "abstract": (
        "from openrlhf.utils.agent import AgentExecutorBase\nclass AgentExecutor(AgentExecutorBase): pass\n",
        "AgentExecutor() raised TypeError",
    ),
    "not async": (source().replace("async def step", "def step"), "AgentInstance.step"),
    "raises in a turn": (returning("{}['answer']"), f"KeyError: 'answer' (FILE:{STEP_LINE + 2})"),
    "ends its process": (returning("__import__('os')._exit(4)"), "exit status 4"),
    "ends its process at once": ("import os; os._exit(4)", "exit status 4"),
    "an import that never ends": ("while True: pass", "loading it took more than 1 s"),
    "waits for ever": (source().replace("self.turn += 1", f"await {SLEEP}(1000)"), "verifier.timeout"),
    "blocks for ever": (source().replace("self.turn += 1", "while True: pass"), "verifier.timeout"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_agent(refusal, monkeypatch, name):
    text, named = FILES[name]
    if "never" in name:
        monkeypatch.setattr(apart, "LOADING", 1.0)
    assert named in refusal(text, timeout=1.0 if "ever" in name else 60.0)


@pytest.mark.parametrize(("timeout", "adapted"), [(2.0, True), (0.5, False)])
def test_the_limit_is_that_of_the_run(refusal, timeout, adapted):
    """An episode has three generations here. The limit holds between two of them, and only if batches are adapted."""
    text = source(done="False").replace("self.turn += 1", f"await {SLEEP}(0.9)")
    assert refusal(text, timeout=timeout, adapted=adapted) == []


def test_loading_may_take_longer_than_a_turn(refusal):
    assert refusal(source().replace("import torch\n", "import torch, time\ntime.sleep(2.5)\n"), timeout=2.0) == []


@pytest.mark.parametrize(("values", "adapted"), [
    ({}, True),
    ({}, False),
    ({"extra_logs": "{'tries': torch.tensor(2.0), 'n': 1}", "scores": "torch.tensor(0.25)"}, True),
    ({"environment_feedback": "''"}, True),
    ({"done": "False"}, True),  # it would go on for ever
    ({"rewards": "__import__('numpy').float32(1)", "done": "True"}, True),
    ({"done": "states['label'] == '4' and states['observation_text'] == '2+2=' and Verdict(True)"}, True),
    ({"done": f"1 / ({ASKED}.stop_token_ids == [] and {ASKED}.repetition_penalty == {ASKED}.temperature == 1)"}, True),
])  # fmt: skip
def test_a_good_agent_may_play(refusal, values, adapted):
    assert refusal(source(**values), adapted=adapted) == []


def test_the_agent_gets_the_scripted_answer(refusal, tmp_path):
    note = tmp_path / "note"
    noted = f"open({str(note)!r}, 'a').write(states['observation_text'] + '|' + states['action_text'] + chr(10)) < 0"
    assert refusal(source(done=noted)) == []
    lines = note.read_text().splitlines()
    assert lines[:2] == [f"2+2=|{ANSWER}", f"2+2={ANSWER} again |{ANSWER}"] and len(lines) == TURNS


@pytest.mark.parametrize(("text", "loads"), [(returning("None"), True), ("def broken(:\n", False)])
def test_without_a_problem_it_is_only_loaded(refusal, text, loads):
    result = refusal(text, problem=None)
    assert result == [] if loads else "cannot be imported" in result


OWN = """
from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    async def execute(self, *, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        tokens = hf_tokenizer(text=prompt, add_special_tokens=False, return_tensors="pt")["input_ids"][0].tolist()
        found = (await llm_engine.generate(tokens, sampling_params)).outputs[0]
        log_probs = [0.0] * len(tokens) + [one[t].logprob for t, one in zip(found.token_ids, found.logprobs)]
        whole = {"prompt": prompt, "label": label, "observation_tokens": tokens + found.token_ids,
                 "action_ranges": [(len(tokens), len(tokens) + len(found.token_ids))],
                 "rollout_log_probs": log_probs, "reward": 1.0, "scores": 1.0, "extra_logs": {}}
        return CHANGED
"""
RESPONSES = {
    "None": "None",
    "observation_tokens": "{**whole, 'observation_tokens': []}",
    "action_ranges": "{k: v for k, v in whole.items() if k != 'action_ranges'}",
    "action_ranges = [3]": "{**whole, 'action_ranges': [3]}",
    "action_ranges = [('a', 'b')]": "{**whole, 'action_ranges': [('a', 'b')]}",
    "action_ranges = [(0, 10000)]": "{**whole, 'action_ranges': [(0, 10_000)]}",
    "1 rollout_log_probs": "{**whole, 'rollout_log_probs': [0.0]}",
    "no rollout_log_probs": "{**whole, 'rollout_log_probs': None}",
    "reward = 'x'": "{**whole, 'reward': 'x'}",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    base_model = Path(__file__).parents[3] / "examples" / "quickstart" / "base_model.py"
    folder = tmp_path_factory.mktemp("model")
    user_file.load("base model", base_model).make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    return folder


@pytest.mark.parametrize(("named", "value"), RESPONSES.items())
def test_an_executor_of_ones_own_that_returns_something_else(refusal, model, named, value):
    assert named in refusal(OWN.replace("CHANGED", value), model=model)


def test_an_executor_of_ones_own_may_play_with_the_models_tokenizer(refusal, model):
    assert refusal(OWN.replace("CHANGED", "whole"), model=model) == []
    (warning,) = refusal(OWN.replace("CHANGED", "None"))
    assert warning.startswith("train.agent_func_path is ") and "org/model" in warning
    # Log-probs are not needed without batch adaptation.
    assert refusal(OWN.replace("CHANGED", "{**whole, 'rollout_log_probs': None}"), model=model, adapted=False) == []
