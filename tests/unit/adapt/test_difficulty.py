"""Counts by prompt against a dictionary, and ratings against Laplace's approximation in two dimensions."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_openrlhf.adapt.difficulty import Ratings, SuccessCounts
from bapo_openrlhf.adapt.group import Prompt

PROMPTS = [Prompt(f"problem {number}") for number in range(12)]
one_group = st.tuples(st.integers(0, 9), st.integers(0, 4))  # prompt, right ones of four; two prompts never come


@given(steps=st.lists(st.lists(one_group, max_size=6), max_size=6), decay=st.sampled_from([0.0, 0.5, 1.0]))
def test_counts_are_those_of_a_dictionary(make_group, steps, decay):
    counts, expected = SuccessCounts(decay, 1.0, 2.0), {}
    for step in steps:
        counts.update([make_group(right, size=4, prompt=PROMPTS[number]) for number, right in step])
        for number, right in step:
            a, b = expected.get(number, (Fraction(1), Fraction(2)))
            rest = 1 - Fraction(decay)
            expected[number] = (Fraction(decay) * a + rest + right, Fraction(decay) * b + 2 * rest + 4 - right)
        found, known = counts.of(PROMPTS)
        assert known.tolist() == [number in expected for number in range(len(PROMPTS))]
        wanted = [[float(count) for count in expected.get(number, (1, 2))] for number in range(len(PROMPTS))]
        assert found == pytest.approx(np.array(wanted), rel=1e-6)
    assert len(counts) == len(expected)


def laplace(theta, d, right, size):
    """Mode and variances of ability and difficulty after a group, from the Hessian of their joint posterior.

    Args:
        theta, d: Mean and variance before.
    """
    means, precisions = np.array([theta[0], d[0]]), np.diag([1 / theta[1], 1 / d[1]])
    place = means.copy()
    for _ in range(400):  # Newton's method with short steps
        p = 1 / (1 + np.exp(place[1] - place[0]))
        slope = (right - size * p) * np.array([1, -1]) - precisions @ (place - means)
        hessian = precisions + size * p * (1 - p) * np.array([[1, -1], [-1, 1]])
        place += np.clip(np.linalg.solve(hessian, slope), -0.5, 0.5)
    return list(zip(place, np.diag(np.linalg.inv(hessian)), strict=True))


@given(
    steps=st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 8)), max_size=4), max_size=4),
    spread=st.floats(0.1, 5),
    drift=st.floats(0, 1),
)
def test_ratings_are_those_of_the_joint_posterior(make_group, steps, spread, drift):
    ratings, theta, difficulties = Ratings(spread, drift), (0.0, 4.0), {}
    for step in steps:
        ratings.update([make_group(right, prompt=PROMPTS[number]) for number, right in step])
        theta = theta[0], theta[1] + drift
        for number, right in step:
            theta, difficulties[number] = laplace(theta, difficulties.get(number, (0.0, spread)), right, 8)
    assert (ratings.ability, ratings.uncertainty) == pytest.approx(theta, abs=1e-5)
    found, known = ratings.of(PROMPTS)
    assert known.tolist() == [number in difficulties for number in range(len(PROMPTS))]
    wanted = [difficulties.get(number, (0.0, spread)) for number in range(len(PROMPTS))]
    assert found == pytest.approx(np.array(wanted), abs=1e-5)


def after(make_group, *rights: int) -> Ratings:
    """Ratings after one step of groups of eight, each of a prompt of its own."""
    ratings = Ratings(2.0, 0.05)
    ratings.update([make_group(right, prompt=PROMPTS[number]) for number, right in enumerate(rights)])
    return ratings


def test_predictions_are_means_over_ability_and_difficulty(make_group):
    ratings = after(make_group, 0, 3, 8)
    rows = ratings.of(PROMPTS[:4])[0]
    rng = np.random.default_rng(0)
    x = rng.normal(ratings.ability - rows[:, 0], np.sqrt(ratings.uncertainty + rows[:, 1]), size=(200_000, 4))
    assert ratings.predicted(rows) == pytest.approx((1 / (1 + np.exp(-x))).mean(axis=0), abs=0.02)


def test_draws_are_those_of_the_difficulties(make_group):
    """The logit of a draw is normal: the mean ability minus a difficulty."""
    ratings = after(make_group, 1, 6)
    rows = np.repeat(ratings.of(PROMPTS[:1])[0], 100_000, axis=0)
    draws = ratings.draw(rows, np.random.default_rng(0))
    logits = np.log(draws / (1 - draws))
    mean, variance = ratings.ability - rows[0, 0], rows[0, 1]
    assert (logits.mean(), logits.var()) == pytest.approx((mean, variance), abs=0.02)
    assert ((logits - mean) ** 4).mean() == pytest.approx(3 * variance**2, rel=0.05)


def test_a_learning_policy_is_followed(make_group):
    """Of prompts that failed when the policy was weak, ratings know that they are easier now. Counts do not."""
    rng = np.random.default_rng(0)
    prompts = [Prompt(f"sum {number}") for number in range(200)]
    difficulty = dict(zip(prompts, rng.normal(0, 1.5, 200), strict=True))
    ratings, counts = Ratings(2.0, 0.05), SuccessCounts(0.5, 1.0, 1.0)
    errors = {"ratings": [], "counts": []}
    for step in range(50):  # the ability rises from -2 to 2, and each prompt comes twice
        chosen = [prompts[(8 * step + place) % 200] for place in range(8)]
        p = 1 / (1 + np.exp(np.array([difficulty[one] for one in chosen]) - (-2 + 0.08 * step)))
        if step >= 25:
            for name, kept in (("ratings", ratings), ("counts", counts)):
                errors[name].append(np.abs(kept.predicted(kept.of(chosen)[0]) - p).mean())
        groups = [make_group(int(right), prompt=one) for right, one in zip(rng.binomial(8, p), chosen, strict=True)]
        ratings.update(groups)
        counts.update(groups)
    assert np.mean(errors["ratings"]) < 0.12 < 0.25 < np.mean(errors["counts"])


def test_a_loaded_state_learns_alike(make_group):
    whole, loaded = after(make_group, 2, 7), Ratings(2.0, 0.05)
    loaded.load_state_dict(whole.state_dict())
    for ratings in (whole, loaded):
        ratings.update([make_group(4, prompt=PROMPTS[1]), make_group(4, prompt=PROMPTS[5])])
    assert loaded.ability == whole.ability and loaded.uncertainty == whole.uncertainty
    assert (loaded.of(PROMPTS)[0] == whole.of(PROMPTS)[0]).all()
