"""Checkpoints from which a run continues exactly as if it had never stopped.

OpenRLHF saves the models, their optimizers and the position in the data. This module adds everything else that the
next steps depend on: the method's state with both buffers, the rollout weights if they are not today's, the random
number generators, and the counters. A manifest is written last. A checkpoint without a manifest does not count.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import ray
import torch
from openrlhf.utils.logging_utils import init_logger

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.adapt.review import Review
from bapo_openrlhf.adapt.shift import Gap
from bapo_openrlhf.record.checkpoint_store import CheckpointStore
from bapo_openrlhf.record.state_file import load_state, save_state
from bapo_openrlhf.training.contract import extends
from bapo_openrlhf.training.recorder import Base, RecordedTrainer

STATE_VERSION = 3
logger = init_logger(__name__)


class WholeCheckpoints(RecordedTrainer):
    """OpenRLHF's trainer with whole checkpoints. `AdaptedPPOTrainer` extends it, and owns the state that it saves."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.checkpoints = CheckpointStore(Path(self.args.ckpt.path), critic=self.critic_model_group is not None)
        self.resumed_engine_step: int | None = None  # set after a resume, until the engines hold their weights again

    def state_dict(self) -> dict[str, Any]:
        """Everything that is not in OpenRLHF's own checkpoint, as plain data and arrays."""
        groups = {"actor": self.actor_model_group, "critic": self.critic_model_group}
        return {
            "version": STATE_VERSION,
            "step": self.step,
            "engine_step": self.rollout_weights.step,
            "generated": self.generated,
            "rollouts": self.recorder.rollouts,
            "group_size": self.args.rollout.n_samples_per_prompt,
            "epoch_done": self.samples_generator.epoch_done,
            "ahead": self.samples_generator.state_dict() if self.ahead else None,
            "torch_rng": torch.get_rng_state(),
            "worker_rng": {
                name: ray.get(group.async_run_method(method_name="rng_state"))
                for name, group in groups.items()
                if group
            },
            "gap": self.reviewed.gap.state_dict(),
            "ledger": self.ledger.state_dict(),
            "method": self.method.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: The state has another format, method or group size.
        """
        size = self.args.rollout.n_samples_per_prompt
        if state["version"] != STATE_VERSION:
            raise ValueError(f"the state is of format {state['version']}; this version reads {STATE_VERSION}")
        if state["group_size"] != size:
            raise ValueError(
                f"rollout.n_samples_per_prompt is {size}, and was {state['group_size']}; it must not change"
            )
        self.method.load_state_dict(state["method"])
        self.ledger.load_state_dict(state["ledger"])
        self.reviewed = Review.empty(Batch(), Gap(**state["gap"]))
        self.step, self.generated, self.recorder.rollouts = state["step"], state["generated"], state["rollouts"]
        if state["epoch_done"]:
            torch.set_rng_state(state["torch_rng"])
        else:
            self.samples_generator.rng_after_first_draw = state["torch_rng"]
        for name, group in (("actor", self.actor_model_group), ("critic", self.critic_model_group)):
            saved, workers = state["worker_rng"].get(name, []), group._actor_handlers if group else []
            if len(saved) == len(workers):
                ray.get([worker.set_rng_state.remote(rng) for worker, rng in zip(workers, saved, strict=True)])
            else:
                what = f"{len(saved)} {name} ranks wrote the checkpoint, {len(workers)} resume: other shuffles"
                self.recorder.warn(self.step, f"{name} shuffles", what)

    @extends(Base)
    def init_checkpoint_states(self) -> dict[str, Any]:
        """Restore OpenRLHF's state and the state of the layer, and continue the record at the checkpoint."""
        states = super().init_checkpoint_states()
        if states["global_step"]:
            self.phase = "resuming"
            tag = self.args.checked.resume_tag
            state = load_state(self.checkpoints.folder(tag))
            if state["step"] != states["global_step"]:
                raise ValueError(
                    f"checkpoint {tag} has the layer of step {state['step']} and the actor of step "
                    f"{states['global_step']}"
                )
            self.load_state_dict(state)
            start = {"next_step": state["step"], "epochs": states["episode"], "rollouts": [], "hard_prompts_left": []}
            ahead = state["ahead"] or start
            if self.ahead:
                self.samples_generator.load_state_dict(ahead)
            elif ahead["rollouts"]:
                raise ValueError(
                    f"checkpoint {tag} has {len(ahead['rollouts'])} rollouts that were not trained on yet; resume it "
                    "with --train.async_enable, as it was written"
                )
            else:
                self.prompts_after_fresh = [Prompt(**prompt) for prompt in ahead["hard_prompts_left"]]
            self.resumed_engine_step = state["engine_step"]
            logger.info(f"resumed from {tag}")
            if states["episode"] >= self.args.train.num_episodes:
                what = f"{tag} is the end of all {self.args.train.num_episodes} episodes (train.num_episodes)"
                self.recorder.warn(self.step, "nothing left", f"{what}: nothing is left to train")
        return states

    def resume_engines(self) -> None:
        """Give the engines the weights that they held when the checkpoint was written."""
        saved, self.resumed_engine_step = self.resumed_engine_step, None
        folder = self.checkpoints.folder(self.args.checked.resume_tag)
        may_be_early = self.args.adapt.max_shift_rollout is not None
        self.rollout_weights.resume(saved, self.step, folder, may_be_early=may_be_early)

    @extends(Base)
    def save_logs_and_checkpoints(
        self, global_step: int, logs_dict: dict | None = None, client_states: Any = None
    ) -> None:
        """Record, log and save the step. A saved checkpoint is made whole."""
        if self.samples_generator.rollout.exhausted:
            client_states["episode"] += 1  # otherwise OpenRLHF would repeat the data of this episode after a resume
        saves = global_step % self.args.ckpt.save_steps == 0
        with self._whole_checkpoint(f"global_step{global_step}", client_states) if saves else nullcontext():
            super().save_logs_and_checkpoints(global_step, logs_dict, client_states)

    @extends(Base)
    def save_best_checkpoint(self, eval_metrics: dict, global_step: int, client_states: Any = None) -> None:
        """Save as OpenRLHF does if the evaluation is the best so far. A saved checkpoint is made whole."""
        key = self._detect_eval_metric_key(eval_metrics) if eval_metrics else None
        best = key is not None and eval_metrics[key] > self.best_eval_metric_value
        with self._whole_checkpoint(f"best_global_step{global_step}", client_states) if best else nullcontext():
            super().save_best_checkpoint(eval_metrics, global_step, client_states)

    @contextmanager
    def _whole_checkpoint(self, tag: str, client_states: dict[str, Any]) -> Iterator[None]:
        """Make the checkpoint whole that OpenRLHF saves in the block, with `client_states`.

        Before the block the checkpoint is marked as begun. After it the layer's state is added, and the checkpoint is
        sealed.
        """
        if self.args.ckpt.disable_ds:
            yield
            return
        self.phase = f"saving checkpoint {tag}"
        self.samples_generator.wait()
        client_states["data_loader_state_dict"] = self.prompts_dataloader.state_dict()  # after all rollouts
        folder = self.checkpoints.begin(tag)
        yield
        if not self.checkpoints.has_models(tag):
            self.checkpoints.abandon(tag)  # OpenRLHF saved nothing, because it was not the best
        else:
            save_state(folder, self.state_dict())
            if self.rollout_weights.step != self.step:
                self.rollout_weights.save(folder)
            self.checkpoints.complete(tag, self.step)
            self.checkpoints.forget_rotated()
        self.phase = "finishing the step"
