"""The processes of the other tests' runs fork from one that has imported the stack."""

import os
import subprocess

import pytest

from bapo_openrlhf.cpu.prefork.serving import python

pytestmark = pytest.mark.stack


def test_processes_fork_from_one_that_has_the_stack_and_not_ray():
    program = (
        "import sys; there = [name in sys.modules for name in ('deepspeed', 'vllm', 'transformers', 'ray')]; "
        "import torch, numpy; print(*there, torch.get_num_threads(), torch.cuda.synchronize.__module__, "
        "numpy.random.random())"
    )

    def child():
        environment = os.environ | {"OMP_NUM_THREADS": "3", "BAPO_OPENRLHF_THREADS": "3"}  # as of a run in a study
        done = subprocess.run([python(), "-c", program], env=environment, capture_output=True, text=True, check=True)
        return done.stdout.split()

    first, second = child(), child()
    assert first[:-1] == ["True", "True", "True", "False", "3", "bapo_openrlhf.cpu.patching"]
    assert first[-1] != second[-1]
