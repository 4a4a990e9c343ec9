"""Measures the training side of a step on one GPU, without Ray and vLLM: forward passes, training, MFU, memory.

    python benchmarks/gpu_training.py                # writes benchmarks/results/gpu_training.{json,md}; needs a GPU
    python benchmarks/gpu_training.py --model 0.6b --rollout _adapt/TAG   # on the replay buffer of a real run
    python benchmarks/gpu_training.py --dry-run      # on the CPU with a tiny model; writes nothing

It runs this project's workers and experience maker in one process (one_process.py). The rollout is recorded: it is the
replay buffer of a checkpoint, or prompts and responses of random tokens with a wide range of lengths. Each algorithm
has a process of its own. In it, variants of the same step take turns.

A machine that has torch for CUDA, nvcc, transformers, accelerate and peft needs this checkout and these packages. They
can be carried there as wheels: `pip wheel --no-deps NAME==VERSION`, with the Python of that machine and DS_BUILD_OPS=0.

    openrlhf==0.11.2 deepspeed==0.19.6 torchdata==0.11.0 pylatexenc==2.11 hjson==3.1.0 pydantic==2.14.3
    annotated-types==0.8.0 typing-inspection==0.4.5 einops==0.8.2 py-cpuinfo==9.0.0
    compiled: pydantic-core==2.50.4 msgpack==1.2.4 ninja==1.13.2

All but the last three are pure Python. DeepSpeed compiles its optimizer on first use.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gpu
import numpy as np
import one_process
import steps
from gpu_setting import DRY_RUN, MODELS, PROMPT, TRAINING_PASSES, G, flags_of, make_inputs
from report import RESULTS, origin, write

from bapo_openrlhf.adapt.arithmetic import batch_arithmetic
from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.group import Group, Prompt, Response
from bapo_openrlhf.adapt.state import group_from_state
from bapo_openrlhf.cli import arguments
from bapo_openrlhf.config import Checked
from bapo_openrlhf.cpu import flash_attention
from bapo_openrlhf.cpu import stack as cpu
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.launch.openrlhf_flags import behaviour_kl, set_openrlhf_flags
from bapo_openrlhf.record.state_file import CheckpointError, load_state
from bapo_openrlhf.workbench.planning.constants import GIB
from bapo_openrlhf.workbench.planning.shapes import ModelShape

KINDS = [kind for kind in gpu.KINDS if kind.name in ("BAPO-GRPO", "BA-PPO")]
PHASES = ("experience", "training")
SECONDS = ("forward", "training", "moving")
EXTRAS = {"info": {}, "score": None, "truncated": False, "mm_train_inputs": None}
HEAD = ("seconds a step", "forward passes", "training", "moving states", "tokens trained a second",
        "MFU of forward passes, %", "MFU of training, %", "GiB, forward passes", "planned", "GiB, training", "planned",
        "log-prob differs by")  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """A way to compute the same step.

    Attributes:
        sliced: Whether log-probs are computed only for response tokens, in tiles.
        checkpointing: Whether activations are computed again in the backward pass.
        packed: Whether samples are packed without padding, if flash-attention is installed.
    """

    name: str
    sliced: bool = True
    checkpointing: bool = True
    packed: bool = True

    def apply(self, models: Mapping[str, Any], packs: bool) -> None:
        """Switch the models of this process.

        Args:
            models: The workers, by the model's name.
            packs: Whether the workers were built for packed samples.
        """
        for name, worker in models.items():
            # DeepSpeed's engine would keep an attribute of the critic to itself.
            model = worker.critic.module if name == "critic" else worker.actor if name == "actor" else worker.model
            model.sliced, model.packing_samples = self.sliced, packs and self.packed
            if name == "reference":
                continue
            if self.checkpointing:
                reentrant = worker.strategy.args.actor.gradient_checkpointing_reentrant
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            else:
                model.gradient_checkpointing_disable()


USUAL = Variant("as a run computes it")
VARIANTS = (
    USUAL,
    Variant("logits of all positions", sliced=False),
    Variant("activations kept", checkpointing=False),
    Variant("padded samples", packed=False),
)


# ── The rollout ──


def made_up_rollout(prompts: int, tokens: int, vocabulary: int) -> list[Group]:
    """Groups of random tokens. Logarithms of the responses' lengths are uniform between an eighth of `tokens` and it.

    Args:
        prompts: Number of groups.
        tokens: Largest length of a response.
        vocabulary: Number of token ids.
    """
    rng = np.random.default_rng(0)
    groups = []
    for number in range(prompts):
        prompt, responses = rng.integers(4, vocabulary, PROMPT), []
        for _ in range(G):
            length = round(tokens * 8 ** (rng.random() - 1))
            ids = np.concatenate([prompt, rng.integers(4, vocabulary, length)])
            log_probs, reward = np.full(length, -np.log(vocabulary)), float(rng.random() < 0.5)
            responses.append(Response(ids, ((PROMPT, PROMPT + length),), log_probs, reward, dict(EXTRAS)))
        groups.append(Group(number, Prompt(str(number), ""), tuple(responses), 0, 0))
    return groups


def recorded_rollout(checkpoint: Path, vocabulary: int) -> list[Group]:
    """The replay buffer of a checkpoint (its folder _adapt/TAG): responses of a run, with their log-probs and rewards.

    Raises:
        ConfigError: There is none, or the model has no embedding for a token.
    """
    try:
        stored = load_state(checkpoint)["method"].get("replay", {"groups": ()})["groups"]
    except CheckpointError as error:
        raise ConfigError(f"rollout {checkpoint} cannot be read: {error}") from error
    groups = [group for group in map(group_from_state, stored) if group.size == G]
    if not groups:
        raise ConfigError(f"rollout {checkpoint} has no group of {G} responses in its replay buffer")
    largest = max(int(response.token_ids.max()) for group in groups for response in group.responses)
    if largest >= vocabulary:
        raise ConfigError(f"rollout {checkpoint} has token {largest}, and --model has {vocabulary} tokens")
    return groups


def on_policy(groups: Sequence[Group]) -> Batch:
    """A batch of these groups, as if today's actor had generated them. The reference model does not know them yet."""
    fresh = [
        replace(group, step=0, policy_step=0, responses=tuple(
            replace(response, extras=dict(EXTRAS), policy_step=None) for response in group.responses))
        for group in groups
    ]  # fmt: skip
    return Batch(fresh=fresh)


# ── One step ──


class Models:
    """The workers of an algorithm in this process, and the experience maker.

    Args:
        words: Flags of `bapo-openrlhf train`.
        kind: The algorithm.
    """

    def __init__(self, words: Sequence[str], kind: steps.Kind) -> None:
        with one_process.stand_ins():
            from bapo_openrlhf.training import dealing, experience, workers
        from openrlhf.trainer.ppo_utils import FixedKLController
        from openrlhf.utils import get_strategy, get_tokenizer

        args = arguments.parse(words)
        args.checked = Checked(batch_arithmetic(args), kl_coef=behaviour_kl(args))
        set_openrlhf_flags(args)
        strategy, folder = get_strategy(args), args.actor.model_name_or_path
        kinds = {"actor": workers.AdaptedPolicyActor, "reference": workers.ReferenceActor}
        kinds |= {"critic": workers.AdaptedCriticActor} if gpu.critic_too(kind) else {}
        self.groups = {name: dealing.DealtActorGroup(1, 1, worker) for name, worker in kinds.items()}
        for name, group in self.groups.items():
            more = {"actor": (1000, None), "critic": (1000,)}.get(name, ())  # optimizer steps; no engines
            group.async_init_model_from_pretrained(strategy, folder, *more)
        self.workers = {name: group._actor_handlers[0].actor for name, group in self.groups.items()}
        self.args, self.kl, self.batch_of = args, FixedKLController(args.algo.kl.init_coef), experience.BatchToTrain.of
        self.maker = experience.AdaptedExperienceMaker(
            self.groups["actor"], self.groups.get("critic"), None, self.groups["reference"], self.kl, strategy,
            get_tokenizer(folder, None, "left", strategy), reference="reference",
        )  # fmt: skip

    def log_probs(self, groups: Sequence[Group]) -> list[Any]:
        """The actor's log-probs of all responses, shape (B, A) for each forward-pass batch."""
        passed = self.maker.forward(self.batch_of(on_policy(groups), 0))
        return [experience.action_log_probs for experience in passed.experiences]

    def train(self, groups: Sequence[Group]) -> dict[str, float]:
        """Make the experience of a step, and train on it.

        Returns:
            Seconds of the step, of the workers' methods by name, and the most bytes of the GPU in each phase.
        """
        import torch

        one_process.SECONDS.clear()
        seconds, most, batch = {}, {}, self.batch_of(on_policy(groups), 0)
        for phase in PHASES:
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            if phase == "experience":
                passed = self.maker.forward(batch)
                made = self.maker.finish(passed, range(len(batch.samples))).experiences
            else:
                self._fit(made)
            seconds[phase] = time.perf_counter() - start
            most[f"{phase}_bytes"] = float(torch.cuda.max_memory_allocated())
        return {**most, **one_process.SECONDS, "step_total": sum(seconds.values())}

    def _fit(self, made: Sequence[Any]) -> None:
        """Train the critic, then the actor. If models sleep, each of them is awake only meanwhile."""
        trained = [name for name in ("critic", "actor") if name in self.groups]
        for name in trained:
            self.groups[name].async_run_method_batch("append", experience=made)
        for name in trained:
            group, sleeps = self.groups[name], self.args.ds.enable_sleep
            if sleeps:
                group.async_run_method("reload_states")
            group.async_run_method("fit", **({"kl_ctl": self.kl.value} if name == "actor" else {}))
            if sleeps:
                group.async_run_method("offload_states")


def measure(
    kind: steps.Kind, words: Sequence[str], groups: Sequence[Group], variants: Sequence[Variant], rounds: int
) -> dict[str, Any]:
    """Measure an algorithm in this process, which must have no Ray and no models yet.

    Returns:
        For each variant, by name: `differs`, the largest difference of a log-prob from the usual variant's, before any
        training; and `runs`, what `Models.train` returns for each round.
    """
    if cpu.active():
        cpu.prepare_environment()
        cpu.install()
    else:
        flash_attention.do_without()
    models = Models(words, kind)
    packs = models.args.ds.packing_samples
    found: dict[str, Any] = {}
    usual: list[Any] = []
    for variant in variants:
        variant.apply(models.workers, packs)
        log_probs = models.log_probs(groups)
        usual = usual or log_probs
        differs = max(float((a - b).abs().max()) for a, b in zip(log_probs, usual, strict=True))
        found[variant.name] = {"differs": differs, "runs": []}
    for one in range(rounds + 1):  # the first is not measured, because kernels are compiled in it
        for variant in variants if one % 2 else reversed(variants):
            variant.apply(models.workers, packs)
            step = models.train(groups)
            if one:
                found[variant.name]["runs"].append(step)
    return found


# ── Numbers and page ──


def numbers(
    step: Mapping[str, float], lengths: Sequence[int], shape: ModelShape, peak: float, *, critic: bool
) -> dict[str, float]:
    """What the table says of a step.

    Args:
        step: What `Models.train` returned.
        lengths: Tokens of each sample.
        peak: FLOP/s of the GPU.
        critic: Whether a critic is trained, too.
    """
    passed, trained = step["forward"], step["fit"]

    def mfu(seconds: float, *, critic: bool) -> float:
        return sum(gpu.training_mfu(shape, 1, length, seconds, peak, critic=critic) for length in lengths)

    # A forward pass of actor and critic, and one more of the reference model.
    forward = (mfu(passed, critic=critic) + mfu(passed, critic=False)) / TRAINING_PASSES
    return {
        "step_total": step["step_total"],
        "forward": passed,
        "training": trained,
        "moving": step.get("reload_states", 0.0) + step.get("offload_states", 0.0),
        "trained_per_second": sum(lengths) / trained,
        "forward_mfu": forward,
        "mfu": mfu(trained, critic=critic),
        **{f"{phase}_gib": step[f"{phase}_bytes"] / GIB for phase in PHASES},
    }


def markdown(result: Mapping[str, Any]) -> str:
    """The page of results."""
    rows = []
    for kind, variants in result["runs"].items():
        for variant, found in variants.items():
            runs, plan = found["runs"], result["planned_gib"][kind][variant]
            cells = {name: [run[name] for run in runs] for name in runs[0]}
            for name in ("forward_mfu", "mfu"):
                cells[name] = [100 * share for share in cells[name]]
            digits = dict.fromkeys(cells, 2) | {"trained_per_second": 0, "forward_mfu": 1, "mfu": 1}
            shown = {name: steps.with_spread(values, digits[name]) for name, values in cells.items()}
            memory = [cell for phase in PHASES for cell in (f"{max(cells[f'{phase}_gib']):.1f}", f"{plan[phase]:.1f}")]
            seconds = [shown["step_total"], *(f"{statistics.median(cells[name]):.2f}" for name in SECONDS)]
            speeds = [shown[name] for name in ("trained_per_second", "forward_mfu", "mfu")]
            rows.append([f"{kind}, {variant}", *seconds, *speeds, *memory, f"{found['differs']:.2g}"])
    dry = ["**Dry run: no GPU.** It shows only that the script runs. Its numbers mean nothing.", ""]
    left_out = [f"{kind}, {variant}" for kind, names in result["left_out"].items() for variant in names]
    lengths = result["lengths"]
    lines = [
        "# The training side of a step on one GPU",
        "",
        *(dry if result["dry_run"] else []),
        f"{result['model']}, random weights, bf16, {result['attention']}. A step has {len(lengths)} samples of "
        f"{min(lengths):,} to {max(lengths):,} tokens, {sum(lengths):,} together, from {result['source']}. A "
        f"micro-batch has {result['micro']} samples in training and twice as many in a forward pass. There is one "
        f"optimizer step. The table has the median over {result['rounds']} rounds, with the smallest and the largest "
        f"in brackets. {result['machine']}; commit {result['commit']}.",
        "",
        f"`{result['command']}`",
        "",
        *gpu.table(HEAD, rows),
        "Forward passes are those of actor, critic and reference model. Moving states is what `ds.enable_sleep` costs: "
        "the states of a trained model wait in the host's memory. MFU counts the operations of one forward pass of "
        "each model, or of three of each trained one, without what checkpointing computes again. It is relative to "
        f"{result['peak_tflops']:g} TFLOP/s. Memory is the most that PyTorch had allocated; the plan is that of "
        "`bapo-openrlhf plan` without the engine. The last column is the largest difference of a response token's "
        f"log-prob from the variant “{USUAL.name}”, in nats, before any training.",
        *(["", f"Left out, because by the plan they do not fit: {'; '.join(left_out)}."] if left_out else []),
    ]
    return "\n".join(lines) + "\n"


# ── All of it ──


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)  # fmt: skip
    parser.add_argument("--model", choices=[*MODELS][1:], default="1.7b")
    parser.add_argument("--rollout", type=Path, metavar="DIR", help="_adapt/TAG of a run (default: made-up tokens)")
    parser.add_argument("--prompts", type=int, default=8, help=f"of a made-up rollout, with {G} responses each")
    parser.add_argument("--tokens", type=int, default=4096, help="of a made-up response, at most")
    parser.add_argument("--micro", type=int, default=2, help="samples of a micro-batch of training")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peak-tflops", type=float, help="of the GPU in bf16, dense; else by the GPU's name")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, a tiny model and 1 round; writes nothing")
    given = parser.parse_args(argv)
    if given.dry_run:
        vars(given).update(DRY_RUN | {"prompts": 2})
    elif cpu.active():
        parser.error("this machine has no GPU, and a GPU is what is measured; --dry-run tries the script without one")
    vars(given).update(gpus=1, steps=1)
    return given


def flags_for(given: argparse.Namespace, groups: Sequence[Group], *, packs: bool) -> dict[str, Any]:
    """The flags of `bapo-openrlhf train` that all variants have."""
    responses = [response for group in groups for response in group.responses]
    flags = flags_of(argparse.Namespace(**{**vars(given), "prompts": len(groups)})) | {
        "data.max_len": max(len(response.token_ids) for response in responses),
        "rollout.max_new_tokens": max(len(response.log_probs) for response in responses),
        "train.micro_batch_size": given.micro,
        "rollout.micro_batch_size": 2 * given.micro,
        "vllm.sync_backend": "gloo",  # with nccl, OpenRLHF asks for vLLM's version
    }
    return flags | ({"ds.attn_implementation": "flash_attention_2", "ds.packing_samples": ""} if packs else {})


def words_of(kind: steps.Kind, variant: Variant, flags: Mapping[str, Any]) -> list[str]:
    """The command line of `bapo-openrlhf train` for a variant, as the plan reads it."""
    flag = "actor.gradient_checkpointing_enable"
    return steps.words_of(kind, {n: value for n, value in flags.items() if variant.checkpointing or n != flag})


def main() -> None:
    """Measure and write."""
    given = parse(sys.argv[1:])
    sheet, size, tflops, machine = gpu.prepare(given)
    shape, packs = MODELS[given.model], find_spec("flash_attn_2_cuda") is not None and not given.dry_run
    rollout = given.rollout and recorded_rollout(given.rollout, shape.vocabulary)
    groups = rollout or made_up_rollout(given.prompts, given.tokens, shape.vocabulary)
    lengths = [len(response.token_ids) for group in groups for response in group.responses]
    flags = flags_for(given, groups, packs=packs)
    result: dict[str, Any] = {
        **{name: value for name, value in vars(given).items() if name != "rollout"},
        "model": shape.name,
        "attention": flags["ds.attn_implementation"] + (", packed samples" if packs else ""),
        "source": "the replay buffer of a checkpoint" if rollout else "random tokens",
        "peak_tflops": tflops,
        "lengths": lengths,
        **origin(shlex.join(["python", "benchmarks/gpu_training.py", *sys.argv[1:]]), *machine),
        **{name: {} for name in ("planned_gib", "left_out", "runs")},
    }
    with tempfile.TemporaryDirectory() as name:
        flags |= make_inputs(Path(name), shape, len(groups))
        for kind in KINDS:
            variants = [variant for variant in VARIANTS if packs or variant.packed]
            plans = {v.name: gpu.planned(kind, shape, words_of(kind, v, flags), sheet, size) for v in variants}
            gib = {name: {phase: getattr(plan, phase) / GIB for phase in PHASES} for name, plan in plans.items()}
            left_out = [] if given.dry_run else [n for n, plan in gib.items() if max(plan.values()) > size / GIB]
            variants = [variant for variant in variants if variant.name not in left_out]
            result["planned_gib"][kind.name], result["left_out"][kind.name] = gib, left_out
            if not variants:
                continue
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                words = words_of(kind, USUAL, flags)
                found = pool.submit(measure, kind, words, groups, variants, given.rounds).result()
            for variant in found.values():
                critic, peak = gpu.critic_too(kind), tflops * 1e12
                variant["runs"] = [numbers(step, lengths, shape, peak, critic=critic) for step in variant["runs"]]
            result["runs"][kind.name] = found
            if not given.dry_run:
                write(RESULTS, "gpu_training", result, markdown(result))
    if given.dry_run:
        print(markdown(result))


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(f"error: {error}")
