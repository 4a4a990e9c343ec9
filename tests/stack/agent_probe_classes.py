"""The trainer and the actor under watch (see agent_probe.py). Digests of weights are not asked for."""

import ray
from probe_classes import ProbeTrainer
from ragged_probe_classes import WatchedPolicyActor as WatchedPolicyActor


class AgentProbeTrainer(ProbeTrainer):
    def note(self, kind, step):
        pass

    def note_actor(self):
        pass


ProbeTrainerActor = ray.remote(AgentProbeTrainer)
