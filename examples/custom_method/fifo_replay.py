"""A method in one file: fresh groups with signal, filled up with the most recent informative groups."""

from collections import deque

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.filters import has_signal
from bapo_openrlhf.adapt.state import group_from_state, group_state
from bapo_openrlhf.methods import Method


class FIFOReplay(Method):
    def __init__(self, capacity: int, memory: int):
        self.capacity = capacity  # groups of a batch
        self.stored = deque(maxlen=memory)  # groups of earlier steps, the newest last

    def begin_step(self, step):
        return []  # no prompt is generated again

    def build_batch(self, step, fresh, reevaluated):
        informative = [group for group in fresh if has_signal(group)][: self.capacity]
        room = self.capacity - len(informative)
        batch = Batch(fresh=informative, replayed=list(self.stored)[-room:] if room else [])
        self.stored.extend(informative)
        self.last = batch
        return batch

    def metrics(self):
        return {"groups/fresh": len(self.last.fresh), "groups/replayed": len(self.last.replayed)}

    def state_dict(self):
        return {"method": "fifo", "version": 1, "stored": [group_state(group) for group in self.stored]}

    def load_state_dict(self, state):
        if (state.get("method"), state.get("version")) != ("fifo", 1):
            raise ValueError(f"no state of this method: {state.get('method')!r}, version {state.get('version')!r}")
        self.stored.extend(group_from_state(item) for item in state["stored"])
