"""python3 tools/stoppable.py COMMAND...: runs the command, and ends all that it started when it is told to end.

SIGTERM to make reaches only the first process of a recipe. Ray, vLLM and the processes of pytest would go on. So this
process adopts all processes whose parents have ended, and passes SIGTERM and SIGHUP on to the command. Ctrl-C in a
terminal reaches the command itself. The command may take PATIENCE seconds to end, because a training run saves what it
has. After Ctrl-C it may take as long as it likes. Then, or at a second signal, everything below this process gets
SIGTERM, and what is left after GRACE seconds is killed.

The status is that of the command, or 128 + the signal.
"""

import ctypes
import os
import signal
import sys
import time

PATIENCE, GRACE = 25, 5  # seconds; schedulers kill 30 seconds after SIGTERM
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


def send(number, processes=None):
    """Send a signal to processes, or to all below this one."""
    for process in descendants() if processes is None else processes:
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue


def run(command):
    """Run the command, and return its status."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    told, child = [], None

    def stop(number, _frame):
        told.append(number)
        if len(told) > 1:
            end()
        elif number != signal.SIGINT and child:
            send(number, [child])
            signal.signal(signal.SIGALRM, end)
            signal.alarm(PATIENCE)

    def end(*_):
        send(signal.SIGTERM)
        signal.signal(signal.SIGALRM, lambda *_: send(signal.SIGKILL))
        signal.alarm(GRACE)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # a shell's background job ignores Ctrl-C
            signal.signal(number, stop)
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
