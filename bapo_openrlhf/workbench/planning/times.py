"""Seconds of a step's phases: what is done, and what each piece of work costs.

`step_seconds` adds up the phases for any `Costs`. `GPUCosts` computes them from a model's shape and the constants.
benchmarks/plan.py uses costs that it fitted to measured runs instead.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from bapo_openrlhf.workbench.planning.constants import Constants
from bapo_openrlhf.workbench.planning.groups import Groups, groups_of_step
from bapo_openrlhf.workbench.planning.shapes import ModelShape
from bapo_openrlhf.workbench.planning.workload import Algorithm, Workload

PHASES = ("generation", "reevaluation", "experience", "training", "sync")
OVERLAP = "overlap"  # Minus the seconds in which the engines generate while the models compute.
TRAINING_PASSES = 3.0  # Training takes as long as 3 forward passes: forward 1, backward 2.


@dataclass(frozen=True)
class Lengths:
    """Mean tokens of a prompt and of a response, and tokens of the longest response."""

    prompt: float
    response: float
    longest: float

    @property
    def total(self) -> float:
        """Tokens of an average sample."""
        return self.prompt + self.response


def lengths(workload: Workload, constants: Constants) -> Lengths:
    """The lengths of a run. Among thousands of responses one is as long as the limit, so the longest one is."""
    return Lengths(
        prompt=constants.prompt_share * workload.prompt_tokens,
        response=constants.response_share * workload.response_tokens,
        longest=float(workload.response_tokens),
    )


class Costs(Protocol):
    """Seconds of one piece of work."""

    def generation(self, responses: float, rounds: float) -> float:
        """Generate so many responses in at least `rounds` rounds, one after another."""

    def experience(self, samples: float) -> float:
        """Compute log-probs and values of a batch of so many samples with all models of the run."""

    def training(self, samples: float) -> float:
        """Train actor and critic on a batch of so many samples."""

    def sync(self) -> float:
        """Send the actor's weights to the engines once."""


def rounds_of(algorithm: Algorithm, workload: Workload, constants: Constants) -> float:
    """Number of generations that follow one another in a step. It is 1 except for dynamic sampling.

    Dynamic sampling fills each of n places again until its group has a signal, which has probability p. The number of
    rounds is the largest of n geometric numbers, E = sum over k >= 0 of 1 - (1 - (1 - p)^k)^n.
    """
    if not algorithm.dynamic:
        return 1.0
    failing, total, power = 1 - max(constants.signal_share, 1e-3), 0.0, 1.0
    while (term := -math.expm1(workload.args.rollout.batch_size * math.log1p(-power)) if power < 1 else 1.0) > 1e-9:
        total += term
        power *= failing
    return total


def step_seconds(algorithm: Algorithm, workload: Workload, constants: Constants, groups: Groups, costs: Costs, *,
                 together: bool, synced: bool) -> dict[str, float]:  # fmt: skip
    """Seconds of one step by phase.

    With generation ahead of training, only a sync and a re-evaluation apart from the rollout wait. So a step takes
    sync + apart + max(generation + together, experience + training). OVERLAP is the part that this saves, below 0.

    Args:
        groups: The groups of this step.
        costs: Seconds of each piece of work.
        together: Whether hard prompts, if any, are generated together with the fresh ones (t mod v = 0).
        synced: Whether the engines get the actor's weights after its update.
    """
    size, rounds = workload.args.rollout.n_samples_per_prompt, rounds_of(algorithm, workload, constants)
    fresh = costs.generation(size * groups.fresh, rounds)
    again = 0.0
    if groups.again and together:
        again = costs.generation(size * groups.generated, rounds) - fresh
    elif groups.again:
        again = costs.generation(size * groups.again, 1.0) + costs.sync()
    samples = size * groups.trained
    seconds = {
        "generation": fresh,
        "reevaluation": again,
        "experience": costs.experience(samples),
        "training": costs.training(samples),
        "sync": costs.sync() if synced else 0.0,
    }
    if workload.ahead(algorithm):
        generated = fresh + (again if together else 0.0)
        seconds[OVERLAP] = -min(generated, seconds["experience"] + seconds["training"])
    return seconds


def average_seconds(algorithm: Algorithm, workload: Workload, constants: Constants, costs: Costs) -> dict[str, float]:
    """Seconds by phase of an average step over a whole period of v and m."""
    schedule = workload.schedule(algorithm)
    period = math.lcm(schedule.delay, schedule.reevaluate_every or 1)
    total: dict[str, float] = {}
    kinds = Counter(
        (schedule.reevaluation_due(step), schedule.sync_due(step), schedule.sync_due(step + 1))
        for step in range(period, 2 * period)  # The first period differs because t = 0 re-evaluates nothing.
    )
    for (reevaluates, together, synced), count in kinds.items():
        groups = groups_of_step(algorithm, workload, constants, reevaluates=reevaluates)
        seconds = step_seconds(algorithm, workload, constants, groups, costs, together=together, synced=synced)
        for phase, spent in seconds.items():
            total[phase] = total.get(phase, 0.0) + spent * count / period
    return total


@dataclass(frozen=True)
class GPUCosts:
    """Costs of a model on `total` GPUs. Compute or memory limits the engines; ranks also exchange weights.

    Attributes:
        tensor_parallel: Number of GPUs of an engine.
        cache_tokens: Number of tokens whose keys and values fit into an engine.
    """

    shape: ModelShape
    workload: Workload
    algorithm: Algorithm
    constants: Constants
    total: int
    tensor_parallel: int
    cache_tokens: float

    @property
    def lengths(self) -> Lengths:
        """Lengths of prompts and responses."""
        return lengths(self.workload, self.constants)

    def generation(self, responses: float, rounds: float) -> float:
        """Seconds of prefill and decoding."""
        engines = max(self.workload.gpus_of("engines", self.algorithm, self.total) // self.tensor_parallel, 1)
        return self.prefill_seconds(responses / engines) + self.decode_seconds(responses / engines, rounds)

    def prefill_seconds(self, responses: float) -> float:
        """Seconds of one engine's prefill. The G responses to a prompt are G requests, each with its own prefill."""
        prompt = self.lengths.prompt
        operations = self.shape.pass_flops(responses, prompt)
        return operations / (self.tensor_parallel * self.constants.peak_flops * self.constants.prefill_utilisation)

    def decode_seconds(self, responses: float, rounds: float) -> float:
        """Seconds in which one engine decodes so many responses.

        An engine decodes as many sequences at once as its cache and its limit allow. All tokens need a number of
        iterations, which is at least the length of the longest response plus a mean response for each earlier round.
        An iteration reads all weights and the sequences' caches, and it computes. The slower of the two counts.
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
        """Seconds of a forward pass of each model. Models that share GPUs follow one another; others run together."""
        models = [*self.algorithm.trained, *["reference"] * self.workload.has_reference(self.algorithm)]
        utilisation, micro = self.constants.forward_utilisation, self.workload.args.rollout.micro_batch_size
        return self._of_all(self._passes(model, samples, 1.0, utilisation, micro, gathers=1) for model in models)

    def training(self, samples: float) -> float:
        """Seconds of all epochs. Gradient checkpointing adds one forward pass to TRAINING_PASSES."""
        again = 1.0 if self.workload.args.actor.gradient_checkpointing_enable else 0.0
        utilisation, micro = self.constants.train_utilisation, self.workload.args.train.micro_batch_size
        seconds = self._of_all(
            self._passes(model, samples, TRAINING_PASSES + again, utilisation, micro, gathers=3 + int(again))
            for model in self.algorithm.trained
        )
        return self.workload.args.train.max_epochs * seconds

    def sync(self) -> float:
        """Seconds in which all weights go once through the network. ZeRO-3 gathers them on the way."""
        return self.shape.weight_bytes / self._bandwidth(self.total)

    def _of_all(self, seconds: Iterable[float]) -> float:
        return sum(seconds) if self.workload.args.train.colocate_all else max(seconds)

    def _passes(self, model: str, samples: float, passes: float, utilisation: float, micro: int,
                gathers: int) -> float:  # fmt: skip
        gpus = self.workload.gpus_of(model, self.algorithm, self.total)
        operations = self.shape.pass_flops(samples, self.lengths.total) * passes
        computed = operations / (gpus * self.constants.peak_flops * utilisation)
        exchanged = self.exchange_seconds(model, samples, micro, gathers)
        return max(computed, exchanged) if self.workload.args.ds.overlap_comm else computed + exchanged

    def exchange_seconds(self, model: str, samples: float, micro: int, gathers: int) -> float:
        """Seconds in which the ranks exchange weights and gradients.

        ZeRO-3 gathers all weights once in each pass of each micro-batch; the reduction of gradients counts as a gather.
        ZeRO-1 and ZeRO-2 reduce gradients and gather weights once in each optimizer step.
        """
        ranks = self.workload.ranks(model, self.algorithm, self.total)
        if ranks == 1 or samples <= 0:
            return 0.0
        if self.workload.args.ds.zero_stage == 3:
            times = math.ceil(samples / (ranks * micro)) * gathers
        else:
            times = 2 * math.ceil(samples / self.workload.args.train.batch_size) if gathers > 1 else 0
        return times * self.shape.weight_bytes / self._bandwidth(ranks * self.workload.copies)

    def _bandwidth(self, gpus: int) -> float:
        """Bytes per second of a gather or a broadcast in rings, which leave each machine once."""
        inside = gpus <= self.constants.gpus_per_machine
        bandwidth = self.constants.link_bandwidth if inside else self.constants.network_bandwidth
        return bandwidth * self.constants.network_utilisation
