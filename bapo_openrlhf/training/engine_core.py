"""In the process that vLLM starts beside each rollout engine: end with the engine.

vLLM's engine core does not notice when the Ray actor that started it is killed. It would stay, with its GPU memory.
"""

from __future__ import annotations

import os

from bapo_openrlhf.training.reward_worker import die_with

ENGINE = "BAPO_OPENRLHF_ENGINE"  # process id of the rollout engine, set by it for the processes that it starts


def vllm_plugin() -> None:
    """vLLM's entry point, called in each of its processes. Acts in children of a rollout engine alone."""
    if os.environ.get(ENGINE) == str(os.getppid()):
        die_with(os.getppid())
