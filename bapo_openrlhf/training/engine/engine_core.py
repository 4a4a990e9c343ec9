"""A rollout engine and the process that vLLM starts for it, its engine core, end together.

- vLLM's process does not notice that the Ray actor that started it is killed. It would stay, and keep its GPU memory.
- If vLLM's process dies, vLLM 0.29 leaves some calls without an answer. Whoever called would wait without end.
- Ctrl-C reaches all processes of a terminal's job, and vLLM's process would end in the middle of the run's last step.
"""

import atexit
import os
import signal
import sys
import threading
from multiprocessing import resource_tracker
from typing import Any

from bapo_openrlhf.training.engine.reward_worker import die_with

ENGINE = "BAPO_OPENRLHF_ENGINE"  # process id of the engine, which sets it for the processes it starts
EVERY = 1.0  # seconds between two looks at vLLM's process


def vllm_plugin() -> None:
    """vLLM's entry point, called in each of its processes. It acts only in the children of a rollout engine."""
    if os.environ.get(ENGINE) == str(os.getppid()):
        die_with(os.getppid())
        block_interrupts()


def block_interrupts() -> None:
    """Let no Ctrl-C reach this thread, nor the processes that it starts. Ray blocks them in its processes, too."""
    resource_tracker.ensure_running()  # because Python unblocks them in the thread that starts this process
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def end_with(llm: Any) -> None:
    """Let this process, a rollout engine, end soon after vLLM's process has died. Ray then tells all who wait for it.

    Args:
        llm: vLLM's engine in this process. It is `errored` once the other process is dead.
    """
    exits = threading.Event()
    atexit.register(exits.set)  # because an engine that exits stops vLLM's process itself

    def watch() -> None:
        while not exits.wait(EVERY):
            if llm.errored and not exits.is_set():  # in this order, because an exit can begin during the first look
                print("the rollout engine ends, because vLLM's process died", file=sys.stderr, flush=True)
                os._exit(1)

    threading.Thread(target=watch, name="vllm", daemon=True).start()
