"""Methods by name and by file, and their options."""

import functools
import itertools
import pickle
import random
import textwrap
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path

import pytest

from bapo_openrlhf.adapt.arithmetic import BatchArithmetic
from bapo_openrlhf.adapt.batch import drop
from bapo_openrlhf.adapt.group import Group, Prompt
from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.adapt.thresholds import Interval
from bapo_openrlhf.errors import ConfigError, one_line
from bapo_openrlhf.flags.config import AdaptConfig
from bapo_openrlhf.methods import Method
from bapo_openrlhf.methods.base import FilteredMethod, option
from bapo_openrlhf.methods.registry import METHODS, build, method_class
from bapo_openrlhf.record.metrics import names
from bapo_openrlhf.record.state_file import load_state, save_state


class Solved(Container):
    def __contains__(self, name):
        return True


HALF = Interval(Fraction(1, 2), Fraction(1, 2))
GIVEN = {"capacity": 8, "group_size": 4, "seed": 7, "buffer_size": 64}
SOURCE = """
    from fractions import Fraction
    from bapo_openrlhf.adapt.batch import Batch
    from bapo_openrlhf.methods import Method

    class Complete(Method):
        def begin_step(self, step): return []
        def build_batch(self, step, fresh, reevaluated): return Batch(filtered=list(fresh))
        def metrics(self): return {}
        def state_dict(self): return {}
        def load_state_dict(self, state): pass

    class Mine(Complete):
        candidates = 3
        def __init__(self, *, seed, capacity, buffer_size, size: int = 5, share: float = 0.5, name: str = "x",
                     on: bool = False, c: Fraction = Fraction(1, 8)):
            if size < 1:
                raise ValueError(f"size is {size}; it must be at least 1")
            self.got = seed, capacity, buffer_size, size, share, name, on, c

    class Plain(Complete): pass
    class Least(Method):
        def build_batch(self, step, fresh, reevaluated): return Batch(filtered=list(fresh))
    class Partial(Method):
        def begin_step(self, step): return []
    class Demanding(Complete):
        def __init__(self, seed, strength): pass
    class Loose(Complete):
        def __init__(self, x: float = 1.0, **kwargs): pass
    class Clash(Complete):
        def __init__(self, ratio: float = 0.5): pass
    class Unset(Complete):
        def __init__(self, batch_size: int = 0): pass
    class Named(Complete):
        def __init__(self, method: str = "a", eps: int = 1, c2=None, ks: tuple = (1, 2), least: int | None = None):
            self.got = method, eps, c2, ks
    class Broken(Complete):
        def __init__(self, k: int = 0): 1 / k
    class Other: pass
    number = 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(SOURCE))
    return path


@pytest.mark.parametrize("name", METHODS)
def test_every_name_is_a_method_that_can_be_made(name):
    kind = method_class(name)
    assert issubclass(kind, Method) and kind.__doc__
    arithmetic = BatchArithmetic(8, 32, 32, 128, {"actor": 1}, 8)
    method = AdaptConfig(method=name).make_method(arithmetic, seed=3)
    assert type(method) is kind and method.candidates >= 1
    other = AdaptConfig(method=name).make_method(arithmetic, seed=4)
    before = pickle.dumps(other.state_dict())
    for change in ({"method": "another"}, {"method": None}, {"version": 0}, {"version": "1"}):
        with pytest.raises(ValueError, match=f"expected '{name}', version {kind.VERSION}"):
            other.load_state_dict(method.state_dict() | change)
    assert pickle.dumps(other.state_dict()) == before
    other.load_state_dict(method.state_dict())


# For groups of 8: values just outside a range, values inside, which are its ends where it has them, and its options.
OPTIONS = """
    0 | 1 | ar3po.successes arpo.successes bapo_demonstrations.failures relift.finetune_batch rollout_replay.oldest
    0 | 1 | dots.candidates dots.buffer_groups freshness.buffer_groups mopps.candidates remix.buffer_groups
    -1 | 0 | prompt_replay.cooldown prompt_replay.most_uses rollout_replay.warm_up
    -1/10 1 | 0 | ar3po.success_above arpo.success_above remix.replay_share
    -1/2 3/2 | 0 1 | exgrpo.experience_share exgrpo.start_above freshness.replay_share prompt_replay.replay_share
    -0.1 1.1 nan | 0 1 | dots.decay freshness.exponent mopps.decay mopps.target
    0 inf nan | 1e-9 | dots.temperature freshness.tau freshness.epsilon mopps.prior_a mopps.prior_b
    0 | 1/100 | arpo.std_below
    0 9/8 | 1 | dots.fresh_share
    0 1 | 1/9 | prefix_sampling.prefix_share
    0 1 | 1/4 99/100 | prompt_replay.highest
    0 7/8 | 1/100 3/4 | prompt_replay.lowest
    0.1 nan inf | 0 -inf | bapo_bound.least
    -1/9 | 0 7 | rollout_replay.replay_share
    -0.1 10.1 nan inf | 0 10 | rollout_replay.exponent
    -8 7 | 8 | rollout_replay.buffer_responses
    8 | 9 | bapo_authors_code.buffer_size
    -2 0 3 16 | 1 2 4 8 | ar3po.stages
    -1 1 9 | 0 2 8 | pods.keep
    -4 7 | 0 8 | repo.cache_responses
    -1 7 17 | 0 8 16 | repo.warm_up
    best | all random highest recent variance | repo.strategy
"""


@pytest.mark.parametrize("row", OPTIONS.strip().splitlines())
def test_the_range_of_options(row):
    outside, inside, options = (part.split() for part in row.split("|"))
    for option_name in options:
        method, field = option_name.split(".")
        kind = method_class(method)
        number = type(getattr(kind(capacity=8, group_size=8), field))
        for value in map(number, inside):
            kind(capacity=8, group_size=8, **{field: value})
        for value in map(number, outside):
            with pytest.raises(ValueError, match=f"^{field} is '?{value}'?; it must be "):
                kind(capacity=8, group_size=8, **{field: value})


@pytest.mark.parametrize("name", METHODS)
def test_the_fresh_filter_is_the_configured_one(name, make_group):
    """No filter keeps every group, and a narrow one those at its mean. Nothing is stored that could change a group."""
    size = 3 if name == "luffy" else 4
    fresh = [make_group(right, size=size) for right in (0, 1, 2, size, 2)]
    at_the_mean = {"filter": "gaussian", "gaussian_mean": float(fresh[2].mean), "gaussian_std": 1e-3}
    for options, kept in (({"filter": "none"}, range(5)), (at_the_mean, (2, 4)), ({}, (1, 2, 4))):
        batch = method_class(name)(capacity=8, group_size=4, **options).build_batch(0, fresh, [])
        assert [group.uid for group in batch.fresh] == [fresh[place].uid for place in kept]
        assert batch.filtered == [group for place, group in enumerate(fresh) if place not in kept]


STATES = {
    "bapo": "rng thresholds hard replay prefixes",
    "bapo_authors_code": "rng replay again thresholds",
    "bapo_bound": "rng hard replay prefixes last sums",
    "mopps": "rng posteriors",
    "dots": "rng predictor replay",
    "exgrpo": "rng started store retired",
    "prompt_replay": "rng known",
    "pods": "rng",
    **dict.fromkeys(("freshness", "popo", "remix", "rollout_replay"), "rng replay"),
    **dict.fromkeys(("ar3po", "arpo", "repo"), "rng cache"),
}


@pytest.mark.parametrize("name", STATES)
def test_the_state_of_a_method_keeps_its_format(name):
    """Checkpoints of format 12 have states with this name, version and these keys."""
    method = AdaptConfig(method=name).make_method(BatchArithmetic(8, 32, 32, 128, {"actor": 1}, 8), seed=3)
    state = method.state_dict()
    assert (state["method"], state["version"]) == (name, 1)
    assert list(state) == ["method", "version", *STATES[name].split()]
    assert state["rng"]["bit_generator"] == "PCG64"


def new_method(name: str, seed: int, **flags) -> Method:
    """A method of groups of 4 and a batch of 6, whose buffers are small."""
    adapt = AdaptConfig(method=name, buffer_size=32, reevaluate_every=1, **flags)
    method = adapt.make_method(BatchArithmetic(4, 6, 6, 8, {"actor": 1}, 4), seed=seed)
    method.solutions = Solved()
    return method


def act(method: Method, step: int, make: Callable[..., Group]) -> tuple:
    """One step as the trainer takes it: what the method chooses, names, and makes of the groups, by their uids.

    `make` builds a group with so many right responses of 4. All but four of the named prompts give no group.
    """
    rng, prompts = random.Random(step), [Prompt(f"p{n}") for n in range(12)]
    chosen = method.choose_prompts(step, prompts, 6) if method.candidates > 1 else list(range(6))
    named = method.begin_step(step)
    fresh = [make(rng.choice([0, 0, 1, 2, 3, 4]), prompt=prompts[place], step=step, uid=100 * step + n)
             for n, place in enumerate(chosen)]  # fmt: skip
    hard = [make(rng.choice([0, 0, 0, 1, 3, 4]), prompt=prompt, step=step, uid=100 * step + 50 + n)
            for n, prompt in enumerate(named[:4])]  # fmt: skip
    method.unanswered(named[4:])
    batch = method.build_batch(step, fresh, hard)
    method.observe_distances(step, {group: 0.01 * (group.uid % 7) for _, group in batch.with_sources()})
    return chosen, named, [[getattr(one, "uid", one) for one in getattr(batch, item.name)] for item in fields(batch)]


@pytest.mark.parametrize("name", [name for name in METHODS if name != "freshness"])  # it weighs rewards as they are
def test_a_reward_means_its_place_in_the_range(name, make_group):
    """The same outcomes make the same batches if a wrong answer has -1 and a right one 3."""
    runs = []
    for low, high in ((0, 1), (-1, 3)):
        method = new_method(name, seed=1)

        def make(right, low=low, high=high, **where):
            group = make_group([float(high)] * right + [float(low)] * (4 - right), **where)
            return replace(group, reward_range=(Fraction(low), Fraction(high)))

        runs.append([act(method, step, make) for step in range(24)])
    assert runs[0] == runs[1]


@pytest.mark.parametrize("name", METHODS)
def test_any_number_of_groups_on_any_number_of_ranks(name, make_group):
    """All informative fresh groups are in a batch that has room for them, and only a full batch cuts any.

    There are no others, unless the method adds rewards to groups. Every group ends in one counted state, also if the
    review drops it or it failed. Only groups of earlier steps are replayed. Every metric is in the catalogue.
    """
    arithmetic = BatchArithmetic(4, 7, 7, 9216, {"actor": 1024, "critic": 3}, 8)
    method = AdaptConfig(method=name, buffer_size=32).make_method(arithmetic, seed=1)
    method.solutions = Solved()
    size = 3 if name == "luffy" else 4  # a worked solution has the place of its fourth
    rng, review, sizes, most, others = random.Random(2), random.Random(3), set(), 7 * size, 0
    ledger, metrics = Ledger(), set()
    for step in range(60):  # rollout_replay replays nothing in the first 20
        again = method.begin_step(step)
        prompts = [f"p{n}" for n in range(rng.randrange(20))]
        fresh, hard = (
            [make_group(rng.randrange(size + 1), size=size, prompt=p, step=step, weights_version=step) for p in names]
            for names in (prompts, again)
        )
        batch = method.build_batch(step, fresh, hard)
        trained = {group.uid for _, group in batch.with_sources()}
        unfit = {why: {uid for uid in trained if review.random() < 0.1} for why in ("too_far", "nonfinite")}
        ledger.settle(fresh + hard, drop(batch, **unfit), failed=[size] * review.randrange(3))
        metrics |= set(method.metrics())
        assert all(group.step < step for group in batch.replayed)
        assert not batch.cut or batch.responses > most - batch.cut[0].size
        kept = {group.uid for group in batch.fresh + batch.cut}
        informative = {group.uid for group in fresh if 0 < group.mean < 1}
        assert informative <= kept
        others += len(informative) > 0 and len(kept & {group.uid for group in fresh} - informative)
        sizes.add(batch.responses)
        method.observe_distances(step, {group: 0.1 for _, group in batch.with_sources()})
    assert len(sizes) >= 3 and max(sizes) == most and (others > 0) == method.adds_rewards
    known = {metric.name for metric in method.METRICS}
    assert metrics <= known <= names("bapo_grpo", optional=True)
    never = {name for name in known - metrics if method.prefixed or not name.startswith("prefix/")}
    assert never <= {"buffer/replay_expired"}  # of a buffer in which nothing expires


@pytest.mark.parametrize("name", ["freshness", "remix", "rollout_replay"])
@pytest.mark.parametrize(("fresh_filter", "stored"), [("range", (0, 2, 4)), ("none", range(5))])
def test_what_was_cut_is_stored_and_what_was_filtered_is_not(name, fresh_filter, stored, make_group):
    fresh = [make_group(right, size=4) for right in (2, 0, 1, 4, 3)]
    method = method_class(name)(capacity=2, group_size=4, filter=fresh_filter)
    assert method.build_batch(0, fresh, []).cut
    assert list(method.replay) == [fresh[place] for place in stored]


@pytest.mark.parametrize(("name", "flags"), [*((name, {}) for name in METHODS), ("bapo", {"filter": "gaussian"})])
def test_a_method_that_a_checkpoint_brings_back_goes_on_as_if_it_had_not_stopped(name, flags, make_group, tmp_path):
    """A twin is saved after each step of a random run, and a new one loads it from the file."""
    make, stored = functools.partial(make_group, size=4), set()
    whole, resumed, states = new_method(name, 1, **flags), new_method(name, 1, **flags), []
    for step in range(24):  # rollout_replay replays nothing in the first 20
        what = [(act(method, step, make), method.metrics()) for method in (whole, resumed)]
        assert repr(what[0]) == repr(what[1])  # nan is equal to nan
        save_state(tmp_path, resumed.state_dict())
        resumed = new_method(name, 100 + step, **flags)
        resumed.load_state_dict(load_state(tmp_path))
        state = whole.state_dict()
        states.append((state, pickle.dumps(state)))
        stored |= {key for key, value in state.items() if value}
        whole.metrics()["method"] = 0
        assert "method" not in whole.metrics()
    assert stored == set(whole.state_dict())
    for state, dumped in states:  # no later step has changed a state, nor what was loaded from it
        new_method(name, 1, **flags).load_state_dict(state)
        assert pickle.dumps(state) == dumped


@pytest.mark.parametrize(("name", "options", "fresh"), [
    ("bapo", {"capacity": 2, "replay_steps": 1, "c2": HALF, "c3": HALF}, 0),
    ("dots", {"capacity": 4}, 0),
    ("remix", {"capacity": 4, "replay_share": Fraction(1, 2)}, 2),
])  # fmt: skip
def test_replays_are_drawn_evenly(name, options, fresh, make_group):
    """Which 2 of 5 are replayed, over many draws: chi-square with 9 degrees of freedom."""
    method = method_class(name)(group_size=8, seed=11, **options)
    method.build_batch(0, [make_group(4, prompt=f"p{n}", uid=n) for n in range(5)], [])
    new, draws, seen = [make_group(4, step=1, uid=9 + n) for n in range(fresh)], 1_000, Counter()
    for _ in range(draws):
        state = method.state_dict()
        seen[tuple(group.uid for group in method.build_batch(1, new, []).replayed)] += 1
        method.load_state_dict(state | {"rng": method.rng.bit_generator.state})
    assert set(seen) == set(itertools.combinations(range(5), 2))
    assert sum((count - draws / 10) ** 2 / (draws / 10) for count in seen.values()) < 27.9  # 99.9 % point


def test_a_class_of_a_file_gets_what_it_asks_for(file):
    kind = method_class(f"{file}:Mine")
    assert kind is method_class(f"{file}:Mine")
    assert build(kind, GIVEN, []).got == (7, 8, 64, 5, 0.5, "x", False, Fraction(1, 8))
    options = ["size=9", "share=1e-3", "name=a=b", "on=true", "c=1/3"]
    assert build(kind, GIVEN, options).got == (7, 8, 64, 9, 0.001, "a=b", True, Fraction(1, 3))
    last = build(kind, GIVEN, ["on=False", "c=0.1", "size=1", "size=2"])
    assert last.got[3:] == (2, 0.5, "x", False, Fraction(1, 10))
    assert isinstance(build(method_class(f"{file}:Plain"), GIVEN, []), Method)


def test_a_method_needs_only_build_batch(file):
    method = build(method_class(f"{file}:Least"), GIVEN, [])
    assert method.begin_step(0) == [] and method.metrics() == {} and method.METRICS == ()
    assert method.state_dict() == {"method": "Least", "version": 1}
    method.load_state_dict(method.state_dict())
    with pytest.raises(ValueError, match="state of method 'bapo', version 1; expected 'Least', version 1"):
        method.load_state_dict({"method": "bapo", "version": 1})


FLAGS = GIVEN | {"method": "bapo", "options": [], "ratio": "behaviour", "batch_size": None, "eps": 1e-6, "c2": "c2"}


@pytest.mark.parametrize(("name", "option", "named"), [
    ("Mine", "size", "adapt.options has 'size'.* size=5, share=0.5, name=x, on=False, c=1/8"),
    ("Mine", "sise=3", "adapt.options has 'sise=3'"),
    ("Mine", "seed=3", "adapt.options has 'seed=3'"),
    ("Mine", "size=3.5", "adapt.options has 'size=3.5'.* a whole number"),
    ("Mine", "share=half", "adapt.options has 'share=half'.* a number"),
    ("Mine", "on=yes", "adapt.options has 'on=yes'.* true or false"),
    ("Mine", "c=1/0", "adapt.options has 'c=1/0'.* a number"),
    ("Mine", "size=0", "Mine .*ValueError: size is 0"),
    ("Plain", "a=1", "adapt.options has 'a=1'.* none"),
    ("Named", "ks=3", r"adapt.options has 'ks=3'.* \(1, 2\)"),
    ("Named", "least=3", "adapt.options has 'least=3'.* None"),
    ("Loose", None, r"Loose: .*\*\*kwargs"),
    ("Clash", None, "Clash: .* ratio .* 0.5, .*'behaviour'"),
    ("Unset", None, "Unset: .* batch_size .* 0, .*None"),
    ("Demanding", None, "Demanding: .* strength .* default"),
    ("Broken", None, "Broken .*ZeroDivisionError"),
])  # fmt: skip
def test_what_a_constructor_does_not_take(file, name, option, named):
    with pytest.raises(ConfigError, match=named):
        build(method_class(f"{file}:{name}"), FLAGS, [option] if option else [])


def test_a_parameter_has_the_value_of_its_flag_unless_the_flag_chooses_the_method(file):
    assert build(method_class(f"{file}:Named"), FLAGS, []).got == ("a", 1e-6, "c2", (1, 2))
    assert build(method_class(f"{file}:Named"), FLAGS, ["method=b"]).got[0] == "b"


def test_the_example_replays_its_newest_groups_with_signal(make_group):
    example = Path(__file__).parents[3] / "examples" / "custom_method" / "fifo_replay.py"
    method = method_class(f"{example}:FIFOReplay")(capacity=3, group_size=8, memory=2)
    groups = [make_group(right) for right in (1, 2, 0, 3)]
    assert method.build_batch(0, groups, []).filtered == [groups[2]]
    assert method.build_batch(1, [make_group(4, step=1)], []).replayed == [groups[3], groups[1]]


def test_fields_without_a_dataclass():
    with pytest.raises(ValueError, match=r"option\(1.0, 'positive'\): the range must be one of 'a number', 'at least"):
        option(1.0, "positive")

    class Below(FilteredMethod):
        share: float = option(0.5, "in [0, 1]")

        def build_batch(self, step, fresh, reevaluated):
            return None

    class Further(Below):
        pass

    for kind in (Below, Further):
        with pytest.raises(ConfigError, match=r"Below.share is no parameter of its constructor; @dataclass"):
            build(kind, GIVEN, [])


@pytest.mark.parametrize(("name", "named"), [
    ("bappo", "bappo"),
    ("mine.py:", "mine.py:"),
    ("FOLDER/nothing.py:Mine", "nothing.py"),
    ("FOLDER/mine.py:Nobody", "Nobody"),
    ("FOLDER/mine.py:Other", "Other"),
    ("FOLDER/mine.py:number", "number"),
    ("FOLDER/mine.py:Partial", "build_batch"),
    ("FOLDER/broken.py:Mine", "ZeroDivisionError"),
])  # fmt: skip
def test_what_is_no_method_is_refused(file, name, named):
    (file.parent / "broken.py").write_text("1 / 0\n")
    for _ in range(2):  # a failed import leaves nothing behind
        with pytest.raises(ConfigError, match=f"adapt.method.*{named}"):
            AdaptConfig(method=name.replace("FOLDER", str(file.parent))).check()


def test_an_error_of_a_users_file_takes_one_line():
    assert one_line(ValueError("a\n  b" + 400 * "c")) == "ValueError: a b" + 297 * "c"
