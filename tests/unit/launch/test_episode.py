"""Agents that `check` refuses by name, or lets play: the same files as a run loads them."""

from types import SimpleNamespace

import pytest

from bapo_openrlhf.errors import ConfigError
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


# What `step` returns instead, and what the error says of it. Its place is where `step` begins.
STEPS = {
    "None": ("None", "returned None, a NoneType; it must be a dict with rewards, environment_feedback, done"),
    "a number": ("1.0", "returned 1.0, a float; it must be a dict with"),
    "nothing": ("{}", "returned no rewards; it must be a tensor with one finite number"),
}
KEYS = {
    "a float": ({"rewards": "0.5"}, "returned rewards = 0.5, a float; it must be a tensor with one finite number"),
    "no number": ({"rewards": "torch.tensor(float('nan'))"}, "a Tensor; it must be a tensor with one finite number"),
    "two numbers": ({"rewards": "torch.zeros(2)"}, "it must be a tensor with one finite number"),
    "no reward": ({"rewards": "None"}, "returned rewards = None, a NoneType; it must be a tensor"),
    "no feedback": ({"environment_feedback": None}, "returned no environment_feedback; it must be a text, which may"),
    "feedback None": ({"environment_feedback": "None"}, "returned environment_feedback = None, a NoneType; it must be"),
    "no end": ({"done": None}, "returned no done; it must be true or false"),
    "a log of text": ({"extra_logs": "{'a': 'x'}"}, "returned extra_logs['a'] = 'x' for one response; one number"),
    "a log of the run": ({"extra_logs": "{'score': 1}"}, "returned extra_logs['score'], a name that the run itself"),
    "logs in a list": ({"extra_logs": "[1]"}, "returned extra_logs = [1]; it must be a dict of numbers"),
    "a score of text": ({"scores": "'x'"}, "returned scores = 'x' for one response; one finite number is needed"),
}
RESETS = {
    "an empty one": ("{}", "returned no observation; it must be a text that is not empty"),
    "nothing": ("None", "returned None, a NoneType; it must be a dict with observation"),
    "no text": ("{'observation': ''}", "returned observation = '', a str; it must be a text that is not empty"),
    "tokens": ("{'observation': [1]}", "returned observation = [1], a list; it must be a text"),
}


@pytest.mark.parametrize("text", [returning(value) for value, _ in STEPS.values()], ids=STEPS)
def test_a_step_that_returns_something_else(refusal, text, request):
    says = STEPS[request.node.callspec.id][1]
    assert f"the agent raised Invalid: AgentInstance.step {says}" in refusal(text)
    assert f"(FILE:{STEP_LINE})" in refusal(text)


@pytest.mark.parametrize("name", KEYS)
def test_a_step_with_a_wrong_value(refusal, name):
    values, says = KEYS[name]
    result = refusal(source(**values))
    assert "AgentInstance.step " in result and says in result and f"(FILE:{STEP_LINE})" in result


@pytest.mark.parametrize("name", RESETS)
def test_a_reset_with_a_wrong_value(refusal, name):
    reset, says = RESETS[name]
    result = refusal(source(reset=reset))
    assert f"AgentInstance.reset {says}" in result and f"(FILE:{STEP_LINE - 3})" in result


# A whole file, and what the error says of it.
FILES = {
    "syntax": ("def broken(:\n", "FILE cannot be imported: SyntaxError: invalid syntax (my_agent.py, line 1) (FILE:1)"),
    "no executor": ("class Agent: pass\n", "FILE has no class AgentExecutor that is an openrlhf.utils.agent.Agent"),
    "another class": ("class AgentExecutor: pass\n", "FILE has no class AgentExecutor that is an openrlhf.utils"),
    "an object": ("AgentExecutor = 3\n", "FILE has no class AgentExecutor that is an openrlhf.utils.agent.Agent"),
    "abstract": (
        "from openrlhf.utils.agent import AgentExecutorBase\nclass AgentExecutor(AgentExecutorBase): pass\n",
        "FILE: AgentExecutor() raised TypeError: Can't instantiate abstract class",
    ),
    "not async": (source().replace("async def step", "def step"), "AgentInstance.step is not async; write `async def`"),
    "raises in a turn": (returning("{}['answer']"), f"the agent raised KeyError: 'answer' (FILE:{STEP_LINE + 2})"),
    "raises later": (
        source(done="self.turn == 2 and 1 / 0"),
        f"ZeroDivisionError: division by zero (FILE:{STEP_LINE + 2})",
    ),
    "ends its process": (
        returning("__import__('os')._exit(4)"),
        f"FILE: the agent ended its process (exit status 4), in an episode with the first prompt in which the model "
        f"always says {ANSWER!r} (FILE:{STEP_LINE})",
    ),
    "ends its process at once": ("import os; os._exit(4)", "FILE: loading it ended its process (exit status 4)"),
}  # fmt: skip


def test_a_file_whose_import_never_ends(refusal):
    assert refusal("while True: pass", timeout=0.5) == (
        "train.agent_func_path FILE: loading it took more than 0.5 s (verifier.timeout)"
    )


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_agent(refusal, name):
    text, says = FILES[name]
    assert says in refusal(text)


@pytest.mark.parametrize(
    ("values", "adapted"),
    [
        ({}, True),
        ({}, False),
        ({"extra_logs": "{'tries': torch.tensor(2.0), 'n': 1}", "scores": "torch.tensor(0.25)"}, True),
        ({"environment_feedback": "''"}, True),
        ({"done": "False"}, True),  # it would go on for ever
        ({"rewards": "__import__('numpy').float32(1)", "done": "True"}, True),
        ({"done": "states['label'] == '4' and states['observation_text'] == '2+2=' and Verdict(True)"}, True),
    ],
)
def test_a_good_agent_may_play(refusal, values, adapted):
    assert refusal(source(**values), adapted=adapted) == []


def test_the_agent_may_read_and_change_what_vllm_is_asked(refusal):
    asked = "[states['sampling_params'].clone()][0]"
    may = f"{asked}.stop_token_ids == [] and {asked}.repetition_penalty == 1 and {asked}.temperature == 1"
    assert refusal(source(done=f"1 / ({may})")) == []


def test_the_agent_gets_the_scripted_answer(refusal, tmp_path):
    note = tmp_path / "note"
    noted = f"open({str(note)!r}, 'a').write(states['observation_text'] + '|' + states['action_text'] + chr(10)) < 0"
    assert refusal(source(done=noted)) == []
    lines = note.read_text().splitlines()
    assert lines[:2] == [f"2+2=|{ANSWER}", f"2+2={ANSWER} again |{ANSWER}"] and len(lines) == TURNS


def test_an_agent_that_waits_for_ever(refusal):
    text = source().replace("self.turn += 1", "await __import__('asyncio').sleep(1000)")
    assert "TimeoutError: verifier.timeout: it took more than 0.5 s" in refusal(text, timeout=0.5)


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
    "None": ("None", "returned None, a NoneType; it must be a dict with prompt, label, observation_tokens"),
    "no tokens": ("{**whole, 'observation_tokens': []}", "returned observation_tokens = [], a list; it must be a list"),
    "no ranges": ("{k: v for k, v in whole.items() if k != 'action_ranges'}", "returned no action_ranges; it must be"),
    "no pairs": ("{**whole, 'action_ranges': [3]}", "returned action_ranges = [3], a list; it must be a list of pairs"),
    "no numbers": ("{**whole, 'action_ranges': [('a', 'b')]}", "returned action_ranges = [('a', 'b')], a list; it"),
    "beyond the end": ("{**whole, 'action_ranges': [(0, 10_000)]}", "returned action_ranges = [(0, 10000)]; each must"),
    "too few log-probs": ("{**whole, 'rollout_log_probs': [0.0]}", "returned 1 rollout_log_probs for "),
    "no log-probs": ("{**whole, 'rollout_log_probs': None}", "returned no rollout_log_probs for "),
    "a reward of text": ("{**whole, 'reward': 'x'}", "returned reward = 'x' for one response; one finite number"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tokenizer."""
    from pathlib import Path

    from bapo_openrlhf import user_file

    base_model = Path(__file__).parents[3] / "examples" / "quickstart" / "base_model.py"
    folder = tmp_path_factory.mktemp("model")
    user_file.load("base model", base_model).make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    return folder


@pytest.mark.parametrize("name", RESPONSES)
def test_an_executor_of_ones_own_that_returns_something_else(refusal, model, name):
    value, says = RESPONSES[name]
    assert says in refusal(OWN.replace("CHANGED", value), model=model)


def test_an_executor_of_ones_own_may_play_with_the_models_tokenizer(refusal, model):
    assert refusal(OWN.replace("CHANGED", "whole"), model=model) == []
    (warning,) = refusal(OWN.replace("CHANGED", "None"))
    assert "not tried, because the tokenizer of org/model is not here" in warning


def test_log_probs_are_not_needed_without_batch_adaptation(refusal, model):
    assert refusal(OWN.replace("CHANGED", "{**whole, 'rollout_log_probs': None}"), model=model, adapted=False) == []
