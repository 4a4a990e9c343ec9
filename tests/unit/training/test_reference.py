"""Responses pass the reference model once: against OpenRLHF's experience maker, which sends it every sample."""

import copy
import gc
import random
import weakref
from collections.abc import Iterable
from dataclasses import fields, replace
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.trainer.ray import launcher

from bapo_openrlhf.adapt.group import REFERENCE, Group, Prompt, Response
from bapo_openrlhf.training.trainer.experience import ExperienceMaker, SampleOrigin
from bapo_openrlhf.training.trainer.samples import sample_of

pytestmark = pytest.mark.usefixtures("values_for_refs")

PROMPT = Prompt("prompt", "label")
PAIR = ("actor", "reference")


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


def log_probs(row: list[int], of: float) -> list[float]:
    """A pure function of the tokens up to each place, as a model's."""
    result, history = [], 0
    for token in row[:-1]:
        history = (history * 31 + token) % 10007
        result.append(-1.0 - ((history + int(of * 1000)) % 997) / 773)
    return result


class Rank:
    """One process of a model."""

    def __init__(self, of: float) -> None:
        self.of = of
        self.forget()
        self.execute_batch = SimpleNamespace(remote=self.execute)
        self.empty_cache = SimpleNamespace(remote=self.empty)

    def execute(self, method: str, chunk: dict, start: int, end: int) -> list[torch.Tensor]:
        assert method == "forward" and start == 0
        result = []
        for place in range(end):
            item = {name: values[place] for name, values in chunk.items()}
            sequences, mask, attention = item["sequences"], item["action_mask"], item["attention_mask"]
            assert sequences.shape == attention.shape and mask.shape[1] == sequences.shape[1] - 1
            assert attention.any(-1).all()  # no row is only padding
            self.calls.append([tokens[0] - 1000 for tokens in sequences.tolist()])
            result.append(torch.tensor([log_probs(row, self.of) for row in sequences.tolist()]) * mask.float())
        return result

    def forget(self) -> None:
        self.calls: list[list[int]] = []  # the numbers of the samples of each
        self.emptied = 0

    def empty(self) -> None:
        self.emptied += 1


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

    def of(self, name: str) -> list[Rank]:
        """One rank of each ring."""
        return self.ranks[name][:: self.copies]

    @property
    def seen(self) -> list[int]:
        """Samples that the reference was asked for, with repetitions."""
        return [number for rank in self.of("reference") for call in rank.calls for number in call]

    def forget(self) -> None:
        for rank in chain(*self.ranks.values()):
            rank.forget()


def arguments(ranks: dict[str, int], *, dynamic: bool = False, copies: int = 1, use_loss: bool = False,
              colocated: bool = False, micro: int = 3) -> SimpleNamespace:  # fmt: skip
    return SimpleNamespace(
        train=SimpleNamespace(
            dynamic_batch_enable=dynamic, colocate_all=colocated, colocate_actor_ref=False, colocate_critic_reward=False
        ),
        rollout=SimpleNamespace(micro_batch_size=micro, max_tokens_per_gpu=24),
        adapt=SimpleNamespace(micro_batch_tokens=None),
        ds=SimpleNamespace(ring_attn_size=1, tensor_parallel_size=copies, packing_samples=dynamic),
        actor=SimpleNamespace(num_nodes=1, num_gpus_per_node=ranks["actor"] * copies),
        algo=SimpleNamespace(
            kl=SimpleNamespace(use_loss=use_loss, estimator="k1"), advantage=SimpleNamespace(estimator="group_norm")
        ),
    )


def maker(models: Models, args: SimpleNamespace, **changed) -> ExperienceMaker:
    groups = [models.groups.get(name) for name in ("actor", "critic", "reference")]
    return ExperienceMaker(args, *groups, **{"kl_ctl": None, "pad": 9, "reference_name": "one"} | changed)


def models_and_maker(count: int = 1, **options) -> tuple[Models, ExperienceMaker]:
    """An actor and a reference model of so many ranks, and the maker of a run that has them."""
    ranks = {"actor": count, "reference": count}
    models = Models(ranks)
    return models, maker(models, arguments(ranks, **options))


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
    assert len(actual) == len(wanted)
    for one, other in zip(actual, wanted, strict=True):
        for item in fields(Experience):
            ours, theirs = getattr(one, item.name), getattr(other, item.name)
            if isinstance(theirs, torch.Tensor):
                assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), item.name
            elif item.name == "info":
                assert ours.keys() == theirs.keys()
                for name in theirs:
                    # OpenRLHF has nan for a response without tokens.
                    assert torch.equal(ours[name], theirs[name].nan_to_num(0)), name
            else:
                assert repr(ours) == repr(theirs), item.name


RANKS = [
    {"actor": 1, "reference": 1},
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
            models, known = Models(ranks, copies), set()
            args = arguments(ranks, dynamic=dynamic, copies=copies, use_loss=use_loss, micro=micro)
            experience_maker = maker(models, args)
            spoken = [number for number in range(60) if response(number).action_spans]
            everything = {number: response(number) for number in spoken}
            for _ in range(5):
                chosen = draw.sample(spoken, draw.randint(1, 20))
                responses = [everything[number] for number in chosen]
                models.forget()
                tokens = sum(len(everything[number].log_probs) for number in chosen if number in known)
                result = make(experience_maker, responses, known=tokens if "reference" in ranks else 0)
                assert_same(result, openrlhfs(experience_maker, ranks, responses))
                new = set(chosen) - known
                assert set(models.seen) == new
                known |= new

    def test_with_nothing_new_the_reference_is_left_alone(self):
        models, experience_maker = models_and_maker(2, colocated=True)
        responses = [response(number) for number in range(4)]
        make(experience_maker, responses)
        assert [rank.emptied for rank in models.of("reference")] == [1, 1]
        models.forget()
        assert_same(make(experience_maker, responses[::-1]), openrlhfs(experience_maker, PAIR, responses[::-1]))
        assert models.seen == [] and [rank.emptied for rank in models.of("reference")] == [0, 0]
        assert [rank.emptied for rank in models.of("actor")] == [1, 1]

    def test_without_a_reference_nothing_is_kept(self):
        models = Models({"actor": 1})
        experience_maker = maker(models, arguments({"actor": 1}))
        responses = [response(number) for number in range(4)]
        for _ in range(2):
            actual = make(experience_maker, responses, known=0)
            assert_same(actual, openrlhfs(experience_maker, ("actor",), responses))
        assert not any(REFERENCE in one.extras for one in responses)

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
    def test_is_what_the_reference_said_of_the_generated_tokens(self):
        _, experience_maker = models_and_maker(2)
        responses = [response(number) for number in range(8)]
        make(experience_maker, responses)
        for one in responses:
            name, kept = one.extras[REFERENCE]
            whole = log_probs([*one.token_ids.tolist(), 0], of=1)  # of token 1 on: the last is of the 0
            wanted = [whole[place - 1] for start, end in one.action_spans for place in range(start, end)]
            assert name == "one" and kept.dtype == np.float32 and kept.tolist() == [np.float32(x) for x in wanted]

    def test_of_another_reference_is_not_used(self):
        models, experience_maker = models_and_maker()
        responses = [response(number) for number in range(4)]
        before = make(experience_maker, responses)
        for rank in models.of("reference"):
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
