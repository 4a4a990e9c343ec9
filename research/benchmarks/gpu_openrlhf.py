"""OpenRLHF's own command, `python -m openrlhf.cli.train_ppo_ray`, with none of this project's classes.

Only what its import needs is there: a stand-in for flash-attn if that is not installed, and without a GPU the CPU's
patches, for dry runs.
"""

import runpy

import ray

from bapo_openrlhf import machine
from bapo_openrlhf.cpu import stack as cpu

if __name__ == "__main__":
    machine.set_up()
    if machine.on_cpu():
        ray.init(**cpu.ray_init_kwargs(4))
    else:
        start, of_workers = ray.init, machine.of_workers()
        ray.init = lambda runtime_env, **settings: start(runtime_env=runtime_env | of_workers, **settings)
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")
