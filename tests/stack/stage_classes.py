"""An actor worker and a rollout engine that note which functions of docs/images/step.svg they call (see stages.py)."""

import ray
import stages
import weight_checksums

stages.note_calls()


class NotingEngine(weight_checksums.ChecksumEngine):
    """The rollout engine, whose process has imported this module."""


class NotingWorker(weight_checksums.ChecksumWorker):
    """The actor's worker, whose process has imported this module."""


NotingEngineActor = ray.remote(NotingEngine)
NotingPolicyActor = ray.remote(num_gpus=1)(NotingWorker)
