"""Times the layer on made-up groups: the steps of a run as the trainer makes them, and each part by itself.

Part of `adaptation.py`. A round is v = m = 5 steps. One of them re-evaluates hard prompts. Numbers are means over a
round.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bapo_openrlhf.adapt.arithmetic import BatchArithmetic
from bapo_openrlhf.adapt.batch import Batch, fill
from bapo_openrlhf.adapt.buffers import HardBuffer, ReplayBuffer
from bapo_openrlhf.adapt.group import Group, Prompt, Response
from bapo_openrlhf.adapt.ledger import Ledger, states_of
from bapo_openrlhf.adapt.monitor import composition, off_policy, replay_ages
from bapo_openrlhf.adapt.review import review
from bapo_openrlhf.adapt.shift import Gap, TokenSums
from bapo_openrlhf.flags.config import AdaptConfig

PERIOD = 5  # v and m
WARM_UP = 2  # rounds until the buffers are full and prompts have been re-evaluated
SCALES = (1, 10, 100)  # times the groups of a step
LAYER = ("begin_step", "build_batch", "monitor", "ledger")  # what the layer does in a step, in the order of the trainer
EXTRAS = {"info": {"reward": 0.0}, "score": 0.0, "truncated": False, "mm_train_inputs": None}


def engine_answers(group: Group) -> list[dict[str, Any]]:
    """What a rollout engine answers to a prompt, if its responses are those of the group."""
    answers = []
    for response in group.responses:
        ((start, end),) = response.action_spans
        answers.append(
            {
                "observation_tokens": response.token_ids,
                "action_ranges": [(start, end)],
                "rollout_log_probs": np.concatenate([np.zeros(start, dtype=np.float32), response.log_probs]),
                "reward": response.reward,
                "scores": response.reward,
            }
        )
    return answers


class Clock:
    """Seconds between laps, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.skip()

    def skip(self) -> None:
        """Do not count the time since the last lap."""
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Add the time since the last lap to a name."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


class World:
    """Makes up groups: random tokens, and for each prompt its own chance of a right response.

    Args:
        size: G.
        tokens: tokens of a response with its prompt. The prompt has an eighth of them, and 4 characters a token.
        shared: whether all responses have the same two arrays, for more groups than would fit into memory.
    """

    def __init__(self, size: int, tokens: int, *, shared: bool) -> None:
        self.rng = np.random.default_rng(0)
        self.size, self.tokens, self.prompt_tokens = size, tokens, tokens // 8
        self.uid = self.drawn = 0
        self.arrays = self._arrays() if shared else None

    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Token ids (T,) and log-probs (A,)."""
        token_ids = self.rng.integers(0, 150_000, self.tokens, dtype=np.int32)
        return token_ids, self.rng.normal(-1, 1, self.tokens - self.prompt_tokens).astype(np.float32)

    def prompts(self, count: int) -> list[Prompt]:
        """New prompts."""
        self.drawn += count
        return [Prompt(f"{n:>{4 * self.prompt_tokens}}", "1") for n in range(self.drawn - count, self.drawn)]

    def groups(self, prompts: Sequence[Prompt], step: int, weights_version: int) -> list[Group]:
        """A group for each prompt."""
        right = self.rng.random((len(prompts), self.size)) < self.rng.beta(0.7, 0.9, (len(prompts), 1))
        spans, groups = ((self.prompt_tokens, self.tokens),), []
        for prompt, rewards in zip(prompts, right.astype(float).tolist(), strict=True):
            responses = []
            for reward in rewards:
                token_ids, log_probs = self.arrays or self._arrays()
                responses.append(Response(token_ids, spans, log_probs, reward, EXTRAS))
            groups.append(Group(self.uid, prompt, tuple(responses), step, weights_version))
            self.uid += 1
        return groups


class Run:
    """Runs the layer as `training.trainer.trainer` does, with the paper's settings (Table 3).

    Buffers hold as many entries as a step generates groups, and half as many prompts are generated again: 256, 256
    and 128 in the paper.

    Args:
        groups: number of prompts of a step.
        world: what makes the groups.
    """

    def __init__(self, groups: int, world: World) -> None:
        self.groups, self.world, self.step = groups, world, 0
        config = AdaptConfig(
            method="bapo",
            buffer_size=groups,
            max_reevaluated_prompts=max(groups // 2, 1),
            rollout_delay=PERIOD,
            reevaluate_every=PERIOD,
        )
        self.eps = config.eps
        self.arithmetic = BatchArithmetic(world.size, groups, groups, groups * world.size, {"actor": 8}, 8)
        self.make_method = lambda: config.make_method(self.arithmetic, seed=0)
        self.method, self.ledger = self.make_method(), Ledger()

    def take_step(self, clock: Clock) -> None:
        """One trainer step. A subclass adds the conversion from engines' answers and to OpenRLHF's samples."""
        step, method = self.step, self.method
        clock.skip()
        named = method.begin_step(step)
        clock.lap("begin_step")
        fresh = self.generated(self.world.prompts(self.groups), step - step % PERIOD, clock)
        again = self.generated(named, step, clock)
        clock.skip()
        batch = method.build_batch(step, fresh, again)
        clock.lap("build_batch")
        trained = self.trained(batch, clock)
        log_ratios = self.world.rng.normal(0, 0.1, len(trained) * self.world.size)
        sums = TokenSums.of(log_ratios[:, None], np.ones((len(log_ratios), 1), dtype=bool))
        clock.skip()
        review(batch, log_ratios, sums, step, Gap(), since=step)
        composition(batch, self.groups * self.world.size, len(again))
        replay_ages(batch, step, PERIOD, self.ledger.uses(batch.replayed))
        off_policy(batch, log_ratios, method.constants(), self.eps)
        method.metrics()
        clock.lap("monitor")
        self.ledger.settle(fresh + again, batch)
        states_of(batch)
        clock.lap("ledger")
        self.step += 1

    def generated(self, prompts: Sequence[Prompt], weights_version: int, clock: Clock) -> list[Group]:
        """Groups of the prompts."""
        return self.world.groups(prompts, self.step, weights_version)

    def trained(self, batch: Batch, clock: Clock) -> list[Group]:
        """The groups that are trained on."""
        return [group for _, group in batch.with_sources()]

    def round(self) -> dict[str, float]:
        """Seconds a step by name, as means over PERIOD steps. "layer" is the sum of LAYER."""
        clock = Clock()
        for _ in range(PERIOD):
            self.take_step(clock)
        seconds = {name: value / PERIOD for name, value in clock.seconds.items()}
        return {"layer": sum(seconds[name] for name in LAYER), **seconds}


def pieces(world: World, count: int) -> dict[str, float]:
    """Seconds that each part takes for a group, measured by itself on the groups of two steps of `count` prompts."""
    first, second = (world.groups(world.prompts(count), step, step) for step in (0, 1))
    half, clock = count // 2, Clock()
    for group in first:
        _ = group.mean
    clock.lap("group: mean reward")
    for group in first:
        _ = group.variance
    clock.lap("group: variance")
    for group in first:
        _ = group.prompt.id
    clock.lap("group: id of its prompt")
    for group in second:
        _ = group.mean, group.variance, group.prompt.id
    hard, replay = HardBuffer(count), ReplayBuffer(count, max_age=0)
    for name, groups in (("add", first), ("add and evict", second)):
        clock.skip()
        for group in groups:
            hard.add(group)
        clock.lap(f"hard buffer: {name}")
        for group in groups:
            replay.add(group)
        clock.lap(f"replay buffer: {name}")
    hard.oldest(half)
    clock.lap("hard buffer: name the oldest")
    for group in second[:half]:
        hard.remove(group.prompt)
    clock.lap("hard buffer: remove")
    replay.sample(half, world.rng, lambda group: 0.25 <= group.mean <= 0.5)
    clock.lap("replay buffer: sample")
    replay.expire(step=2)
    clock.lap("replay buffer: expire")
    fill(half * world.size, first[:half], [True] * half, second[:half])
    clock.lap("batch: cut to half")
    handled = {"hard buffer: name the oldest": half, "hard buffer: remove": half}  # the others: all
    return {name: value / handled.get(name, count) for name, value in clock.seconds.items()}


def layer_round(runs: Mapping[int, Run]) -> dict[str, float]:
    """Seconds a group for the layer's steps and pieces in a round, by SCALE/NAME, one scale after the other."""
    timings = {}
    for scale, run in runs.items():
        seconds = {name: value / run.groups for name, value in run.round().items()}
        timings |= {f"{scale}/{name}": value for name, value in (seconds | pieces(run.world, run.groups)).items()}
    return timings
