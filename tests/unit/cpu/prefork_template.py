"""Prepares the servers of test_prefork.py."""

import os
import sys
import time

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


def prepare_slowly():
    time.sleep(1)
    return prepare()


def fail():
    raise RuntimeError("no such library")
