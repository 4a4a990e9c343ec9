"""An agent of two turns, scripted as scripted_reward.py, which writes down what the engine was asked and gave.

LABEL says how many of a prompt's 4 responses are right. 8: all; 4: two; 2: none at first and two when the prompt is
generated again; 0: one. A right response gets a reward of 1 in each turn, so rewards go from 0 to 2.

AGENT_FOLDER gets a line of episodes.jsonl for each response, and PROMPT.count counts the responses, also over several
runs. Nothing in the lines comes from OpenRLHF's masks or from what is stored: they hold the tokens and log-probs of
vLLM's own outputs. The first response to AGENT_HANGS never gets an answer in its second turn. If the file AGENT_FAILS
exists, each agent fails at its start.
"""

import asyncio
import fcntl
import json
import os
from contextvars import ContextVar
from copy import copy
from pathlib import Path

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

from bapo_openrlhf.launch.episode import ScriptedEngine

RESPONSES = 4
STOP = "7"  # ends a turn
FOLDER = Path(os.environ["AGENT_FOLDER"])
turns = ContextVar("turns")  # of the response of this task
checked = ContextVar("checked", default=False)  # whether this is the episode of the check before the run


def count(prompt):
    """How often the prompt was generated before, and the number of this response among the 4."""
    if checked.get():
        return 0, 0
    with (FOLDER / f"{prompt}.count").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        before = divmod(file.seek(0, os.SEEK_END), RESPONSES)
        file.write(b".")
    return before


class AgentInstance(AgentInstanceBase):
    def __init__(self):
        self.feedback = []

    async def reset(self, states):
        if Path(os.environ["AGENT_FAILS"]).exists():
            raise LookupError("the environment is gone")
        self.prompt, label = states["observation"], int(states["label"])
        self.generation, self.position = count(self.prompt)
        right = {8: 4, 4: 2, 2: 2 if self.generation else 0, 0: 1}[label]
        self.reward = float(self.position < right)
        return states

    async def step(self, states):
        second = len(turns.get()) == 2
        self.feedback.append(":" if second else " 12345"[: 2 + self.position] + "=")
        if second and not checked.get():
            self.write()
        if second and self.prompt == os.environ["AGENT_HANGS"] and (self.generation, self.position) == (0, 0):
            await asyncio.Event().wait()
        return {
            "rewards": torch.tensor(self.reward),
            "environment_feedback": self.feedback[-1],
            "done": second,
            "extra_logs": {"turns": torch.tensor(float(len(turns.get())))},
        }

    def write(self):
        line = {"prompt": self.prompt, "generation": self.generation, "position": self.position}
        line |= {"turns": turns.get(), "feedback": self.feedback, "reward": self.reward * len(self.feedback)}
        with (FOLDER / "episodes.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


class Engine:
    """The engine, with short turns; OpenRLHF gives each one what is left of data.max_len."""

    def __init__(self, engine):
        self.engine = engine

    async def generate(self, tokens, params, **kwargs):
        params = copy(params)
        params.max_tokens = min(params.max_tokens, 4 + len(tokens) % 5)
        output = await self.engine.generate(tokens, params, **kwargs)
        result = output.outputs[0]
        log_probs = [place[token].logprob for token, place in zip(result.token_ids, result.logprobs, strict=True)]
        turns.get().append({"asked": list(tokens), "given": list(result.token_ids), "log_probs": log_probs})
        return output


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)

    async def execute(self, *, llm_engine, sampling_params, **request):
        turns.set([])
        checked.set(isinstance(llm_engine, ScriptedEngine))
        sampling_params.stop = [STOP]
        return await super().execute(llm_engine=Engine(llm_engine), sampling_params=sampling_params, **request)
