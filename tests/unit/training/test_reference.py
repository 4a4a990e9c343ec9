"""Responses pass the reference model once: against OpenRLHF's experience maker, which sends it every sample."""

import copy
import gc
import random
import weakref
from collections.abc import Iterable
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from fake_stack import World
from hypothesis import given, settings
from hypothesis import strategies as st
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.trainer.ray import launcher
from test_dealing import Process, numbers_of
from test_samples import comparable

from bapo_openrlhf.adapt.group import REFERENCE, Group, Prompt, Response
from bapo_openrlhf.training.trainer.experience import ExperienceMaker, SampleOrigin
from bapo_openrlhf.training.trainer.samples import sample_of

pytestmark = pytest.mark.usefixtures("values_for_refs")

PROMPT = Prompt("prompt", "label")
PAIR = {"actor": 1, "reference": 1}


def response(number: int) -> Response:
    """Tokens that no other number has; one turn, two turns, or nothing generated."""
    draw = random.Random(number)
    prompt, turns = draw.randint(1, 4), draw.choice([0, 1, 1, 1, 2])
    tokens, spans = [1000 + number, *(draw.randrange(10, 99) for _ in range(prompt))], []
    for _ in range(turns):
        length = draw.randint(1, 5)
        spans.append((len(tokens), len(tokens) + length))
        tokens += [draw.randrange(10, 99) for _ in range(length + 1)]
    generated = sum(end - start for start, end in spans)
    extras = {"info": {"reward": 0.5}, "score": 0.5, "truncated": False, "mm_train_inputs": None}
    return Response(np.array(tokens), tuple(spans), np.full(generated, -0.5), 0.5, extras)


class Rank(Process):
    """One process of a model, whose answers are 0 where nothing was generated."""

    def execute(self, *given) -> list[torch.Tensor]:
        answers = super().execute(*given)
        return [answer * mask for answer, mask in zip(answers, self.calls[-1][1]["action_mask"], strict=True)]

    @property
    def asked(self) -> list[int]:
        return [number for _, inputs in self.calls for rows in inputs["sequences"] for number in numbers_of(rows)]


class Models:
    """The groups of processes that a maker has, each of OpenRLHF's class; copies of a rank do the same."""

    def __init__(self, ranks: dict[str, int], copies: int = 1) -> None:
        self.ranks = {name: [Rank(number) for _ in range(ranks[name] * copies)] for number, name in enumerate(ranks)}
        self.groups = {}
        for name, handlers in self.ranks.items():
            group = object.__new__(launcher.RayActorGroup)
            group._actor_handlers, group.duplicate_actors = handlers, copies
            self.groups[name] = group
        self.copies = copies

    @property
    def seen(self) -> list[int]:
        """Samples that the reference was asked for, with repetitions."""
        asked = self.ranks.get("reference", [])[:: self.copies]  # one rank of each ring
        return [number for rank in asked for number in rank.asked]

    def forget(self) -> None:
        for rank in chain(*self.ranks.values()):
            rank.calls = []


def models_and_maker(
    ranks: dict[str, int] = PAIR, *, dynamic: bool = False, copies: int = 1, use_loss: bool = False, micro: int = 3
) -> tuple[Models, ExperienceMaker]:
    """Models of so many ranks each, and the maker of a run that has them."""
    models, args = Models(ranks, copies), World.arguments(Path("unused"), {})
    args.train.dynamic_batch_enable = args.ds.packing_samples = dynamic
    args.ds.tensor_parallel_size, args.actor.num_gpus_per_node = copies, ranks["actor"] * copies
    args.rollout.micro_batch_size, args.rollout.max_tokens_per_gpu = micro, 24
    args.algo.kl.use_loss = use_loss
    groups = [models.groups.get(name) for name in ("actor", "critic", "reference")]
    return models, ExperienceMaker(args, *groups, kl_ctl=None, pad=9, reference_name="one")


def make(experience_maker: ExperienceMaker, responses: list[Response], *, known: int | None = None) -> list[Experience]:
    """The forward pass of a batch of these responses; `known` of their tokens had log-probs before."""
    group = SimpleNamespace(prompt=PROMPT)
    passed = experience_maker.forward([SampleOrigin("fresh", True, group, response) for response in responses])
    assert known is None or passed.reference_kept == known
    return passed.samples


def openrlhfs(experience_maker: ExperienceMaker, names: Iterable[str], responses: list[Response]) -> list[Experience]:
    """The same by OpenRLHF's maker, on models of its own that have one rank each: it can share any batch out."""
    models = Models(dict.fromkeys(names, 1), experience_maker.args.ds.tensor_parallel_size)
    groups = [models.groups.get(name) for name in ("actor", "critic", "reward", "reference")]
    parts = (None, SimpleNamespace(args=experience_maker.args), SimpleNamespace(pad_token_id=9))
    plain = RemoteExperienceMaker(*groups, *parts)
    samples = [sample_of(PROMPT, replace(one, extras=copy.deepcopy(one.extras))) for one in responses]
    return plain.make_experience(samples)


def assert_same(actual: list[Experience], wanted: list[Experience]) -> None:
    for one, other in zip(actual, wanted, strict=True):
        # OpenRLHF has nan for a response without tokens.
        theirs = replace(other, info={name: value.nan_to_num(0) for name, value in other.info.items()})
        for item in fields(Experience):
            assert comparable(getattr(one, item.name)) == comparable(getattr(theirs, item.name)), item.name


RANKS = [
    {"actor": 2},
    {"actor": 2, "reference": 2},
    {"actor": 4, "reference": 2},
    {"actor": 2, "critic": 1, "reference": 2},
    {"actor": 3, "critic": 2, "reference": 1},
    {"actor": 2, "critic": 5, "reference": 3},
]


class TestBatches:
    @given(
        ranks=st.sampled_from(RANKS),
        copies=st.sampled_from([1, 2]),
        dynamic=st.booleans(),
        use_loss=st.booleans(),
        micro=st.integers(1, 5),
        draw=st.randoms(use_true_random=False),
    )
    @settings(max_examples=settings.default.max_examples // 4, derandomize=True, database=None)
    def test_are_openrlhfs_and_each_response_is_sent_once(self, ranks, copies, dynamic, use_loss, micro, draw):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ray, "get", lambda refs: refs)
            patch.setattr(ray, "put", lambda value: value)
            options, known = {"dynamic": dynamic, "copies": copies, "use_loss": use_loss, "micro": micro}, set()
            models, experience_maker = models_and_maker(ranks, **options)
            spoken = [number for number in range(60) if response(number).action_spans]
            everything = {number: response(number) for number in spoken}
            for _ in range(5):
                chosen = draw.sample(spoken, draw.randint(1, 20))
                responses = [everything[number] for number in chosen]
                models.forget()
                tokens = sum(len(everything[number].log_probs) for number in chosen if number in known)
                result = make(experience_maker, responses, known=tokens if "reference" in ranks else 0)
                assert_same(result, openrlhfs(experience_maker, ranks, responses))
                new = set(chosen) - known if "reference" in ranks else set()
                assert set(models.seen) == new
                known |= new
            models.forget()
            assert_same(make(experience_maker, responses[::-1]), openrlhfs(experience_maker, ranks, responses[::-1]))
            assert models.seen == []
            assert all((REFERENCE in one.extras) == ("reference" in ranks) for one in responses)

    def test_nothing_of_a_batch_is_held_afterwards(self):
        (_, experience_maker), gone = models_and_maker(), []
        passed = make(experience_maker, [response(0), response(1)])
        for batch in passed:
            weakref.finalize(batch, gone.append, True)
        count = len(passed)
        del passed, batch
        gc.collect()
        assert len(gone) == count > 0

    def test_a_response_may_be_in_a_batch_twice(self):
        models, experience_maker = models_and_maker()
        twice = response(1)
        for count in (2, 0):
            models.forget()
            responses = [twice, response(2), replace(twice, weights_version=3)]
            assert_same(make(experience_maker, responses), openrlhfs(experience_maker, PAIR, responses))
            assert models.seen.count(1) == count


class TestKept:
    def test_of_another_reference_is_not_used(self):
        models, experience_maker = models_and_maker()
        responses = [response(number) for number in range(4)]
        before = make(experience_maker, responses)
        for rank in models.ranks["reference"]:
            rank.of += 0.25
        experience_maker.reference_name = "another"
        models.forget()
        after = make(experience_maker, responses, known=0)
        assert sorted(models.seen) == [0, 1, 2, 3]
        assert not torch.equal(before[0].kl, after[0].kl)
        models.forget()
        assert_same(make(experience_maker, responses), after)
        assert models.seen == []

    def test_counts_among_the_bytes(self):
        one = response(3)
        before = one.nbytes
        make(models_and_maker()[1], [one])
        assert one.nbytes == before + 4 * len(one.log_probs) and len(one.log_probs)

    def test_of_copies_is_shared(self):
        """A method stores a group before its batch is made, and may store copies of its responses."""
        one = response(3)
        group = Group(0, PROMPT, (one,), 2, 1)
        stored = group.standalone(one)
        make(models_and_maker()[1], [one])
        assert stored.extras[REFERENCE][1] is one.extras[REFERENCE][1]
