"""`bapo-openrlhf check`: check a whole configuration without models or GPU, and print what would run."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from bapo_openrlhf.adapt.arithmetic import BatchArithmetic, epoch_steps
from bapo_openrlhf.adapt.schedule import RolloutSchedule
from bapo_openrlhf.cli import arguments
from bapo_openrlhf.config import Checked
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.methods import BAPO, registry
from bapo_openrlhf.workbench.pages.text import duration
from bapo_openrlhf.workbench.planning.groups import happenings

BYTES_PER_RESPONSE_TOKEN = 8  # 4 for the id and 4 for the behaviour log-prob of a stored token (adapt/group.py)
BYTES_PER_PROMPT_TOKEN = 4  # for the id
BYTES_OF_REFERENCE = 4  # in addition for each response token if there is a reference model


def main(argv: Sequence[str], prog: str = "bapo-openrlhf check") -> int:
    """Parse, check, print."""
    own = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
    own.add_argument("--prompts", type=int, default=None, help="rows of the training data if it is not on this machine")
    mine, rest = own.parse_known_args(list(argv))
    args = arguments.parse(rest, prog)

    from bapo_openrlhf.launch.preflight import check_inputs

    checked = check_inputs(args, data=mine.prompts is None or _is_here(args.data.prompt_dataset))
    if checked.prompts is None:
        checked = replace(checked, prompts=mine.prompts)
    if checked.prompts is not None and checked.prompts < 1:
        raise ConfigError(f"prompts is {checked.prompts}; it must be at least 1")
    report = describe(args, checked)
    width = max(len(name) for name, _ in report)
    print("\n".join(f"{name:<{width}}  {value}" for name, value in report))
    print("configuration is valid")
    return 0


def _is_here(datasets: str | None) -> bool:
    return all(Path(dataset.strip().split("@")[0]).exists() for dataset in (datasets or "").split(","))


def describe(args: SimpleNamespace, checked: Checked) -> list[tuple[str, str]]:
    """Each fact about the run: its name and its value."""
    adapt, kl, arithmetic = args.adapt, args.algo.kl, checked.arithmetic
    rows = [
        ("algorithm", args.algorithm or "none given: OpenRLHF's flags as they are"),
        ("advantages", f"{args.algo.advantage.estimator} (lambda {args.algo.advantage.lambd:g})"),
        ("batch adaptation", " ".join([adapt.method, *(adapt.options or [])])),
        ("actor", _model(args.actor, args.actor.model_name_or_path)),
    ]
    if args.critic.model_name_or_path:
        rows.append(("critic", _model(args.critic, args.critic.model_name_or_path)))
    target = adapt.kl_target if adapt.enabled else "reference"
    if kl.init_coef > 0 and target == "reference":
        rows.append(("reference", _model(args.ref, args.actor.model_name_or_path)))
    rows += [
        ("KL penalty", f"{kl.init_coef:g} to the {target} policy, in the {'loss' if kl.use_loss else 'reward'}"),
        ("rollout engines", f"{args.vllm.num_engines} x tensor parallel {args.vllm.tensor_parallel_size}"),
        ("rollout batch", f"{args.rollout.batch_size} prompts x G {arithmetic.group_size} responses"),
        ("training batch", _batch(arithmetic, adapt.enabled)),
        ("optimizer steps", f"{arithmetic.optimizer_steps(arithmetic.capacity)} per epoch of a full batch, each of "
                            f"{arithmetic.train_batch} samples; the last of a smaller batch takes what is left"),
    ]  # fmt: skip
    for model in ("actor", "critic"):
        if model in arithmetic.ranks:
            count = arithmetic.micro_batches(arithmetic.capacity, model)
            most = arithmetic.micro_train
            rows.append((f"{model} micro-batches", f"{count} per rank and full batch, of at most {most} samples"))
    if adapt.enabled:
        rows += _adaptation(args, checked)
    if args.train.async_enable:
        rows.append(("record", "only run.json and OpenRLHF's own logs: the asynchronous trainer is used as it is"))
    rows += _epoch(args, checked)
    return rows


def _model(model: SimpleNamespace, name: str) -> str:
    return f"{name}, {model.num_nodes} node(s) x {model.num_gpus_per_node} GPU(s)"


def _batch(arithmetic: BatchArithmetic, adapted: bool) -> str:
    size = arithmetic.capacity * arithmetic.group_size
    if not adapted:
        return f"{arithmetic.capacity} groups = {size} samples"
    return f"any number of groups up to B {arithmetic.capacity} (= {size} samples)"


def _adaptation(args: SimpleNamespace, checked: Checked) -> list[tuple[str, str]]:
    adapt, arithmetic = args.adapt, checked.arithmetic
    c1, c2, c3 = adapt.thresholds()
    response = args.rollout.max_new_tokens or args.data.max_len
    prompt = max(args.data.max_len - response, 0)
    groups = adapt.replay_buffer_size or adapt.buffer_size
    groups = min(groups, adapt.replay_steps * args.rollout.batch_size)
    per_token = BYTES_PER_RESPONSE_TOKEN + BYTES_OF_REFERENCE * ("reference" in arithmetic.ranks)
    most = groups * arithmetic.group_size * (response * per_token + prompt * BYTES_PER_PROMPT_TOKEN)
    again = (
        f"every m {adapt.reevaluate_every} steps, at most {adapt.max_reevaluated_prompts} prompts; "
        f"hard at mean reward <= c1 {c1}"
    )
    replay = f"{adapt.replay_steps} steps, c2 in [{c2.low}, {c2.high}], c3 in [{c3.low}, {c3.high}]"
    size = f"{most / 2**20:.1f} MiB at {response} response and {prompt} prompt tokens"
    limits = [
        f"{source} {limit:g}"
        for source, limit in (("fresh", adapt.max_tv_fresh), ("replayed", adapt.max_tv_replayed))
        if limit is not None
    ]
    truncated = f" (rho {adapt.vtrace_rho_max:g}, c {adapt.vtrace_c_max:g})" if adapt.returns == "vtrace" else ""
    sources = [
        ("fresh filter (X1)", adapt.filter),
        ("re-evaluation (X2)", again if adapt.reevaluate_every else "off"),
        ("replay (X3)", replay if adapt.replay_steps else "off"),
        ("hard buffer", f"{adapt.buffer_size} prompts"),
        ("replay buffer", f"at most {groups} groups, {size}"),
    ]
    # The other rows describe BAPO's buffers, which another method need not have.
    rows = sources if issubclass(registry.method_class(adapt.method), BAPO) else []
    if checked.candidates > 1:
        rows = [("prompts drawn", f"{checked.candidates} for each one that is generated for"), *rows]
    rows += [("importance ratio", adapt.ratio)]
    if args.critic.model_name_or_path:
        rows += [("returns", adapt.returns + truncated)]
    return [
        *rows,
        ("maximum TV distance", ", ".join(limits) or "none"),
        ("reward function", _verifier(args)),
        ("checkpoints", _checkpoints(args.ckpt)),
    ]


def _verifier(args: SimpleNamespace) -> str:
    verifier, endpoints = args.verifier, args.reward.remote_url
    if not endpoints or endpoints == "agent" or not endpoints[0].endswith(".py"):
        return "not a Python file: it runs where it is"
    if not verifier.processes:
        return "within the rollout engine, without limits"
    limits = f"{duration(verifier.timeout)} and {verifier.memory_gib:g} GiB a call"
    return f"{verifier.processes} processes for each rollout engine, {limits}"


def _checkpoints(ckpt: SimpleNamespace) -> str:
    if ckpt.save_steps < 1 or ckpt.disable_ds:
        return "none (--ckpt.save_steps)"
    return f"every {ckpt.save_steps} steps in {ckpt.path}, with the buffers"


def _epoch(args: SimpleNamespace, checked: Checked) -> list[tuple[str, str]]:
    if checked.prompts is None:
        return [("epoch", "the training data is not here: give its rows with --prompts to see steps and syncs")]
    steps = epoch_steps(args, checked.prompts, checked.candidates)
    rows = [("epoch", f"{checked.prompts} prompts = {steps} trainer steps; {args.train.num_episodes} epoch(s)")]
    if args.adapt.enabled:
        schedule = RolloutSchedule(args.adapt.rollout_delay, args.adapt.reevaluate_every)
        found = happenings(schedule, steps)
        again = f"{found.reevaluations} re-evaluations (m {schedule.reevaluate_every})"
        rows.append(
            ("per epoch", f"{found.syncs} syncs (v {schedule.delay}), {again}, {found.apart} of them between syncs")
        )
    return rows
