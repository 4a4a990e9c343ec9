"""Supervised training with OpenRLHF's `train_sft` on a machine without a GPU, in one process.

    python examples/warmup.py --model.model_name_or_path MODEL --data.dataset ROWS.jsonl --data.output_key solution \
        --ds.attn_implementation eager --ckpt.output_dir OUT

All flags are OpenRLHF's. On GPUs nothing of this is needed: `deepspeed --module openrlhf.cli.train_sft` takes the same
flags. A base model that solves no problem of a task cannot learn from rewards, so it first learns from solutions.
"""

import os
import runpy
import socket

from bapo_openrlhf import machine


def main() -> None:
    """Prepare this process as a run does, set what DeepSpeed's launcher would set, and run OpenRLHF's script."""
    machine.set_up()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    runpy.run_module("openrlhf.cli.train_sft", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
