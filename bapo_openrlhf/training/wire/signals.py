"""The signals that end a run. Only its driver heeds them.

A scheduler or a terminal may send a signal to every process of a job. A worker that ends by it would take the step with
it, which the driver wants to save. Therefore all other processes of a run block these signals. A process inherits what
is blocked from the one that starts it.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

# `kill` and most schedulers; Ctrl-C; a lost terminal; Slurm, Grid Engine and LSF before a time limit.
NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)


@contextmanager
def blocked() -> Iterator[None]:
    """Block the signals in the block, and in all processes and threads that it starts. One that comes waits."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def leave_to_driver() -> None:
    """Let none of the signals reach this thread, nor the processes that it starts."""
    from multiprocessing import resource_tracker  # not above, because a reward process reads this file

    resource_tracker.ensure_running()  # because Python unblocks two of them in the thread that starts this process
    signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
