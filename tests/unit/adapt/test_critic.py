"""What the critic may learn from: each response of the step once, and none of the actor's. Its values as a baseline."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_rules import exact_variance

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.critic import beside_batch, critic_leaves_less, explained_variance
from bapo_openrlhf.adapt.vocabulary import STATES, TRAINED

SIZE = 4
NUMBERS = st.integers(-8, 8).map(lambda number: number / 4)
TOKENS = st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), max_size=12)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_every_response_of_a_random_step_is_with_the_actor_or_beside_it(make_group, data):
    states = data.draw(st.lists(st.sampled_from(STATES), max_size=12))
    groups = [make_group(1, size=SIZE, uid=uid) for uid in range(len(states))]
    earlier = [make_group(2, size=SIZE, uid=100 + n) for n in range(data.draw(st.integers(0, 3)))]
    batch, wanted = Batch(replayed=earlier[:2], unused=earlier[2:]), Counter()
    for group, state in zip(groups, states, strict=True):
        held = group
        if state in TRAINED:  # a method may leave out some responses, and put a stored one in the place of another
            held = group.keep(sorted(data.draw(st.sets(st.integers(0, SIZE - 1), min_size=1))), relative_to="kept")
            if earlier and data.draw(st.booleans()):
                held = held.exchange(0, earlier[0].standalone(earlier[0].responses[0]))
        getattr(batch, state).append(held)
        stay = {id(response) for response in held.responses} if state in TRAINED else set()
        if state != "nonfinite":
            wanted += Counter(id(response) for response in group.responses if id(response) not in stay)
    beside = beside_batch(groups, batch)
    assert Counter(id(response) for group in beside for response in group.responses) == wanted
    assert all(group.generated == groups[group.uid].generated and group.mean == groups[group.uid].mean
               for group in beside)  # fmt: skip


@given(tokens=TOKENS)
def test_the_critic_is_taken_if_it_leaves_less_variance(tokens):
    returns, values, other = (np.array(column) for column in (zip(*tokens, strict=True) if tokens else ((), (), ())))
    if not tokens:
        assert not critic_leaves_less(returns, values, returns - other) and explained_variance(returns, values) is None
        return
    left, otherwise, spread = map(exact_variance, (returns - values, returns - other, returns))
    if left != otherwise:  # equal ones may differ by rounding
        assert critic_leaves_less(returns, values, returns - other) == (left < otherwise)
    explained = explained_variance(returns, values)
    assert (explained is None) == (spread == 0)
    if explained is not None:
        assert explained == pytest.approx(float(1 - left / spread), abs=1e-12)
        if left != spread:  # with one mean for all tokens, it is EVPO's rule
            assert critic_leaves_less(returns, values, returns - 0.75) == (explained > 0)
