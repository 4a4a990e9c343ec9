"""`bapo-openrlhf check`: check a whole configuration without models or GPU, and print what would run."""

import math
import os
from collections.abc import Sequence
from types import SimpleNamespace

from bapo_openrlhf.cli import arguments
from bapo_openrlhf.cli.parser import Parser
from bapo_openrlhf.flags.checked import Checked
from bapo_openrlhf.flags.ranges import check_ranges
from bapo_openrlhf.flags.rule import Flags
from bapo_openrlhf.flags.sizes import (
    ENOUGH_STEPS,
    batch_arithmetic,
    blocks_of,
    epoch_steps,
    most_tokens,
    response_tokens,
)
from bapo_openrlhf.launch.environment import missing_attention, versions_in_words
from bapo_openrlhf.methods import BAPO, registry
from bapo_openrlhf.workbench.pages.text import duration, many
from bapo_openrlhf.workbench.planning.groups import happenings
from bapo_openrlhf.workbench.planning.memory import replay_bytes
from bapo_openrlhf.workbench.planning.workload import Workload


def main(argv: Sequence[str], prog: str = "bapo-openrlhf check") -> int:
    """Parse, check, print."""
    parser = Parser(prog, __doc__, add_help=False)
    parser.add_argument("--prompts", type=int, help="rows of the training data if it is not on this machine")
    options, rest = parser.parse_known_args(argv)
    args = arguments.parse(rest, prog, own=parser)

    from bapo_openrlhf.launch.preflight import check_inputs, print_warnings

    check_ranges(vars(options), {"prompts": "at least 1"})
    datasets = (args.data.prompt_dataset or "").split(",")
    data = options.prompts is None or all(os.path.exists(dataset.strip().split("@")[0]) for dataset in datasets)
    checked = check_inputs(args, data=data, ahead=True, elsewhere=options.prompts)
    print_warnings(checked)
    report = describe(args, checked)
    width = max(len(name) for name, _ in report)
    print("\n".join(f"{name:<{width}}  {value}" for name, value in report))
    print(f"{'start':<{width}}  {_start(args, checked.prompts, data=data)}")
    if problem := missing_attention(args):
        print(f"warning: {problem}")
    print("configuration is valid")
    return 0


def _start(args: SimpleNamespace, prompts: int | None, *, data: bool) -> str:
    """How `train` would start now; a ConfigError if it would not. Without `data`, that is not compared with a run's."""
    from bapo_openrlhf.launch.resume import check_free_folders, choose_start, compare_with_beginning
    from bapo_openrlhf.launch.settings import settings_of

    check_free_folders(args)
    start = choose_start(args)
    if start.tag is None:
        return "from the beginning"
    compare_with_beginning(args, settings_of(args, prompts), start, data=data)
    return f"with step {start.step + 1}, from {start.tag}"


def describe(args: SimpleNamespace, checked: Checked) -> list[tuple[str, str]]:
    """Each fact about the run: its name and its value."""
    adapt, kl, arithmetic, loaded = args.adapt, args.algo.kl, batch_arithmetic(args), Flags.of(args).loaded
    rows = [
        ("algorithm", args.algorithm or "none given: OpenRLHF's flags as they are"),
        ("advantages", f"{args.algo.advantage.estimator} (lambda {args.algo.advantage.lambd:g})"),
        ("batch adaptation", " ".join([adapt.method, *(adapt.options or [])])),
        ("actor", _model(args.actor, args.actor.model_name_or_path)),
    ]
    if "critic" in loaded:
        rows.append(("critic", _model(args.critic, args.critic.model_name_or_path)))
    target = adapt.kl_target if adapt.enabled else "reference"
    response = args.rollout.max_new_tokens
    limit = "" if response is None else f", response at most {response}"
    samples = arithmetic.most_samples
    batch = f"any number of samples up to {samples} (= B {arithmetic.capacity} groups)"
    if "ref" in loaded:
        rows.append(("reference", _model(args.ref, args.actor.model_name_or_path)))
    if args.ds.lora.rank:
        trained = "actor and critic" if "critic" in loaded else "actor"
        rows.append(
            ("LoRA", f"rank {args.ds.lora.rank}, alpha {args.ds.lora.alpha}: only adapters of the {trained} learn")
        )
    rows += [
        ("KL penalty", f"{kl.init_coef:g} to the {target} policy, in the {'loss' if kl.use_loss else 'reward'}"),
        ("attention", args.ds.attn_implementation),
        ("rollout engines", f"{args.vllm.num_engines} x tensor parallel {args.vllm.tensor_parallel_size}"),
        ("GPUs", _gpus(args)),
        *[("CUDA", versions_in_words())] * (args.vllm.sync_backend == "nccl"),
        ("learning rates", _learning_rates(args)),
        ("lengths", f"prompt and response at most {args.data.max_len} tokens{limit}"),
        ("rollout batch", f"{args.rollout.batch_size} prompts x G {arithmetic.group_size} responses"),
        ("training batch", batch if adapt.enabled else f"{arithmetic.capacity} groups = {samples} samples"),
        ("optimizer steps", f"{arithmetic.optimizer_steps} per epoch of a full batch, each of "
                            f"{arithmetic.train_batch} samples; the last of a smaller batch takes what is left"),
    ]  # fmt: skip
    tokens = most_tokens(args, "train")
    if tokens is not None:
        rows.append(("micro-batches", f"as many samples as fit into {tokens} tokens"))
    for model in ("actor", "critic"):
        if model in arithmetic.ranks and tokens is None:
            count, most = arithmetic.micro_batches(model), arithmetic.micro_train
            rows.append((f"{model} micro-batches", f"{count} per rank and full batch, of at most {most} samples"))
    if adapt.enabled:
        rows += _adaptation(args, checked)
    proof = f"compared in the first steps; the run ends above a KL divergence of {adapt.max_gap:g} in a token"
    rows.append(("engine and actor", proof if adapt.enabled else "not compared, because batches are not adapted"))
    if args.train.async_enable and not adapt.enabled:
        rows.append(("record", "only run.json and OpenRLHF's own logs: the asynchronous trainer is used as it is"))
    return [*rows, *_folders(args), *_epoch(args, checked)]


def _model(model: SimpleNamespace, name: str) -> str:
    return f"{name}, {model.num_nodes} node(s) x {model.num_gpus_per_node} GPU(s)"


def _gpus(args: SimpleNamespace) -> str:
    flags = Flags.of(args)
    blocks = blocks_of(args, critic=flags.critic, reference="ref" in flags.loaded).values()
    parts = [f"{block.gpus} for {' + '.join(block.roles).replace('reward', 'reward model')}" for block in blocks]
    return f"{sum(block.gpus for block in blocks)} in total: {', '.join(parts)}"


def _learning_rates(args: SimpleNamespace) -> str:
    models = {name: getattr(args, name) for name in Flags.of(args).loaded if name in ("actor", "critic")}
    return ", ".join(
        f"{name} {model.adam.lr:g} ({model.lr_scheduler}, warm-up in {model.lr_warmup_ratio:.0%} of the steps)"
        for name, model in models.items()
    )


def _adaptation(args: SimpleNamespace, checked: Checked) -> list[tuple[str, str]]:
    adapt, groups = args.adapt, Workload(args).replay_capacity
    c1, c2, c3 = adapt.thresholds()
    response = response_tokens(args)
    prompt = max(args.data.max_len - response, 0)
    most = replay_bytes(Workload(args), prompt, response, groups)
    hard = f"at most {adapt.most_reevaluated(args.rollout.batch_size)} prompts; hard at mean reward <= c1 {c1}"
    reevaluation = f"every m {adapt.reevaluate_every} steps, {hard}"
    replay = f"{adapt.replay_steps} steps, c2 in [{c2.low}, {c2.high}], c3 in [{c3.low}, {c3.high}]"
    size = f"{most / 2**20:.1f} MiB at {response} response and {prompt} prompt tokens"
    shifts = {"fresh": adapt.max_shift_fresh, "replayed": adapt.max_shift_replayed}
    limits = [f"{source} {limit:g}" for source, limit in shifts.items() if limit is not None]
    sources = [
        ("fresh filter (X1)", adapt.filter),
        ("re-evaluation (X2)", reevaluation if adapt.reevaluate_every else "off"),
        ("replay (X3)", replay if adapt.replay_steps else "off"),
        ("hard buffer", f"{adapt.buffer_size} prompts"),
        ("replay buffer", f"at most {groups} groups, {size}"),
    ]
    # The other rows describe BAPO's buffers, which another method need not have.
    rows = sources if issubclass(registry.method_class(adapt.method), BAPO) else []
    if checked.candidates > 1:
        rows = [("prompts drawn", f"{checked.candidates} for each one that is generated for"), *rows]
    if adapt.partial_rollout_tokens is not None:
        rows = [("partial rollouts", f"a response stops after {adapt.partial_rollout_tokens} tokens of a step"), *rows]
    rows += [("importance ratio", adapt.ratio)]
    if Flags.of(args).critic:
        rows += [("returns", adapt.returns)]
    bounds = adapt.rewards()
    rewards = f"{bounds[0]} to {bounds[1]}" if bounds else "measured in the first step"
    rows += [("maximum shift", ", ".join(limits) or "none"), ("reward function", _verifier(args))]
    return [*rows, ("range of rewards", rewards)]


def _verifier(args: SimpleNamespace) -> str:
    verifier, endpoints, agent = args.verifier, args.reward.remote_url, args.train.agent_func_path
    if not endpoints:
        return "none; the reward model scores the responses"
    if not agent and not endpoints[0].endswith(".py"):
        return "not a Python file: it runs where it is"
    if not verifier.processes:
        return "within the rollout engine, without limits"
    if agent:
        return f"an agent, which may take {duration(verifier.timeout)} between two generations"
    limits = f"{duration(verifier.timeout)} and {verifier.memory_gib:g} GiB a call"
    return f"{verifier.processes} processes for each rollout engine, {limits}"


def _folders(args: SimpleNamespace) -> list[tuple[str, str]]:
    ckpt = args.ckpt
    saved = f"every {ckpt.save_steps} steps in {ckpt.path}" + (", with the buffers" if args.adapt.enabled else "")
    if ckpt.disable_ds or ckpt.save_steps <= 0:
        saved = f"none ({'--ckpt.disable_ds' if ckpt.disable_ds else '--ckpt.save_steps'})"
    return [
        ("run's folder", f"{args.run.dir}/{args.run.name}"),
        ("trained model", ckpt.output_dir),
        ("checkpoints", saved),
        ("training data", args.data.prompt_dataset or "none"),
        *([("evaluation", _evaluation(args.eval))] if args.eval.dataset else []),
    ]


def _evaluation(evaluation: SimpleNamespace) -> str:
    every = f"every {many(evaluation.steps, 'step')}" if evaluation.steps > 0 else "never (--eval.steps)"
    return f"{evaluation.dataset}, {every}, {many(evaluation.n_samples_per_prompt, 'response')} to each prompt"


def _epoch(args: SimpleNamespace, checked: Checked) -> list[tuple[str, str]]:
    if checked.prompts is None:
        return [("epoch", "the training data is not here: give its rows with --prompts to see steps and syncs")]
    steps = epoch_steps(args, checked.prompts, checked.candidates)
    total, arithmetic = steps * args.train.num_episodes, batch_arithmetic(args)
    updates = total * args.train.max_epochs * arithmetic.optimizer_steps
    episodes = many(args.train.num_episodes, "epoch")
    most = "at most " if args.algo.dynamic_filtering_enable else ""
    drawn = args.rollout.batch_size * checked.candidates
    draws = f", each of which draws {drawn} and generates for {args.rollout.batch_size}"
    hint = f"; for {ENOUGH_STEPS} steps or more, --train.num_episodes {math.ceil(ENOUGH_STEPS / steps)}"
    rows = [
        ("epoch", f"{checked.prompts} prompts = {most}{many(steps, 'trainer step')}"
                  f"{draws if checked.candidates > 1 else ''}; {episodes}"),
        ("whole run", f"{many(total, 'rollout step')}, at most {many(updates, 'optimizer step')}"
                      f"{hint if total < ENOUGH_STEPS else ''}"),
    ]  # fmt: skip
    if args.adapt.enabled:
        delay, every = args.adapt.rollout_delay, args.adapt.reevaluate_every
        syncs, count, between = happenings(delay, every, steps)
        reevaluations = f", {many(count, 're-evaluation')} (m {every}), {between} of them between syncs"
        x2 = registry.takes(registry.method_class(args.adapt.method), "reevaluate_every")
        rows.append(("per epoch", f"{many(syncs, 'sync')} (v {delay}){reevaluations if x2 else ''}"))
    return rows
