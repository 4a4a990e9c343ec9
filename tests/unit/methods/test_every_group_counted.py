"""Every generated group ends in exactly one counted state, and so does each of its responses.

The whole layer over random runs, driven as the trainer drives it: a method makes a batch, groups that turn out unfit
are dropped from it, the ledger settles the step. Beside it a dictionary knows every group that was ever generated.
"""

from __future__ import annotations

import runpy
from collections import Counter
from dataclasses import fields
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from one_step import run, uids

from bapo_openrlhf.adapt.batch import Batch, drop, fill, fitting
from bapo_openrlhf.adapt.buffers import ReplayBuffer
from bapo_openrlhf.adapt.filters import has_signal
from bapo_openrlhf.adapt.group import Group, Prompt
from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.methods import Method

EXAMPLE = Path(__file__).parents[3] / "examples" / "custom_method" / "fifo_replay.py"
PROMPTS = [Prompt(f"prompt {letter}", "1") for letter in "abcdefg"]
LISTS = [field.name for field in fields(Batch) if field.name not in ("demonstrations", "fine_tuned")]
OF_EARLIER_STEPS = ("replayed", "unused")


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


class Layer(RuleBasedStateMachine):
    """One run. The last `memory` informative groups are stored whole, also if only a part was trained on."""

    make_group = None  # given by the test
    met: Counter  # what the runs have come across, all together

    @initialize(data=st.data())
    def start(self, data):
        self.size, self.memory = data.draw(st.sampled_from([2, 4, 5])), data.draw(st.integers(1, 8))
        self.max_responses, self.delay = data.draw(st.integers(1, 10)) * self.size, data.draw(st.integers(1, 3))
        self.method, self.ledger = Parts(self.max_responses, self.memory), Ledger()
        self.t = 0
        self.informative: list[int] = []
        self.groups: dict[int, Group] = {}  # by uid, as generated
        self.state: dict[int, str | None] = {}  # of every group ever generated; None within its step
        self.responses: Counter[str] = Counter()  # of every response ever generated, by state

    def generate(self, data, prompts: list[Prompt], policy: int) -> list[Group]:
        """Groups of the prompts, some of which fail. Those have a number too, as in the trainer."""
        outcomes_of = [(prompt, data.draw(rewards(self.size) | st.none())) for prompt in prompts]
        groups = []
        for prompt, outcome in sorted(outcomes_of, key=lambda pair: pair[1] is None):
            uid = len(self.state)
            self.state[uid] = None if outcome else "failed"
            if outcome:
                groups.append(self.make_group(outcome, prompt=prompt, step=self.t, weights_version=policy, uid=uid))
                self.groups[uid] = groups[-1]
        return groups

    @rule(
        data=st.data(),
        count=st.integers(0, 8),
        review=st.sampled_from(["nothing", "nothing", "some", "some", "some", "all"]),
    )
    def step(self, data, count, review):
        before = len(self.state)
        prompts = data.draw(st.lists(st.sampled_from(PROMPTS), min_size=count, max_size=count))
        named = self.method.begin_step(self.t)
        fresh = self.generate(data, prompts, policy=self.t - self.t % self.delay)
        again = self.generate(data, named, policy=self.t)
        batch = selected = self.method.build_batch(self.t, fresh, again)
        self.check_trained(batch)
        assert set(uids(batch.replayed)) <= set(self.informative[-self.memory :])
        self.informative += [group.uid for group in fresh if len(set(group.rewards)) > 1]

        too_far, nonfinite = set(), set()
        if review != "nothing":
            trained = st.sampled_from(uids(group for _, group in batch.with_sources()) or [0])
            too_far = data.draw(st.sets(trained | st.integers(0, len(self.state)), max_size=5))
            nonfinite = data.draw(st.sets(trained, max_size=3))
        if review == "all":
            nonfinite |= {group.uid for _, group in batch.with_sources()}
        batch = drop(batch, too_far=too_far, nonfinite=nonfinite)
        self.check_trained(batch)
        free = self.max_responses - selected.responses  # nothing is cut that fits
        assert not selected.cut or free < max(group.size for group in selected.cut)
        assert not {group.uid for _, group in batch.with_sources()} & (too_far | nonfinite)
        assert Counter(uids(batch.replayed + batch.unused)) == Counter(uids(selected.replayed))

        failed = len(self.state) - before - len(fresh) - len(again)
        counts, responses = self.ledger.settle(fresh + again, batch, failed=[self.size] * failed)
        self.check_states(batch, selected, fresh, again, too_far, nonfinite)
        ends = list(self.state.values())[before:]
        assert +Counter(counts) == Counter(ends) + Counter(generated=len(ends))
        parts = {group.uid: group.size for group in batch.fresh + batch.reevaluated}
        expected = Counter(failed=failed * self.size, generated=len(ends) * self.size)
        for group in fresh + again:
            held = parts.get(group.uid, self.size)
            expected.update({self.state[group.uid]: held, "dropped": self.size - held})
        assert +Counter(responses) == +expected
        self.responses += expected
        self.check_counts()
        self.met.update({"replayed": len(batch.replayed), "unused": len(batch.unused), "skipped": not len(batch)})
        self.met.update({"dropped": expected["dropped"], "alone": sum(group.size == 1 for group in batch.replayed)})
        self.t += 1

    def check_trained(self, batch: Batch) -> None:
        """A batch fits; its groups are distinct and as generated, and those replayed are old."""
        trained = [group for _, group in batch.with_sources()]
        assert sum(len(group.responses) for group in trained) == batch.responses <= self.max_responses
        assert len(trained) == len({group.uid for group in trained})
        for group in batch.replayed + batch.unused:
            assert self.groups[group.uid].step < self.t and self.state[group.uid] is not None
        for group in trained + batch.unused:
            first = self.groups[group.uid]
            same = (group.prompt, group.generated, group.step, group.weights_version)
            assert same == (first.prompt, first.generated, first.step, first.weights_version)
            assert group.baseline == (first.rewards if group.relative_to == "generated" else group.rewards)
            places = [int(response.token_ids[0]) // 100 for response in group.responses]
            assert places == sorted(set(places))
            for response, place in zip(group.responses, places, strict=True):
                original = first.responses[place]
                assert np.array_equal(response.token_ids, original.token_ids)
                assert np.array_equal(response.log_probs, original.log_probs) and response.reward == original.reward

    def check_states(self, batch, selected, fresh, again, too_far, nonfinite) -> None:
        """Every group of the step is in exactly one list, the one that its rewards and the review put it in."""
        listed = [(name, group.uid) for name in LISTS for group in getattr(batch, name)]
        of_this_step = Counter(uid for name, uid in listed if name not in OF_EARLIER_STEPS)
        assert of_this_step == Counter(uids(fresh + again))  # each once, and no other
        assert not {uid for name, uid in listed if name in OF_EARLIER_STEPS} & of_this_step.keys()
        places = {uid: name for name, uid in listed}
        for group in fresh + again:
            differ = len(set(group.rewards)) > 1
            trained = group.uid in uids(selected.fresh + selected.reevaluated)
            if trained and group.uid in nonfinite:
                allowed = {"nonfinite"}
            elif trained and group.uid in too_far:
                allowed = {"too_far"}
            elif group in again and group.mean <= 0:
                allowed = {"unimproved"}
            elif differ:
                allowed = {"reevaluated" if group in again else "fresh", "cut"}
            else:
                allowed = {"solved" if group in again else "filtered"}
            assert places[group.uid] in allowed
            assert self.state[group.uid] is None  # it had no end before
            self.state[group.uid] = places[group.uid]
            self.met[places[group.uid]] += 1

    def check_counts(self) -> None:
        """The ledger says what the dictionary says, of the whole run, and the store is as it must be."""
        assert +self.ledger.counts == Counter(self.state.values()) + Counter(generated=len(self.state))
        assert +self.ledger.responses == +self.responses
        self.ledger.check()
        assert uids(self.method.stored) == self.informative[-self.memory :]
        assert all(group.size == self.size for group in self.method.stored)


def test_every_group_ends_in_one_state_over_random_runs(make_group):
    Machine = type("Machine", (Layer,), {"met": Counter(), "make_group": staticmethod(make_group)})
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=2 * settings.default.max_examples, stateful_step_count=20, derandomize=True, database=None
        ),
    )
    # the runs have come to every end there is, or they would say little
    ends = {"fresh", "filtered", "cut", "too_far", "nonfinite", "replayed", "unused", "skipped"}
    ends |= {"reevaluated", "unimproved", "solved", "dropped", "alone"}
    assert min(Machine.met[end] for end in ends) > 0, Machine.met


def test_the_example_replays_its_newest_groups_with_signal(make_group):
    method = runpy.run_path(str(EXAMPLE))["FIFOReplay"](capacity=3, group_size=8, memory=2)
    groups = [make_group(right) for right in (1, 2, 0, 3)]
    assert run(method, 0, groups).filtered == [groups[2]]
    assert run(method, 1, [make_group(4, step=1)]).replayed == [groups[3], groups[1]]
