"""What a run proves of itself in its first steps, and what it warns of."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_stack import World
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_openrlhf.adapt.shift import Gap
from bapo_openrlhf.training.trainer import experience, proof
from bapo_openrlhf.training.trainer.proof import Proof
from bapo_openrlhf.training.trainer.run_state import RunState

MOST, WARNED = 0.02, 0.003
MODEL = "actor.model_name_or_path"


@functools.cache
def arguments_of(*flags):
    return World.arguments(Path("unused"), {"adapt.max_gap": MOST, **dict(flags)})


class Run:
    """A proof without a run around it, and the warnings that it gave."""

    def __init__(self, *, since=0, **flags):
        self.warnings, self.asked = [], []
        self.args = arguments_of(*flags.items())
        self.state = RunState(step=since, weights_since=since)
        self.proof = Proof(self.args, state=self.state, warn=lambda *warning: self.warnings.append(warning), actor=self)

    def step(self, kl, tokens, *, moved=True, measured=True):
        """Look at a gap, of this step or of the one before, and go on. Returns "ends", "warns" or ""."""
        self.state.gap = Gap(kl=kl, tokens=tokens, step=self.state.step - (not measured))
        before = len(self.warnings)
        try:
            self.proof.check_gap()
            result = "warns" if len(self.warnings) > before else ""
        except RuntimeError as error:
            result, self.error = "ends", str(error)
        self.state.step += 1
        self.state.weights_since = self.state.step if moved else self.state.weights_since
        return result

    def async_run_method(self, method_name, limit):
        assert method_name == "expect_first_ratio"
        self.asked.append(limit)
        return []


@pytest.fixture(autouse=True, scope="module")
def configs():
    """The name of a model is its config.json, and `model` is a dense one."""

    def from_pretrained(name, trust_remote_code):
        return SimpleNamespace(to_dict=lambda: {} if name == "model" else json.loads(name))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proof, "AutoConfig", SimpleNamespace(from_pretrained=from_pretrained))
        yield


kls, flags = st.sampled_from([0.0, 0.001, 0.0029, 0.0031, 0.0199, 0.0201, 0.3]), st.booleans()
steps = st.lists(st.tuples(kls, st.integers(1, 1500), flags, flags), min_size=1, max_size=8)


@given(steps=steps)
@settings(derandomize=True, database=None, deadline=None)
def test_it_ends_by_the_mean_over_a_thousand_tokens_before_and_after_the_first_update(steps):
    """Brute force: all tokens of all steps in two lists, of which those after the first thousand prove nothing."""
    run, phases, began, has_moved = Run(), {False: [], True: []}, False, False
    for kl, tokens, measured, moves in steps:
        wanted, began = "", began or measured
        if measured:
            listed = phases[has_moved]
            proven = len(listed) >= 1000
            new = [kl] * tokens
            judged = new if proven else listed + new
            phases[has_moved] = listed if proven else judged
            mean = sum(judged) / max(len(judged), 1000)
            wanted = "" if mean <= WARNED else "warns" if proven or mean <= MOST else "ends"
            if min(abs(mean - WARNED), abs(mean - MOST)) < 1e-9:
                return
        assert run.step(kl, tokens, moved=moves, measured=measured) == wanted
        if wanted == "ends":
            return
        has_moved |= moves and began


@pytest.mark.parametrize(("since", "agent"), [(0, None), (7, "agent.py")])
def test_what_is_said_of_the_first_step_of_a_process(since, agent):
    run = Run(since=since, **{"train.agent_func_path": agent})
    assert run.step(5.0, 2000) == "ends" and "adapt.max_gap is 0.02" in run.error
    assert ("beside those" in run.error) == (since == 0)  # at the beginning both have read the folder
    assert ("the agent" in run.error) == bool(agent)
    warned = Run(since=since, **{"adapt.max_gap": 0.5})
    assert warned.step(0.4, 2000) == "warns" and warned.warnings[0][:2] == (since + 1, "gap")


@pytest.mark.parametrize(("flags", "named"), [
    ({"rollout.top_p": 0.9}, "rollout.top_p is 0.9"),
    ({MODEL: json.dumps({"num_local_experts": 8})}, "experts"),
    ({MODEL: json.dumps({"text_config": {"n_routed_experts": 64}})}, "experts"),
    ({MODEL: json.dumps({"quantization_config": {"quant_method": "fp8"}})}, "quantized"),
    ({MODEL: json.dumps({"num_experts": 1, "num_experts_per_tok": None})}, None),  # a dense model
])  # fmt: skip
def test_what_is_known_to_differ_only_warns(flags, named):
    run = Run(**flags)
    assert run.step(5.0, 2000) == ("warns" if named else "ends")
    assert not named or named in run.warnings[0][2]


def batch(*on_policy):
    return SimpleNamespace(origins=[experience.SampleOrigin("fresh", today, None, None) for today in on_policy])


@pytest.mark.parametrize(("flags", "on_policy", "asked"), [
    ({}, (True, True), [0.05]),  # twice the gap
    ({}, (True, False), [None]),
    ({"adapt.ratio": "decoupled"}, (True, False), [0.05]),
    ({"adapt.keep_dropout": True}, (True, True), []),
    ({"ds.lora.rank": 8}, (True, True), [0.05]),
    ({"ds.lora.rank": 8, "ds.lora.dropout": 0.1}, (True, True), []),
    ({"ds.lora.dropout": 0.1}, (True, True), [0.05]),
])  # fmt: skip
def test_when_the_actor_looks_at_the_first_ratio(no_ray, flags, on_policy, asked):
    run = Run(**flags)
    run.state.gap = Gap(absolute=0.025, tokens=10, step=0)
    run.proof.before_update(batch(*on_policy))
    assert run.asked == asked


def test_the_actor_looks_until_it_has_looked(no_ray):
    run = Run()
    for status in ({}, {"actor_lr": 1.0, "first_ratio": 0.0}, {}):  # frozen at first
        run.proof.before_update(batch(True))
        run.proof.after_update(status)
        assert "first_ratio" not in status  # a run that continues has the same rows
    assert run.asked == [0.01, 0.01]


def test_a_run_ends_before_it_trains_on_other_weights(world):
    """The engines have read other weights than the actor. The first update would be on their responses."""
    run = world(**{"adapt.max_gap": 1e-6})
    run.engines[0].weights = 40
    with pytest.raises(RuntimeError, match=r"^step 1, making experience: RuntimeError: .*adapt\.max_gap is 1e-06"):
        run.trainer.fit()
    assert run.requests and not run.trained


def test_a_run_proves_its_first_ratio_before_its_first_update(fitted):
    run = fitted(**{"adapt.rollout_delay": 1})
    names = [name for name, _ in run.events if name in ("first ratio", "fit")]
    assert names[:2] == ["first ratio", "fit"] and run.noted("first ratio")[0] == 0.01
