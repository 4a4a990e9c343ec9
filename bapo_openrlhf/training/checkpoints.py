"""Checkpoints that a run goes on from exactly: all that the next steps depend on beside the models.

OpenRLHF saves the models, their optimizers and the position in the data. Added here: the method's state with both
buffers, the rollout weights where they are not today's, the generators of random numbers, and the counters; and a
manifest, written last, without which a checkpoint does not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import ray
import torch
from openrlhf.utils.logging_utils import init_logger

from bapo_openrlhf.record.checkpoint_store import CheckpointStore
from bapo_openrlhf.record.state_file import load_state, save_state

STATE_VERSION = 1
logger = init_logger(__name__)


class WholeCheckpoints:
    """Mixed into the trainer."""

    def open_checkpoints(self) -> None:
        """To be called once, when the trainer is made."""
        self.checkpoints = CheckpointStore(Path(self.args.ckpt.path), critic=self.critic_model_group is not None)
        self.resumed_engine_step: int | None = None  # after a resume, until the engines hold their weights again
        self._epoch_done = False

    def state_dict(self) -> dict[str, Any]:
        """Everything outside OpenRLHF's own checkpoint, as plain data and arrays."""
        groups = {"actor": self.actor_model_group, "critic": self.critic_model_group}
        return {
            "version": STATE_VERSION,
            "step": self.step,
            "engine_step": self.engine_step,
            "generated": self.generated,
            "rollouts": self.rollouts,
            "group_size": self.args.rollout.n_samples_per_prompt,
            "epoch_done": self._epoch_done,
            "torch_rng": torch.get_rng_state(),
            "worker_rng": {
                name: ray.get(group.async_run_method(method_name="rng_state"))
                for name, group in groups.items()
                if group
            },
            "ledger": self.ledger.state_dict(),
            "method": self.method.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`.

        Raises:
            ValueError: the state is of another format, method or group size.
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
        self.step, self.generated, self.rollouts = state["step"], state["generated"], state["rollouts"]
        if state["epoch_done"]:
            torch.set_rng_state(state["torch_rng"])
        else:
            self.samples_generator.rng_after_first_draw = state["torch_rng"]
        for name, group in (("actor", self.actor_model_group), ("critic", self.critic_model_group)):
            saved, workers = state["worker_rng"].get(name, []), group._actor_handlers if group else []
            if len(saved) == len(workers):
                ray.get([worker.set_rng_state.remote(rng) for worker, rng in zip(workers, saved, strict=True)])
            else:
                logger.warning(f"{len(saved)} {name} ranks wrote the checkpoint, {len(workers)} resume: other shuffles")

    def init_checkpoint_states(self) -> dict[str, Any]:
        """OpenRLHF's, and the state of the layer that was saved with it."""
        states = super().init_checkpoint_states()
        if states["global_step"]:
            self.phase = "resuming"
            state = load_state(self.checkpoints.folder(self.args.checked.resume_tag))
            if state["step"] != states["global_step"]:
                raise ValueError(
                    f"checkpoint {self.args.checked.resume_tag} has the layer of step {state['step']} and the actor of "
                    f"step {states['global_step']}"
                )
            self.load_state_dict(state)
            self.resumed_engine_step = state["engine_step"]
            logger.info(f"resumed from {self.args.checked.resume_tag}")
            if states["episode"] >= self.args.train.num_episodes:
                logger.warning(
                    f"{self.args.checked.resume_tag} is the end of all {self.args.train.num_episodes} episodes "
                    "(train.num_episodes): nothing is left to train"
                )
        return states

    def resume_engines(self) -> None:
        """Give the engines the weights they held when the checkpoint was written; today's where v has changed since.

        With --adapt.max_tv_rollout they may be of any step since the last multiple of v.
        """
        saved, self.resumed_engine_step = self.resumed_engine_step, None
        first = self.schedule.rollout_step(self.step)
        usable = saved == first if self.args.adapt.max_tv_rollout is None else saved >= first
        if saved == self.step or not usable:
            self._sync_engines()
        else:
            self._engines("load_weights", str(self.checkpoints.folder(self.args.checked.resume_tag)))
            self.engine_step = saved
        self._keep_if_needed()

    def save_logs_and_checkpoints(
        self, global_step: int, logs_dict: dict | None = None, client_states: Any = None
    ) -> None:
        """OpenRLHF's loggers and checkpoints; a checkpoint is whole when the layer's state is in it, too."""
        self._epoch_done = self.samples_generator.exhausted
        if self._epoch_done:
            client_states["episode"] += 1  # or OpenRLHF would go through the data once more in this episode
        saves = global_step % self.args.ckpt.save_steps == 0
        with self._whole_checkpoint(f"global_step{global_step}") if saves else nullcontext():
            super().save_logs_and_checkpoints(global_step, logs_dict, client_states)

    def save_best_checkpoint(self, eval_metrics: dict, global_step: int, client_states: Any = None) -> None:
        """OpenRLHF's, where the evaluation was the best so far, made whole."""
        key = self._detect_eval_metric_key(eval_metrics) if eval_metrics else None
        best = key is not None and eval_metrics[key] > self.best_eval_metric_value
        with self._whole_checkpoint(f"best_global_step{global_step}") if best else nullcontext():
            super().save_best_checkpoint(eval_metrics, global_step, client_states)

    @contextmanager
    def _whole_checkpoint(self, tag: str) -> Iterator[None]:
        """Around OpenRLHF's saving of models: mark the checkpoint as begun, add the layer's state, seal it."""
        if self.args.ckpt.disable_ds:
            yield
            return
        self.phase = f"saving checkpoint {tag}"
        folder = self.checkpoints.begin(tag)
        yield
        if not self.checkpoints.has_models(tag):
            self.checkpoints.abandon(tag)  # it was not the best
        else:
            save_state(folder, self.state_dict())
            if self.engine_step != self.step:
                self._engines("save_weights", str(folder), engines=self.vllm_engines[:1])  # the same in all of them
            self.checkpoints.complete(tag, self.step)
            self.checkpoints.forget_rotated()
        self.phase = "finishing the step"
