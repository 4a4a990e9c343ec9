"""Processes of runs, and workers of a run in this process without Ray: for scripts, because it is set up once."""

import os
import signal
import socket
import subprocess
from pathlib import Path

from bapo_openrlhf.cpu import stack as cpu
from bapo_openrlhf.cpu.prefork.serving import python

HERE = Path(__file__).parent


def begun(words, folder, environment):
    """Python with these words, in a process group of its own."""
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = os.environ | environment
    return subprocess.Popen([python(), *words], cwd=folder, env=environment, start_new_session=True, **output)


def ended(process):
    """The output and the status of such a process. After ten minutes it is killed with its group."""
    try:
        output, _ = process.communicate(timeout=600)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return output, process.returncode


def run_script(name, folder):
    """Run a script of this folder, whose argument is a folder, to its end."""
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"BAPO_OPENRLHF_CPU": "1", "PYTHONPATH": path}
    done = subprocess.run([python(), str(HERE / name), str(folder)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def set_up(model, *switches, **more):
    """Be the only process of a run with this actor, without a GPU. Returns its arguments."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    cpu.prepare_environment()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    cpu.install()

    from bapo_openrlhf.cli import arguments

    flags = {
        "algorithm": "ba_ppo", "actor.model_name_or_path": model, "train.batch_size": 1,
        "train.micro_batch_size": 1, "data.prompt_dataset": "none.jsonl", "reward.remote_url": "none.py",
        "ds.attn_implementation": "eager", "vllm.sync_backend": "gloo", "ckpt.output_dir": model.parent / "out",
    }  # fmt: skip
    flags |= {name.replace("__", "."): value for name, value in more.items()}
    return arguments.parse([*(f"--{name}={value}" for name, value in flags.items()), *switches])


def worker(kind, args, *more):
    """A worker that has loaded its model. `more`: what `init_model_from_pretrained` takes after the strategy."""
    from bapo_openrlhf.training.worker import workers
    from bapo_openrlhf.training.worker.strategy import strategy_of

    process = getattr(workers, f"{kind}Worker")(1, 0, "127.0.0.1", os.environ["MASTER_PORT"])
    process.init_model_from_pretrained(strategy_of(args), *more)
    return process
