"""The record of a run's steps: what each step generated, and how much the run has generated and trained on so far.

Every group has a row, also a group that cannot be used.
"""

from collections.abc import Mapping, Sequence
from numbers import Real
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.utils.logging_utils import init_logger

from bapo_openrlhf.adapt import critic
from bapo_openrlhf.adapt.group import Response
from bapo_openrlhf.adapt.vocabulary import FAILED
from bapo_openrlhf.record.run_record import (
    ANSWERS,
    EVALUATIONS,
    GROUPS,
    METRICS,
    WARNINGS,
    PromptStates,
    append_rows,
    cut_rows,
    read_answers,
    read_metrics,
    read_warnings,
    scores_in_words,
    shortened,
    sync_rows,
)
from bapo_openrlhf.training.trainer.generated import GeneratedGroup

logger = init_logger(__name__)


class StepRecorder:
    """Writes down every step (from 1 on) and every evaluation of a run, and counts over the whole run.

    `rollouts` and `tokens` are responses and tokens so far. Without `answer_chars` there is no answers.jsonl.
    """

    def __init__(self, *, folder: Path, tokenizer: Any, answer_chars: int) -> None:
        self.folder = folder
        self.step = self.rollouts = 0
        self.tokens = {"generated": 0, "trained": 0}
        self._answer_chars, self._tokenizer = answer_chars, tokenizer
        self._prompt_states = PromptStates()
        self._warned: set[str] = set()  # kinds of warnings

    def resume(self, step: int) -> None:
        """Continue the record after this step. Lines of later steps are dropped, because the run repeats them."""
        if not step:
            return
        self.step = step
        cut_rows(self.folder, step + 1)
        self._prompt_states = PromptStates(read_answers(self.folder))
        self._warned = {row["kind"] for row in read_warnings(self.folder)}
        rows = read_metrics(self.folder)
        last = rows[-1] if rows else {}
        self.rollouts = last.get("rollouts/total", 0)
        self.tokens = {kind: last.get(f"tokens/{kind}_total", 0) for kind in self.tokens}
        if missing := step - len({row["step"] for row in rows}):
            text = (
                f"the record has no metrics of {missing} of the {step} steps before it, which may be those of a run "
                "with another name, or lost in a power cut; its totals of tokens lack them"
            )
            self.warn(step + 1, "missing steps", text)

    def add_groups(
        self, step: int, groups: Sequence[GeneratedGroup], states: Mapping[int, str], *, trained: int
    ) -> dict[str, int]:
        """Write down what a step generated. A group whose uid has no state has failed. Returns the metrics."""
        self.step = step
        append_rows(self.folder, GROUPS, step, [group.row(states.get(group.uid, FAILED)) for group in groups])
        if self._answer_chars:
            answers = answers_of(groups, self._prompt_states, self._tokenizer, self._answer_chars)
            append_rows(self.folder, ANSWERS, step, answers)
        rollouts, generated = sum(len(group.responses) for group in groups), sum(group.tokens for group in groups)
        self.rollouts += rollouts
        self.tokens["generated"] += generated
        self.tokens["trained"] += trained
        return {
            "rollouts/step": rollouts,
            "rollouts/total": self.rollouts,
            **signals(groups),
            "tokens/generated": generated,
            "tokens/trained": trained,
            "tokens/generated_total": self.tokens["generated"],
            "tokens/trained_total": self.tokens["trained"],
        }

    def warn(self, step: int, kind: str, text: str) -> None:
        """Log a warning, and write it down for the terminal and for `watch`. Only the first one of a kind counts."""
        if kind not in self._warned:
            self._warned.add(kind)
            text = f"step {step}: {text}"
            logger.warning(text)
            append_rows(self.folder, WARNINGS, step, [{"kind": kind, "text": text}])

    def add_metrics(self, step: int, metrics: Mapping[str, Any] | None) -> None:
        """Write down the numbers among the metrics of a step. Then the record has all of it, also after a power cut."""
        numbers = {key: value for key, value in (metrics or {}).items() if isinstance(value, Real)}
        append_rows(self.folder, METRICS, step, [numbers])
        sync_rows(self.folder)

    def add_evaluation(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Log the result of an evaluation after a step, and write it down."""
        logger.info(f"step {step}: held-out {scores_in_words(numbers) or 'evaluation without a score'}")
        append_rows(self.folder, EVALUATIONS, step, [numbers])
        sync_rows(self.folder)


def signals(groups: Sequence[GeneratedGroup]) -> dict[str, int]:
    """How many groups have rewards that differ. It is missing if no reward is known, as with a reward model."""
    rated = any(group.mean is not None for group in groups)
    return {"groups/with_signal": sum(group.has_signal for group in groups)} if rated else {}


def answers_of(groups: Sequence[GeneratedGroup], prompts: PromptStates, tokenizer: Any, chars: int) -> list[dict]:
    """Lines of answers.jsonl: one response of each prompt that failed first, the best one of each newly solved prompt.

    A group with a prefix does not tell how hard its prompt is. What the groups tell is added to `prompts`.
    """
    rows = []
    for group in groups:
        kind = None if group.prompt.prefix else prompts.news(group.prompt.id, group.mean)
        if kind is None:
            continue
        best = max(group.responses, key=attrgetter("reward"))  # the first one if several are equal
        row = {"prompt": group.prompt.id, "kind": kind, "text": group.prompt.text, "label": str(group.prompt.label)}
        rows.append(row | {"response": shortened(_text_of(best, tokenizer), chars), "reward": best.reward})
    return rows


def _text_of(response: Response, tokenizer: Any) -> str:
    """The text from the first generated token to the last one. It includes what was said between the turns."""
    spans = response.action_spans or ((0, 0),)
    return tokenizer.decode(response.token_ids[spans[0][0] : spans[-1][1]].tolist(), skip_special_tokens=True)


def explained_variance(experiences: Sequence[Experience]) -> dict[str, float]:
    """1 - var(return - value) / var(return) over generated tokens. Missing without a critic, or if all are equal."""
    tokens = [
        torch.stack([e.returns, e.values]).double()[:, e.action_mask.bool()]
        for e in experiences
        if e.values is not None
    ]
    if not tokens:
        return {}
    returns, values = torch.cat(tokens, dim=1).numpy()
    explained = critic.explained_variance(returns, values)
    return {} if explained is None else {"value/explained_variance": explained}
