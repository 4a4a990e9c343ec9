"""What a process of multiprocessing does in test_prefork.py."""

import sys


def work(pipe, numbers):
    pipe.send((sum(numbers), "prefork_prepared" in sys.modules))
    sys.exit(3)
