"""A test of the method with made-up groups: `pytest examples/custom_method`."""

from pathlib import Path

from bapo_openrlhf.launch.method_trial import try_method
from bapo_openrlhf.methods.registry import method_class

FIFOReplay = method_class(f"{Path(__file__).with_name('fifo_replay.py')}:FIFOReplay")


def test_it_replays_the_newest_groups():
    batches = try_method(lambda: FIFOReplay(capacity=6, group_size=4), capacity=6, group_size=4)
    replayed = [group.step for group in batches[-1].replayed]
    assert replayed == sorted(replayed, reverse=True) and replayed[0] == len(batches) - 2
