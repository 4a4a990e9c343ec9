"""One Ray that several runs share. Each run has its own process, which connects to this Ray."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from bapo_openrlhf import machine


@contextmanager
def shared_ray(devices: int, runs: int) -> Iterator[dict[str, str]]:
    """Start a Ray for the time of the block. Yields the environment variables with which a run connects to it.

    If RAY_ADDRESS names a cluster that is already up, the runs go there and no Ray is started. On the CPU, Ray only
    counts the `devices` of the `runs` that train at the same time, and these share the cores. With GPUs, it counts
    those of this machine.
    """
    if os.environ.get("RAY_ADDRESS") and not machine.on_cpu():
        yield {}
        return
    with machine.processes():
        import ray

        from bapo_openrlhf.training.driver.own_ray import connect, token

        with_gpus = {"address": "local", "include_dashboard": False, "logging_level": "warning"}
        context = connect(**(machine.own_ray(devices) or with_gpus))
        try:
            address = {machine.shared_address(): context.address_info["gcs_address"]}
            yield address | token() | machine.share_of_cores(runs)
        finally:
            ray.shutdown()
