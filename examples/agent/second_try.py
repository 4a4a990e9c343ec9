"""Countdown with a second try: a right answer is worth 1 at the first try and 0.5 at the second."""

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

from bapo_openrlhf.tasks.countdown import answer, parse_problem, value_over


class AgentInstance(AgentInstanceBase):
    def __init__(self):
        self.tries = 0

    async def step(self, states):
        self.tries += 1
        numbers, target = parse_problem(states["label"])
        right = value_over(answer(states["action_text"]) or "", numbers) == target
        done = right or self.tries == 2
        return {
            "rewards": torch.tensor(1 / self.tries if right else 0.0),
            "environment_feedback": "" if done else f" {states['label']}=",
            "done": done,
            "extra_logs": {"tries": torch.tensor(float(self.tries))},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
