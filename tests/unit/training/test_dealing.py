"""Samples on their way to the ranks of a model, against shares and fillers that are written out here."""

import copy
import gc
import math
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from openrlhf.models import PolicyLoss, ValueLoss
from openrlhf.models.loss import aggregate_loss
from openrlhf.trainer.ppo_utils.experience import Experience, make_experience_batch, split_experience_batch
from openrlhf.trainer.ray import launcher

from bapo_openrlhf.adapt.batch import Skipped
from bapo_openrlhf.training.trainer.dealing import DealtActorGroup, DealtBatch, filler_of, length_of
from bapo_openrlhf.training.wire.packing import Packed, packed, unpacked
from bapo_openrlhf.training.worker.whole_batch import WholeBatchReplayBuffer

pytestmark = pytest.mark.usefixtures("values_for_refs")

PAD = 9
SLOW = settings(derandomize=True, database=None)
STEP = ("action_log_probs", "base_action_log_probs", "rollout_log_probs", "values", "returns", "advantages", "kl")


def sample(number: int, length: int | None = None) -> Experience:
    """A sample with every field of an experience filled; its first token says its number."""
    rng = np.random.Generator(np.random.PCG64(number))
    length = length or int(rng.integers(3, 9))
    prompt = int(rng.integers(1, length))
    mask = torch.tensor([[0] * (prompt - 1) + [1] * (length - prompt)])
    if length - prompt > 3:
        mask[0, prompt + 1] = 0  # what the environment said between two turns
    step = {name: torch.from_numpy(rng.normal(size=(1, length - 1))).float() for name in STEP}
    return Experience(
        sequences=torch.tensor([[1000 + number, *rng.integers(10, 99, length - 1).tolist()]]),
        attention_mask=torch.ones((1, length), dtype=torch.long), action_mask=mask, **step,
        rewards=torch.tensor([float(rng.normal())]), scores=torch.tensor([float(number)]),
        response_length=torch.tensor([length - prompt]), truncated=torch.tensor([number % 3 == 0]),
        total_length=torch.tensor([float(length)]), index=[number], prompts=[f"prompt {number}"], labels=[number],
        images=[[f"{number}.png"] if number % 2 else None],
        mm_train_inputs=[{"pixel_values": torch.full((2, 3), float(number))} if number % 2 else None],
        info={"reward": torch.tensor([0.5 + number]), "kl": torch.tensor([0.25]), "turns": torch.tensor([number])},
    )  # fmt: skip


def plain(value: Any) -> Any:
    """A value that can be compared: tensors with their types, and numbers that are none as words."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), str(value.tolist())
    if isinstance(value, dict):
        return [(key, plain(item)) for key, item in value.items()]  # in order
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def everything(experience: Experience) -> dict[str, Any]:
    return {item.name: plain(getattr(experience, item.name)) for item in fields(Experience)}


def number_of(experience: Experience) -> int:
    """The number of a sample without a batch dimension."""
    return int(experience.sequences[0]) - 1000


def numbers_of(sequences: torch.Tensor) -> list[int]:
    return [int(row[0]) - 1000 for row in sequences]


def dealt(lengths: dict[int, int], ranks: int) -> list[list[int]]:
    """Numbers of the samples of each rank, from their lengths in the order of the batch: by length, every R-th."""
    by_length = []
    for length in range(max(lengths.values()) + 1):
        by_length += [number for number in lengths if lengths[number] == length]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for place, number in enumerate(by_length):
        shares[place % ranks].append(number)
    return shares


class TestFiller:
    @given(
        number=st.integers(0, 30), single=st.booleans(), broken=st.sampled_from([None, math.nan, math.inf, -math.inf]),
        absent=st.sets(st.sampled_from([*STEP, "rewards", "scores", "truncated"])),
        kind=st.sampled_from([torch.long, torch.bool]),
    )  # fmt: skip
    @SLOW
    def test_is_like_the_sample_and_counts_for_nothing(self, number, single, absent, broken, kind):
        one = sample(number)
        one.action_mask = one.action_mask.to(kind)
        for name in absent:
            setattr(one, name, None)
        if broken is not None:
            for tensor in (*(getattr(one, name) for name in (*STEP, "rewards")), *one.info.values()):
                if tensor is not None and tensor.is_floating_point():
                    tensor.view(-1)[-1] = broken
        if single:
            (one,) = split_experience_batch(one)  # without a batch dimension
        before = everything(one)
        result = filler_of(one)
        assert everything(one) == before  # the sample stays as it was
        assert all(item.is_floating_point() is False or not item.any() for item in tensors(result))
        for item in fields(Experience):
            name, ours, theirs = item.name, getattr(result, item.name), getattr(one, item.name)
            if isinstance(theirs, torch.Tensor):
                assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), name
            elif name == "info":
                assert list(ours) == list(theirs)
                assert all((ours[k].shape, ours[k].dtype) == (theirs[k].shape, theirs[k].dtype) for k in theirs)
            elif name != "index":
                assert plain(ours) == plain(theirs), name
            if name in ("sequences", "attention_mask", "response_length", "truncated") and theirs is not None:
                assert torch.equal(ours, theirs), name
        assert result.index == [] and result.attention_mask.any() and not result.action_mask.any()

    @pytest.mark.parametrize("kind", [
        {"token_level_loss": False},
        {"policy_loss_type": "gspo"},
        {"is_correction_level": "token", "is_correction_mode": "clip", "is_correction_threshold": [0.0, 2.0]},
    ], ids=str)  # fmt: skip
    def test_has_no_loss_and_no_gradient_by_openrlhfs_losses(self, kind):
        filler = filler_of(sample(4))
        step = {"dp_size": 2, "batch_num_tokens": torch.tensor(7.0), "global_batch_size": torch.tensor(3.0)}
        log_probs = torch.randn(filler.action_mask.shape, requires_grad=True)
        about = {"action_mask": filler.action_mask, **step}
        about_policy = about | {"rollout_log_probs": filler.rollout_log_probs}
        loss, *_ = PolicyLoss(0.2, 0.2, **kind)(log_probs, filler.action_log_probs, filler.advantages, **about_policy)
        loss = loss + aggregate_loss((log_probs - filler.base_action_log_probs) ** 2, filler.action_mask, **step)
        loss = loss + ValueLoss(0.5)(log_probs, filler.values, filler.returns, **about)
        loss.backward()
        assert loss.item() == 0 and not log_probs.grad.any()


def tensors(experience: Experience) -> list[torch.Tensor]:
    values = [getattr(experience, item.name) for item in fields(Experience)]
    return [item for item in (*values, *experience.info.values()) if isinstance(item, torch.Tensor)]


# --- a batch to train on ----------------------------------------------------------------------------------------------


class Process:
    """A process of a model, which notes its calls: (method, inputs). Its answers tell what stands before a token."""

    def __init__(self, of: int) -> None:
        self.of = of
        self.calls: list[tuple[str, dict[str, list]]] = []
        self.execute_batch = SimpleNamespace(remote=self.execute)

    def execute(self, method: str, chunk: dict, start: int, end: int) -> list[torch.Tensor]:
        chunk = unpacked(dict(chunk)) if isinstance(chunk, Packed) else chunk
        assert all(len(values) == end for values in chunk.values())
        inputs = {name: values[start:end] for name, values in chunk.items()}
        self.calls.append((method, copy.deepcopy(inputs)))  # a process of its own
        return [model_answers(sequences, self.of) for sequences in inputs.get("sequences", [])]


def model_answers(sequences: torch.Tensor, of: int) -> torch.Tensor:
    return torch.sin(sequences.cumsum(-1)[:, 1:].double() * (of + 1)).float()


def group_of(ranks: int, copies: int = 1, *, of: int = 0, kind: type = DealtActorGroup) -> Any:
    """All processes of a model."""
    group = object.__new__(kind)
    group._actor_handlers, group.duplicate_actors = [Process(of) for _ in range(ranks * copies)], copies
    return group


def noted(group: Any) -> list[tuple[str, dict[str, list]]]:
    """The calls of all processes, of one after the other."""
    return [call for process in group._actor_handlers for call in process.calls]


def appended(
    experiences: list[Experience], ranks: int, copies: int = 1, skipped: Sequence[Skipped] = ()
) -> list[dict[str, Any]]:
    """What `take` gets in each process."""
    group = group_of(ranks, copies)
    group.skipped = skipped
    refs, calls = group.take(experiences), noted(group)
    assert len(refs) == len(calls) == ranks * copies and {method for method, _ in calls} == {"take"}
    assert all(len(values) == 1 for _, inputs in calls for values in inputs.values())
    return [{name: value for name, (value,) in inputs.items()} for _, inputs in calls]


def buffer_of(call: dict[str, Any]) -> WholeBatchReplayBuffer:
    """The buffer of a process after its `take`."""
    buffer = WholeBatchReplayBuffer(1)
    buffer.take(call["experience"], call["filler"], call["samples"], call["skipped"])
    return buffer


def batched(parts: Iterable[list[int]], lengths: dict[int, int]) -> list[Experience]:
    """Samples in batches of these parts."""
    return [Experience.concat_experiences([sample(n, lengths[n]) for n in part], PAD) for part in parts]


@st.composite
def cases(draw):
    """(length of each sample, samples of each batch on the driver, ranks, processes of a tensor-parallel group)."""
    count = draw(st.integers(1, 30))
    lengths = {number: draw(st.integers(2, 7)) for number in range(count)}
    order = draw(st.permutations(range(count)))
    cuts = sorted(draw(st.sets(st.integers(1, count), max_size=6)) | {count})
    parts = [order[start:end] for start, end in zip([0, *cuts[:-1]], cuts, strict=True)]
    return lengths, parts, draw(st.integers(1, 6)), draw(st.integers(1, 2))


class TestTake:
    @given(case=cases(), draw=st.randoms(use_true_random=False), share=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
    @settings(SLOW, max_examples=2 * settings.default.max_examples)
    def test_every_sample_reaches_one_rank_with_all_its_fields(self, case, draw, share):
        """Skipped ones have places in the shares, and only numbers of them are sent, or a filler if all are skipped."""
        lengths, parts, ranks, copies = case
        lengths = {number: lengths[number] for part in parts for number in part}  # in the order of the batch
        gone = {number for number in lengths if draw.random() < share}
        skipped = [Skipped(place, lengths[n], 100 + n) for place, n in enumerate(lengths) if n in gone]
        kept = [[number for number in part if number not in gone] for part in parts]
        experiences = batched(filter(None, kept), lengths)
        if not experiences:
            experiences = [filler_of(min((sample(*pair) for pair in lengths.items()), key=length_of))]
        shares = []
        for call in appended(experiences, ranks, copies, skipped):
            assert list(call) == ["experience", "filler", "samples", "skipped"]
            buffer = buffer_of(call)
            skips = [isinstance(item, Skipped) for item in buffer.items]
            shares.append(
                [x.tokens - 100 if skip else number_of(x) for x, skip in zip(buffer.items, skips, strict=True)]
            )
            assert (call["experience"] is None) is all(skips)
            for item, skip, number in zip(buffer.items, skips, shares[-1], strict=True):
                if skip:
                    assert item.total_length == lengths[number]
                else:  # as if it had never been padded, batched or dealt
                    assert everything(item) == everything(split_experience_batch(sample(number, lengths[number]))[0])
            assert list(map(number_of, buffer.passed)) == [number for number in shares[-1] if number not in gone]
            # the filler is like a sample of the fewest tokens, and is not among the others
            assert not buffer.filler.action_mask.any() and buffer.filler.attention_mask.all()
            assert not any(item.any() for item in tensors(buffer.filler) if item.is_floating_point())
            assert len(buffer.filler.sequences) == min(lengths[n] for n in lengths.keys() - gone or lengths)
            assert buffer.total == len(lengths) and all(buffer.filler is not item for item in buffer.items)
        # those of a tensor-parallel group get the same, however the samples were batched
        assert shares == [share for share in dealt(lengths, ranks) for _ in range(copies)]

    def test_skipped_samples_are_of_one_batch(self):
        group = group_of(1)
        group.skipped = [Skipped(1, 5, 2)]
        for _ in range(2):
            group.take(batched([[0, 1]], {0: 3, 1: 5}))
        assert [len(call["skipped"][0]) for _, call in noted(group)] == [1, 0]

    @pytest.mark.parametrize("ranks", [1, 2, 4])
    def test_metrics_are_in_the_same_order_on_all_ranks(self, ranks):
        """The ranks reduce them one after the other, by their order. One that a sample does not have is nan."""
        experiences = batched([[1], [0], [2]], {0: 3, 1: 5, 2: 4})
        experiences[1].info = dict(reversed(experiences[1].info.items())) | {"depth": torch.tensor([2.0])}
        del experiences[0].info["kl"]
        buffers = [buffer_of(call) for call in appended(experiences, ranks)]
        infos = {number_of(item): item.info for buffer in buffers for item in buffer.items}
        orders = {tuple(info) for info in (*infos.values(), *(buffer.filler.info for buffer in buffers))}
        assert len(orders) == 1 and set(*orders) == {"reward", "kl", "turns", "depth"}
        names = "reward", "kl", "turns", "depth"
        actual = {number: str([float(info[name]) for name in names]) for number, info in infos.items()}
        assert actual == {0: "[0.5, 0.25, 0.0, 2.0]", 1: "[1.5, nan, 1.0, nan]", 2: "[2.5, 0.25, 2.0, nan]"}

    @pytest.mark.parametrize(("ranks", "copies"), [(1, 1), (2, 1), (3, 2)])
    def test_other_methods_are_handed_out_by_openrlhf(self, ranks, copies):
        result = []
        for kind in (DealtActorGroup, launcher.RayActorGroup):
            group, rows = group_of(ranks, copies, kind=kind), [torch.tensor([[n, n]]) for n in range(7)]
            refs = group.async_run_method_batch(method_name="forward", sequences=rows, experience=[*"abcdefg"])
            refs += group.async_run_method_batch("fit", demonstrations=[[1]] * ranks)
            result.append((refs, noted(group)))
        assert plain(result[0]) == plain(result[1]) and len(result[0][1]) == 2 * ranks * copies


# --- what is in Ray's object store ------------------------------------------------------------------------------------


class TestPacked:
    @pytest.mark.parametrize("batch", [1, 3])
    def test_a_share_arrives_as_it_was(self, batch):
        """Tokens and masks arrive as int64, whatever they were. Nothing else changes its type."""
        share = make_experience_batch([split_experience_batch(sample(number))[0] for number in range(batch)])
        share.values = share.values.bfloat16()  # numpy has no such type
        masks = {name: getattr(share, name).bool() for name in ("action_mask", "attention_mask")}
        narrow = replace(share, sequences=share.sequences.int(), **masks)
        sent = packed({"experience": [narrow], "samples": [7]})
        arrived = unpacked(pickle.loads(pickle.dumps(sent)))
        assert arrived["samples"] == [7]
        actual, wanted = split_experience_batch(arrived["experience"][0]), split_experience_batch(share)
        assert list(map(everything, actual)) == list(map(everything, wanted))
        held = tensors(sent["experience"][0])
        assert len(held) == 1 and held[0] is narrow.values  # all the others are arrays
        actual[0].sequences += 1  # can be written to

    @pytest.fixture
    def puts(self, monkeypatch):
        result: list[Any] = []
        monkeypatch.setattr(ray, "put", lambda value: result.append(value) or value)
        return result

    @pytest.mark.parametrize(("ranks", "wanted"), [((2, 2), 2), ((2, 3), 5)])
    def test_models_with_equally_many_ranks_share_what_they_train_on_and_pass(self, puts, ranks, wanted):
        experiences, calls = batched([[0, 1, 2], [3, 4]], dict.fromkeys(range(5), 5)), []
        for count in ranks:
            group = group_of(count)
            group.take(experiences)
            calls.append([(list(map(everything, c["experience"])), c["samples"]) for _, c in noted(group)])
        assert len(puts) == wanted and (calls[0] == calls[1]) is (ranks[0] == ranks[1])
        asked(passes_of(dict.fromkeys(range(6), 4), micro=1), *map(group_of, ranks))
        assert len(puts) == 2 * wanted

    def test_other_inputs_are_not_shared(self, puts):
        group = group_of(1)
        tokens, mask, other = torch.tensor([[1, 2]]), torch.tensor([[1, 1]]), torch.tensor([[0, 1]])
        for more in ({}, {"action_mask": [mask]}, {"action_mask": [other]}):
            group.async_run_method_batch("forward", sequences=[tokens], **more)
        group.async_run_method_batch("forward", sequences=[tokens.clone()])
        calls = noted(group)
        assert len(puts) == 4 and list(calls[1][1]) == ["sequences", "action_mask"]
        assert calls[2][1]["action_mask"][0].tolist() == other.tolist()

    def test_nothing_is_kept_longer_than_the_batch(self, puts):
        group = group_of(2)
        experiences = batched([[0, 1], [2]], dict.fromkeys(range(3), 5))
        group.take(experiences)
        group.async_run_method_batch(method_name="forward", sequences=[one.sequences for one in experiences])
        assert len(DealtActorGroup._sent) == 3
        puts.clear()
        del experiences
        gc.collect()
        assert not DealtActorGroup._sent


# --- batches of a forward pass ----------------------------------------------------------------------------------------


def passes_of(lengths: dict[int, int], *, micro: int = 3, tokens: int | None = None, tensor: int = 1) -> DealtBatch:
    """Samples of these lengths on their way to models. `tokens` are those of a forward pass, if batching is dynamic."""
    args = SimpleNamespace(
        train=SimpleNamespace(dynamic_batch_enable=tokens is not None),
        rollout=SimpleNamespace(micro_batch_size=micro, max_tokens_per_gpu=tokens),
        adapt=SimpleNamespace(micro_batch_tokens=None),
        ds=SimpleNamespace(ring_attn_size=1, tensor_parallel_size=tensor, packing_samples=tokens is not None),
    )
    return DealtBatch([sample(*pair) for pair in lengths.items()], args, PAD)


def asked(passed: DealtBatch, *models: Any) -> list[dict[int, torch.Tensor]]:
    """The answers of each of these models; all are asked before one is heard."""
    heard = [passed.ask(model, images=True) for model in models]
    return [answers() for answers in heard]


def calls_of(group: Any) -> list[list[dict[str, Any]]]:
    """What each rank passes at once; the processes of a tensor-parallel group pass the same."""
    of_processes = []
    for process in group._actor_handlers:
        rows = [(inputs, row) for _, inputs in process.calls for row in zip(*inputs.values(), strict=True)]
        of_processes.append([dict(zip(inputs, row, strict=True)) for inputs, row in rows])
    of_ranks = of_processes[:: group.duplicate_actors]
    assert plain(of_processes) == plain([calls for calls in of_ranks for _ in range(group.duplicate_actors)])
    return of_ranks


def assert_answered(answers: dict[int, torch.Tensor], of: int, lengths: dict[int, int]) -> None:
    """Each answer is that to the sample on its own, without padding."""
    assert sorted(answers) == sorted(lengths)
    for number, row in answers.items():
        assert torch.equal(row, model_answers(sample(number, lengths[number]).sequences, of)[0])


class TestForwardPasses:
    @pytest.mark.parametrize("by_tokens", [True, False])
    @given(
        lengths=st.lists(st.integers(2, 9), min_size=1, max_size=24).map(lambda each: dict(enumerate(each))),
        ranks=st.tuples(st.integers(1, 4), st.integers(1, 4)), tensor=st.sampled_from([1, 2]),
        micro=st.integers(1, 6), tokens=st.integers(9, 40),
    )  # fmt: skip
    @SLOW
    def test_each_sample_passes_once(self, by_tokens, lengths, ranks, tensor, micro, tokens):
        """Actor and critic have `ranks`, and a tensor-parallel group has `tensor` processes."""
        models = [group_of(count, tensor, of=of) for of, count in enumerate(ranks)]
        heard = asked(passes_of(lengths, micro=micro, tokens=tokens if by_tokens else None, tensor=tensor), *models)
        for of, (group, answers) in enumerate(zip(models, heard, strict=True)):
            assert_answered(answers, of, lengths)
            of_ranks = calls_of(group)
            assert len(set(map(len, of_ranks))) == 1  # a rank that needs fewer passes gets fillers at the end
            assert any(calls[-1]["action_mask"].any() for calls in of_ranks)
            for share, calls in zip(dealt(lengths, ranks[of]), of_ranks, strict=True):
                filled = [bool(call["action_mask"].any()) for call in calls]
                loads = [numbers_of(call["sequences"]) for call in calls]
                filler_calls, wanted = calls[sum(filled) :], loads[: sum(filled)]
                assert filled == sorted(filled, reverse=True)
                if by_tokens:
                    assert sorted(chain(*wanted)) == sorted(share)
                    assert all(sum(lengths[number] for number in load) <= tokens * tensor for load in wanted)
                else:
                    assert wanted == [share[at : at + micro] for at in range(0, len(share), micro)]
                assert all(call["sequences"].shape == (1, min(lengths.values())) for call in filler_calls)
                for load, call in zip(loads, calls, strict=True):
                    assert ("mm_train_inputs_list" in call) == any(number % 2 for number in lengths)
                    pixels = call.get("mm_train_inputs_list", [None] * len(load))
                    assert [item and item["pixel_values"][0, 0].item() for item in pixels] == [
                        number if number % 2 else None for number in load
                    ]
                    # no row is only padding, and padding is the tokenizer's
                    assert call["attention_mask"].any(-1).all()
                    assert (call["sequences"][call["attention_mask"] == 0] == PAD).all()

    def test_a_model_may_be_asked_for_some_of_the_samples(self):
        lengths = dict.fromkeys(range(6), 5) | {4: 3}
        passed, actor, critic = passes_of(lengths), group_of(2), group_of(2, of=1)
        heard = passed.ask(actor), passed.ask(critic, [1, 4, 5])
        assert_answered(heard[0](), 0, lengths)
        assert_answered(heard[1](), 1, {number: lengths[number] for number in (1, 4, 5)})
        loads = [[number for call in calls for number in numbers_of(call["sequences"])] for calls in calls_of(critic)]
        assert loads == [[4, 5], [1]]  # by length: 4, 1, 5

    def test_no_samples_or_no_model_no_call(self):
        passed, critic = passes_of({0: 4, 1: 5}), group_of(1)
        assert passed.ask(critic, [])() == passed.ask(None)() == {}
        assert calls_of(critic) == [[]]
