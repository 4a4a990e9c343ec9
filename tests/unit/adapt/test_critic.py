"""What the critic may learn from beside the batch: each response of the step once, and none of the actor's."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.critic import beside_batch
from bapo_openrlhf.adapt.vocabulary import STATES, TRAINED

SIZE = 4


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
