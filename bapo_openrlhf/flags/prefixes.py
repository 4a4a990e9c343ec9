"""What a method that generates from prefixes cannot be combined with."""

from collections.abc import Callable
from typing import Any

from bapo_openrlhf.flags.rule import Flags, Rule


def _no_prefix(flag: str, broken: Callable[[Flags], Any], allowed: str) -> Rule:
    return Rule(flag, lambda f: f.method and f.method.prefixed and broken(f),
                "{it}; with adapt.method {f[adapt.method]}, which generates from prefixes of stored responses, it must "
                + allowed)  # fmt: skip


PREFIXES = [
    _no_prefix("train.agent_func_path", lambda f: f["train.agent_func_path"],
               "not be set, because an agent begins with its prompt"),
    _no_prefix("data.max_images_per_prompt", lambda f: f["data.max_images_per_prompt"],
               "be 0, because vLLM would take an image token of a prefix for an image"),
    _no_prefix("run.faster", lambda f: not {"requests", "all"} & set(f["run.faster"] or ()),
               "have requests, because OpenRLHF's requests have no place for a prefix"),
    _no_prefix("reward.overlong_buffer_len", lambda f: f["reward.overlong_buffer_len"] is not None,
               "not be set, because a prefix does not count as length, so that a response that is cut would pass for a "
               "short one"),
]  # fmt: skip
