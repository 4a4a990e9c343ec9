"""OpenRLHF's trainer with its faults mended: a seed, a stop between steps, and state that its checkpoints leave out."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from openrlhf.trainer.ppo_trainer import PPOTrainer

from bapo_openrlhf.flags.paths import run_folder
from bapo_openrlhf.host import extends, plain_class
from bapo_openrlhf.record.durable import undeleted
from bapo_openrlhf.record.run_record import read_evaluations
from bapo_openrlhf.training.trainer.engine_calls import EngineCalls
from bapo_openrlhf.training.trainer.recorder import StepRecorder, explained_variance
from bapo_openrlhf.training.trainer.run_state import RunState
from bapo_openrlhf.training.wire.signals import leave_to_driver

Base = plain_class(PPOTrainer)
KL, EVALUATION = "kl_coefficient", "evaluation"  # in OpenRLHF's state of a checkpoint


class StopTraining(Exception):
    """Leaves OpenRLHF's loop between two steps."""


class MendedTrainer(Base):
    """OpenRLHF's trainer, whose `place` and `stop` may be called while `fit` goes on in another thread.

    The generator of a trainer of this class calls `begin` before the samples of each step. A checkpoint also has the
    coefficient of the KL penalty, which moves if `--algo.kl.target` is set.
    """

    def __init__(self, pretrain: str, strategy: Any, *args: Any, **kwargs: Any) -> None:
        leave_to_driver()
        self.state = RunState()
        # OpenRLHF does not seed this process, whose random numbers decide the order of the prompts.
        torch.manual_seed(strategy.args.train.seed)
        super().__init__(pretrain, strategy, *args, **kwargs)
        self.calls = EngineCalls(self.vllm_engines, self.args, self.tokenizer)
        folder, answer_chars = run_folder(self.args), self.args.run.answer_chars
        self.recorder = StepRecorder(folder=folder, tokenizer=self.tokenizer, answer_chars=answer_chars)

    def place(self) -> tuple[int, str]:
        """The step that was begun last, and the phase."""
        return self.state.begun, self.state.phase

    def stop(self) -> None:
        """Stop as soon as a step has ended and is saved. If the data ends with it, the run goes to its end."""
        self.state.stopping = True

    def begin(self) -> None:
        """Begin a step, unless the run was told to stop and the last step is saved, or no step ever is."""
        state = self.state
        if not state.begun:
            self.evaluate_again()
        if state.stopping and (state.saved == state.step or self.args.ckpt.disable_ds):
            raise StopTraining
        state.begun, state.phase = state.step + 1, "generating"

    def evaluate_again(self) -> None:
        """Evaluate the step that a run goes on from, if it is due: OpenRLHF evaluates a step after it has saved it."""
        step, flags = self.state.step, self.args.eval
        if not step or not self.eval_dataloader or step % flags.steps:
            return
        if step not in {row["step"] for row in read_evaluations(self.recorder.folder)}:
            sampling = {"temperature": flags.temperature, "n_samples_per_prompt": flags.n_samples_per_prompt}
            numbers = self.evaluate(step, **self.generate_kwargs | sampling)
            self.save_best_checkpoint(numbers, step, self.restored | {EVALUATION: self.evaluation})

    @property
    def evaluation(self) -> dict[str, Any]:
        """What the numbers of an evaluation depend on besides the weights."""
        flags = ("split", "temperature", "n_samples_per_prompt")
        return {"dataset": self.args.checked.evaluated, **{name: getattr(self.args.eval, name) for name in flags}}

    @extends(Base)
    def init_checkpoint_states(self) -> dict[str, Any]:
        """Restore OpenRLHF's state, the step and the coefficient of the KL penalty, and go on with the record there."""
        states: dict[str, Any] = super().init_checkpoint_states()
        self.restored = dict(states)
        self.kl_ctl.value = states.get(KL, self.kl_ctl.value)
        step, episodes = states["global_step"], self.args.train.num_episodes
        self.state.step, self.state.saved = step, step or None
        self.recorder.resume(step)
        if step and states["episode"] >= episodes:
            what = f"the checkpoint is the end of all {episodes} episodes (train.num_episodes)"
            self.recorder.warn(step, "nothing left", f"{what}: nothing is left to train")
        return states

    @extends(Base)
    def ppo_train(self, global_steps: int) -> dict:
        """OpenRLHF's optimizer steps."""
        self.state.phase = "training"
        return super().ppo_train(global_steps)

    @extends(Base)
    def _compute_rollout_stats(self, experiences: list[Any]) -> dict:
        """OpenRLHF's numbers of a batch, and how much its critic knew of the returns."""
        return super()._compute_rollout_stats(experiences) | explained_variance(experiences)

    @extends(Base)
    def restore_best_checkpoint_state(self, checkpoint_states: Mapping[str, Any]) -> None:
        """Restore OpenRLHF's best evaluation, or the one after this checkpoint if its own is there and better.

        If another number is asked for than in the checkpoint, or another evaluation, none was the best so far.
        """
        key = self.best_eval_metric_key
        evaluation = checkpoint_states.get(EVALUATION, self.evaluation)
        if evaluation != self.evaluation or key not in ("", checkpoint_states.get("best_eval_metric_key")):
            return
        super().restore_best_checkpoint_state(checkpoint_states)
        step = self.state.step
        is_saved = Path(self.args.ckpt.path, "_actor", f"best_global_step{step}").is_dir()
        for row in read_evaluations(self.recorder.folder) if step and is_saved else ():
            if row["step"] == step and (key := self._detect_eval_metric_key(row)) and row[key] is not None:
                self._latest_eval_metric_value = row[key]
                self.best_eval_metric_value = max(self.best_eval_metric_value, row[key])

    @extends(Base)
    def save_logs_and_checkpoints(
        self, global_step: int, logs_dict: dict | None = None, client_states: Any = None
    ) -> None:
        """Record the step, then log and save as OpenRLHF does. After an epoch, a resume goes on with the next one."""
        if self.state.stopping:
            self.args.ckpt.save_steps = 1  # only the next step is left, and it is saved
        self.recorder.add_metrics(global_step, logs_dict)
        # `save_best_checkpoint` gets the same dict after this step.
        client_states[KL], client_states[EVALUATION] = float(self.kl_ctl.value), self.evaluation
        client_states["episode"] += self.samples_generator.exhausted
        saves = global_step % self.args.ckpt.save_steps == 0
        with self.saving(f"global_step{global_step}", client_states) if saves else nullcontext():
            super().save_logs_and_checkpoints(global_step, logs_dict, client_states)
        if warning := undeleted(Path(self.args.ckpt.path)):
            self.recorder.warn(global_step, "not deleted", warning)

    @contextmanager
    def saving(self, tag: str, client_states: dict[str, Any]) -> Iterator[None]:
        """Let OpenRLHF save a checkpoint in the block, with these states. The run's state says so."""
        self.state.phase = f"saving checkpoint {tag}"
        yield
        self.state.phase, self.state.saved = "finishing the step", self.state.step

    @extends(Base)
    def fit(self, global_step: int = 0) -> int | None:
        """Train. Returns the step after which the run stopped because it was told to; None at its end."""
        self.calls.set_up()
        try:
            super().fit(global_step)
        except StopTraining:
            for log in filter(None, (self.wandb_logger, self.tensorboard_logger)):
                log.close()  # as OpenRLHF does at the end
            return self.state.step
        if not self.state.begun:  # no step was left
            self.wandb_logger = self.tensorboard_logger = None  # they are closed
            self.evaluate_again()
        self.state.begun, self.state.phase = self.state.step, "ending"  # the loop asked for a step that the data lack
        return None
