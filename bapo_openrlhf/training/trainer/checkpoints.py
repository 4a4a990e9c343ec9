"""Checkpoints from which a run continues exactly as if it had never stopped.

OpenRLHF saves the models, their optimizers and the position in the data. This module adds everything else that the next
steps depend on. A manifest is written last, and a checkpoint without it does not count.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
from openrlhf.utils.logging_utils import init_logger

from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.adapt.rewards import as_range
from bapo_openrlhf.adapt.shift import Gap
from bapo_openrlhf.methods.base import Method
from bapo_openrlhf.record.checkpoint_store import CheckpointStore
from bapo_openrlhf.record.state_file import load_state, save_state
from bapo_openrlhf.training.trainer.generator import Generator
from bapo_openrlhf.training.trainer.recorder import StepRecorder
from bapo_openrlhf.training.trainer.run_state import RunState

STATE_VERSION = 12
logger = init_logger(__name__)


class WholeCheckpoints:
    """Makes the checkpoints whole that OpenRLHF saves, and continues a run from one.

    Rollouts ahead of training are saved, and the engines' weights if they are not today's. `workers` are OpenRLHF's
    groups of the workers that shuffle, by name, whose random generators are saved.
    """

    def __init__(
        self,
        args: SimpleNamespace,
        *,
        state: RunState,
        method: Method,
        ledger: Ledger,
        recorder: StepRecorder,
        generator: Generator,
        loader: Any,
        workers: Mapping[str, Any],
    ) -> None:
        self.args, self.state, self.method, self.ledger, self.recorder = args, state, method, ledger, recorder
        self.generator, self.loader, self.rollout_weights = generator, loader, generator.rollout_weights
        self.workers = dict(workers)
        self.store = CheckpointStore(Path(args.ckpt.path), critic="critic" in self.workers)

    # ── Saving ──

    @contextmanager
    def whole(self, tag: str, client_states: dict[str, Any]) -> Iterator[None]:
        """Make the checkpoint whole that OpenRLHF saves in the block: add the layer's state, and seal it."""
        if self.args.ckpt.disable_ds:
            yield
            return
        self.rollout_weights.queue.wait()
        client_states["data_loader_state_dict"] = self.loader.state_dict()  # after all rollouts
        folder = self.store.begin(tag)
        yield
        save_state(folder, self.state_dict())
        if self.rollout_weights.weights_version != self.state.step:
            self.rollout_weights.save(folder)
        self.store.complete(tag, self.state.step)
        self.store.forget_rotated()

    def state_dict(self) -> dict[str, Any]:
        """Everything that is not in OpenRLHF's own checkpoint, as plain data and arrays."""
        return {
            "version": STATE_VERSION,
            "step": self.state.step,
            "weights_since": self.state.weights_since,
            "weights_version": self.rollout_weights.weights_version,
            "rollouts": self.recorder.rollouts,
            "reward_range": self.state.reward_range and [str(end) for end in self.state.reward_range],
            "ahead": self.generator.rollouts.state_dict() if self.generator.steps_ahead else None,
            "unfinished": self.generator.fresh.unfinished(),
            "worker_rng": {
                name: ray.get(model.async_run_method(method_name="rng_state")) for name, model in self.workers.items()
            },
            "reuse_gate": self._gates("gate_state")[0] if self.args.adapt.reuse_gate is not None else None,
            "gap": self.state.gap.state_dict(),
            "ledger": self.ledger.state_dict(),
            "method": self.method.state_dict(),
        }

    # ── Resuming ──

    def resume(self, states: dict[str, Any]) -> None:
        """Restore the state of the layer and the engines' weights. `states` is OpenRLHF's state in the checkpoint.

        Raises:
            ValueError: The checkpoint is of another step or method, was written ahead of training, or has
                unfinished responses.
        """
        if not states["global_step"]:
            return
        self.state.phase = "resuming"
        tag = self.args.checked.resume_tag
        saved = load_state(self.store.folder(tag))
        if saved["step"] != states["global_step"]:
            raise ValueError(
                f"checkpoint {tag} has the layer of step {saved['step']} and the actor of step {states['global_step']}"
            )
        self.load_state_dict(saved)
        start = {"next_step": saved["step"], "epochs": states["episode"], "rollouts": [], "hard_prompts_left": []}
        ahead = saved["ahead"] or start
        if self.generator.steps_ahead:
            self.generator.rollouts.load_state_dict(ahead)
        elif ahead["rollouts"]:
            raise ValueError(
                f"checkpoint {tag} has {len(ahead['rollouts'])} rollouts that were not trained on yet; resume it "
                "with --train.async_enable, as it was written"
            )
        if self.args.adapt.partial_rollout_tokens is not None:
            self.generator.fresh.take_unfinished(saved["unfinished"])
        elif saved["unfinished"]:
            raise ValueError(
                f"checkpoint {tag} has {len(saved['unfinished'])} groups with unfinished responses; resume it with "
                "--adapt.partial_rollout_tokens, as it was written"
            )
        self._resume_engines(saved["weights_version"])
        logger.info(f"resumed from {tag}")

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. If it has another format or method, it raises a ValueError."""
        if saved["version"] != STATE_VERSION:
            raise ValueError(f"the state is of format {saved['version']}; this version reads {STATE_VERSION}")
        self.method.load_state_dict(saved["method"])
        self.ledger.load_state_dict(saved["ledger"])
        self.state.gap = Gap(**saved["gap"])
        self.state.step, self.state.weights_since = saved["step"], saved["weights_since"]
        self.state.reward_range = saved["reward_range"] and as_range(saved["reward_range"])
        self.recorder.rollouts = saved["rollouts"]
        if saved.get("reuse_gate"):
            self._gates("set_gate_state", state=saved["reuse_gate"])
        for name, model in self.workers.items():
            self._load_shuffles(model._actor_handlers, saved["worker_rng"].get(name, []))

    def _gates(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method of each rank of the actor, all of which have the same gate on reuse."""
        return ray.get(self.workers["actor"].async_run_method(method_name=method, **arguments))

    def _load_shuffles(self, ranks: list[Any], states: list[Any]) -> None:
        """Restore the random generators of a model's ranks. A rank that is new is seeded by its number and step."""
        new_ranks = range(len(states), len(ranks))
        seeds = [np.random.SeedSequence([self.args.train.seed, self.state.step, rank]) for rank in new_ranks]
        calls = [rank.set_rng_state.remote(rng) for rank, rng in zip(ranks, states, strict=False)]
        calls += [ranks[n].seed_rng.remote(int(s.generate_state(1)[0])) for n, s in zip(new_ranks, seeds, strict=True)]
        ray.get(calls)

    def _resume_engines(self, version: int) -> None:
        """Give the engines the weights that they held when the checkpoint was written, those of step `version`."""
        self.state.phase, folder = "syncing weights", self.store.folder(self.args.checked.resume_tag)
        may_be_early = self.args.adapt.max_shift_rollout is not None
        self.rollout_weights.resume(version, self.state.step, folder, may_be_early=may_be_early)
