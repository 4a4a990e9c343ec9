"""Measures what this project replaces inside of a step: log-probs, sampling on the CPU, and the optimizer on the CPU.

    python benchmarks/kernels.py            # writes benchmarks/results/kernels.{json,md}

Log-probs: a batch with a prompt and a response in each sample. The model has two layers, so that nearly everything is
the output head. Its other sizes are SmolLM2-135M's; Qwen3 has a head of 151,936 tokens. Sampling: one token for each of
128 sequences, over 49,152 entries. Optimizer: AdamW on 135 million weights in one tensor, as ZeRO-2 has them.

Each measurement has a process of its own, because the peak of a process's memory cannot be reset.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import CORES, RESULTS, again, origin, write
from steps import with_spread
from tqdm import tqdm

SHAPES = {  # vocabulary, samples, tokens of a prompt, tokens of a response
    "49,152 tokens, 8 samples of 64 + 64": (49152, 8, 64, 64),
    "151,936 tokens, 8 samples of 64 + 64": (151936, 8, 64, 64),
    "151,936 tokens, one sample of 256 + 1,792": (151936, 1, 256, 1792),
}
LOG_PROBS = ("OpenRLHF", "in tiles")
CPU = {  # what is measured, and its two ways: before and after
    "sampling 128 tokens": ("vLLM", "one number for each token"),
    "an optimizer step": ("torch's AdamW", "torch's fused AdamW"),
}


def of_log_probs(kind: str, shape: str) -> dict[str, float]:
    """Processor seconds of a forward pass alone and of a training pass, and GiB at the peak beyond the model."""
    from bapo_openrlhf.cpu import stack as cpu

    cpu.prepare_environment()
    cpu.install()

    import torch
    from openrlhf.models import Actor
    from transformers import LlamaConfig, LlamaForCausalLM

    from bapo_openrlhf.training.worker.log_probs import SlicedActor

    torch.manual_seed(0)
    torch.set_num_threads(1)
    vocabulary, samples, prompt, response = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=576, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True, max_position_embeddings=4096,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    actor = {"OpenRLHF": Actor, "in tiles": SlicedActor}[kind](model)
    actor.packing_samples, actor.is_vlm, actor.temperature = False, False, 1.0
    sequences = torch.randint(0, vocabulary, (samples, prompt + response))
    actions = torch.zeros(samples, prompt + response - 1, dtype=torch.long)
    actions[:, prompt - 1 :] = 1
    batch = sequences, actions, torch.ones_like(sequences)
    model.lm_head.weight.grad = torch.zeros_like(model.lm_head.weight)  # as in training, it is there before

    def forward() -> None:
        with torch.no_grad():
            actor(*batch)

    def train() -> None:
        log_probs, output = actor(*batch, return_output=True, return_entropy=True)
        (log_probs.mean() + 0.001 * output.entropy.mean()).backward()

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = {}
    for name, work in (("forward", forward), ("train", train)):
        result[name] = processor_seconds(work, 2)
    return result | {"gib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20}


def processor_seconds(work: Callable[[], Any], times: int) -> float:
    """The least of the processor seconds of some calls."""
    taken = []
    for _ in range(times):
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    return min(taken)


def of_the_cpu(kind: str, what: str) -> dict[str, float]:
    """Processor seconds of sampling one token for each sequence, or of an optimizer step."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if what == "an optimizer step":
        weights = torch.nn.Parameter(torch.zeros(135_000_000))
        weights.grad = torch.randn_like(weights)
        optimizer = torch.optim.AdamW([weights], lr=1e-6, fused=kind == CPU[what][1])
        return {"seconds": processor_seconds(optimizer.step, 4)}
    from bapo_openrlhf.cpu import stack as cpu

    cpu.prepare_environment()
    if kind == CPU[what][1]:
        cpu.install()

    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.sample.sampler import Sampler

    sampler, logits = TopKTopPSampler("processed_logprobs"), torch.randn(128, 49152) * 3

    def draw() -> None:
        tokens, log_probs = sampler.forward_cpu(logits, {}, None, None)
        Sampler.gather_logprobs(log_probs, 1, tokens.long())

    return {"seconds": processor_seconds(draw, 6)}


def markdown(result: dict[str, Any]) -> str:
    """The page of results."""
    lines = [
        "# Kernels",
        "",
        f"Processor seconds of one thread; medians of {result['rounds']} processes, with the smallest and the largest "
        f"in brackets. {result['machine']}; commit {result['commit']}. `benchmarks/kernels.py` says what is measured.",
        "",
        f"`{result['command']}`",
        "",
        "## Log-probs and entropies of response tokens",
        "",
        "Seconds of a forward pass without gradients, and of a training pass (forward and backward, with the entropy). "
        "GiB are those of the peak beyond the model.",
        "",
        "| vocabulary and batch | | forward | training | GiB |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for shape in SHAPES:
        for kind, rows in result["found"][shape].items():
            cells = [with_spread([row[name] for row in rows]) for name in ("forward", "train", "gib")]
            lines.append(f"| {shape} | {kind} | {' | '.join(cells)} |")
    lines += ["", "## On the CPU", "", "| | | seconds |", "| --- | --- | ---: |"]
    for what in CPU:
        for kind, rows in result["found"][what].items():
            lines.append(f"| {what} | {kind} | {with_spread([row['seconds'] for row in rows], 3)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=2, metavar=("KIND", "WHAT"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        kind, what = given.one
        print(json.dumps((of_log_probs if what in SHAPES else of_the_cpu)(kind, what)))
        return
    kinds = {**dict.fromkeys(SHAPES, LOG_PROBS), **CPU}
    timings: dict[str, dict[str, list[Any]]] = {what: {kind: [] for kind in kinds[what]} for what in kinds}
    turns = [(kind, what) for _ in range(given.rounds) for what in kinds for kind in kinds[what]]
    for kind, what in tqdm(turns, unit="process"):
        words = [sys.executable, str(Path(__file__)), "--one", kind, what]
        output = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
        timings[what][kind].append(json.loads(output.splitlines()[-1]))
    result = {"rounds": given.rounds, **origin(again("benchmarks/kernels.py"), CORES, "no GPU"), "found": timings}
    write(RESULTS, "kernels", result, markdown(result))


if __name__ == "__main__":
    main()
