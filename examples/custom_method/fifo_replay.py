"""A method in one file: fresh groups with signal, filled up with the most recent informative groups."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from bapo_openrlhf.adapt.batch import Batch, fresh_alone, replay_room
from bapo_openrlhf.adapt.filters import has_signal
from bapo_openrlhf.adapt.group import Group, Prompt
from bapo_openrlhf.adapt.state import group_from_state, group_state
from bapo_openrlhf.methods import Method


class FIFOReplay(Method):
    def __init__(self, capacity: int, memory: int = 64) -> None:
        self.capacity = capacity
        self.stored: deque[Group] = deque(maxlen=memory)  # groups of earlier steps, the newest last

    def begin_step(self, step: int) -> list[Prompt]:
        return []  # no prompt is generated again

    def build_batch(self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group]) -> Batch:
        batch = fresh_alone(fresh, [has_signal(group) for group in fresh], self.capacity)
        room = replay_room(self.capacity, len(batch), len(self.stored))
        batch.replayed = list(self.stored)[len(self.stored) - room :]
        # Last: a step's own groups are not replayed in that same step.
        self.stored.extend(group for group in fresh if has_signal(group))
        return batch

    def metrics(self) -> dict[str, float]:
        return {"buffer/replay": len(self.stored)}

    def state_dict(self) -> dict[str, Any]:
        return {"method": "fifo", "version": 1, "stored": [group_state(group) for group in self.stored]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if (state.get("method"), state.get("version")) != ("fifo", 1):
            raise ValueError(f"no state of this method: {state.get('method')!r}, version {state.get('version')!r}")
        self.stored.clear()
        self.stored.extend(group_from_state(item) for item in state["stored"])
