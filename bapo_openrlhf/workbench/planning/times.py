"""Seconds of a step's phases: what is done, and what each piece of it costs.

`step_seconds` adds up phases for any `Costs`. `GPUCosts` has those of a GPU, from a model's shape and the constants;
the benchmark puts costs in its place that it fitted to measured runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from bapo_openrlhf.workbench.planning.constants import Constants
from bapo_openrlhf.workbench.planning.groups import Groups, groups_of_step
from bapo_openrlhf.workbench.planning.settings import Method, Settings
from bapo_openrlhf.workbench.planning.shapes import ModelShape

PHASES = ("generation", "reevaluation", "experience", "training", "sync")
TRAINING_PASSES = 3.0  # what training takes, in forward passes: forward 1, backward 2


@dataclass(frozen=True)
class Lengths:
    """Tokens of a prompt and of a response on average, and of the longest response."""

    prompt: float
    response: float
    longest: float

    @property
    def total(self) -> float:
        """Of an average sample."""
        return self.prompt + self.response


def lengths(settings: Settings, constants: Constants) -> Lengths:
    """Mean lengths; the longest response is taken to be as long as it may, for among thousands one is."""
    return Lengths(
        prompt=constants.prompt_share * settings.prompt_tokens,
        response=constants.response_share * settings.response_tokens,
        longest=float(settings.response_tokens),
    )


class Costs(Protocol):
    """Seconds of one piece of work."""

    def generation(self, responses: float, rounds: float) -> float:
        """Generate so many responses; `rounds` follow one another at least."""

    def experience(self, samples: float) -> float:
        """Log-probs and values of a batch of so many samples, by all models that are there."""

    def training(self, samples: float) -> float:
        """Train actor and critic on a batch of so many samples."""

    def sync(self) -> float:
        """Send the actor's weights to the engines once."""


def rounds_of(method: Method, settings: Settings, constants: Constants) -> float:
    """Generations that follow one another in a step: 1, but for dynamic sampling.

    There each of n places is filled anew until its group has a signal, with chance p: the slowest of n geometric
    numbers, E = sum over k >= 0 of 1 - (1 - (1 - p)^k)^n.
    """
    if not method.dynamic:
        return 1.0
    failing, total, power = 1 - max(constants.signal_share, 1e-3), 0.0, 1.0
    while (term := -math.expm1(settings.prompts * math.log1p(-power)) if power < 1 else 1.0) > 1e-9:
        total += term
        power *= failing
    return total


def step_seconds(method: Method, settings: Settings, constants: Constants, groups: Groups, costs: Costs, *,
                 together: bool, synced: bool) -> dict[str, float]:  # fmt: skip
    """Seconds of one step by phase.

    Args:
        groups: of this step.
        together: whether its hard prompts, if any, are generated together with the fresh ones (t mod v = 0).
        synced: whether the engines get the actor's weights after its update.
    """
    size, rounds = settings.group_size, rounds_of(method, settings, constants)
    fresh = costs.generation(size * groups.fresh, rounds)
    again = 0.0
    if groups.again and together:
        again = costs.generation(size * groups.generated, rounds) - fresh
    elif groups.again:
        again = costs.generation(size * groups.again, 1.0) + costs.sync()
    samples = size * groups.trained
    return {
        "generation": fresh,
        "reevaluation": again,
        "experience": costs.experience(samples),
        "training": costs.training(samples),
        "sync": costs.sync() if synced else 0.0,
    }


def average_seconds(method: Method, settings: Settings, constants: Constants, costs: Costs) -> dict[str, float]:
    """Seconds by phase of an average step, over a whole period of v and m."""
    schedule = settings.schedule(method)
    period = math.lcm(schedule.delay, schedule.reevaluate_every or 1)
    total = dict.fromkeys(PHASES, 0.0)
    kinds: dict[tuple[bool, bool, bool], int] = {}
    for step in range(period, 2 * period):  # t = 0 re-evaluates nothing
        kind = (schedule.reevaluation_due(step), schedule.sync_due(step), schedule.sync_due(step + 1))
        kinds[kind] = kinds.get(kind, 0) + 1
    for (reevaluates, together, synced), count in kinds.items():
        groups = groups_of_step(method, settings, constants, reevaluates=reevaluates)
        seconds = step_seconds(method, settings, constants, groups, costs, together=together, synced=synced)
        for phase in PHASES:
            total[phase] += seconds[phase] * count / period
    return total


@dataclass(frozen=True)
class GPUCosts:
    """Costs of a model on `total` GPUs: the larger of what compute and memory take, and what the ranks exchange.

    Attributes:
        tensor_parallel: GPUs of an engine.
        cache_tokens: tokens whose keys and values fit into an engine.
    """

    shape: ModelShape
    settings: Settings
    method: Method
    constants: Constants
    total: int
    tensor_parallel: int
    cache_tokens: float

    @property
    def lengths(self) -> Lengths:
        """Of prompts and responses."""
        return lengths(self.settings, self.constants)

    def generation(self, responses: float, rounds: float) -> float:
        """Prefill at `prefill_utilisation`, then decoding."""
        engines = max(self.settings.gpus_of("engines", self.method, self.total) // self.tensor_parallel, 1)
        return self.prefill_seconds(responses / engines) + self.decode_seconds(responses / engines, rounds)

    def prefill_seconds(self, responses: float) -> float:
        """Of one engine's prompts; the G responses to a prompt are G requests, each with its own prefill."""
        prompt = self.lengths.prompt
        operations = self.shape.pass_flops(responses, prompt)
        return operations / (self.tensor_parallel * self.constants.peak_flops * self.constants.prefill_utilisation)

    def decode_seconds(self, responses: float, rounds: float) -> float:
        """Of one engine's responses.

        An engine decodes as many sequences at once as its cache and its limit take. It takes as many iterations as
        their tokens need, and at least as many as the longest response has tokens (and each earlier round's mean
        response). An iteration reads all weights and the sequences' caches, or computes, whichever takes longer.
        """
        if responses <= 0:
            return 0.0
        length, constants = self.lengths, self.constants
        tokens, context = responses * length.response, length.prompt + length.response / 2
        at_once = min(float(constants.engine_sequences), self.cache_tokens / (length.prompt + length.response))
        iterations = max(tokens / max(at_once, 1.0), length.longest + (rounds - 1) * length.response)
        read = iterations * self.shape.weight_bytes + tokens * context * self.shape.cache_bytes
        from_memory = read / (self.tensor_parallel * constants.memory_bandwidth * constants.memory_utilisation)
        operations = tokens * self.shape.forward_flops(context)
        computed = operations / (self.tensor_parallel * constants.peak_flops * constants.decode_utilisation)
        return max(from_memory, computed)

    def experience(self, samples: float) -> float:
        """A forward pass of each model; one after the other where they share GPUs, else the slowest."""
        models = self.settings.passed_forward(self.method)
        utilisation, micro = self.constants.forward_utilisation, self.settings.micro_forward
        return self._together(self._passes(model, samples, 1.0, utilisation, micro, gathers=1) for model in models)

    def training(self, samples: float) -> float:
        """TRAINING_PASSES, and recomputation 1 with gradient checkpointing: in forward passes, for each epoch."""
        again = 1.0 if self.settings.checkpointing else 0.0
        utilisation, micro = self.constants.train_utilisation, self.settings.micro_train
        seconds = self._together(
            self._passes(model, samples, TRAINING_PASSES + again, utilisation, micro, gathers=3 + int(again))
            for model in self.method.trained
        )
        return self.settings.epochs * seconds

    def sync(self) -> float:
        """All weights once through the network, gathered by ZeRO-3 on the way."""
        return self.shape.weight_bytes / self._bandwidth(self.total)

    def _together(self, seconds: Iterable[float]) -> float:
        return sum(seconds) if self.settings.colocated else max(seconds)

    def _passes(self, model: str, samples: float, passes: float, utilisation: float, micro: int,
                gathers: int) -> float:  # fmt: skip
        gpus = self.settings.gpus_of(model, self.method, self.total)
        operations = self.shape.pass_flops(samples, self.lengths.total) * passes
        computed = operations / (gpus * self.constants.peak_flops * utilisation)
        exchanged = self.exchange_seconds(model, samples, micro, gathers)
        return max(computed, exchanged) if self.settings.overlapped else computed + exchanged

    def exchange_seconds(self, model: str, samples: float, micro: int, gathers: int) -> float:
        """What the ranks exchange.

        ZeRO-3: each micro-batch gathers all weights once a pass (the backward's reduction counts as one). ZeRO-1, 2:
        gradients are reduced and weights gathered once an optimizer step.
        """
        ranks = self.settings.ranks(model, self.method, self.total)
        if ranks == 1 or samples <= 0:
            return 0.0
        if self.settings.zero_stage == 3:
            times = math.ceil(samples / (ranks * micro)) * gathers
        else:
            times = 2 * math.ceil(samples / self.settings.train_samples) if gathers > 1 else 0
        return times * self.shape.weight_bytes / self._bandwidth(ranks * self.settings.copies)

    def _bandwidth(self, gpus: int) -> float:
        """Bytes a second of a gather or a broadcast in rings, which cross each machine's border once."""
        inside = gpus <= self.constants.gpus_per_machine
        bandwidth = self.constants.link_bandwidth if inside else self.constants.network_bandwidth
        return bandwidth * self.constants.network_utilisation
