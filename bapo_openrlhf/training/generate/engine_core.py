"""End the process that vLLM starts for each rollout engine together with the engine.

This process, vLLM's engine core, does not notice that the Ray actor that started it is killed. Without this module it
would stay, and keep its GPU memory.
"""

import os

from bapo_openrlhf.training.reward.reward_worker import die_with

ENGINE = "BAPO_OPENRLHF_ENGINE"  # process id of the engine, which sets it for the processes it starts


def vllm_plugin() -> None:
    """vLLM's entry point, called in each of its processes. It acts only in the children of a rollout engine."""
    if os.environ.get(ENGINE) == str(os.getppid()):
        die_with(os.getppid())
