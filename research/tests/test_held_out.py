"""The method of part 4, driven by hand for three probes."""

import itertools

import numpy as np
import yaml
from folders import STUDIES
from held_out import HeldOut

from bapo_openrlhf.adapt.group import Group, Prompt, Response
from bapo_openrlhf.adapt.ledger import Ledger

SPAN = ((1, 2),)


def group(uid: int, right: int, step: int) -> Group:
    """A group of four responses of one token."""
    responses = tuple(
        Response(token_ids=np.arange(2), action_spans=SPAN, log_probs=np.full(1, -1.0), reward=float(n < right))
        for n in range(4)
    )
    return Group(uid, Prompt(f"prompt {uid}"), responses, step, step)


def test_each_probed_group_was_trained_on_once_or_never():
    uids = itertools.count()
    method = HeldOut(capacity=200, group_size=4, reevaluate_every=0, replay_steps=7)
    trained, probed = {}, {}
    for step in range(25):
        assert method.begin_step(step) == []
        fresh = [group(next(uids), right, step) for right in (0, 1, 2, 3, 4, 2, 1, 1)]
        batch = method.build_batch(step, fresh, [])
        Ledger().settle(fresh, batch)
        with_signal = [one for one in fresh if one.mean not in (0, 1)]
        assert batch.fresh == [one for one in with_signal if one.uid % 2 == 0] and len(batch.fresh) < len(with_signal)
        trained |= {one.uid: step for one in batch.fresh}
        if step in (8, 16, 24):
            assert {step - one.step for one in batch.replayed} == set(range(1, 8))
            assert len(batch.replayed) == 7 * len(with_signal)  # all of both halves
            assert not probed.keys() & {one.uid for one in batch.replayed}
            probed |= {one.uid: step for one in batch.replayed}
        else:
            assert batch.replayed == []
    halves = [uid in trained for uid in probed]
    assert any(halves) and not all(halves) and all(trained[uid] < probed[uid] for uid in probed if uid in trained)


def test_the_study_stores_every_group_until_its_probe():
    """Also if all groups have a signal. With a smaller buffer the oldest would leave before they are probed."""
    flags = yaml.safe_load((STUDIES / "age_or_distance.yaml").read_text())["flags"]
    prompts, adapt, uids = flags["rollout"]["batch_size"], flags["adapt"], itertools.count()
    names = ("reevaluate_every", "replay_steps", "buffer_size")
    method = HeldOut(capacity=adapt["batch_size"], group_size=4, **{name: adapt[name] for name in names})
    for step in range(25):
        method.begin_step(step)
        batch = method.build_batch(step, [group(next(uids), 1, step) for _ in range(prompts)], [])
        assert method.replay.counts["evicted"] == 0
        if step in (8, 16, 24):
            assert len(batch.replayed) == adapt["batch_size"] - prompts // 2  # drawn, because not all of them fit
            assert {step - one.step for one in batch.replayed} == set(range(1, 8))
