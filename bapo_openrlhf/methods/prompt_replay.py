"""Prompt Replay: prompts whose pass rate is near 1/2 are generated for again (arXiv 2603.21177).

Paper: "Prompt Replay: Speeding up GRPO with On-Policy Reuse of High-Signal Prompts". Details follow its authors' code
(baroian/GRPO_prompt_replay, open_instruct/grpo_fast.py, read at commit 9e406c7).
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from bapo_openrlhf.adapt.batch import Batch, fill
from bapo_openrlhf.adapt.filters import has_signal
from bapo_openrlhf.adapt.group import Group, Prompt, prompt_state
from bapo_openrlhf.adapt.metric import ATTEMPTS, declare
from bapo_openrlhf.adapt.schedule import due
from bapo_openrlhf.methods.base import FilteredMethod, option

HALF = Fraction(1, 2)


@dataclass(frozen=True)
class KnownPrompt:
    """A prompt, the mean reward and the step of its last group, and how often it was named."""

    prompt: Prompt
    rate: Fraction
    step: int
    uses: int = 0
    away: bool = False  # whether it is named and its group has not come yet


@dataclass(eq=False, kw_only=True)
class PromptReplay(FilteredMethod):
    """Generates again for the prompts whose pass rate is near 1/2, with a cooldown and a number of uses.

    Today's policy generates for stored prompts, and no response is replayed. A prompt is stored while its pass rate,
    the mean reward of its last group, is from `lowest` to `highest`. Each step that re-evaluates names up to
    `replay_share` of the capacity: the prompts with the pass rate nearest 1/2, of these the lower, then those with
    fewer uses. A prompt is not named while its last group is less than `cooldown` steps old or the next one has not
    come, and at most `most_uses` times. The groups of named prompts are X2 and update pass rates as fresh ones do. If
    a prompt gave no group, its cooldown begins again.

    The authors' setting is `--adapt.reevaluate_every 1 --adapt.rollout_delay 1`, with `--rollout.batch_size` 1 -
    `replay_share` of `--adapt.batch_size`.

    Deviations: while too few prompts are stored, batches are smaller; the authors fill them with fresh groups. A named
    prompt may also be a fresh one of the same step. With generation ahead of training, the cooldown ends when a prompt
    is named; in their code, when its group is trained on. They also remove prompts with a pass rate of 0.9 and more
    from the data. The paper's numbers are known here only from a summary: the window, the cooldown, the uses (the code
    has 0.24 to 0.7, 5, 20), and a share of 3/4, but the code allows 1/2.

    Args:
        replay_share: Greatest share of the capacity that is generated again, within [0, 1].
        lowest, highest: Pass rates of stored prompts, above 0 and below 1.
        cooldown: Least number of steps from a prompt's last group to the step that names it.
        most_uses: How often a prompt is named at most. 0 stands for no limit.
    """

    USE = "Use it if few prompts have signal and every response must come from today's policy."
    SOURCE = "arXiv 2603.21177"
    STATE = ("rng", "known")
    METRICS = (
        ATTEMPTS,
        *declare("""
            again/stored | prompts | Stored prompts | | Prompts that may be generated for again, now or later.
            again/used_up | prompts | Used-up prompts | | Prompts that were generated for again as often as allowed.
        """),
    )

    reevaluate_every: int = 1
    replay_share: Fraction = option(HALF, "in [0, 1]")
    lowest: Fraction = Fraction(1, 4)
    highest: Fraction = option(Fraction(3, 4), "in (0, 1)")
    cooldown: int = option(10, "at least 0")
    most_uses: int = option(15, "at least 0")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.lowest <= self.highest:
            raise ValueError(f"lowest is {self.lowest}; it must be above 0 and at most highest, {self.highest}")
        self.places = math.floor(self.replay_share * self.capacity)
        self.limit = self.most_uses or math.inf
        self.known: dict[str, KnownPrompt] = {}  # by prompt id: those in the window, and all that were named before
        self._unanswered: Sequence[Prompt] = ()

    def _in_window(self) -> list[KnownPrompt]:
        entries = (entry for entry in self.known.values() if self.lowest <= entry.rate <= self.highest)
        return [entry for entry in entries if entry.uses < self.limit]

    def begin_step(self, step: int) -> list[Prompt]:
        """The stored prompts nearest 1/2 that may be named. There are none in a step that does not re-evaluate."""
        candidates = [entry for entry in self._in_window() if not entry.away and step - entry.step >= self.cooldown]
        count = self.places if due(step, self.reevaluate_every) else 0
        entries = heapq.nsmallest(count, candidates, self.rank)
        self.known |= {entry.prompt.id: replace(entry, uses=entry.uses + 1, away=True) for entry in entries}
        return [entry.prompt for entry in entries]

    def rank(self, entry: KnownPrompt) -> tuple[Any, ...]:
        """Prompts with the least rank are named first: those nearest 1/2. The id decides between equal ones."""
        return abs(entry.rate - HALF), entry.rate, entry.uses, entry.prompt.id

    def unanswered(self, prompts: Sequence[Prompt]) -> None:
        """Note prompts whose cooldown begins again in `build_batch`."""
        self._unanswered = prompts

    def build_batch(self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group]) -> Batch:
        """X1: fresh groups that the filter keeps. X2: groups of named prompts."""
        batch = fill(
            self.max_responses, fresh, self.keeps(fresh), [group for group in reevaluated if has_signal(group)]
        )
        silent = [group for group in reevaluated if not has_signal(group)]
        batch.unimproved = [group for group in silent if group.mean < HALF]
        batch.solved = [group for group in silent if group.mean >= HALF]

        for prompt in [*self._unanswered, *(group.prompt for group in reevaluated)]:
            self.known[prompt.id] = replace(self.known[prompt.id], step=step, away=False)
        self._unanswered = ()
        for group in (*fresh, *reevaluated):
            first_entry = KnownPrompt(group.prompt, group.mean, step)
            entry = replace(self.known.pop(group.prompt.id, first_entry), rate=first_entry.rate, step=step)
            if entry.uses or self.lowest <= entry.rate <= self.highest:
                self.known[group.prompt.id] = entry
        self.measured = {
            "groups/reevaluation_attempts": len(reevaluated),
            "again/stored": len(self._in_window()),
            "again/used_up": sum(entry.uses >= self.limit for entry in self.known.values()),
        }
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Generator state, and what is known of each prompt."""
        entries = self.known.values()
        known = [vars(entry) | {"prompt": prompt_state(entry.prompt), "rate": str(entry.rate)} for entry in entries]
        return super().state_dict() | {"known": known}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        super().load_state_dict(state)
        self.known = {}
        for entry in state["known"]:
            prompt = Prompt(**entry["prompt"])
            self.known[prompt.id] = KnownPrompt(**entry | {"prompt": prompt, "rate": Fraction(entry["rate"])})
