"""configs/methods/filter_only.yaml on the fake stack.

Its control is GRPO but for Eq. 2. It is its control without the groups that have no signal.
"""

import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from fake_stack import World, rows_of

from bapo_openrlhf.training.trainer.plain_trainer import RecordedPPOTrainer

FILE = Path(__file__).parents[3] / "configs" / "methods" / "filter_only.yaml"
FLAGS = {f"adapt.{name}": value for name, value in yaml.safe_load(FILE.read_text())["adapt"].items()}
SIZE, EPS = 4, 1e-6  # responses of a group in the fake stack, and eps of Eq. 2


def samples(experiences: list, *more: str) -> list[tuple]:
    """What an update has of each response, sorted: tokens, reward, its advantages and old log-probs, and more."""
    return sorted(rows_of(experiences, "advantages", "action_log_probs", *more))


@pytest.fixture
def runs(fitted):
    """A run of GRPO, one of the control, and one of filter only, each over the same prompts."""
    common = {"prompts": 12, "train.num_episodes": 2, "algo.kl.use_loss": True}
    return {
        "grpo": fitted(algorithm="grpo", kind=RecordedPPOTrainer, **common),
        "control": fitted(**common, **FLAGS, **{"adapt.filter": "none"}),
        "filter only": fitted(**common, **FLAGS),
    }


def test_the_control_trains_as_grpo_but_for_the_deviation_in_equation_2(runs):
    grpo, control = runs["grpo"], runs["control"]
    assert len(grpo.trained) == len(control.trained) == 6 == control.updates["actor"]
    asked = [[(request.prompt, request.weights) for request in run.requests] for run in (grpo, control)]
    assert asked[0] == asked[1] and {weights for _, weights in asked[0]} == set(range(6))
    with_signal = without = 0
    for (_, theirs), (_, ours) in zip(grpo.trained, control.trained, strict=True):
        for one, other in zip(samples(theirs), samples(ours), strict=True):
            (tokens, reward, advantages, log_probs), corrected = one, other[2]
            assert (tokens, reward, log_probs) == (*other[:2], other[3])
            if not any(advantages):
                assert not any(corrected)
                without += 1
                continue
            # OpenRLHF divides by the sample deviation s + 1e-9, and Eq. 2 by sqrt(s^2 (G - 1) / G + eps).
            spreads = (np.array([1.0] * right + [0.0] * (SIZE - right)) for right in range(1, SIZE))
            factors = [
                spread.std(ddof=1) / np.sqrt(spread.var() + EPS)
                for spread in spreads
                if np.isclose(abs(advantages[0]), abs(reward - spread.mean()) / spread.std(ddof=1), rtol=1e-5)
            ]
            assert corrected == pytest.approx([factors[0] * advantage for advantage in advantages], rel=1e-5)
            with_signal += 1
    assert with_signal >= 20 and without >= 20


def test_with_a_critic_the_control_trains_as_ppo(fitted):
    """Advantages are whitened over the batch, in whose order the sums are rounded."""
    common = {"prompts": 12, "train.num_episodes": 2}
    plain = fitted(algorithm="ppo", kind=RecordedPPOTrainer, **common)
    control = fitted(algorithm="ba_ppo", **common, **FLAGS, **{"adapt.filter": "none"})
    assert len(plain.trained) == len(control.trained) == 6
    for (_, theirs), (_, ours) in zip(plain.trained, control.trained, strict=True):
        for one, other in zip(samples(theirs, "returns"), samples(ours, "returns"), strict=True):
            assert one[:2] == other[:2]
            assert one[2:] == tuple(pytest.approx(numbers, rel=1e-5, abs=1e-6) for numbers in other[2:])


def test_filter_only_trains_on_the_groups_of_its_control_that_have_a_signal(runs):
    control, filtered = runs["control"], runs["filter only"]
    (_, theirs), (_, ours) = control.trained[0], filtered.trained[0]  # the same weights have generated both
    wanted = [one for one in samples(theirs) if any(one[2])]
    assert samples(ours) == wanted and 0 < len(wanted) < len(samples(theirs))
    for row in filtered.metrics():
        assert row["groups/fresh"] == row["groups/with_signal"] and row["groups/generated"] == 4
        assert row["groups/reevaluated"] == row["groups/replayed"] == row["staleness/rollout_policy"] == 0
    assert any(row["groups/filtered"] for row in filtered.metrics())


SKIP = {"adapt.skip_zero_advantage": True}


def of_batch(run, step: int) -> list[tuple[int, int]]:
    """Tokens, and generated ones, of each sample of an update in the order in which they are dealt."""
    real = [one for one in run.trained[step][1] if one.index is None]
    members = [(int(one.attention_mask.sum()), int(one.action_mask.sum())) for one in real]
    for sample in run.skipped[step][1]:
        members.insert(sample.place, (sample.total_length, sample.tokens))
    return members


@pytest.fixture
def one_silent_step(monkeypatch):
    """All responses of the weights of step 2 are right."""
    reward = World.reward
    monkeypatch.setattr(World, "reward", lambda run, prompt, weights, sample: (
        1.0 if weights == 2 else reward(run, prompt, weights, sample)))  # fmt: skip


@pytest.mark.parametrize("name", ["range", "none"])
def test_with_skipping_an_update_has_the_samples_of_the_control(fitted, one_silent_step, name):
    """Those with a signal are the same. Of the others it has tokens and places, and no model gets them."""
    begun, seconds = time.perf_counter(), 0.0
    common = {"prompts": 12, "train.num_episodes": 2, "algo.kl.use_loss": True, "algo.kl.init_coef": 0.01, **FLAGS}
    control = fitted(**common, **{"adapt.filter": "none"})
    skipping = fitted(**common, **SKIP, **{"adapt.filter": name})
    assert len(control.trained) == len(skipping.trained) == 6 == skipping.updates["actor"]
    assert [request.prompt for request in skipping.requests] == [request.prompt for request in control.requests]
    referred = [len([1 for step, _ in skipping.referred if step == number]) for number in range(6)]
    for number, ((_, theirs), (_, ours), row) in enumerate(
        zip(control.trained, skipping.trained, skipping.metrics(), strict=True)
    ):
        assert of_batch(control, number) == of_batch(skipping, number)
        wanted = [one for one in samples(theirs) if any(one[2])]
        found = [one for one in samples(ours) if one[2]]  # no filler
        assert found == wanted and bool(wanted) == (number != 2)
        assert row["responses/trained"] == SIZE * row["groups/fresh"] == len(wanted) >= referred[number]
        assert row["responses/skipped"] == SIZE * row["groups/filtered"] == 4 * SIZE - len(wanted)
        assert "skipped_update" not in row
        seconds += sum(row[f"timing/{phase}"] for phase in ("adapt", "make_experience", "ppo_train", "broadcast"))
    assert sum(referred) > 0 and 0 < seconds < time.perf_counter() - begun


def test_a_step_whose_samples_are_all_skipped_moves_the_weights(fitted, one_silent_step):
    """By the momentum of Adam. The responses of the weights before are no longer of today's policy."""
    run = fitted(prompts=12, **FLAGS, **SKIP, **{"train.num_episodes": 1})
    assert run.trainer.state.weights_since == run.trainer.state.step == 3
