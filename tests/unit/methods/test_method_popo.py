"""POPO: random runs against the rule written from its source."""

from hypothesis import given, settings
from hypothesis import strategies as st
from one_step import run, uids

from bapo_openrlhf.methods.popo import POPO


@settings(derandomize=True, database=None, max_examples=2 * settings.default.max_examples)
@given(st.data())
def test_random_runs_follow_the_rule_of_the_source(make_group, data):
    """The reference keeps all groups of the run, so the buffer of B groups is large enough."""
    capacity, size = data.draw(st.integers(1, 8)), data.draw(st.integers(2, 5))
    filtered = data.draw(st.booleans())  # without the filter no fresh group gives way
    options = {"capacity": capacity, "group_size": size, "filter": "range" if filtered else "none"}
    method, effective = POPO(**options), []
    right = st.lists(st.integers(0, size), max_size=10)
    for step in range(data.draw(st.integers(1, 9))):
        fresh = [make_group(count, size=size, step=step) for count in data.draw(right)]
        batch = run(method, step, fresh)
        signal = [group for group in fresh if 0 < sum(group.rewards) < size]
        kept = signal if filtered else fresh
        assert len(batch.fresh) == min(len(kept), capacity) and set(uids(batch.fresh)) <= set(uids(kept))
        places = capacity - len(batch.fresh)
        assert uids(batch.replayed) == [group.uid for _, group in zip(range(places), reversed(effective), strict=False)]
        effective += signal
