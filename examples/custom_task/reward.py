"""Sums: a response is right if it is numbers joined by + whose sum is the label."""

import re


def reward_func(queries, prompts, labels, responses, **kwargs):
    rewards = []
    for response, label in zip(responses, labels, strict=True):
        answer = re.fullmatch(r"(\d+(?:\+\d+)+)(?:<eos>)?", response)
        rewards.append(float(answer is not None and sum(map(int, answer[1].split("+"))) == int(label)))
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}
