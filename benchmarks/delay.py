"""Measures what the rollout delay v and re-evaluation every m steps cost on the real stack, each with an alternative.

    python benchmarks/delay.py            # writes benchmarks/results/delay.{json,md}

Restore: each engine copies the delayed weights back from its own host memory. The alternative is a copy in the actor
that is sent again. The same rounds of one run time both, and OpenRLHF's own weight sync.

Re-evaluation: hard prompts are generated together with the fresh ones. The alternative is one after the other. This
takes two runs with the same settings, v = m = 1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from report import CORES, RESULTS, again, opening, origin, python_path, write

from bapo_openrlhf import user_file
from bapo_openrlhf.record.run_record import read_metrics

HERE = Path(__file__).parent
BASE_MODEL = HERE.parent / "examples" / "quickstart" / "base_model.py"
REWARD = """
import hashlib

def reward_func(queries, prompts, labels, **kwargs):
    # "0": never solved; else solved by about half of the responses
    solved = labels[0] != "0" and hashlib.blake2b(queries[0].encode()).digest()[0] % 2
    return {"rewards": [float(solved)]}
"""
FLAGS = {
    "algorithm": "bapo_grpo",
    "actor.num_gpus_per_node": 1,
    "vllm.sync_backend": "gloo",
    "vllm.gpu_memory_utilization": 0.5,
    "algo.kl.init_coef": 0,
    "rollout.batch_size": 32,
    "rollout.n_samples_per_prompt": 8,
    "rollout.micro_batch_size": 64,
    "rollout.max_new_tokens": 32,
    "train.batch_size": 128,
    "train.micro_batch_size": 16,
    "data.max_len": 64,
    "data.input_key": "input",
    "data.label_key": "label",
    "ds.attn_implementation": "eager",
    "adapt.reevaluate_every": 1,
    "adapt.max_reevaluated_prompts": 16,
}


def make_inputs(folder: Path, hidden: int, layers: int) -> int:
    """Make a model with random weights, and 32 x 12 prompts, half of them never solved; return its parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    tokenizer = user_file.load("base model", BASE_MODEL).make_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 128, head_dim=64, max_position_embeddings=256,
        tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    rows = [{"input": f"{number}+{number % 7}=", "label": str(number % 2)} for number in range(32 * 12)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return model.num_parameters()


def run(folder: Path, kind: str, **flags: Any) -> Path:
    """Run the stack once in a process of its own; return the run's folder."""
    values = FLAGS | {
        "actor.model_name_or_path": folder / "model",
        "data.prompt_dataset": folder / "data.jsonl",
        "reward.remote_url": folder / "reward.py",
        "ckpt.output_dir": folder / "trained",
        "run.dir": folder / "runs",
        "run.name": kind,
    }
    values |= {name.replace("__", "."): value for name, value in flags.items()}
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    environment = os.environ | {"PYTHONPATH": python_path(), "RESULT": str(folder / "restore.json"), "REPEATS": "9"}
    log = folder / f"{kind}.log"
    with log.open("w") as output:
        status = subprocess.run(
            [sys.executable, __file__, "--inside", kind, *words, "--vllm.enforce_eager"],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        ).returncode
    if status:
        raise RuntimeError(f"{kind} failed:\n{log.read_text()[-4000:]}")
    return folder / "runs" / kind


def inside(kind: str, flags: list[str]) -> int:
    """Train, in the process of a run, with the measured classes instead of the project's."""
    from bapo_openrlhf.cpu import stack as cpu

    cpu.prepare_environment()
    cpu.install()

    import delay_classes
    import weight_checksums

    from bapo_openrlhf.cli.main import run as command
    from bapo_openrlhf.training.engine import engines
    from bapo_openrlhf.training.trainer import trainer
    from bapo_openrlhf.training.worker import workers

    if kind == "serial":
        trainer.AdaptedPPOTrainerActor = delay_classes.SerialTrainerActor
    elif kind == "restore":
        trainer.AdaptedPPOTrainerActor = delay_classes.MeasuringTrainerActor
        workers.AdaptedPolicyActor = delay_classes.SendingWorkerActor
        engines.RolloutActor = weight_checksums.ChecksumEngineActor
    return command(["train", *flags])


def median(rows: list[dict[str, float]], name: str) -> float:
    """The median over all steps but the first, which has nothing to re-evaluate."""
    return statistics.median(row[name] for row in rows[1:])


def measure(hidden: int, layers: int, engines: int) -> dict[str, Any]:
    """Make all three runs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = make_inputs(folder, hidden, layers)
        run(folder, "restore", vllm__num_engines=engines, adapt__rollout_delay=2)
        restore = json.loads((folder / "restore.json").read_text())
        restore["seconds"] = {kind: statistics.median(times) for kind, times in restore["seconds"].items()}
        reevaluation = {}
        for kind in ("together", "serial"):
            rows = read_metrics(run(folder, kind, vllm__num_engines=1, adapt__rollout_delay=1))
            generated = [row["timing/generation"] + row.get("timing/reevaluation", 0) for row in rows]
            reevaluation[kind] = {
                "added_seconds": median(rows, "reevaluation/added_seconds"),
                "generation_seconds": statistics.median(generated[1:]),
                "hard_prompts": median(rows, "groups/reevaluation_attempts"),
            }
    return {"parameters": parameters, "engines": engines, "restore": restore, "reevaluation": reevaluation}


def markdown(result: dict[str, Any]) -> str:
    """The page of results."""
    seconds, size = result["restore"]["seconds"], result["restore"]["bytes"]
    again = result["reevaluation"]
    alternative = seconds["actor_send"]
    rows = [
        ("OpenRLHF's weight sync", f"{seconds['sync'] * 1e3:.0f} ms", f"{seconds['sync'] / alternative:.2f}", ""),
        ("the actor sends kept weights again", f"{alternative * 1e3:.0f} ms", "1",
         f"{size['actor'] / 2**20:.0f} MiB kept, and the same again while sending"),
        ("each engine restores its own (chosen)", f"{seconds['engines_restore'] * 1e3:.0f} ms",
         f"{seconds['engines_restore'] / alternative:.2f}", f"{size['engines'] / 2**20:.0f} MiB kept"),
        ("keeping, by the actor", f"{seconds['actor_keep'] * 1e3:.0f} ms", "", ""),
        ("keeping, by the engines", f"{seconds['engines_keep'] * 1e3:.0f} ms", "", ""),
    ]  # fmt: skip
    lines = opening(
        "Delay and re-evaluation", f"A Qwen3 of {result['parameters'] / 1e6:.1f}M parameters in bf16;", result
    )
    lines += [
        f"## Restoring delayed weights, {result['engines']} engine(s), median of 9 rounds",
        "",
        "| what | time | ratio to sending again | host memory |",
        "| --- | --- | --- | --- |",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        f"## Re-evaluating {again['together']['hard_prompts']:.0f} hard prompts in a step with 32 fresh ones, v = m = "
        "1, median step",
        "",
        "| | added to the step | generation and re-evaluation | ratio |",
        "| --- | --- | --- | --- |",
    ]
    serial = again["serial"]["generation_seconds"]
    for kind, name in (("serial", "one after the other"), ("together", "together (chosen)")):
        numbers = again[kind]
        lines.append(
            f"| {name} | {numbers['added_seconds']:.2f} s | {numbers['generation_seconds']:.2f} s "
            f"| {numbers['generation_seconds'] / serial:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--engines", type=int, default=2)
    given = parser.parse_args()
    result = measure(given.hidden, given.layers, given.engines)
    result |= origin(again("benchmarks/delay.py"), CORES, "no GPU")
    write(RESULTS, "delay", result, markdown(result))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        sys.exit(inside(sys.argv[2], sys.argv[3:]))
    main()
