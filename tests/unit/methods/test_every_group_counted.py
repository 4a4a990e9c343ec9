"""Every generated group ends in exactly one counted state, and so does each of its responses.

What is stored leaves in exactly one counted way.

The whole layer over random runs, driven as the trainer drives it: a method makes a batch, groups that turn out unfit
are dropped from it, the ledger settles the step. Beside it a dictionary knows every group that was ever generated.
"""

from __future__ import annotations

import pickle
import runpy
from collections import Counter
from dataclasses import fields
from fractions import Fraction as F
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from one_step import uids

from bapo_openrlhf.adapt.batch import Batch, drop, fill, fitting
from bapo_openrlhf.adapt.buffers import ReplayBuffer
from bapo_openrlhf.adapt.filters import has_signal
from bapo_openrlhf.adapt.group import Group, Prompt
from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.adapt.thresholds import Interval
from bapo_openrlhf.methods import BAPO, Method

EXAMPLE = Path(__file__).parents[3] / "examples" / "custom_method" / "fifo_replay.py"
FIFOReplay = runpy.run_path(str(EXAMPLE))["FIFOReplay"]

PROMPTS = [Prompt(f"prompt {letter}", "1") for letter in "abcdefg"]
LISTS = [field.name for field in fields(Batch) if field.name not in ("demonstrations", "fine_tuned")]
OF_EARLIER_STEPS = ("replayed", "unused")


def rewards(size: int) -> st.SearchStrategy[list[float]]:
    """Every number of right responses is equally likely; now and then rewards other than 0/1."""
    binary = st.integers(0, size).map(lambda right: [1.0] * right + [0.0] * (size - right))
    return binary | binary | st.lists(st.sampled_from([-0.5, 0.0, 0.5, 2.0]), min_size=size, max_size=size)


# --- Random runs -----------------------------------------------------------------------------------------------------


class Layer(RuleBasedStateMachine):
    """One run. A subclass says which method, and what is known of its storage."""

    make_group = None  # given by the test
    met: Counter  # what the runs have come across, all together

    def begin(self, new_method, *, capacity: int, size: int, delay: int) -> None:
        self.new_method, self.size, self.max_responses, self.delay = new_method, size, capacity * size, delay
        self.outcomes = rewards(size)
        self.method, self.ledger = new_method(), Ledger()
        self.t = 0
        self.groups: dict[int, Group] = {}  # by uid, as generated
        self.state: dict[int, str | None] = {}  # of every group ever generated; None within its step
        self.responses: Counter[str] = Counter()  # of every response ever generated, by state

    # what the subclass knows
    c1, fresh_filter, max_age, in_parts = F(0), "range", None, False

    def due(self) -> list[Prompt]:
        """Prompts that the method must name in this step."""
        return []

    def store(self, batch: Batch, fresh: list[Group], again: list[Group]) -> None:
        """Enter what the method has stored and let go in this step."""

    def check_storage(self) -> None:
        """What the method holds is what it must hold."""
        raise NotImplementedError

    def generate(self, data, prompts: list[Prompt], policy: int) -> list[Group]:
        """Groups of the prompts, some of which fail. Those have a number too, as in the trainer."""
        outcomes_of = [(prompt, data.draw(self.outcomes | st.none())) for prompt in prompts]
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
        due = self.due()
        assert self.method.begin_step(self.t) == due
        fresh = self.generate(data, prompts, policy=self.t - self.t % self.delay)
        again = self.generate(data, due, policy=self.t)
        answered = [group.prompt.id for group in again]
        self.method.unanswered([prompt for prompt in due if prompt.id not in answered])
        batch = selected = self.method.build_batch(self.t, fresh, again)
        self.check_trained(batch)
        self.store(batch, fresh, again)

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
        self.check_storage()
        self.met.update({"replayed": len(batch.replayed), "unused": len(batch.unused), "skipped": not len(batch)})
        self.met.update({"dropped": expected["dropped"], "alone": sum(group.size == 1 for group in batch.replayed)})
        self.t += 1

    @rule()
    def save_and_load(self):
        """Stop and go on: new objects take over from the saved state."""
        method, ledger = pickle.loads(pickle.dumps((self.method.state_dict(), self.ledger.state_dict())))
        self.method, self.ledger = self.new_method(), Ledger()
        self.method.load_state_dict(method)
        self.ledger.load_state_dict(ledger)
        self.check_counts()
        self.check_storage()

    def check_trained(self, batch: Batch) -> None:
        """A batch fits; its groups are distinct and as generated, and those replayed are old but not too old."""
        trained = [group for _, group in batch.with_sources()]
        assert sum(len(group.responses) for group in trained) == batch.responses <= self.max_responses
        assert len(trained) == len({group.uid for group in trained})
        for group in batch.replayed + batch.unused:
            first = self.groups[group.uid]
            assert first.step < self.t and (self.max_age is None or self.t - first.step <= self.max_age)
            assert self.state[group.uid] is not None
        for group in trained + batch.unused:
            first = self.groups[group.uid]
            same = (group.prompt, group.generated, group.step, group.weights_version)
            assert same == (first.prompt, first.generated, first.step, first.weights_version)
            assert group.baseline == (first.rewards if group.relative_to == "generated" else group.rewards)
            places = [int(response.token_ids[0]) // 100 for response in group.responses]
            assert places == sorted(set(places)) and (self.in_parts or len(places) == self.size)
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
            chosen = {"reevaluated" if group in again else "fresh", "cut"}
            trained = group.uid in uids(selected.fresh + selected.reevaluated)
            if trained and group.uid in nonfinite:
                allowed = {"nonfinite"}
            elif trained and group.uid in too_far:
                allowed = {"too_far"}
            elif group in again:
                allowed = {"unimproved"} if group.mean <= self.c1 else chosen if differ else {"solved"}
            elif self.fresh_filter == "range":
                allowed = chosen if differ else {"filtered"}
            else:
                allowed = {*chosen, "filtered"}
            assert places[group.uid] in allowed
            assert self.state[group.uid] is None  # it had no end before
            self.state[group.uid] = places[group.uid]
            self.met[places[group.uid]] += 1

    def check_counts(self) -> None:
        """The ledger says what the dictionary says, of the whole run."""
        assert +self.ledger.counts == Counter(self.state.values()) + Counter(generated=len(self.state))
        assert +self.ledger.responses == +self.responses
        self.ledger.check()


def held(entries: dict[int, str]) -> list[int]:
    """Numbers of the stored entries, the oldest first."""
    return [uid for uid, state in entries.items() if state == "held"]


class BAPORun(Layer):
    """BAPO: a failed group is an entry of the hard buffer, an informative one of the replay buffer.

    Both stores are dictionaries from the group's number to what became of the entry. Nothing is ever taken out of them.
    """

    @initialize(data=st.data())
    def start(self, data):
        size = data.draw(st.sampled_from([2, 4, 5]))
        mean = st.integers(0, size).map(lambda right: F(right, size))
        low, high = sorted((data.draw(mean), data.draw(mean)))
        half = Interval(F(1, 2), F(1, 2))
        thresholds = {
            "paper": {},  # the defaults
            "mini-test": {"c1": F(0), "c2": half, "c3": half},
            "moving": {"c1": data.draw(mean) / 2, "c2": Interval(F(0), low), "c3": Interval(high, F(1))},
            "all": {"c1": F(1, size), "c2": Interval(F(0), F(0)), "c3": Interval(F(1), F(1))},
        }[data.draw(st.sampled_from(["paper", "mini-test", "moving", "all"]))]
        config = SimpleNamespace(
            capacity=data.draw(st.integers(1, 10)),
            group_size=size,
            filter=data.draw(st.sampled_from(["range", "range", "gaussian", "uniform", "none"])),
            threshold_direction=data.draw(st.sampled_from(["eq8", "text"])),
            buffer_size=data.draw(st.integers(1, 4)),
            replay_steps=data.draw(st.integers(0, 3)),
            reevaluate_every=data.draw(st.sampled_from([0, 1, 1, 2, 3])),
            max_reevaluated_prompts=data.draw(st.integers(1, 6)),
            **thresholds,
        )
        self.config, self.c1 = config, BAPO(**vars(config)).c1
        self.fresh_filter, self.max_age = config.filter, config.replay_steps
        self.hard: dict[int, str] = {}
        self.replay: dict[int, str] = {}
        seeds = iter(range(1000))  # a loaded state must not depend on the seed of the new object
        self.begin(
            lambda: BAPO(**vars(config), seed=next(seeds)),
            capacity=config.capacity,
            size=size,
            delay=data.draw(st.integers(1, 3)),
        )

    def due(self):
        every = self.config.reevaluate_every
        if not every or not self.t or self.t % every:
            return []
        return [self.groups[uid].prompt for uid in held(self.hard)][: self.config.max_reevaluated_prompts]

    @staticmethod
    def leave(entries: dict[int, str], uid: int, how: str) -> None:
        assert entries[uid] == "held"  # what has left does not leave again
        entries[uid] = how

    def enter(self, entries: dict[int, str], uid: int, capacity: int) -> None:
        assert uid not in entries
        entries[uid] = "held"
        for oldest in held(entries)[:-capacity]:
            self.leave(entries, oldest, "evicted")

    def leave_hard(self, prompt: Prompt, how: str) -> None:
        for uid in held(self.hard):
            if self.groups[uid].prompt == prompt:
                self.leave(self.hard, uid, how)

    def fail(self, group: Group) -> None:
        self.leave_hard(group.prompt, "replaced")
        self.enter(self.hard, group.uid, self.config.buffer_size)

    def store(self, batch, fresh, again):
        for uid in held(self.replay):
            if self.t - self.groups[uid].step > self.config.replay_steps:
                self.leave(self.replay, uid, "expired")
        assert set(uids(batch.replayed)) <= set(held(self.replay))  # before this step's own are stored
        named = self.due()
        for group in again:
            if group.mean <= self.c1:
                self.fail(group)
            else:
                self.leave_hard(group.prompt, "removed")
        for prompt in named:
            if prompt not in [group.prompt for group in again]:  # its verifier failed: last in the queue
                for uid in held(self.hard):
                    if self.groups[uid].prompt == prompt:
                        self.hard[uid] = self.hard.pop(uid)
        for group in fresh:
            if group.mean <= self.c1:
                self.fail(group)
        for group in fresh:
            informative = self.method.thresholds.c2 <= group.mean <= self.method.thresholds.c3
            if self.config.replay_steps and informative:
                self.enter(self.replay, group.uid, self.config.buffer_size)

    def check_storage(self):
        hard, replay = self.method.hard, self.method.replay
        entries = [(entry.prompt, entry.mean, entry.step) for entry in hard.oldest(len(hard))]
        assert entries == [(g.prompt, g.mean, g.step) for g in (self.groups[uid] for uid in held(self.hard))]
        assert uids(replay) == held(self.replay)
        for buffer, known in ((hard, self.hard), (replay, self.replay)):
            ends = Counter(known.values())
            self.met.update({f"{type(buffer).__name__} {end}": count for end, count in ends.items()})
            del ends["held"]
            assert +buffer.counts == +Counter({**ends, "added": len(known)})
            buffer.check()
        if self.method.metrics():
            metrics = self.method.metrics()
            assert (metrics["buffer/hard"], metrics["buffer/replay"]) == (len(held(self.hard)), len(held(self.replay)))
            assert metrics["buffer/replay_added"] == len(self.replay)
            for end in ("evicted", "expired"):
                assert metrics[f"buffer/replay_{end}"] == Counter(self.replay.values())[end]


class FIFORun(Layer):
    """The example: whatever is informative is stored, the last `memory` of them."""

    @initialize(data=st.data())
    def start(self, data):
        memory, capacity = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 10))
        size = data.draw(st.sampled_from([2, 4, 5]))
        self.memory, self.informative = memory, []
        self.begin(
            lambda: FIFOReplay(capacity, size, memory=memory),
            capacity=capacity,
            size=size,
            delay=data.draw(st.integers(1, 3)),
        )

    def store(self, batch, fresh, again):
        assert set(uids(batch.replayed)) <= set(self.informative[-self.memory :])
        self.informative += [group.uid for group in fresh if len(set(group.rewards)) > 1]

    def check_storage(self):
        assert uids(self.method.stored) == self.informative[-self.memory :]


class Parts(Method):
    """Trains on some responses of a group and replays some of a stored one. Chance says which ones."""

    STATE = ("rng", "stored")

    def __init__(self, max_responses: int, memory: int, seed: int) -> None:
        self.max_responses, self.stored, self.rng = (
            max_responses,
            ReplayBuffer(memory),
            np.random.Generator(np.random.PCG64(seed)),
        )

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


class PartsRun(Layer):
    """Groups of any size. The last `memory` informative ones are stored whole, also if only a part was trained on."""

    in_parts = True

    @initialize(data=st.data())
    def start(self, data):
        memory, capacity = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 10))
        size = data.draw(st.sampled_from([2, 4, 5]))
        self.memory, self.informative, seeds = memory, [], iter(range(1000))
        self.begin(
            lambda: Parts(capacity * size, memory, seed=next(seeds)),
            capacity=capacity,
            size=size,
            delay=data.draw(st.integers(1, 3)),
        )

    def due(self):
        return [PROMPTS[self.t % 7]]

    def store(self, batch, fresh, again):
        assert set(uids(batch.replayed)) <= set(self.informative[-self.memory :])
        self.informative += [group.uid for group in fresh if len(set(group.rewards)) > 1]

    def check_storage(self):
        assert uids(self.method.stored) == self.informative[-self.memory :]
        assert all(group.size == self.size for group in self.method.stored)


ENDS = {"fresh", "filtered", "cut", "too_far", "nonfinite", "replayed", "unused", "skipped"}
AGAIN = {"reevaluated", "unimproved", "solved"}
STORED = {f"HardBuffer {end}" for end in ("held", "replaced", "evicted", "removed")}
STORED |= {f"ReplayBuffer {end}" for end in ("held", "evicted", "expired")}


@pytest.mark.parametrize(
    ("kind", "ends"),
    [
        (BAPORun, ENDS | STORED | AGAIN),
        (FIFORun, ENDS),
        (PartsRun, ENDS | AGAIN | {"dropped", "alone"}),
    ],
    ids=["bapo", "fifo", "parts"],
)
def test_every_group_ends_in_one_state_over_random_runs(make_group, kind, ends):
    Machine = type("Machine", (kind,), {"met": Counter(), "make_group": staticmethod(make_group)})
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=2 * settings.default.max_examples, stateful_step_count=20, derandomize=True, database=None
        ),
    )
    # the runs have come to every end there is, or they would say little
    assert min(Machine.met[end] for end in ends) > 0, Machine.met


# --- Methods with a fault --------------------------------------------------------------------------------------------


def test_the_example_without_its_filtered_groups(make_group):
    """The line that is forgotten most easily in a method of one's own."""

    class Forgetful(FIFOReplay):
        def build_batch(self, step, fresh, reevaluated):
            batch = super().build_batch(step, fresh, reevaluated)
            batch.filtered = []
            return batch

    fresh = [make_group(4), make_group(8)]
    with pytest.raises(RuntimeError, match=rf"group {fresh[1].uid} was generated 1 time\(s\) .* states \[\]"):
        Ledger().settle(fresh, Forgetful(capacity=4, group_size=8).build_batch(0, fresh, []))
