"""Prepares the servers of test_prefork.py, and has what a process of multiprocessing does there."""

import os
import sys
import threading

from bapo_openrlhf.cpu.prefork.server import Prepared

FILE = "PREFORK_TEST_FILE"  # a line for each preparation and each child


def _note(word):
    with open(os.environ[FILE], "a") as file:
        file.write(f"{word} {os.getpid()}\n")


def prepare():
    _note("prepared")
    sys.modules["prefork_prepared"] = sys.modules[__name__]  # what a child finds imported
    os.environ["SET_ON_IMPORT"] = "yes"
    return Prepared(fixed=["FIXED"], in_child=lambda: _note("child"))


def hang():
    _note("preparing")
    threading.Event().wait()


def fail():
    raise RuntimeError("no such library")


def work(pipe, numbers):
    pipe.send((sum(numbers), "prefork_prepared" in sys.modules))
    sys.exit(3)
