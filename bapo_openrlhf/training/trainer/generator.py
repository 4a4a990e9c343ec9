"""Generation: fresh samples with behaviour log-probs, hard prompts again, evaluations, and a reward model's scores.

How a rollout asks for fresh prompts and when it is made are two choices that do not know each other: once, in several
rounds or in parts of responses (`fresh`); in the step that trains on it or ahead of training (`rollout`).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from openrlhf.trainer.ppo_utils.experience import Experience

from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.methods.base import Method
from bapo_openrlhf.training.trainer.dealing import DealtBatch
from bapo_openrlhf.training.trainer.engine_calls import Ask, EngineCalls, SentPrompt
from bapo_openrlhf.training.trainer.fresh import OneRound, prompts_of
from bapo_openrlhf.training.trainer.generated import usable_answers
from bapo_openrlhf.training.trainer.rollout import Ahead, InTurn, Rollout
from bapo_openrlhf.training.trainer.rollout_weights import RolloutWeights
from bapo_openrlhf.training.trainer.run_state import RunState
from bapo_openrlhf.training.trainer.samples import Answers, reward_of, sample_of, samples_of

Samples = tuple[list[Rollout], float | None, int, bool]
"""What OpenRLHF's loop gets: the rollout of the step, if it has samples, in the place of these; the responses of groups
with a signal for each 100 prompts; how many prompts were drawn; and whether the data of the epoch has ended."""

SCORED = ("sequences", "attention_mask")  # what the reward model gets of a sample


class RewardModel:
    """Gives samples their rewards, if the run has OpenRLHF's reward model. Otherwise they have them already.

    OpenRLHF asks it when a batch becomes experience. Filters, thresholds and buffers need the rewards earlier. So here
    the generator hands over what it generated, while the engines sleep if they share GPUs.
    """

    def __init__(self, args: SimpleNamespace, workers: Any, *, state: RunState, pad: int) -> None:
        self.args, self.workers, self.state, self._pad = args, workers, state, pad
        self._alone = args.train.colocate_all or args.train.colocate_critic_reward
        self._seconds = 0.0

    @torch.no_grad()
    def score(self, answers: Sequence[Answers]) -> None:
        """Set the reward of each response, as OpenRLHF does. One that is not a finite number is left out.

        Equal responses to a prompt are scored once: in bfloat16, padding changes scores a little, which would be a
        signal.
        """
        if self.workers is None or not answers:
            return
        self.state.phase, start = "scoring responses", time.perf_counter()
        different = {
            response.token_ids.tobytes(): sample_of(each.prompt, response)
            for each in answers
            for response in each.responses
        }
        places = {key: place for place, key in enumerate(different)}
        dealt = DealtBatch(list(different.values()), self.args, self._pad)
        scores = dealt.ask(self.workers, inputs=SCORED, alone=self._alone)()
        for each in answers:
            for number, response in enumerate(each.responses):
                reward = reward_of(scores[places[response.token_ids.tobytes()]])
                if reward is not None:
                    response.extras["info"]["reward"] = reward
                    each.responses[number] = replace(response, reward=reward)
        self._seconds += time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """Its time since it was last asked for it; nothing without a reward model."""
        seconds, self._seconds = self._seconds, 0.0
        return {} if self.workers is None else {"reward/model_seconds": seconds}


class Generator:
    """Generates for a run with batch adaptation.

    Args:
        evaluation: OpenRLHF's loader of the prompts of evaluations; None if there are none.
        before_samples: Called before OpenRLHF's loop gets the samples of a step.
        steps_ahead: How many steps a rollout is generated before the step that trains on it.

    Attributes:
        evaluated, evaluation_failed: Groups of the last evaluation, and how many of them have no usable rewards.
    """

    def __init__(
        self,
        calls: EngineCalls,
        *,
        evaluation: Any,
        fresh: OneRound,
        method: Method,
        state: RunState,
        rollout_weights: RolloutWeights,
        reward_model: RewardModel,
        before_samples: Callable[[], None] = lambda: None,
        steps_ahead: int = 0,
    ) -> None:
        self.calls, self.evaluation, self.fresh = calls, evaluation, fresh
        self.method, self.state, self.rollout_weights = method, state, rollout_weights
        self.reward_model, self.before_samples, self.steps_ahead = reward_model, before_samples, steps_ahead
        options = {"method": method, "state": state, "rollout_weights": rollout_weights}
        if steps_ahead:
            self.rollouts = Ahead(self.make, episodes=calls.args.train.num_episodes, **options)
        else:
            self.rollouts = InTurn(self.make, **options)
        self.last_rollout, self._next = Rollout(0, 0), None
        self.evaluated = self.evaluation_failed = 0

    def make(self, rollout: Rollout, generation: Mapping[str, Any]) -> None:
        """Generate the fresh groups of a rollout, and those of the hard prompts that it takes along."""
        start, ask = time.perf_counter(), Ask(self.calls, rollout.step, generation)
        sent: list[list[SentPrompt]] = []

        def send_hard() -> None:
            if not sent:
                sent.append(ask.send(self.rollouts.KIND, self.rollouts.hard(rollout)))

        with self.calls.awake():
            self.fresh.generate(rollout, ask, send_hard)
            fresh_end = time.perf_counter()
            rollout.hard = ask.answers(list(chain(*sent)))
        rollout.exhausted, now = self.fresh.prompts.epoch_done, time.perf_counter()
        rollout.added_seconds, rollout.seconds = now - fresh_end, now - start

    def generate_samples(self, **generation: Any) -> Samples:
        """The rollout of a step. OpenRLHF's loop hands it over to the trainer's `train_step`."""
        self.before_samples()
        rollout, self._next = self._next or self._next_rollout(generation), None
        if rollout.begins_epoch:
            rollout.begins_epoch, self._next = False, rollout
            return [], None, 0, True
        self.last_rollout = rollout
        return [rollout] if rollout.fresh else [], rollout.pass_rate, rollout.drawn, rollout.exhausted

    @property
    def exhausted(self) -> bool:
        """Whether the last rollout has the last prompts of an epoch."""
        return self.last_rollout.exhausted

    def _next_rollout(self, generation: Mapping[str, Any]) -> Rollout:
        """The next rollout, with rewards. Its thread does not ask for them: all ranks must get calls in one order."""
        rollout = self.rollouts.next(generation)
        self.reward_model.score([*rollout.fresh, *rollout.hard])
        return rollout

    def hard_prompts(self, rollout: Rollout) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
        """The hard prompts of this step to generate now, and those for the rollout that is asked for in it."""
        if not self.steps_ahead:  # the method has named them for this rollout
            return rollout.hard_prompts_left, []
        prompts = self.method.begin_step(self.state.step)
        return ([], prompts) if self.rollout_weights.weights_version == self.state.step else (prompts, [])

    def reevaluate(
        self, prompts: Sequence[Prompt], generation: Mapping[str, Any]
    ) -> tuple[list[Answers], dict[str, float]]:
        """Responses to hard prompts from today's weights (Algorithm 1, lines 12-15), and the time that they took.

        Without prompts nothing is generated, and no time is shown.
        """
        if not prompts:
            return [], {}
        self.state.phase, start = "generating hard prompts again", time.perf_counter()
        next_rollout = self.state.step if self.steps_ahead else self.state.step + 1
        with self.rollout_weights.synced_to(self.state.step, next_rollout=next_rollout):
            answers = self.generate("reevaluated", prompts, generation)
        return answers, {"timing/reevaluation": time.perf_counter() - start}

    def generate_eval_samples(self, **generation: Any) -> list[Experience]:
        """Generate for the evaluation. Groups without usable rewards are left out: OpenRLHF cannot average them."""
        answers = self.generate("evaluation", list(prompts_of(self.evaluation)), generation)
        usable = usable_answers(answers)
        self.evaluated, self.evaluation_failed = len(answers), len(answers) - len(usable)
        return samples_of(usable)

    def generate(self, kind: str, prompts: Sequence[Prompt], generation: Mapping[str, Any]) -> list[Answers]:
        """Responses to prompts from the weights that the engines hold now. Each kind has seeds of its own."""
        ask = Ask(self.calls, self.state.step, generation)
        with self.calls.awake():
            answers = ask.answers(ask.send(kind, prompts))
        self.reward_model.score(answers)
        return answers

    def metrics(self) -> dict[str, float]:
        """Numbers of the last rollout for the log."""
        rollout = self.last_rollout
        return {"prompts/passed_over": rollout.passed_over, **rollout.numbers, **self.rollouts.metrics(rollout)}
