"""The recipe: its choices against a second implementation, its posteriors by hand, and the rest as bapo_bound's."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest

from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.methods.bound import BoundBAPO
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
        distance = rng.random() / 5
        if step < first:
            continue
        chosen = method.choose_prompts(step, PROMPTS, 6) if isinstance(method, PosteriorBAPO) else list(range(6))
        again = method.begin_step(step)
        places = {"size": 4, "step": step, "policy_step": step}
        fresh = [make_group(fresh_right[n], prompt=PROMPTS[place], **places) for n, place in enumerate(chosen)]
        hard = [make_group(again_right[n], prompt=prompt, **places) for n, prompt in enumerate(again)]
        batch = method.build_batch(step, fresh, hard)
        ledger.settle([*fresh, *hard], batch)
        method.observe_distances(step, {group: distance for _, group in batch.with_sources()})
        done.append((chosen, again, [(group.prompt.id, group.step) for group in batch.replayed]))
    return done


class TestChoices:
    @pytest.mark.parametrize("seed", range(5))
    def test_as_a_second_implementation(self, make_group, seed):
        """Counts in a dictionary, draws one after the other, and the nearest ones by sorting pairs."""
        method, counts = made(seed=seed, max_reevaluated_prompts=3), {}
        rng, data = np.random.Generator(np.random.PCG64(seed)), random.Random(seed)

        def nearest(prompts, count):
            pairs = [rng.beta(*counts.get(prompt.id, (1.0, 1.0))) for prompt in prompts]
            order = sorted(range(len(prompts)), key=lambda place: abs(pairs[place] - 0.5))
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
            for group in groups:
                a, b = counts.get(group.prompt.id, (1.0, 1.0))
                right = sum(response.reward for response in group.responses)
                counts[group.prompt.id] = a / 2 + 0.5 + right, b / 2 + 0.5 + 4 - right

    def test_fresh_and_reevaluated_groups_count(self, make_group):
        """A: 1 of 4, then 3 of 4 again: a = (1 + 1) / 2 + 1 / 2 + 3, b = (1 + 3) / 2 + 1 / 2 + 1."""
        method = made(decay=0.5)
        method.build_batch(0, [make_group(1, size=4, prompt=PROMPTS[0])], [])
        method.hard.add(make_group(0, size=4, prompt=PROMPTS[0]))
        method.build_batch(1, [], [make_group(3, size=4, prompt=PROMPTS[0], step=1)])
        assert method.posteriors.of(PROMPTS[:2])[0].tolist() == [[4.5, 3.5], [1.0, 1.0]]

    def test_the_forecast_is_of_before_the_step(self, make_group):
        """The posterior's mean is 1/2 before anything is known, and (1 + 3) / 6 after 3 of 4 right."""
        method = made(decay=1.0)
        method.build_batch(0, [make_group(3, size=4, prompt=PROMPTS[0])], [])
        assert method.metrics()["prompts/predicted"] == 0.5 and method.metrics()["prompts/unseen_share"] == 1
        method.build_batch(1, [make_group(2, size=4, prompt=PROMPTS[0], step=1)], [])
        found = method.metrics()
        assert found["prompts/predicted"] == pytest.approx(4 / 6) and found["prompts/known"] == 1
        assert found["prompts/prediction_error"] == pytest.approx(4 / 6 - 2 / 4)


def test_the_batch_is_that_of_bapo_bound(make_group):
    """If no prompt is chosen and none is generated again, nothing is left but bapo_bound's replay."""
    method, bound = made(reevaluate_every=0), made(BoundBAPO, reevaluate_every=0)
    method.choose_prompts = lambda *_: list(range(6))
    found, wanted = steps(method, make_group, 20), steps(bound, make_group, 20)
    assert found == wanted and any(replayed for *_, replayed in found)


def test_a_resumed_run_goes_on_alike(make_group, tmp_path):
    whole = made(seed=3)
    steps(whole, make_group, 7)
    save_state(tmp_path, {"method": whole.state_dict()})
    resumed = made(seed=9)
    resumed.load_state_dict(copy.deepcopy(load_state(tmp_path)["method"]))
    assert steps(resumed, make_group, 6, first=7) == steps(whole, make_group, 6, first=7)


@pytest.mark.parametrize(("name", "value"), [("candidates", 0), ("decay", 1.5), ("least", 0.1)])
def test_out_of_range(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}; it must be"):
        made(**{name: value})
