"""The batches of the authors' code beside an independent reading of it, and what that does not cover."""

import random
from collections import Counter
from fractions import Fraction as F

import numpy as np
import pytest
from one_step import uids
from reference_authors_code import AuthorsCode as Reference

from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.adapt.thresholds import Interval
from bapo_openrlhf.methods.bapo_authors_code import AuthorsCode

C2, C3 = (F(1, 8), F(3, 8)), (F(3, 8), F(6, 8))


def authors_code(seed: int = 0, **changes) -> AuthorsCode:
    flags = {"capacity": 6, "group_size": 8, "buffer_size": 12, "reevaluate_every": 2}
    return AuthorsCode(seed=seed, c2=Interval(*C2), c3=Interval(*C3), **flags | changes)


class Run:
    def __init__(self, make_group, *, capacity, size, buffer, moving, every, most):
        self.make_group, self.size, self.max_responses, self.every = make_group, size, capacity * size, every
        self.method = authors_code(capacity=capacity, group_size=size, buffer_size=buffer, moving=moving,
                           reevaluate_every=every, max_reevaluated_prompts=most)  # fmt: skip
        self.reference = Reference(capacity=capacity, group_size=size, total_uids=buffer, c1=F(1, 8), c2=C2, c3=C3,
                                   moving=moving, reeval_freq=every)  # fmt: skip
        self.most, self.ledger, self.t, self.uid = most, Ledger(), 0, 0
        self.seen = Counter()

    def group(self, right: int, prompt: str):
        self.uid += 1
        return self.make_group(right, size=self.size, prompt=prompt, step=self.t, uid=self.uid)

    def step(self, fresh: list[int], again: list[int]) -> None:
        """One step. `fresh` and `again` are numbers of right responses. Each draw of a prompt is another prompt."""
        stored = {group.prompt.text: group.uid for group in self.method.replay}
        named = [prompt.text for prompt in self.method.begin_step(self.t)]
        candidates = self.reference.candidates(self.t) if self.t else []
        allowed = [text for text, uid in stored.items() if uid in candidates]
        assert len(named) == min(len(allowed), self.most) and set(named) <= set(allowed)
        assert named == allowed or len(allowed) > self.most

        again = (again * len(named))[: len(named)]
        groups = [self.group(right, f"p{self.t}.{place}") for place, right in enumerate(fresh)]
        hard = [self.group(right, prompt) for right, prompt in zip(again, named, strict=True)]
        wanted = self.reference.step(
            self.t,
            [(group.uid, [response.reward for response in group.responses]) for group in groups],
            [(stored[group.prompt.text], [response.reward for response in group.responses]) for group in hard],
        )
        batch = self.method.build_batch(self.t, groups, hard)
        self.ledger.settle(groups + hard, batch)

        assert uids(batch.fresh) == wanted["x1"] and uids(batch.filtered) == wanted["filtered"]
        promoted = {group.uid: stored[group.prompt.text] for group in hard}
        better = [promoted[uid] for uid in promoted if uid not in uids(batch.unimproved)]
        assert better == wanted["promoted"]
        assert sum(group.size for group in batch.reevaluated) == wanted["x2_responses"]
        assert all(group.mean == sum(map(F, group.rewards)) / group.size for group in batch.reevaluated)
        left_out = [uid for uid in uids(batch.cut) if uid not in promoted]
        assert left_out == wanted["cut"]
        in_x2 = {promoted[group.uid] for group in batch.reevaluated}
        drawn = uids(batch.replayed)
        assert set(drawn) <= set(wanted["replayable"]) - in_x2
        assert wanted["x3_count"] - len(in_x2) <= len(drawn) <= wanted["x3_count"]
        assert (self.method.thresholds.c2, self.method.thresholds.c3) == tuple(wanted["range"])
        assert uids(self.method.replay) == self.reference.stored()
        assert batch.responses <= self.max_responses

        self.seen.update(promoted=len(better), cut=len(left_out), x3=len(drawn))
        self.seen.update(unfiltered=not any(0 < right < self.size for right in fresh))
        self.seen.update(evicted=self.method.replay.counts["evicted"], moved=self.method.thresholds.c2 not in C2)
        self.seen.update(broken=any(group.size < self.size for group in batch.reevaluated))
        self.t += 1


@pytest.mark.parametrize(
    ("size", "buffer", "moving", "every", "most"),
    [(4, 16, True, 2, 4), (4, 9, False, 1, 5), pytest.param(8, 16, True, 2, 4, marks=pytest.mark.slow)],
)
def test_it_is_the_independent_reading_of_their_code(make_group, size, buffer, moving, every, most):
    rng = random.Random(7)
    run = Run(make_group, capacity=5, size=size, buffer=buffer, moving=moving, every=every, most=most)
    for _ in range(400):
        skew = rng.choice([0, 0, 1, size // 2, size])
        fresh = [min(rng.randrange(size + 1), rng.choice([skew, size])) for _ in range(rng.randrange(8))]
        run.step(fresh, [rng.randrange(size + 1) for _ in range(4)])
    assert all(count for what, count in run.seen.items() if moving or what != "moved"), run.seen
    assert set(run.method.again) <= {str(group.uid) for group in run.method.replay}  # nothing else is kept


def test_nothing_takes_the_place_of_a_drawn_group_whose_prompt_is_in_x2(make_group):
    """As in their code: X3 is drawn first, then such groups are left out. So the batch has room that stays empty."""
    sizes = set()
    for seed in range(20):
        method = authors_code(seed, capacity=2, reevaluate_every=1)
        failed, good = make_group(0, prompt="p"), make_group(3, prompt="q")
        method.build_batch(0, [failed, good], [])
        batch = method.build_batch(1, [], [make_group(2, prompt="p", step=1)])
        assert len(batch.reevaluated) == 1 and batch.replayed in ([], [good])
        sizes.add(len(batch))
    assert sizes == {1, 2}


def test_the_newer_group_of_a_prompt_is_generated_again(make_group):
    method = authors_code(reevaluate_every=1)
    older, newer = make_group(1, prompt="p"), make_group(0, prompt="p", step=1)
    method.build_batch(0, [older], [])
    method.build_batch(1, [newer], [])
    assert method.begin_step(2) == [newer.prompt]
    method.build_batch(2, [], [make_group(1, prompt="p", step=2)])
    assert method.latest(newer) == F(1, 8) and method.again == {str(newer.uid): ["1/8"]}


def test_every_hard_prompt_and_every_response_of_x2_is_as_likely(make_group):
    method = authors_code(3, reevaluate_every=1, max_reevaluated_prompts=2, capacity=1)
    method.build_batch(0, [make_group(0, prompt=f"p{n}") for n in range(5)], [])
    named = [prompt.text for _ in range(1000) for prompt in method.begin_step(1)]
    assert all(abs(named.count(f"p{n}") - 400) < 5 * np.sqrt(1000 * 0.4 * 0.6) for n in range(5))
    groups = [make_group(4, prompt=f"p{n}", step=1) for n in range(2)]
    kept = [response for _ in range(1000) for group in method._cut(groups, 8) for response in group.responses]
    assert len(kept) == 8000
    for group in groups:
        for response in group.responses:
            assert abs(sum(one is response for one in kept) - 500) < 5 * np.sqrt(1000 / 4)


def test_without_replay_x3_is_empty(make_group):
    method = authors_code(replay_steps=0)
    method.build_batch(0, [make_group(3)], [])
    assert method.build_batch(1, [], []).replayed == []
