"""Whether the groups of a batch point the right way: their policy gradients beside that of many fresh responses.

The reference is the gradient over REFERENCE groups that today's policy generates for random prompts of the data. Half
of its groups give one gradient and half another. The cosine of these two says how much of the reference is noise, so no
cosine with it can be expected to be higher than about that.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Hashable

import numpy as np
import ray

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.record.run_record import PROBES
from bapo_openrlhf.training.experience import BatchToTrain, MadeExperience, SampleOrigin, row_of
from bapo_openrlhf.training.generated import GeneratedStep
from bapo_openrlhf.training.gradients import Rows
from bapo_openrlhf.training.pretraining import PretrainedCritic
from bapo_openrlhf.training.samples import by_request

# Groups. In a model of 2M parameters, the cosine of the halves was 0.00 with 64 groups, and 0.09 with 512.
REFERENCE = 512


class ProbedTrainer(PretrainedCritic):
    """OpenRLHF's trainer with a probe of gradients (`--run.gradient_probe`). It changes nothing of the run."""

    def probe(self, batch: Batch, experience: MadeExperience) -> dict[str, float]:
        """Write a line of probes.jsonl for each group of a batch before its update. Returns metrics of the step.

        Args:
            batch: The groups that are trained on.
            experience: Their experience.
        """
        if not self.rollout_weights.schedule.probe_due(self.step):
            return {}
        self.phase, start = "probing gradients", time.perf_counter()
        groups = {group.uid: (source, group) for source, group in batch.with_sources()}
        [found] = ray.get(self.actor_model_group.async_run_method(
            method_name="probe_gradients",
            reference=self._reference_rows(),
            groups=rows_by(experience, lambda origin: origin.group.uid),
            sources={uid: source for uid, (source, _) in groups.items()},
        ))  # fmt: skip
        rows = [
            {
                "uid": uid,
                "source": source,
                "age": self.step - group.policy_step,
                "tv": self.reviewed.distances[group],
                "shift": self.reviewed.shifts[group],
                "mean": float(group.mean),
                "cosine": found[uid][0],
                "norm": found[uid][1],
            }
            for uid, (source, group) in groups.items()
        ]
        self.recorder.record.append_rows(PROBES, self.step + 1, rows)
        cosines = {f"probe/{name}": value[0] for name, value in found.items() if isinstance(name, str)}
        return cosines | {"timing/probe": time.perf_counter() - start}

    def _reference_rows(self) -> Rows:
        """The experience of the reference, in halves 0 and 1."""
        data, maker = self.prompts_dataloader.dataset, self.experience_maker
        size = self.args.rollout.n_samples_per_prompt
        rng = np.random.default_rng([self.args.train.seed, self.step])
        places = rng.choice(len(data), size=min(REFERENCE, len(data)), replace=False).tolist()
        prompts = [Prompt(text, label) for _, text, label, _ in map(data.__getitem__, places)]
        with self.rollout_weights.of_today(self.step, next_rollout=self.step + 1):
            samples = self.samples_generator.reevaluate(prompts, kind="probe", **self.generate_kwargs)
        made = GeneratedStep.of([("fresh", by_request(samples, size), self.step)], first_uid=0, step=self.step)
        to_train = BatchToTrain.of(Batch(fresh=made.fresh), self.step)
        reference = maker.finish(maker.forward(to_train), range(len(to_train.origins)))
        return rows_by(reference, lambda origin: origin.group.uid % 2)


def rows_by(made: MadeExperience, key: Callable[[SampleOrigin], Hashable]) -> Rows:
    """The samples of an experience by a key of their origins, in order, each as an experience of its own."""
    rows = defaultdict(list)
    for experience in made.experiences:
        for row, place in enumerate(experience.index):
            rows[key(made.origins[place])].append(row_of(experience, row))
    return dict(rows)
