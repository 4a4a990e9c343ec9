"""A method in one file: fresh groups with signal, and the most recent informative groups in the room that is left."""

from bapo_openrlhf.adapt.batch import fill, fitting
from bapo_openrlhf.adapt.buffers import ReplayBuffer
from bapo_openrlhf.adapt.filters import has_signal
from bapo_openrlhf.methods import Method


class FIFOReplay(Method):
    STATE = ("stored",)

    def __init__(self, capacity: int, group_size: int, memory: int = 64) -> None:
        self.max_responses, self.stored = capacity * group_size, ReplayBuffer(memory)

    def build_batch(self, step, fresh, reevaluated):
        keep = [has_signal(group) for group in fresh]
        batch = fill(self.max_responses, fresh, keep, replay=lambda free: fitting(reversed(list(self.stored)), free))
        for group in filter(has_signal, fresh):  # last: a step's own groups are not replayed in that same step
            self.stored.add(group)
        self.measured = {"buffer/replay": len(self.stored)}
        return batch
