"""python3 tools/stoppable.py COMMAND...: runs the command, and ends all that it started when it is told to end.

SIGTERM to make reaches only the first process of a recipe. Ray, vLLM and the processes of pytest would go on. So this
process adopts all processes whose parents have ended, passes the signal on to everything below it, and after GRACE
seconds kills what is left. Ctrl-C in a terminal reaches the command itself, which may take its time to end. What is
left then ends in the same way. A second Ctrl-C is like SIGTERM.

The status is that of the command, or 128 + the signal.
"""

import ctypes
import os
import signal
import sys
import time

GRACE = 5  # seconds
PR_SET_CHILD_SUBREAPER = 36  # of Linux's prctl.h


def descendants():
    """The processes below this one that have not ended."""
    children = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except OSError:  # it has just ended
            continue
        if state != "Z":
            children.setdefault(int(parent), []).append(int(name))
    pids = [os.getpid()]
    for process in pids:
        pids += children.get(process, [])
    return pids[1:]


def send(number):
    """Send a signal to all processes below this one."""
    for process in descendants():
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue


def run(command):
    """Run the command, and return its status."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    told = []

    def stop(number, _frame):
        told.append(number)
        if number != signal.SIGINT or len(told) > 1:
            send(signal.SIGTERM)
            signal.alarm(GRACE)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # a shell's background job ignores Ctrl-C
            signal.signal(number, stop)
    signal.signal(signal.SIGALRM, lambda *_: send(signal.SIGKILL))
    child, ended = os.posix_spawnp(command[0], command, os.environ), 0
    while ended != child:
        ended, status = os.wait()
    if not told:
        status = os.waitstatus_to_exitcode(status)
        return status if status >= 0 else 128 - status
    signal.alarm(0)
    send(signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while descendants():
        if time.monotonic() > deadline:
            send(signal.SIGKILL)
        time.sleep(0.05)
    return 128 + told[0]


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python3 tools/stoppable.py COMMAND...")
    if sys.platform == "linux":
        sys.exit(run(sys.argv[1:]))
    os.execvp(sys.argv[1], sys.argv[1:])
