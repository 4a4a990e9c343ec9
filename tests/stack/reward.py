"""Reward of the stack tests: 1 when the response holds at least LABEL digits, so that labels 0 to 9 go from always
solved to never solved under a model with random weights."""

import re

import torch


def reward_func(queries, prompts, labels, **kwargs):
    responses = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    digits = [len(re.findall(r"[0-9]", re.sub(r"<[^>]*>", "", response))) for response in responses]  # no <reserved7>
    rewards = torch.tensor([float(count >= int(label)) for count, label in zip(digits, labels, strict=True)])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"digits": torch.tensor(digits, dtype=torch.float)}}
