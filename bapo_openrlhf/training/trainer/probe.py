"""Whether the groups of a batch point the right way: their policy gradients beside that of many fresh responses.

The reference is the gradient over REFERENCE groups that today's policy generates for random prompts of the data. Half
of its groups give one gradient and half another. The cosine r of these two says how much of the reference is noise: no
cosine with the reference can be expected to be higher than sqrt(2 r / (1 + r)), its own with the true gradient.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
from openrlhf.trainer.ppo_utils.experience import Experience

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.adapt.review import Review, review
from bapo_openrlhf.adapt.rewards import UNIT
from bapo_openrlhf.adapt.schedule import due
from bapo_openrlhf.record.run_record import PROBES, append_rows
from bapo_openrlhf.training.trainer.experience import BatchExperience, ExperienceMaker, SampleOrigin, origins_of
from bapo_openrlhf.training.trainer.generated import GeneratedStep
from bapo_openrlhf.training.trainer.generator import Generator
from bapo_openrlhf.training.trainer.recorder import StepRecorder
from bapo_openrlhf.training.trainer.run_state import RunState

# Groups. In a model of 2M parameters, the cosine of the halves was 0.00 with 64 groups, and 0.09 with 512.
REFERENCE = 512


@dataclass
class GradientProbe:
    """Probes gradients in some steps (`--run.gradient_probe`). It changes nothing of the run."""

    args: SimpleNamespace
    state: RunState
    recorder: StepRecorder
    generator: Generator
    generate_kwargs: Mapping[str, Any]
    maker: ExperienceMaker
    data: Any  # OpenRLHF's data set of prompts
    actor: Any

    def measure(self, reviewed: Review, experience: BatchExperience) -> dict[str, float]:
        """Write a line of probes.jsonl for each group of the batch, before the update. Returns metrics of the step."""
        step = self.state.step
        if not due(step, self.args.run.gradient_probe):
            return {}
        self.state.phase, start = "probing gradients", time.perf_counter()
        reference = self._reference_rows(step)
        if len(reference) < 2:
            text = "too few groups of the reference can be used, so the gradients of this step are not probed"
            self.recorder.warn(step + 1, "probe", text)
            return {}
        groups = {group.uid: (source, group) for source, group in reviewed.batch.with_sources()}
        [alignments] = ray.get(self.actor.async_run_method(
            method_name="probe_gradients",
            reference=reference,
            groups=rows_by(experience, lambda origin: origin.group.uid),
            sources={uid: source for uid, (source, _) in groups.items()},
        ))  # fmt: skip
        rows = [
            {
                "uid": uid,
                "source": source,
                "age": step - group.weights_version,
                "tv": reviewed.distances[group],
                "shift": reviewed.shifts[group],
                "mean": float(group.mean),
                "cosine": alignments[uid][0],
                "norm": alignments[uid][1],
            }
            for uid, (source, group) in groups.items()
        ]
        append_rows(self.recorder.folder, PROBES, step + 1, rows)
        cosines = {f"probe/{name}": value[0] for name, value in alignments.items() if isinstance(name, str)}
        return cosines | {"timing/probe": time.perf_counter() - start}

    def _reference_rows(self, step: int) -> Mapping[Hashable, Sequence[Experience]]:
        """The experience of the reference, in halves 0 and 1. A half is missing if none of its groups can be used."""
        rng = np.random.default_rng([self.args.train.seed, step])
        places = rng.choice(len(self.data), size=min(REFERENCE, len(self.data)), replace=False).tolist()
        prompts = [Prompt(text, label) for _, text, label, _ in map(self.data.__getitem__, places)]
        with self.generator.rollout_weights.synced_to(step, next_rollout=step + 1):
            answers = self.generator.generate("probe", prompts, self.generate_kwargs)
        ends = self.state.reward_range or UNIT
        generated = GeneratedStep.of([("fresh", answers, step)], first_uid=0, step=step, reward_range=ends)
        batch = Batch(fresh=generated.fresh)
        passed = self.maker.forward(origins_of(batch, step))
        kept = review(batch, passed.log_ratios, passed.sums, step, self.state.gap, since=step).kept
        return rows_by(self.maker.finish(passed, kept), lambda origin: origin.group.uid % 2) if kept else {}


def rows_by(batch: BatchExperience, key: Callable[[SampleOrigin], Hashable]) -> Mapping[Hashable, Sequence[Experience]]:
    """The samples of an experience by a key of their origins, in order."""
    rows = defaultdict(list)
    for origin, sample in zip(batch.origins, batch.samples, strict=True):
        rows[key(origin)].append(sample)
    return dict(rows)
