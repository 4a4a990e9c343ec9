"""What this project extends, replaces and calls inside OpenRLHF, and what of it another version changes.

    python tools/openrlhf_contract.py                    # compare the installed packages with the record
    python tools/openrlhf_contract.py --source FOLDER    # compare a folder that holds another version's `openrlhf/`
    python tools/openrlhf_contract.py --write            # record the installed packages

The record is tools/openrlhf_contract.json. It has one entry for each function of OpenRLHF, DeepSpeed or vLLM on which
this project depends: a digest of its source, and the reasons why it matters. If a change of its body could not break
this project unnoticed (`COMPARED`, `ADDED_TO`), the digest is only that of its parameters. A comparison reads source
files only; it imports nothing. It prints one line for each function that was renamed, removed or changed, and exits
with status 1.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import importlib.util
import json
import pkgutil
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FunctionType

RECORD = Path(__file__).with_suffix(".json")
PACKAGES = ("openrlhf", "deepspeed", "vllm")
MAIN = "__main__"  # the block `if __name__ == "__main__"` of a module

GENERATOR = "openrlhf.trainer.ppo_utils.samples_generator:SamplesGenerator"
MAKER = "openrlhf.trainer.ppo_utils.experience_maker:RemoteExperienceMaker"

# Functions that are called, or whose private attributes are used, although they are not a public interface.
CALLED = {
    "openrlhf.cli.train_ppo_ray:__main__": "host.py runs its statements",
    "openrlhf.cli.train_ppo_ray:train": "training/driver/build.py does its work",
    "openrlhf.trainer.ray.vllm_engine:create_vllm_engines": "training/driver/build.py does its work",
    "openrlhf.utils.utils:get_strategy": "training/worker/strategy.py does its work",
    "openrlhf.cli.serve_rm:__main__": "host.py runs its statements",
    "openrlhf.cli.serve_rm:RewardModelProxy.__init__": "cli/serve_rm.py extends it",
    "openrlhf.datasets.prompts_dataset:preprocess_data": "data/prompts.py calls it",
    "openrlhf.datasets.utils:blending_datasets": "data/reading.py calls it",
    "openrlhf.trainer.ppo_trainer:prepare_datasets": "it reads the rows that were kept",
    "openrlhf.utils.vlm_utils:load_images": "training/engine/pictures.py calls it",
    "openrlhf.utils.utils:get_tokenizer": "data/tokenizer.py loads what it loads",
    "openrlhf.utils.config:hierarchize": "host.py calls it",
    "vllm.distributed.utils:stateless_init_torch_distributed_process_group": "cpu/patches_openrlhf.py calls it",
    "openrlhf.trainer.ppo_trainer:BasePPOTrainer._detect_eval_metric_key": "the trainer calls it",
    "openrlhf.models.ring_attn_utils:unpad_and_slice_tensor": "training/worker/log_probs.py calls it",
    "openrlhf.models.ring_attn_utils:gather_and_pad_tensor": "training/worker/log_probs.py calls it",
    f"{GENERATOR}._process_response_into_experience": "training/trainer/samples.py does its work",
    f"{GENERATOR}._generate_vllm": "training/trainer/engine_calls.py does its work",
    f"{GENERATOR}.generate_samples": "training/trainer/generator.py does its work",
    f"{GENERATOR}.generate_eval_samples": "training/trainer/generator.py does its work",
    f"{MAKER}.make_experience": "training/trainer/experience.py does its work",
    f"{MAKER}.split_rollout_samples": "training/trainer/dealing.py does its work",
    f"{MAKER}.compute_advantages_and_returns": "training/trainer/advantages.py does its work",
    f"{MAKER}.get_advantages_and_returns": "training/trainer/advantages.py does its work",
    f"{MAKER}.get_cumulative_returns": "training/trainer/advantages.py does its work",
    "openrlhf.trainer.ray.launcher:BaseModelActor._setup_distributed": "training/worker/workers.py calls it",
    "openrlhf.trainer.ray.launcher:RayActorGroup._initiate_actors": "_actor_handlers is read",
    "openrlhf.trainer.ray.ppo_actor:ActorPPOTrainer._init_vllm_sync_group": "weight_sync.py uses _model_update_group",
    "openrlhf.trainer.ray.vllm_worker_wrap:WorkerWrap.init_process_group": "weight_receipt.py uses _model_update_group",
    "openrlhf.trainer.ray.vllm_worker_wrap:WorkerWrap.update_weight_cuda_ipc": "weight_receipt.py does its work",
    "openrlhf.trainer.ppo_utils.replay_buffer:NaiveReplayBuffer.append": "training/worker/whole_batch.py does its work",
    "openrlhf.trainer.ray.ppo_actor:ActorPPOTrainer.training_step": "training/worker/updates.py does its work",
    "openrlhf.trainer.ray.ppo_critic:CriticPPOTrainer.training_step": "training/worker/updates.py does its work",
    "openrlhf.utils.agent:SingleTurnAgentExecutor.execute": "training/engine/single_turn.py does its work",
    "openrlhf.utils.agent:SingleTurnAgentExecutor._fetch_rewards_via_func": "single_turn.py does its work",
    "openrlhf.utils.agent:SingleTurnAgentExecutor._fetch_rewards_via_http": "reward_server.py does its work",
    "openrlhf.utils.loss_utils:_optimizer_step_loss_norm": "training/worker/updates.py does its work",
    "openrlhf.utils.deepspeed.deepspeed:DeepspeedStrategy.moving_average": "training/worker/updates.py does its work",
}

# Functions whose results a test compares with this project's, on the same input: a change of the body fails the test.
# What a new flag does is not in the test; the flags of a new version are in `__main__`, which is recorded whole.
BUILT = "test_build.py:test_a_plain_run_asks_for_what_openrlhf_asks_for"
LOADED = "test_workers.py:test_models_and_trainers_are_built_as_openrlhf_builds_them"
ESTIMATED = "test_experience.py:test_other_group_estimators_are_openrlhfs"
COMPARED = {
    "openrlhf.cli.train_ppo_ray:train": BUILT,
    "openrlhf.trainer.ray.vllm_engine:create_vllm_engines": BUILT,
    "openrlhf.trainer.ray.launcher:ReferenceModelActor.init_model_from_pretrained": LOADED,
    "openrlhf.trainer.ray.ppo_actor:PolicyModelActor.init_model_from_pretrained": LOADED,
    "openrlhf.trainer.ray.ppo_critic:CriticModelActor.init_model_from_pretrained": LOADED,
    f"{MAKER}.compute_advantages_and_returns": ESTIMATED,
    f"{MAKER}.get_advantages_and_returns": "test_experience.py:test_a_critic_sees_no_groups",
    f"{MAKER}.get_cumulative_returns": ESTIMATED,
    f"{GENERATOR}._process_response_into_experience": "test_rollout.py:test_are_otherwise_openrlhfs",
    "openrlhf.models.actor:Actor.forward": "test_log_probs.py:test_an_actor_has_openrlhfs_numbers_and_gradients",
    "openrlhf.utils.utils:get_tokenizer": "test_tokenizer.py:test_it_is_the_one_of_openrlhf",
    "openrlhf.utils.agent:SingleTurnAgentExecutor.execute": "test_single_turn.py:test_is_what_openrlhf_makes",
}

# Functions that still run as a whole: this project calls them, or its override adds something before or after
# `super()`. It relies on their parameters and on results that it reads by name, so a change of the body is taken over.
ADDED_TO = {
    "openrlhf.datasets.prompts_dataset:preprocess_data",
    "openrlhf.trainer.ppo_trainer:BasePPOTrainer._compute_rollout_stats",
    "openrlhf.trainer.ppo_trainer:BasePPOTrainer._detect_eval_metric_key",
    "openrlhf.trainer.ppo_trainer:BasePPOTrainer.init_checkpoint_states",
    "openrlhf.trainer.ppo_trainer:PPOTrainer.evaluate",
    "openrlhf.trainer.ppo_utils.replay_buffer:NaiveReplayBuffer.__init__",
    f"{GENERATOR}.__init__",
    "openrlhf.trainer.ray.launcher:BaseModelActor._setup_distributed",
    "openrlhf.trainer.ray.launcher:BaseModelActor.execute_batch",
    "openrlhf.trainer.ray.launcher:RewardModelActor.init_model_from_pretrained",
    "openrlhf.trainer.ray.ppo_actor:ActorPPOTrainer.__init__",
    "openrlhf.trainer.ray.ppo_critic:CriticPPOTrainer.__init__",
    "openrlhf.trainer.ray.vllm_engine:RolloutRayActor.generate_responses",
    "openrlhf.utils.agent:AgentExecutorBase.execute",
    "openrlhf.utils.config:hierarchize",
    "openrlhf.utils.deepspeed.deepspeed:DeepspeedStrategy.get_ds_train_config",
    "openrlhf.utils.deepspeed.deepspeed:DeepspeedStrategy.prepare",
    "openrlhf.utils.deepspeed.deepspeed:DeepspeedStrategy.setup_distributed",
}


# ── Source files ──


def folders() -> dict[str, Path]:
    """The folder of each installed package, found without importing it."""
    specs = {package: importlib.util.find_spec(package) for package in PACKAGES}
    return {package: Path(spec.origin).parent for package, spec in specs.items() if spec is not None and spec.origin}


@cache
def functions(path: Path) -> dict[str, tuple[str, str, int, int]]:
    """Each function of a file: digest, source, first and last line. The key is its name with the classes around it.

    The digest does not depend on the function's own name or on its indentation, so a renamed function is found again.
    """
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    result: dict[str, tuple[str, str, int, int]] = {}

    def note(key: str, node: ast.stmt, first: int) -> None:
        last = node.end_lineno or first
        source = textwrap.dedent("".join(lines[first - 1 : last]))
        nameless = re.sub(r"(^|\n)((?:async )?def )\w+", r"\1\2_", source, count=1)
        result[key] = hashlib.sha256(nameless.strip().encode()).hexdigest()[:16], source, first, last

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                note(prefix + node.name, node, min([node.lineno, *(item.lineno for item in node.decorator_list)]))
            elif isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
                note(MAIN, node, node.lineno)

    visit(ast.parse(text).body, "")
    return result


def file_of(module: str, roots: dict[str, Path]) -> Path | None:
    """The source file of a module; None if there is none."""
    package, *rest = module.split(".")
    stem = roots[package].joinpath(*rest)
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)


def reads(source: str, name: str) -> bool:
    """Whether a function reads or imports a name."""
    tree = ast.walk(ast.parse(source))
    return any(
        (isinstance(node, ast.Name) and node.id == name)
        or (isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names))
        for node in tree
    )


def parameters_of(source: str) -> str:
    """A digest of the parameters of a function, with their defaults."""
    node = ast.parse(source).body[0]
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    return hashlib.sha256(ast.unparse(node.args).encode()).hexdigest()[:16]


def readers(module: str, name: str, roots: dict[str, Path]) -> list[str]:
    """The functions of a module that read a name.

    Raises:
        KeyError: No function reads it, so it would be rebound in vain.
    """
    path = file_of(module, roots)
    keys = [key for key, (_, source, *_) in functions(path).items() if key != MAIN and reads(source, name)]
    if not keys:
        raise KeyError(f"no function of {module} reads {name}")
    return keys


# ── What this project depends on ──


def own_classes() -> Iterator[type]:
    """Each class of bapo_openrlhf/training."""
    from bapo_openrlhf import training

    for info in pkgutil.walk_packages(training.__path__, f"{training.__name__}."):
        module = importlib.import_module(info.name)
        for kind in vars(module).values():
            if isinstance(kind, type) and kind.__module__ == module.__name__:
                yield kind


def overrides() -> dict[tuple[type, type], set[str]]:
    """Methods of this project's classes that override one of an OpenRLHF class, by own class and OpenRLHF class."""
    result: dict[tuple[type, type], set[str]] = defaultdict(set)
    for kind in own_classes():
        order = kind.__mro__
        for place, subclass in enumerate(order):
            if not subclass.__module__.startswith("bapo_openrlhf."):
                continue
            for name, value in vars(subclass).items():
                # Ray copies methods of mixed-in classes; a copy keeps the name of the class that it comes from.
                is_method = isinstance(value, (FunctionType, staticmethod, classmethod))
                if not is_method or getattr(value, "__qualname__", "") != f"{subclass.__qualname__}.{name}":
                    continue
                later = (base for base in order[place + 1 :] if base.__module__.startswith("openrlhf."))
                later = (base for base in later if "<locals>" not in base.__qualname__)  # Ray's own subclass
                base = next((base for base in later if name in vars(base)), None)
                if base is not None:
                    result[subclass, base].add(name)
    return result


def reasons(roots: dict[str, Path]) -> dict[str, list[str]]:
    """Each function on which this project depends, as module:name, with the reasons."""
    from bapo_openrlhf.cpu import patching

    result: dict[str, list[str]] = defaultdict(list)
    for (subclass, base), names in overrides().items():
        where = subclass.__module__.removeprefix("bapo_openrlhf.").replace(".", "/") + ".py"
        for name in names:
            result[f"{base.__module__}:{base.__qualname__}.{name}"].append(
                f"{subclass.__name__} in {where} overrides it"
            )
    for module, names in patching.REPLACED.items():
        for name in names if module.partition(".")[0] in PACKAGES else ():
            if name in functions(file_of(module, roots)):
                result[f"{module}:{name}"].append("it is replaced if there is no GPU")
            elif "." not in name:  # the module imports it
                for function in readers(module, name, roots):
                    result[f"{module}:{function}"].append(f"reads {name}, which is rebound if there is no GPU")
    for name, reason in CALLED.items():
        result[name].append(reason)
    return {name: sorted(set(result[name])) for name in sorted(result)}


def record(roots: dict[str, Path]) -> dict[str, dict]:
    """The entries that the installed packages have.

    Raises:
        KeyError: One of the tables above names a function that is not there, or on which nothing depends.
    """
    entries = {}
    for name, why in reasons(roots).items():
        module, function = name.split(":")
        digest, source, *_ = functions(file_of(module, roots))[function]
        only = name in COMPARED or name in ADDED_TO
        entries[name] = {"parameters": parameters_of(source)} if only else {"digest": digest}
        entries[name]["why"] = why
    if unknown := {*COMPARED, *ADDED_TO} - entries.keys():
        raise KeyError(f"this project does not depend on {', '.join(sorted(unknown))}")
    return entries


# ── Comparison ──


def changes(entries: dict[str, dict], roots: dict[str, Path]) -> list[str]:
    """One message for each recorded function that is renamed, removed or changed.

    Args:
        entries: The record.
        roots: Folders of the packages to compare with it. An entry of a package that is not in it is passed over.
    """
    messages = []
    for name, entry in entries.items():
        module, function = name.split(":")
        package = module.partition(".")[0]
        if package not in roots:
            continue
        path = file_of(module, roots)
        current = functions(path) if path is not None else {}
        if function not in current:
            same = sorted(other for other, (digest, *_) in current.items() if digest == entry.get("digest"))
            what = f"renamed to {' or '.join(same)}" if same else f"removed{'' if path else ' with its module'}"
        else:
            digest, source, first, last = current[function]
            names = [why.split(",")[0].removeprefix("reads ") for why in entry["why"] if why.startswith("reads ")]
            gone = [rebound for rebound in names if not reads(source, rebound)]
            whole = "digest" in entry
            same = digest == entry["digest"] if whole else parameters_of(source) == entry["parameters"]
            if same and not gone:
                continue
            file = path.relative_to(roots[package].parent)
            what = f"{'changed' if whole or same else 'given other parameters'} ({file}, lines {first} to {last})"
            if gone:
                what += f", and no longer reads {', '.join(gone)}"
        messages.append(f"{name} was {what}. Look again, because: {'; '.join(entry['why'])}.")
    return messages


def build_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--source", type=Path, help="folder with another version's packages, for example openrlhf/")
    parser.add_argument("--write", action="store_true", help="record the installed packages")
    return parser


def main() -> int:
    """Compare or write."""
    parser = build_parser()
    args = parser.parse_args()
    if args.write:
        from bapo_openrlhf.cpu import stack as cpu

        cpu.prepare_environment()
        cpu.install()
        lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in record(folders()).items()]
        RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        parts = sum('"parameters": ' in line for line in lines)
        print(f"{len(lines)} functions in {RECORD}, {parts} of them only by their parameters")
        return 0
    roots = folders()
    if args.source is not None:
        roots = {package: args.source / package for package in PACKAGES if (args.source / package).is_dir()}
        if not roots:
            parser.error(f"--source is {args.source}; it must hold a folder named {' or '.join(PACKAGES)}")
    changed = changes(json.loads(RECORD.read_text(encoding="utf-8")), roots)
    print("\n".join(changed) or f"nothing changed in {', '.join(roots)}")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
