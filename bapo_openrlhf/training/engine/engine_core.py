"""A rollout engine and the process that vLLM starts for it, its engine core, end together.

- vLLM's process does not notice that the Ray actor that started it is killed. It would stay, and keep its GPU memory.
- If vLLM's process dies, vLLM 0.29 leaves some calls without an answer. Whoever called would wait without end.
"""

import atexit
import os
import sys
import threading
from typing import Any

from bapo_openrlhf.training.engine.reward_worker import die_with
from bapo_openrlhf.training.wire.signals import leave_to_driver

ENGINE = "BAPO_OPENRLHF_ENGINE"  # process id of the engine, which sets it for the processes it starts
EVERY = 1.0  # seconds between two looks at vLLM's process


def vllm_plugin() -> None:
    """vLLM's entry point, called in each of its processes. It acts only in the children of a rollout engine."""
    if os.environ.get(ENGINE) == str(os.getppid()):
        die_with(os.getppid())
        leave_to_driver()


def end_with(llm: Any) -> None:
    """Let this process, a rollout engine, end soon after vLLM's has died. Ray then tells all who wait for it."""
    exits = threading.Event()
    atexit.register(exits.set)  # because an engine that exits stops vLLM's process itself

    def watch() -> None:
        while not exits.wait(EVERY):
            if llm.errored and not exits.is_set():  # in this order, because an exit can begin during the first look
                print("the rollout engine ends, because vLLM's process died", file=sys.stderr, flush=True)
                os._exit(1)

    threading.Thread(target=watch, name="vllm", daemon=True).start()
