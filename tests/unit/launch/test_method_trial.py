"""A method of the user's is tried with made-up groups before any model loads."""

from fractions import Fraction
from threading import Lock

import numpy as np
import pytest

from bapo_openrlhf.adapt.arithmetic import BatchArithmetic
from bapo_openrlhf.adapt.batch import Batch, fill
from bapo_openrlhf.adapt.buffers import HardBuffer, ReplayBuffer
from bapo_openrlhf.adapt.filters import has_signal
from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.flags.config import AdaptConfig
from bapo_openrlhf.launch.method_trial import try_method
from bapo_openrlhf.methods import Method
from bapo_openrlhf.methods.registry import METHODS, method_class

SIZES = {"capacity": 6, "group_size": 4}


class Replaying(Method):
    """Fresh groups with a signal, and stored ones drawn at random. It names the prompts that failed."""

    STATE = ("stored", "hard", "rng")

    def __init__(self):
        self.stored, self.hard, self.rng = ReplayBuffer(9), HardBuffer(9), np.random.default_rng(1)

    def begin_step(self, step):
        prompts = [entry.prompt for entry in self.hard.oldest(2)]
        self.hard.send(prompts)
        return prompts

    def unanswered(self, prompts):
        for prompt in prompts:
            self.hard.back(prompt)

    def build_batch(self, step, fresh, reevaluated):
        keep = [has_signal(group) for group in fresh]
        again = [group for group in reevaluated if has_signal(group)]
        batch = fill(24, fresh, keep, again, replay=lambda free: self.stored.sample(free // 4, self.rng))
        batch.unimproved = [group for group in reevaluated if group not in again]
        for group in reevaluated:
            self.hard.back(group.prompt)
            self.hard.remove(group.prompt)
        for group in fresh:
            (self.stored if has_signal(group) else self.hard).add(group)
        self.measured = {"buffer/replay": len(self.stored), "groups/reevaluation_attempts": len(reevaluated)}
        return batch


def test_a_method_without_a_fault():
    """Groups come from all sources, with and without a signal, and the last prompt that is named gives no group."""
    batches = try_method(Replaying, **SIZES)
    for name in ("fresh", "filtered", "reevaluated", "replayed", "unimproved"):
        assert any(getattr(batch, name) for batch in batches), name
    assert {len(batch.fresh) + len(batch.filtered) + len(batch.cut) for batch in batches} >= {6}
    seen = {group.prompt.id for batch in batches for group in batch.fresh + batch.filtered}
    assert seen == {Prompt("prompt" + " " * n, "1").id for n in range(18)}


@pytest.mark.parametrize("name", METHODS)
def test_no_built_in_method_has_a_fault(name):
    arithmetic = BatchArithmetic(4, 6, 6, 8, {"actor": 1}, 4)
    adapt = AdaptConfig(method=name, reevaluate_every=1)
    assert len(try_method(lambda: adapt.make_method(arithmetic, seed=1), **SIZES, steps=24)) == 24


def test_what_the_caller_says_of_prompts_and_rewards():
    class Seen(Replaying):
        def build_batch(self, step, fresh, reevaluated):
            assert {response.reward for group in fresh for response in group.responses} <= {-1.0, 2.0}
            assert all(0 <= group.mean <= 1 and group.size == 4 for group in fresh)
            return super().build_batch(step, fresh, reevaluated)

    given = {"prompt": Prompt("2 + 2 =", "4"), "reward_range": (Fraction(-1), Fraction(2))}
    batch, *_ = try_method(Seen, **SIZES, prompts=3, steps=2, **given)
    prompts = [group.prompt for group in batch.fresh + batch.filtered]
    assert {prompt.text for prompt in prompts} == {"2 + 2 =", "2 + 2 = ", "2 + 2 =  "} and prompts[0].label == "4"
    batch, *_ = try_method(lambda: Plain(9999, 128), capacity=9999, group_size=128, steps=1)
    assert len(batch.fresh) == 2  # of 128 responses


class Plain(Method):
    def __init__(self, capacity=6, group_size=4):
        self.most = capacity * group_size

    def build_batch(self, step, fresh, reevaluated):
        return fill(self.most, fresh, [True] * len(fresh), reevaluated)


def changed(name, function, **more):
    return type("Changed", (Replaying,), {name: function, **more})


def with_a_set(self):
    Replaying.__init__(self)
    self.seen = set()


def forgets(self, step, fresh, reevaluated):
    batch = Replaying.build_batch(self, step, fresh, reevaluated)
    batch.filtered = []
    return batch


def counts(self, step, fresh, reevaluated):
    self.calls = getattr(self, "calls", 0) + 1
    return fill(24, fresh, [self.calls % 2 == 0] * len(fresh), reevaluated)


def measures(value, name="mine/number"):
    def build_batch(self, step, fresh, reevaluated):
        batch = Replaying.build_batch(self, step, fresh, reevaluated)
        self.measured = {name: value}
        return batch

    return changed("build_batch", build_batch)


def remembers(self, step, fresh, reevaluated):
    """Uses in step 40 what it has not saved. A trial has fewer steps."""
    self.seen = [*getattr(self, "seen", []), step]
    return fill(24, fresh, [len(self.seen) < 40] * len(fresh), reevaluated)


FAULTY = {
    "a missing attribute": (changed("f", None, STATE=("nothing",)), "loaded: AttributeError: .*'nothing'"),
    "a set": (changed("__init__", with_a_set, STATE=(*Replaying.STATE, "seen")), "loaded: TypeError: seen is of type"),
    "too few parameters": (changed("build_batch", lambda self, step, fresh: Batch()), "0: build_batch: TypeError"),
    "no batch": (changed("build_batch", lambda self, *_: None), "0: build_batch returned NoneType; it must be a Batch"),
    "no groups": (changed("build_batch", lambda self, *_: Batch(fresh=["group"])), "0: build_batch: AttributeError"),
    "lost groups": (changed("build_batch", forgets), r"build_batch: RuntimeError: group \d+ was generated 1 time"),
    "a larger batch": (
        changed("build_batch", lambda self, step, *groups: Replaying.build_batch(self, step, *groups) if step < 3 else
                fill(10**6, groups[0], [True] * len(groups[0]), groups[1], replay=lambda _: list(self.stored))),
        "3: build_batch made a batch of 64 responses; it may hold at most 24"),
    "an error": (changed("begin_step", lambda self, step: [] if step < 5 else [1 / 0]), "5: begin_step: Zero"),
    "no prompts": (changed("begin_step", lambda self, step: ["p"]), "returned 'p', a str; it must be a Prompt"),
    "no list": (changed("begin_step", lambda self, step: None), "begin_step: TypeError: 'NoneType' object is not iter"),
    "distances": (changed("observe_distances", lambda self, step, of: of["x"]), "0: observe_distances: KeyError: 'x'"),
    "no generator in its state": (changed("f", None, STATE=("stored", "hard")), r"rng: .*\('stored', 'hard'\)"),
    "a counter that is not in its state": (changed("build_batch", counts), "1: a method that a checkpoint brings"),
    "what is read after the trial": (changed("build_batch", remembers), r"1: seen: a method that a checkpoint brings"),
    "a text as a metric": (measures("much"), "the metric 'mine/number' is 'much', a str; it must be a number"),
    "a name of the run": (measures(1.0, "policy_loss"), "the metric policy_loss has the name of one of the run's own"),
    "a count of the run": (measures(1.0, "groups/filtered"), "the metric groups/filtered has the name of"),
    "constants": (changed("constants", lambda self: (1.0, None, 2.0)), "returned None, a NoneType; it must be a Real"),
    "two constants": (changed("constants", lambda self: (1.0, 2.0)), "returned .1.0, 2.0.; it must be K1, K2"),
    "metrics in a list": (changed("metrics", lambda self: [1.0]), "metrics: TypeError"),
    "wanted": (changed("wanted", lambda self, step, prompts: prompts / (step - 2)), "2: wanted: ZeroDivisionErr"),
    "candidates": (changed("choose_prompts", lambda self, step, prompts, count: [0] * count, candidates=2),
                   "choose_prompts returned .*; it must be 6 of 12 positions"),
    "more responses": (changed("more_responses", lambda self, rewards: [3] * len(rewards), first_responses=2),
                       "more_responses returned .3, 3"),
}  # fmt: skip


def test_what_each_step_sets_anew_need_not_be_saved():
    """Of any kind, and what a method cannot compare."""

    class Anew(Replaying):
        def __init__(self):
            super().__init__()
            self.lock, self.times = Lock(), lambda: 2

        def build_batch(self, step, fresh, reevaluated):
            batch = super().build_batch(step, fresh, reevaluated)
            self.last = {group: np.full(2, np.nan) for group in batch.fresh}
            self.of_step, self.itself = {"groups": fresh, "all": {*fresh}}, self
            return batch

    assert len(try_method(Anew, **SIZES)) == 12


@pytest.mark.parametrize(("kind", "message"), FAULTY.values(), ids=FAULTY)
def test_a_fault_is_named(kind, message):
    with pytest.raises(ConfigError, match=f"(?s)^adapt.method, tried with made-up groups, in step .*{message}"):
        try_method(kind, **SIZES)


def test_responses_that_are_asked_for_little_by_little():
    class Half(Plain):
        first_responses = 2

        def more_responses(self, rewards):
            assert all(len(group) in (2, 4) for group in rewards)
            return [2 if len(group) == 2 and not any(group) else 0 for group in rewards]

    assert {group.size for batch in try_method(Half, **SIZES) for group in batch.fresh} == {2, 4}


def test_an_error_says_the_line_of_the_users_file(tmp_path):
    """Also if a library raised it."""
    (tmp_path / "mine.py").write_text(
        "import dataclasses\nfrom bapo_openrlhf.methods import Method\nclass Mine(Method):\n"
        "    def build_batch(self, step, fresh, reevaluated):\n        return dataclasses.replace(None)\n"
    )
    with pytest.raises(ConfigError, match=r"build_batch: TypeError: .* \(.*/mine.py:5\)$"):
        try_method(method_class(f"{tmp_path}/mine.py:Mine"), **SIZES)
