"""Every generated group ends in exactly one counted state, and so does each of its responses.

The whole layer over random runs, driven as the trainer drives it: a method makes a batch, groups that turn out unfit
are dropped from it, the ledger settles the step. Each group's end is told beside it, from its rewards and the review.
"""

import runpy
from collections import Counter
from dataclasses import fields
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from one_step import run, uids

from bapo_openrlhf.adapt.batch import Batch, drop, fill, fitting
from bapo_openrlhf.adapt.buffers import ReplayBuffer
from bapo_openrlhf.adapt.filters import has_signal
from bapo_openrlhf.adapt.group import Group, Prompt
from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.methods import Method

EXAMPLE = Path(__file__).parents[3] / "examples" / "custom_method" / "fifo_replay.py"
PROMPTS = [Prompt(f"prompt {letter}", "1") for letter in "abcdefg"]
OTHERS = ("replayed", "unused", "demonstrations", "fine_tuned")  # of earlier steps, and without groups
LISTS = [field.name for field in fields(Batch) if field.name not in OTHERS]


def rewards(size: int) -> st.SearchStrategy[list[float]]:
    """Every number of right responses is equally likely; now and then rewards other than 0/1."""
    binary = st.integers(0, size).map(lambda right: [1.0] * right + [0.0] * (size - right))
    return binary | binary | st.lists(st.sampled_from([-0.5, 0.0, 0.5, 2.0]), min_size=size, max_size=size)


class Parts(Method):
    """Trains on some responses of a group and replays some of a stored one. Chance says which ones."""

    def __init__(self, max_responses: int, memory: int) -> None:
        self.max_responses, self.stored = max_responses, ReplayBuffer(memory)
        self.rng = np.random.Generator(np.random.PCG64(0))

    def part(self, group: Group) -> Group:
        size = self.rng.integers(1, group.size + 1)
        positions = np.sort(self.rng.choice(group.size, size, replace=False)).tolist()
        return group.keep(positions, relative_to=("generated", "kept")[self.rng.integers(2)])

    def begin_step(self, step):
        return [PROMPTS[step % 7]]

    def build_batch(self, step, fresh, reevaluated):
        keep = [has_signal(group) for group in fresh]
        parts = [self.part(group) if kept else group for group, kept in zip(fresh, keep, strict=True)]
        again = [group for group in reevaluated if group.mean > 0]
        batch = fill(
            self.max_responses,
            parts,
            keep,
            [self.part(group) for group in again if has_signal(group)],
            replay=lambda free: fitting(map(self.part, list(self.stored)), free),
        )
        batch.unimproved = [group for group in reevaluated if group.mean <= 0]
        batch.solved = [group for group in again if not has_signal(group)]
        for group in filter(has_signal, fresh):
            self.stored.add(group)
        return batch


class Run:
    """One run. The last `memory` informative groups are stored whole, also if only a part was trained on."""

    def __init__(self, make_group, met: Counter, size: int, capacity: int, memory: int) -> None:
        self.make_group, self.met, self.size, self.memory = make_group, met, size, memory
        self.max_responses = capacity * size
        self.method, self.ledger, self.t = Parts(self.max_responses, memory), Ledger(), 0
        self.informative: list[int] = []
        self.generated, self.total = 0, Counter()  # total: every group ever generated, by state

    def generate(self, data, prompts: list[Prompt]) -> list[Group]:
        """Groups of the prompts. Some fail, and give none."""
        groups = []
        for prompt in prompts:
            if outcome := data.draw(rewards(self.size) | st.none()):
                groups.append(self.make_group(outcome, prompt=prompt, step=self.t, uid=self.generated))
                self.generated += 1
        return groups

    def step(self, data) -> None:
        prompts, named = data.draw(st.lists(st.sampled_from(PROMPTS), max_size=8)), self.method.begin_step(self.t)
        fresh, again = self.generate(data, prompts), self.generate(data, named)
        failed = len(prompts) + len(named) - len(fresh) - len(again)
        selected = self.method.build_batch(self.t, fresh, again)
        assert set(uids(selected.replayed)) <= set(self.informative[-self.memory :])
        self.informative += [group.uid for group in fresh if len(set(group.rewards)) > 1]
        assert uids(self.method.stored) == self.informative[-self.memory :]
        free = self.max_responses - selected.responses  # nothing is cut that fits
        assert free >= 0 and (not selected.cut or free < max(group.size for group in selected.cut))

        trained = uids(group for _, group in selected.with_sources())
        some = st.sets(st.sampled_from(trained or [0]), max_size=4)
        too_far, nonfinite = data.draw(some), data.draw(some | st.just(set(trained)))
        batch = drop(selected, too_far=too_far, nonfinite=nonfinite)
        assert not {group.uid for _, group in batch.with_sources()} & (too_far | nonfinite)
        assert Counter(uids(batch.replayed + batch.unused)) == Counter(uids(selected.replayed))

        counts, responses = self.ledger.settle(fresh + again, batch, failed=[self.size] * failed)
        listed = [(group.uid, name) for name in LISTS for group in getattr(batch, name)]
        assert Counter(uid for uid, _ in listed) == Counter(uids(fresh + again))  # each once, and no other
        kept = {group.uid: group.size for group in batch.fresh + batch.reevaluated}
        number = len(fresh) + len(again) + failed
        groups = Counter(failed=failed, generated=number)
        members = Counter(failed=failed * self.size, generated=number * self.size)
        for group in fresh + again:
            state = dict(listed)[group.uid]
            assert state in self.ends(group, group in again, group.uid in trained, too_far, nonfinite)
            held = kept.get(group.uid, self.size)
            groups[state] += 1
            members.update({state: held, "dropped": self.size - held})
        assert +Counter(counts) == +groups and +Counter(responses) == +members
        self.total += groups
        assert +self.ledger.counts == self.total
        self.ledger.check()
        self.met.update(groups, replayed=len(batch.replayed), unused=len(batch.unused), skipped=not len(batch))
        self.met.update(dropped=members["dropped"], single=sum(group.size == 1 for group in batch.replayed))
        self.t += 1

    @staticmethod
    def ends(group: Group, again: bool, trained: bool, too_far: set[int], nonfinite: set[int]) -> set[str]:
        """The lists that the rewards of a group and the review can put it in."""
        if trained and group.uid in nonfinite:
            return {"nonfinite"}
        if trained and group.uid in too_far:
            return {"too_far"}
        if again and group.mean <= 0:
            return {"unimproved"}
        if len(set(group.rewards)) > 1:
            return {"reevaluated" if again else "fresh", "cut"}
        return {"solved" if again else "filtered"}


def test_every_group_ends_in_one_state_over_random_runs(make_group):
    met: Counter[str] = Counter()

    @settings(max_examples=4 * settings.default.max_examples, derandomize=True, database=None)
    @given(size=st.sampled_from([2, 4, 5]), capacity=st.integers(1, 10), memory=st.integers(1, 8), data=st.data())
    def check(size, capacity, memory, data):
        run = Run(make_group, met, size, capacity, memory)
        for _ in range(data.draw(st.integers(1, 12))):
            run.step(data)

    check()
    # the runs have come to every end there is, or they would say little
    ends = {"fresh", "filtered", "cut", "too_far", "nonfinite", "replayed", "unused", "skipped"}
    ends |= {"reevaluated", "unimproved", "solved", "dropped", "single"}
    assert min(met[end] for end in ends) > 0, met


def test_the_example_replays_its_newest_groups_with_signal(make_group):
    method = runpy.run_path(str(EXAMPLE))["FIFOReplay"](capacity=3, group_size=8, memory=2)
    groups = [make_group(right) for right in (1, 2, 0, 3)]
    assert run(method, 0, groups).filtered == [groups[2]]
    assert run(method, 1, [make_group(4, step=1)]).replayed == [groups[3], groups[1]]
