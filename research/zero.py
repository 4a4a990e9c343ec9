"""Compares ZeRO's stages 1, 2 and 3 on the CPU: a forward pass, and optimizer steps of 1 and of 4 micro-batches.

    python research/zero.py               # writes research/results/zero.{json,md}

Each process is a rank, and holds the same model once in each stage, as OpenRLHF configures DeepSpeed. A fourth engine
has stage 2 and computes the activations again in the backward pass (gradient checkpointing). A round measures all
engines one after the other, and a ratio is to stage 2 of the same round. So another program on the machine changes the
seconds more than the ratios.

A CPU has no fast links between GPUs, and its products take longer. So the model is narrow: what it takes is mostly what
the stages cost in Python and in copies, for which a GPU waits.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from folders import RESULTS
from report import CORES, opening, origin, write
from steps import with_spread
from tqdm import tqdm

# As many layers as Qwen3-0.6B and 1.7B have.
LAYERS, HIDDEN, MLP, VOCABULARY = 28, 64, 192, 512
SAMPLES, TOKENS = 2, 32  # of a micro-batch
RANKS = (1, 2)
ENGINES = {  # ZeRO's stage, whether activations are computed again
    "stage 1": (1, False),
    "stage 2": (2, False),
    "stage 3": (3, False),
    "stage 2, activations computed again": (2, True),
}
BASE = "stage 2"
WORK = {"a forward pass": 0, "a step of 1 micro-batch": 1, "a step of 4 micro-batches": 4}


def engine_of(stage: int, *, again: bool) -> Any:
    """A model of transformers in DeepSpeed, with the settings that OpenRLHF gives it."""
    import deepspeed
    import torch
    from openrlhf.utils.deepspeed.deepspeed_utils import get_train_ds_config
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=MLP, num_hidden_layers=LAYERS, head_dim=32,
        num_attention_heads=HIDDEN // 32, num_key_value_heads=HIDDEN // 64, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    if again:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    adam = {"type": "AdamW", "params": {"lr": 1e-6, "torch_adam": True}}  # DeepSpeed would compile its own
    settings = get_train_ds_config(offload=False, adam_offload=False, stage=stage, zpg=1, optim_config=adam)
    settings |= {"train_micro_batch_size_per_gpu": SAMPLES, "gradient_accumulation_steps": max(WORK.values())}
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    engine.train()
    return engine


def work(engine: Any, tokens: Any, micro_batches: int) -> None:
    """An optimizer step of so many micro-batches; a forward pass without gradients if there are none."""
    import torch

    if not micro_batches:
        with torch.no_grad():
            engine(input_ids=tokens, use_cache=False)
    for number in range(micro_batches):
        engine.set_gradient_accumulation_boundary(number == micro_batches - 1)
        engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
        engine.step()


def measure(rounds: int) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Seconds and processor seconds of this rank, for each engine and work; the first round is left out."""
    from bapo_openrlhf.cpu import stack as cpu

    cpu.prepare_environment()
    cpu.install()

    import deepspeed
    import torch

    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    engines = {name: engine_of(stage, again=again) for name, (stage, again) in ENGINES.items()}
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, TOKENS))
    seconds: dict[str, dict[str, list[dict[str, float]]]] = {what: {name: [] for name in ENGINES} for what in WORK}
    for one in range(rounds + 1):
        for what, micro_batches in WORK.items():
            for name, engine in engines.items():
                torch.distributed.barrier()
                start, used = time.perf_counter(), time.process_time()
                work(engine, tokens, micro_batches)
                taken = {"seconds": time.perf_counter() - start, "processor": time.process_time() - used}
                if one:
                    seconds[what][name].append(taken)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return seconds


def run(ranks: int, rounds: int) -> Any:
    """What the first rank measured."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = [sys.executable, str(Path(__file__)), "--rounds", str(rounds), "--one"]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    processes = [
        subprocess.Popen(words, env=os.environ | variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                         stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]  # fmt: skip
    output = [process.communicate() for process in processes]
    for process, (_, errors) in zip(processes, output, strict=True):
        if process.returncode:
            raise RuntimeError(f"a rank ended with {process.returncode}:\n{errors[-3000:]}")
    return json.loads(output[0][0].splitlines()[-1])


def markdown(result: dict[str, Any]) -> str:
    """The page of results."""
    text = (
        f"Medians of {result['rounds']} rounds, with the smallest and the largest in brackets. A ratio is to {BASE} in "
        "the same round; the last column is the ratio of the first rank's processor seconds. Other programs ran on the "
        f"machine: its load was {result['load']:.1f} at the start. `research/zero.py` says what is measured."
    )
    lines = opening("ZeRO's stages on the CPU", text, result)
    lines += [
        "| ranks | | | seconds | ratio | ratio of processor seconds |",
        "| ---: | --- | --- | ---: | ---: | ---: |",
    ]
    for ranks, by_work in result["found"].items():
        for what, engines in by_work.items():
            for name, rows in engines.items():
                seconds = with_spread([row["seconds"] for row in rows], 3)
                ratios = [with_spread([a[kind] / b[kind] for a, b in zip(rows, engines[BASE], strict=True)])
                          for kind in ("seconds", "processor")]  # fmt: skip
                cells = [str(ranks), what, name, seconds, *(["1", "1"] if name == BASE else ratios)]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.rounds)))
        return
    result = {"rounds": given.rounds, "load": os.getloadavg()[0],
              **origin("python research/zero.py", CORES, "no GPU"), "found": {}}  # fmt: skip
    for ranks in tqdm(RANKS, unit="run"):
        result["found"][ranks] = run(ranks, given.rounds)
        write(RESULTS, "zero", result, markdown(result))


if __name__ == "__main__":
    main()
