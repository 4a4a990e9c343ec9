"""The method of halves, driven by hand for three probes, and its shares on made-up probes."""

import itertools

import pytest
from halves import Halves, kind
from halves_shares import PRIMARY, answer, read_probes, shares
from test_age_or_distance import simulated
from test_held_out import group

from bapo_openrlhf.adapt.ledger import Ledger


def places(some) -> list[int]:
    """Where its responses were, by their rewards: the first ones of `group` are right."""
    return [int(response.extras["place"]) for response in some.responses]


def test_each_kind_is_trained_on_and_probed_as_the_page_says():
    uids, probed, trained = itertools.count(), {}, {}
    method = Halves(capacity=200, group_size=4, reevaluate_every=0, replay_steps=7)
    for step in range(25):
        fresh = [group(next(uids), right, step) for right in (0, 1, 2, 3, 4, 2, 1, 1, 3)]
        for one in fresh:
            for place, response in enumerate(one.responses):
                response.extras["place"] = place
        assert method.begin_step(step) == []
        batch = method.build_batch(step, fresh, [])
        Ledger().settle(fresh, batch)
        with_signal = [one for one in fresh if one.mean not in (0, 1)]
        assert [one.uid for one in batch.fresh] == [one.uid for one in with_signal if one.uid % 2 == 0]
        assert all(places(one) == [0, 2] for one in batch.fresh)
        trained |= {one.uid: places(one) for one in batch.fresh}
        assert bool(batch.replayed) == (step in (8, 16, 24))
        for one in batch.replayed:
            assert one.uid not in probed and one.variance > 0
            probed[one.uid] = places(one)
    assert {kind(uid) for uid in probed} == {"same", "other", "apart"}
    for uid, where in probed.items():
        was = trained.get(uid)
        assert was == (None if uid % 2 else [0, 2])
        assert where == ([1, 3] if uid % 4 == 2 else [0, 2])
        assert kind(uid) == ("apart" if was is None else "same" if where == was else "other")


@pytest.mark.parametrize("worth", [1.0, 0.5])
def test_a_loss_by_training_is_found_between_the_kinds(worth):
    """In these probes, even numbers are worth `worth`: then same and other lose alike, and so it is the prompt's."""
    found = [shares(simulated(seed, worth=worth)) for seed in range(6)]
    of = {name: [table[(table["of"] == name) & (table["at equal"] == "age")].iloc[0] for table in found]
          for name in ("the responses", "the prompt", "both")}  # fmt: skip
    assert sum(row["low"] <= 1 <= row["high"] for row in of["the responses"]) >= 4
    for name in ("the prompt", "both"):
        assert sum(row["low"] <= worth <= row["high"] for row in of[name]) >= 4


@pytest.mark.parametrize(
    ("responses", "prompt", "said"),
    [
        ((0.5, 0.9), (0.8, 1.2), "the loss is that of the responses"),
        ((0.8, 1.2), (0.5, 0.9), "the loss is that of the prompt"),
        ((0.5, 0.9), (0.5, 0.9), "the loss is that of the responses and the prompt"),
        ((0.8, 1.2), (-1.0, float("inf")), "the runs say nothing"),
        ((0.8, 1.2), (1.1, 1.3), "a share above 1, which the page does not foresee: the prompt"),
    ],
)
def test_the_intervals_give_the_answer_of_the_page(responses, prompt, said):
    ends = [{"low": low, "high": high} for low, high in (responses, prompt)]
    assert answer(*ends) == said


def test_the_primary_intervals_hold_those_of_95_per_cent():
    probes = simulated(0)
    wide, narrow = shares(probes, PRIMARY), shares(probes)
    assert (wide["low"] < narrow["low"]).all() and (narrow["high"] < wide["high"]).all()
    assert (wide["ratio"] == narrow["ratio"]).all()


def test_no_number_is_read_before_all_runs_have_ended(tmp_path):
    with pytest.raises(ValueError, match="small-group-s601 has not ended"):
        read_probes(tmp_path)
