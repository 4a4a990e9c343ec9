"""One Ray for several runs at a time, each in a process of its own that connects to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from bapo_openrlhf.cpu import stack as cpu


@contextmanager
def shared_ray(devices: int) -> Iterator[dict[str, str]]:
    """A Ray on this machine for the time of the block; the environment with which a run's process connects to it.

    Where RAY_ADDRESS names a cluster that is up already, the runs go there and none is started.

    Args:
        devices: of all runs that go on at a time. On the CPU they exist only as bookkeeping; else they are this
            machine's GPUs, and the number says nothing.
    """
    if os.environ.get("RAY_ADDRESS") and not cpu.active():
        yield {}
        return
    cpu.prepare_environment()

    import ray

    with cpu.forked_processes():
        if cpu.active():
            context = ray.init(**cpu.ray_init_kwargs(devices))
            name = cpu.SHARED_RAY
        else:
            context = ray.init(address="local", include_dashboard=False, logging_level="warning")
            name = "RAY_ADDRESS"
        try:
            yield {name: context.address_info["gcs_address"]}
        finally:
            ray.shutdown()
