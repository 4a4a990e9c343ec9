"""OpenRLHF's own command line, unchanged, on the CPU: what the runs of this project are compared with.

OpenRLHF does not seed the process that shuffles the prompts; it is seeded here as this project's trainer seeds itself.
"""

import runpy

import ray
import torch

from bapo_openrlhf.cpu import stack as cpu

SEED = 42  # OpenRLHF's default for --train.seed


def set_up_worker() -> None:
    """In each Ray worker, before OpenRLHF is imported there."""
    cpu.set_up_ray_worker()
    torch.manual_seed(SEED)


if __name__ == "__main__":
    cpu.prepare_environment()
    cpu.install()
    settings = cpu.ray_init_kwargs(4)
    settings["runtime_env"]["worker_process_setup_hook"] = "plain.set_up_worker"
    ray.init(**settings)
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")
