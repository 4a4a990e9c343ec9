"""Prefixes: the first tokens of a stored response, from which a prompt is generated again (arXiv 2605.05112).

A prompt that mostly fails begins with a part of one of its own best responses, and a prompt that mostly passes with a
part of one of its worst. The share is steered so that about half of the responses are right. All responses of a group
have one prefix, as context (`Prompt.prefix`), so that only tokens of today's policy are trained on. A group with a
prefix does not tell how hard its prompt is.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from bapo_openrlhf.adapt.buffers import CountedStore
from bapo_openrlhf.adapt.filters import has_signal
from bapo_openrlhf.adapt.group import Group, Prompt, prompt_state
from bapo_openrlhf.adapt.metric import Metric, declare
from bapo_openrlhf.adapt.rewards import exact_mean

Kind = Literal["right", "wrong", "worked"]  # what a prefix is of: a response of the prompt, or its worked solution
KINDS: tuple[Kind, ...] = get_args(Kind)

BALANCED = Fraction(3, 10), Fraction(7, 10)  # group mean rewards between which a group needs no prefix
TARGET = 0.5
DEAD_ZONE = 0.03
RATE = 0.05  # of the moving average
CHANGE = Fraction(1, 20)  # of the share at a time
COOLDOWN = 5  # steps without another change


class PrefixShare:
    """The share of a stored response that is its prefix, steered towards a mean reward of 1/2.

    The moving average of the group mean rewards begins at 1/2. If it is more than 0.03 away, the share changes by 0.05,
    and then not again in the next five steps that have groups of this kind. `helps` says that a longer prefix makes the
    rest easier. A wrong one makes it harder. `moves` says whether the share changes at all.
    """

    def __init__(self, share: Fraction, *, helps: bool, moves: bool) -> None:
        self.share, self.average, self.rest = share, TARGET, 0
        self._helps, self._moves = helps, moves

    def observe(self, mean: float) -> None:
        """Take the mean reward of one step's groups, in [0, 1]."""
        self.average += RATE * (mean - self.average)
        if self.rest:
            self.rest -= 1
        elif self._moves and abs(self.average - TARGET) > DEAD_ZONE:
            longer = (self.average < TARGET) == self._helps
            self.share = min(max(self.share + (CHANGE if longer else -CHANGE), CHANGE), 1 - CHANGE)
            self.rest = COOLDOWN

    def length(self, tokens: int) -> int:
        """Tokens of the prefix of a response of at least 2. At least one is in it, and at least one is not."""
        return max(int(self.share * tokens), 1)

    def state_dict(self) -> dict[str, Any]:
        """Its numbers, the share as an exact string."""
        return {"share": str(self.share), "average": self.average, "rest": self.rest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.share, self.average, self.rest = Fraction(state["share"]), state["average"], state["rest"]


@dataclass(frozen=True, eq=False)
class Start:
    """A response whose first tokens a prompt can be generated from: at least 2, and the prompt has no prefix itself."""

    prompt: Prompt
    kind: Kind
    tokens: np.ndarray


class Prefixes(CountedStore[str, Start]):
    """The starts that wait, first in, first out, one for each prompt, and the share of each kind.

    A start is used once. A newer one replaces that of its prompt. `share` is the first share of each kind, in (0, 1).
    The `counts` are `added`, `replaced`, `evicted` and `taken`.
    """

    METRICS: ClassVar[tuple[Metric, ...]] = declare(
        """
        prefix/stored | prompts | Stored starts | | Prompts that wait to be generated again from a prefix.
        prefix/mean_reward | reward | Mean reward with a prefix | | Mean reward of this step's groups with a prefix, \
            which is steered to 1/2. Missing if there are none.
        prefix/token_share | 0 to 1 | Share of prefix tokens | | Share of the prefix in the tokens of these groups' \
            responses. No prefix token is trained on, or counts as generated.
        prefix/share_right | 0 to 1 | Share of a right response | | Share of a right response that is the prefix of a \
            prompt that mostly fails.
        prefix/share_wrong | 0 to 1 | Share of a wrong response | | The same for a prompt that mostly passes.
        prefix/share_worked | 0 to 1 | Share of a worked solution | | The same for a hard prompt with no right response.
        """,
        when="methods that generate from prefixes",
        optional=True,
    )

    KIND = "store of prefixes"

    def __init__(self, capacity: int, share: Fraction, *, moves: bool = True) -> None:
        super().__init__(capacity)
        self.shares = {kind: PrefixShare(share, helps=kind != "wrong", moves=moves) for kind in KINDS}
        self._sent: list[tuple[Prompt, Kind]] = []  # generated again, and not back yet
        self._measured: dict[str, float] = {}

    def store(self, groups: Iterable[Group], rng: np.random.Generator) -> None:
        """Store a drawn start of each group without a prefix: a best response if it mostly fails, or a worst one."""
        low, high = BALANCED
        for group in groups:
            if group.prompt.prefix or low <= group.mean <= high or not has_signal(group):
                continue
            kind: Kind = "right" if group.mean < low else "wrong"
            extreme = (max if kind == "right" else min)(group.rewards)
            places = [place for place, reward in enumerate(group.rewards) if reward == extreme]
            response = group.responses[places[rng.integers(len(places))]]
            if len(response.log_probs) > 1:
                begin = response.action_spans[0][0]
                self._put(group.prompt.id, Start(group.prompt, kind, response.token_ids[begin:].copy()))

    def take(
        self, count: int, never_right: Iterable[Prompt] = (), solutions: Mapping[str, np.ndarray] | None = None
    ) -> list[Prompt]:
        """Up to `count` prompts with their prefixes: those that wait, and then those `never_right`, oldest first.

        The latter begin with their worked solution (token ids by prompt id). One without a solution is left out.
        """
        start_ids, solutions = set(self._entries), solutions or {}
        starts = [self._entries.popitem(last=False)[1] for _ in range(min(count, len(self)))]
        self.counts["taken"] += len(starts)
        worked = [prompt for prompt in never_right if prompt.id in solutions and prompt.id not in start_ids]
        starts += [Start(prompt, "worked", solutions[prompt.id]) for prompt in worked[: count - len(starts)]]
        prompts = []
        for start in starts:
            prefix = start.tokens[: self.shares[start.kind].length(len(start.tokens))]
            prompts.append(replace(start.prompt, prefix=tuple(prefix.tolist())))
            self._sent.append((prompts[-1], start.kind))
        return prompts

    def back(self, prompt: Prompt) -> Kind:
        """Note that a prompt with a prefix has come back, with a group or without one. Returns its kind."""
        place = next(place for place, (sent, _) in enumerate(self._sent) if sent == prompt)
        return self._sent.pop(place)[1]

    def review(self, groups: Sequence[Group]) -> tuple[list[Group], list[Group]]:
        """Move the shares by groups that came back: those with a signal and those without one."""
        means: dict[Kind, list[Fraction]] = {}
        for group in groups:
            means.setdefault(self.back(group.prompt), []).append(group.mean)
        for kind in KINDS:
            if kind in means:
                self.shares[kind].observe(float(exact_mean(means[kind])))
        response_tokens = sum(len(response.log_probs) for group in groups for response in group.responses)
        prefix_tokens = sum(len(group.prompt.prefix) * group.size for group in groups)
        self._measured = {}
        if groups:
            self._measured["prefix/mean_reward"] = float(exact_mean([group.mean for group in groups]))
            self._measured["prefix/token_share"] = prefix_tokens / (prefix_tokens + response_tokens)
        return [group for group in groups if has_signal(group)], [group for group in groups if not has_signal(group)]

    def metrics(self) -> dict[str, float]:
        """Its METRICS, after a `check`."""
        self.check()
        shares = {f"prefix/share_{kind}": float(steered.share) for kind, steered in self.shares.items()}
        return {"prefix/stored": len(self), **shares, **self._measured}

    def state_dict(self) -> dict[str, Any]:
        """Starts in order, shares and counters, as plain data and arrays."""
        return {
            "starts": [
                {"prompt": prompt_state(start.prompt), "kind": start.kind, "tokens": start.tokens}
                for start in self._entries.values()
            ],
            "sent": [{"prompt": prompt_state(prompt), "kind": kind} for prompt, kind in self._sent],
            "shares": {kind: steered.state_dict() for kind, steered in self.shares.items()},
            "counts": dict(self.counts),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`. If the capacity is smaller than before, the oldest starts are evicted."""
        starts = (Start(Prompt(**item["prompt"]), item["kind"], item["tokens"]) for item in state["starts"])
        self._load({start.prompt.id: start for start in starts}, state["counts"])
        self._sent = [(Prompt(**item["prompt"]), item["kind"]) for item in state["sent"]]
        for kind, steered in self.shares.items():
            steered.load_state_dict(state["shares"][kind])


def by_prefix(groups: Iterable[Group]) -> tuple[list[Group], list[Group]]:
    """Groups without a prefix, and groups with one."""
    groups = list(groups)
    return [one for one in groups if not one.prompt.prefix], [one for one in groups if one.prompt.prefix]
