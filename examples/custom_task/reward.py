"""Sums: a response is right if it is numbers joined by + whose sum is the label."""

import re


def reward_func(queries, prompts, labels, **kwargs):
    rewards = []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        answer = re.fullmatch(r"(\d+(?:\+\d+)*)(?:<eos>)?", query.split(prompt, 1)[1])
        rewards.append(float(answer is not None and sum(map(int, answer[1].split("+"))) == int(label)))
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}
