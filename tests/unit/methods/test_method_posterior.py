"""The recipe: its choices against a second implementation, and the rest as BAPO's."""

from __future__ import annotations

import copy
import math
import random

import numpy as np
import pytest
from scipy.optimize import brentq

from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.methods.bapo import BAPO
from bapo_openrlhf.methods.posterior import PosteriorBAPO
from bapo_openrlhf.record.state_file import load_state, save_state

PROMPTS = [Prompt(f"p{n}") for n in range(12)]


def made(kind=PosteriorBAPO, seed: int = 0, **changes):
    return kind(**{"capacity": 6, "group_size": 4, "seed": seed, "reevaluate_every": 2, "buffer_size": 8, **changes})


def steps(method, make_group, count: int = 12, seed: int = 1, first: int = 0):
    """What a method does in a run whose groups do not depend on its choices."""
    rng, ledger, done = random.Random(seed), Ledger(), []
    for step in range(first + count):
        fresh_right = [rng.randrange(5) for _ in range(6)]
        again_right = [rng.randrange(5) for _ in range(8)]
        if step < first:
            continue
        chosen = method.choose_prompts(step, PROMPTS, 6) if isinstance(method, PosteriorBAPO) else list(range(6))
        again = method.begin_step(step)
        places = {"size": 4, "step": step, "policy_step": step}
        fresh = [make_group(fresh_right[n], prompt=PROMPTS[place], **places) for n, place in enumerate(chosen)]
        hard = [make_group(again_right[n], prompt=prompt, **places) for n, prompt in enumerate(again)]
        batch = method.build_batch(step, fresh, hard)
        ledger.settle([*fresh, *hard], batch)
        done.append((chosen, again, [(group.prompt.id, group.step) for group in batch.replayed]))
    return done


class TestChoices:
    @pytest.mark.parametrize("seed", range(5))
    def test_as_a_second_implementation(self, make_group, seed):
        """Ratings in a dictionary, draws one after the other, and the nearest ones by sorting pairs."""
        method, ratings, theta = made(seed=seed, max_reevaluated_prompts=3), {}, (0.0, 4.0)
        rng, data = np.random.Generator(np.random.PCG64(seed)), random.Random(seed)

        def nearest(prompts, count):
            draws = []
            for prompt in prompts:
                mean, variance = ratings.get(prompt.id, (0.0, 2.0))
                draws.append(1 / (1 + math.exp(rng.normal(mean, math.sqrt(variance)) - theta[0])))
            order = sorted(range(len(prompts)), key=lambda place: abs(draws[place] - 0.5))
            return sorted(order[:count])

        for step in range(10):
            chosen = method.choose_prompts(step, PROMPTS, 6)
            assert chosen == nearest(PROMPTS, 6)
            stored = [entry.prompt for entry in method.hard.oldest(100)]
            again = method.begin_step(step)
            assert again == ([stored[n] for n in nearest(stored, 3)] if step > 0 and step % 2 == 0 else [])
            groups = [
                make_group(data.randrange(5), size=4, prompt=prompt, step=step)
                for prompt in [*(PROMPTS[n] for n in chosen), *again]
            ]
            method.build_batch(step, groups[:6], groups[6:])
            theta = theta[0], theta[1] + 0.05
            for group in groups:
                mean, variance = ratings.get(group.prompt.id, (0.0, 2.0))
                right = sum(response.reward for response in group.responses)
                prior, both = theta[0] - mean, theta[1] + variance
                mode = brentq(lambda x: right - 4 / (1 + math.exp(-x)) - (x - prior) / both, -50, 50)  # noqa: B023
                p = 1 / (1 + math.exp(-mode))
                known = 4 * p * (1 - p) / (1 + 4 * p * (1 - p) * both)
                ratings[group.prompt.id] = mean - variance / both * (mode - prior), variance - variance**2 * known
                theta = theta[0] + theta[1] / both * (mode - prior), theta[1] - theta[1] ** 2 * known
        assert method.ratings.ability == pytest.approx(theta[0], abs=1e-5)

    def test_the_forecast_is_of_before_the_step(self, make_group):
        """Before anything is known, the policy is as good as the prompts are difficult."""
        method = made()
        method.build_batch(0, [make_group(3, size=4, prompt=PROMPTS[0])], [])
        assert method.metrics()["prompts/predicted"] == 0.5 and method.metrics()["prompts/unseen_share"] == 1
        expected = method.ratings.predicted(method.ratings.of(PROMPTS[:1])[0])
        method.build_batch(1, [make_group(2, size=4, prompt=PROMPTS[0], step=1)], [])
        found = method.metrics()
        assert found["prompts/predicted"] == pytest.approx(expected) and found["prompts/known"] == 1
        assert found["prompts/prediction_error"] == pytest.approx(abs(expected - 2 / 4))


def test_the_batch_is_that_of_bapo(make_group):
    """If no prompt is chosen and none is generated again, nothing is left but BAPO's replay."""
    method, bapo = made(reevaluate_every=0), made(BAPO, reevaluate_every=0)
    method.choose_prompts = lambda *_: list(range(6))
    found, wanted = steps(method, make_group, 20), steps(bapo, make_group, 20)
    assert found == wanted and any(replayed for *_, replayed in found)


def test_a_resumed_run_goes_on_alike(make_group, tmp_path):
    whole = made(seed=3)
    steps(whole, make_group, 7)
    save_state(tmp_path, {"method": whole.state_dict()})
    resumed = made(seed=9)
    resumed.load_state_dict(copy.deepcopy(load_state(tmp_path)["method"]))
    assert steps(resumed, make_group, 6, first=7) == steps(whole, make_group, 6, first=7)


@pytest.mark.parametrize(("name", "value"), [("candidates", 0), ("spread", 0.0), ("drift", math.inf)])
def test_out_of_range(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}; it must be"):
        made(**{name: value})
