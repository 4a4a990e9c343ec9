"""A batch of any size on any number of ranks: which rank trains on what, in which optimizer step, and what is logged.

OpenRLHF's ranks are threads here; their collectives meet at a barrier.
"""

from __future__ import annotations

import copy
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bapo_openrlhf.cpu import stack as cpu

cpu.prepare_environment()
cpu.install()

import torch  # noqa: E402
from openrlhf.models.loss import PolicyLoss, aggregate_loss  # noqa: E402
from openrlhf.trainer.ppo_utils import NaiveReplayBuffer, replay_buffer  # noqa: E402
from openrlhf.trainer.ppo_utils.experience import Experience  # noqa: E402
from openrlhf.trainer.ray import ppo_actor, ppo_critic  # noqa: E402
from torch.nn.utils.rnn import pad_sequence  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from bapo_openrlhf.adapt.arithmetic import MicroBatch  # noqa: E402
from bapo_openrlhf.training import whole_batch  # noqa: E402
from bapo_openrlhf.training.whole_batch import MicroBatches, WholeBatchLoader, WholeBatchReplayBuffer  # noqa: E402
from bapo_openrlhf.training.workers import WholeBatchActorTrainer, WholeBatchCriticTrainer  # noqa: E402

# --- ranks as threads -------------------------------------------------------------------------------------------------


class Ranks:
    """The part of torch.distributed, and of OpenRLHF's strategy, that plans batches: `count` threads in step."""

    ReduceOp = torch.distributed.ReduceOp

    def __init__(self, count: int) -> None:
        self.count = count
        self.barrier = threading.Barrier(count, timeout=60)  # a rank that asks for one collective more waits for ever
        self.rank = threading.local()
        self.given: list = [None] * count

    def get_world_size(self, group=None) -> int:
        return self.count

    def all_reduce(self, tensor: torch.Tensor, op=torch.distributed.ReduceOp.SUM, group=None) -> None:
        self.given[self.rank.number] = tensor.clone()
        self.barrier.wait()
        assert len({tuple(value.shape) for value in self.given}) == 1
        stacked = torch.stack(self.given)
        self.barrier.wait()
        reduce = {self.ReduceOp.SUM: stacked.sum, self.ReduceOp.MAX: stacked.amax, self.ReduceOp.MIN: stacked.amin}[op]
        tensor.copy_(reduce(0))

    def strategy(self, args: SimpleNamespace) -> SimpleNamespace:
        def all_reduce(data: torch.Tensor, op: str) -> torch.Tensor:
            self.all_reduce(data, {"max": self.ReduceOp.MAX, "sum": self.ReduceOp.SUM}[op])
            return data

        mesh = {"dp": SimpleNamespace(get_group=lambda: None)}
        return SimpleNamespace(args=args, ds_device_mesh=mesh, all_reduce=all_reduce)

    def run(self, work) -> list:
        """The results of `work(rank)` of all ranks."""

        def start(number):
            self.rank.number = number
            try:
                return work(number)
            except Exception:
                self.barrier.abort()  # the others wait for this rank
                raise

        before = replay_buffer.dist, whole_batch.dist
        replay_buffer.dist = whole_batch.dist = self
        try:
            with ThreadPoolExecutor(self.count) as threads:
                return list(threads.map(start, range(self.count)))
        finally:
            replay_buffer.dist, whole_batch.dist = before


def sample(length: int, tokens: int) -> SimpleNamespace:
    """A sample of `length` tokens, `tokens` of them generated."""
    return SimpleNamespace(
        total_length=torch.tensor(length), action_mask=torch.tensor([0] * (length - tokens) + [1] * tokens)
    )


def arguments(train_batch: int, max_tokens: int, rollout: int, group_size: int) -> SimpleNamespace:
    return SimpleNamespace(
        train=SimpleNamespace(batch_size=train_batch, max_tokens_per_gpu=max_tokens),
        rollout=SimpleNamespace(batch_size=rollout, n_samples_per_prompt=group_size),
        ds=SimpleNamespace(ring_attn_size=1, tensor_parallel_size=1),
    )


def filled(kind: type, shares: list[list], size: int = 4, *, dynamic: bool) -> list:
    """The buffers of all ranks, each with its share of the batch."""
    buffers = [kind(size, dynamic_batch=dynamic) for _ in shares]
    for buffer, samples in zip(buffers, shares, strict=True):
        buffer.items = list(samples)
        if kind is WholeBatchReplayBuffer:
            buffer.total, buffer.filler = sum(map(len, shares)), sample(0, 0)
    return buffers


def planned(kind: type, shares: list[list], args: SimpleNamespace) -> list:
    """The buffers of all ranks after planning by tokens."""
    ranks, buffers = Ranks(len(shares)), filled(kind, shares, dynamic=True)
    ranks.run(lambda rank: buffers[rank].setup_dynamic_batch(ranks.strategy(args)))
    return buffers


def steps(buffer) -> list[list[list[int]]]:
    """The buffer positions of each micro-batch, by optimizer step."""
    result, step = [], []
    for micro_batch, last in zip(buffer.dynamic_indices, buffer.dynamic_optimizer_step, strict=True):
        step.append(micro_batch)
        if last:
            result.append(step)
            step = []
    assert not step  # the last micro-batch ends an optimizer step
    return result


UNHURRIED = settings(suppress_health_check=[HealthCheck.too_slow])
LISTS = ("dynamic_indices", "dynamic_batch_num_tokens", "dynamic_global_batch_size", "dynamic_optimizer_step")


@st.composite
def batches(draw):
    """(samples of each rank, arguments): 1 to 4 ranks with shares that differ by at most one, of any lengths."""
    ranks, share = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    total = draw(st.integers(1, 60))
    lengths = st.integers(2, 40).flatmap(lambda length: st.tuples(st.just(length), st.integers(0, length - 1)))
    counts = [total // ranks + (rank < total % ranks) for rank in range(ranks)]
    shares = [[sample(*draw(lengths)) for _ in range(count)] for count in counts]
    return shares, arguments(share * ranks, draw(st.integers(20, 100)), rollout=draw(st.integers(1, 30)), group_size=2)


def real(buffer, part: list[int], share: list) -> list:
    """The samples of a micro-batch without fillers."""
    return [buffer.items[index] for index in part if any(buffer.items[index] is own for own in share)]


# --- the plan by tokens -----------------------------------------------------------------------------------------------


class TestPlanByTokens:
    @UNHURRIED
    @given(batches())
    def test_every_sample_once_in_steps_that_all_ranks_share(self, batch):
        shares, args = batch
        before, total = copy.deepcopy(args), sum(map(len, shares))
        buffers = planned(WholeBatchReplayBuffer, shares, args)
        assert args == before
        trained: list[list[int]] = [[0] * len(shares) for _ in range(math.ceil(total / args.train.batch_size))]
        for rank, (share, buffer) in enumerate(zip(shares, buffers, strict=True)):
            assert len({len(getattr(buffer, name)) for name in (*LISTS, "plan", "dynamic_sample_loss_scale")}) == 1
            assert buffer.sample_batch_size == 1 and buffer.dynamic_optimizer_step == buffers[0].dynamic_optimizer_step
            seen = [id(item) for part in buffer.dynamic_indices for item in real(buffer, part, share)]
            assert sorted(seen) == sorted(map(id, share))
            for number, step in enumerate(steps(buffer)):
                trained[number][rank] = sum(len(real(buffer, part, share)) for part in step)
            # a filler is on its own, and there is at most one
            only_fillers = [part for part in buffer.dynamic_indices if not real(buffer, part, share)]
            assert [len(part) for part in only_fillers] in ([], [1])
            assert all(
                len(real(buffer, part, share)) == len(part)
                for part in buffer.dynamic_indices
                if part not in only_fillers
            )
        full = [args.train.batch_size] * (total // args.train.batch_size)
        assert [sum(step) for step in trained] == full + [total % args.train.batch_size] * bool(
            total % args.train.batch_size
        )
        assert all(max(step) - min(step) <= 1 for step in trained)

    @UNHURRIED
    @given(batches())
    def test_says_what_is_in_each_micro_batch_and_its_step(self, batch):
        shares, args = batch
        buffers = planned(WholeBatchReplayBuffer, shares, args)
        for share, buffer in zip(shares, buffers, strict=True):
            position = 0
            for number, step in enumerate(steps(buffer)):
                parts = [
                    [len(real(other, part, own)) for part in steps(other)[number]]
                    for own, other in zip(shares, buffers, strict=True)
                ]
                members = [
                    item
                    for own, other in zip(shares, buffers, strict=True)
                    for part in steps(other)[number]
                    for item in real(other, part, own)
                ]
                for place, part in enumerate(step):
                    assert buffer.plan[position] == MicroBatch(
                        samples=len(real(buffer, part, share)),
                        closes=place + 1 == len(step),
                        step_samples=sum(map(sum, parts)),
                        step_parts=sum(size > 0 for rank in parts for size in rank),
                    )
                    assert buffer.dynamic_batch_num_tokens[position] == sum(
                        int(one.action_mask.sum()) for one in members
                    )
                    assert buffer.dynamic_global_batch_size[position] == sum(
                        bool(one.action_mask.any()) for one in members
                    )
                    position += 1

    @UNHURRIED
    @given(batches())
    def test_a_full_batch_is_planned_as_openrlhf_plans_it(self, batch):
        shares, args = batch
        share = min(args.train.batch_size // len(shares), len(shares[-1]))
        if not share:
            return  # a rank has nothing: OpenRLHF could not train on this at all
        whole = len(shares[-1]) // share
        shares = [samples[: whole * share] for samples in shares]
        args.train.batch_size = share * len(shares)
        args.rollout.batch_size, args.rollout.n_samples_per_prompt = whole * args.train.batch_size, 1
        ours = planned(WholeBatchReplayBuffer, shares, args)
        theirs = planned(NaiveReplayBuffer, [buffer.items for buffer in ours], args)
        for mine, its in zip(ours, theirs, strict=True):
            assert len(steps(its)) == whole
            assert all(getattr(mine, name) == getattr(its, name) for name in LISTS)

    def test_by_hand(self):
        """Two ranks, 4 samples a step, 5 and 4 samples: steps of 2 and 2 a rank, and of 1 and a filler."""
        a, b, c, d, e = sample(2, 1), sample(2, 1), sample(6, 2), sample(6, 1), sample(9, 5)
        f, g, h, i = sample(2, 1), sample(2, 1), sample(2, 0), sample(9, 7)
        first, second = planned(
            WholeBatchReplayBuffer, [[a, b, c, d, e], [f, g, h, i]], arguments(4, 10, rollout=2, group_size=2)
        )
        # a long one beside a short one: a e b d c, and f i g h
        assert [[first.items[n] for n in part] for part in first.dynamic_indices[-1:]] == [[c]]
        # 2 + 9 tokens are too many for one micro-batch of either rank; 2 + 6 are not, nor are 2 + 2
        assert sorted(first.dynamic_indices[:2]) == sorted(second.dynamic_indices[:2]) == [[0], [1]]
        assert first.dynamic_indices[2:] == second.dynamic_indices[2:] == [[2, 3], [4]]
        assert second.items[4] is second.filler
        for buffer in (first, second):
            assert buffer.dynamic_optimizer_step == [0, 1, 1, 1]
            assert buffer.dynamic_batch_num_tokens == [1 + 5 + 1 + 7, 1 + 5 + 1 + 7, 1 + 1 + 1 + 0, 2]
            assert buffer.dynamic_global_batch_size == [4, 4, 3, 1]
        assert [part.samples for part in first.plan] == [1, 1, 2, 1] and [p.samples for p in second.plan] == [
            1,
            1,
            2,
            0,
        ]
        assert [part.step_parts for part in first.plan] == [4, 4, 2, 1]

    def test_openrlhf_drops_the_rest(self):
        shares = [[sample(3, 1)] * 5]
        args = arguments(4, 10, rollout=5, group_size=1)
        (theirs,), (ours,) = planned(NaiveReplayBuffer, shares, args), planned(WholeBatchReplayBuffer, shares, args)
        assert len([*chain(*theirs.dynamic_indices)]) == 4 and len([*chain(*ours.dynamic_indices)]) == 5

    def test_each_optimizer_step_has_long_and_short_samples(self):
        numbers = [whole_batch.long_and_short(list(range(count))) for count in range(1, 6)]
        assert numbers == [[0], [0, 1], [0, 2, 1], [0, 3, 1, 2], [0, 4, 1, 3, 2]]


# --- the micro-batches without it -------------------------------------------------------------------------------------


class TestMicroBatches:
    @UNHURRIED
    @given(
        total=st.integers(1, 80),
        ranks=st.integers(1, 5),
        size=st.integers(1, 7),
        accumulated=st.integers(1, 4),
        shuffle=st.booleans(),
        seed=st.integers(0, 9),
    )
    def test_every_sample_once_and_whole_steps_are_whole_whatever_the_order(
        self, total, ranks, size, accumulated, shuffle, seed
    ):
        args = arguments(ranks * size * accumulated, 10, rollout=1, group_size=2)
        shares = [[(rank, n) for n in range(len(range(rank, total, ranks)))] for rank in range(ranks)]
        buffers, threads = filled(WholeBatchReplayBuffer, shares, size, dynamic=False), Ranks(ranks)
        threads.run(lambda rank: buffers[rank].set_up(threads.strategy(args)))
        torch.manual_seed(seed)
        for _ in range(2):  # epochs
            loaded = [[[buffer.items[n] for n in part] for part in MicroBatches(buffer, size, shuffle)]
                      for buffer in buffers]  # fmt: skip
            fillers = [[part for part in parts if part == [buffer.filler]]
                       for parts, buffer in zip(loaded, buffers, strict=True)]  # fmt: skip
            assert all(
                parts.index(found[0]) == len(parts) - 1 for parts, found in zip(loaded, fillers, strict=True) if found
            )
            assert len(set(map(len, loaded))) == 1 and all(len(found) <= 1 for found in fillers)
            taken = [
                [part for part in parts if part not in found] for parts, found in zip(loaded, fillers, strict=True)
            ]
            assert [sorted(chain(*parts)) for parts in taken] == shares
            for number in range(0, len(loaded[0]), accumulated):
                window = [part for parts in taken for part in parts[number : number + accumulated]]
                left = total - number // accumulated * args.train.batch_size
                assert sum(map(len, window)) == min(left, args.train.batch_size)
                for rank, parts in enumerate(loaded):
                    for place, part in enumerate(parts[number : number + accumulated], number):
                        last = (place + 1) % accumulated == 0 or place + 1 == len(parts)
                        real = len(part) if part in taken[rank] else 0
                        wanted = MicroBatch(real, last, min(left, args.train.batch_size), len(window))
                        assert buffers[rank].plan[place] == wanted

    @pytest.mark.parametrize("count", [4, 12, 24])
    def test_order_and_random_numbers_are_those_of_openrlhfs_loader(self, count):
        """If every micro-batch is whole, a run is the same as with OpenRLHF's own loader."""
        samples = [Experience(sequences=torch.tensor([n]), attention_mask=torch.tensor([1])) for n in range(count)]
        (buffer,), ranks = filled(WholeBatchReplayBuffer, [samples], 4, dynamic=False), Ranks(1)
        ranks.run(lambda _: buffer.set_up(ranks.strategy(arguments(8, 10, rollout=1, group_size=2))))
        found = []
        for kind in (WholeBatchLoader, DataLoader):
            torch.manual_seed(3)
            loader = kind(buffer, batch_size=4, shuffle=True, drop_last=True, collate_fn=buffer.collate_fn)
            epochs = [[batch.sequences.flatten().tolist() for batch in loader] for _ in range(2)]
            found.append((len(loader), epochs, torch.rand(2).tolist()))
        assert found[0] == found[1]

    def test_take_keeps_the_filler_apart_until_it_is_needed(self):
        def made(count):
            return Experience(
                sequences=torch.arange(count * 3).reshape(count, 3),
                attention_mask=torch.ones(count, 3, dtype=torch.long),
                info={"reward": torch.ones(count)},
            )

        args, ranks = arguments(6, 10, rollout=1, group_size=2), Ranks(2)
        for counts, fillers in (((3, 2), (0, 0)), ((4, 3), (0, 1)), ((1, 0), (0, 1))):
            buffers = [WholeBatchReplayBuffer(3) for _ in counts]
            for buffer, count in zip(buffers, counts, strict=True):
                buffer.take(
                    made(2), made(1), 2
                )  # not trained on, because the actor is frozen; the next one replaces it
                buffer.take(made(count) if count else None, made(1), sum(counts))
                assert len(buffer) == count
            ranks.run(lambda rank, buffers=buffers: buffers[rank].set_up(ranks.strategy(args)))
            assert [len(b) - n for b, n in zip(buffers, counts, strict=True)] == list(fillers)
            assert [sum(item is b.filler for item in b.items) for b in buffers] == list(fillers)


# --- gradients --------------------------------------------------------------------------------------------------------


class TestGradient:
    @UNHURRIED
    @given(batches(), st.booleans())
    def test_adds_up_to_that_of_the_plain_mean_over_the_step(self, batch, by_token):
        """DeepSpeed adds the gradients of a step's micro-batches, and averages them over the ranks."""
        shares, args = batch
        torch.manual_seed(0)
        weight = torch.randn(3, dtype=torch.double, requires_grad=True)
        buffers = planned(WholeBatchReplayBuffer, shares, args)
        features = {id(item): torch.randn(len(item.action_mask), 3).double() for b in buffers for item in b.items}

        def losses(item):
            return (features[id(item)] @ weight).sin()

        plans = [steps(buffer) for buffer in buffers]
        position = 0
        for step in range(len(plans[0])):
            accumulated, terms = torch.zeros(3, dtype=torch.double), []
            for rank, buffer in enumerate(buffers):
                for number, part in enumerate(plans[rank][step], position):
                    items = [buffer.items[index] for index in part]
                    loss = aggregate_loss(
                        pad_sequence([losses(item) for item in items], batch_first=True),
                        pad_sequence([item.action_mask for item in items], batch_first=True).double(),
                        token_level_loss=by_token,
                        dp_size=len(shares),
                        # at least 1: if no sample of a step was generated at all, there is no mean
                        batch_num_tokens=max(buffer.dynamic_batch_num_tokens[number], 1),
                        global_batch_size=max(buffer.dynamic_global_batch_size[number], 1),
                    )
                    accumulated += torch.autograd.grad(loss, weight)[0] / len(shares)
                    terms += [losses(item)[item.action_mask.bool()] for item in real(buffer, part, shares[rank])]
            position += len(plans[0][step])
            terms = [term for term in terms if len(term)]
            if terms:
                mean = torch.cat(terms).mean() if by_token else torch.stack([term.mean() for term in terms]).mean()
                assert torch.allclose(accumulated, torch.autograd.grad(mean, weight)[0], rtol=1e-6, atol=1e-9)


# --- what a worker does with a micro-batch ----------------------------------------------------------------------------


def trainer_with(kind: type, plan: list[MicroBatch], *, dynamic: bool = False, ranks: int = 2, accumulated: int = 3,
                 total: int = 1, use_loss: bool = False, aux: float = 0.5):  # fmt: skip
    """A trainer without a model: DeepSpeed's boundaries are in `marked`."""
    made = object.__new__(kind)
    made.args = SimpleNamespace(
        train=SimpleNamespace(dynamic_batch_enable=dynamic),
        actor=SimpleNamespace(aux_loss_coef=aux),
        algo=SimpleNamespace(kl=SimpleNamespace(use_loss=use_loss)),
    )
    mesh = {"dp": SimpleNamespace(get_group=lambda: None)}
    made.strategy = SimpleNamespace(accumulated_gradient=accumulated, ds_device_mesh=mesh, time_steps={"ema": 7})
    made.replay_buffer = SimpleNamespace(plan=plan, total=total)
    made.marked = []
    engine = SimpleNamespace(set_gradient_accumulation_boundary=made.marked.append)
    made.actor, made.critic = SimpleNamespace(model=engine), engine
    return made


@pytest.fixture
def two_ranks(monkeypatch):
    monkeypatch.setattr(whole_batch.dist, "get_world_size", lambda group=None: 2)


@pytest.fixture
def openrlhfs(monkeypatch):
    """openrlhfs(status) sets what OpenRLHF's training steps return; the list has the coefficient that each step saw."""

    def returning(status, seen):
        def step(self, *args):
            seen.append((self.args.actor.aux_loss_coef, self.strategy.time_steps["ema"]))
            return copy.deepcopy(status)

        monkeypatch.setattr(ppo_actor.ActorPPOTrainer, "training_step", step)
        monkeypatch.setattr(ppo_critic.CriticPPOTrainer, "training_step", step)

    return returning


EXPERIENCE = SimpleNamespace(info={})
NUMBERS = {
    "metrics": {"policy_loss": torch.tensor(6.0), "kl": torch.tensor(3.0), "entropy_loss": torch.tensor(9.0),
                "ppo_kl": torch.tensor(4.0), "reward": torch.tensor([1.0, 2.0]), "actor_lr": 0.1},
    "weights": {"policy_loss": "token", "kl": "token", "entropy_loss": "token", "ppo_kl": "token", "reward": "sample",
                "actor_lr": None},
    "num_samples": 2.0,
    "num_action_tokens": 5.0,
}  # fmt: skip


@pytest.mark.usefixtures("two_ranks")
class TestActorNumbers:
    def test_of_a_whole_step_are_openrlhfs(self, openrlhfs):
        openrlhfs(NUMBERS, [])
        made = trainer_with(WholeBatchActorTrainer, [MicroBatch(2, False, 12, 6)], use_loss=True)
        assert str(made.training_step(EXPERIENCE, 0.0, 0)) == str(NUMBERS)

    @pytest.mark.parametrize("use_loss", [False, True])
    def test_losses_of_a_smaller_step_are_not_blown_up(self, openrlhfs, use_loss):
        """OpenRLHF: sum / (tokens of the step / 6 micro-batches of a whole step); here there are 2: a third of that."""
        openrlhfs(NUMBERS, [])
        made = trainer_with(WholeBatchActorTrainer, [MicroBatch(2, True, 4, 2)], use_loss=use_loss)
        metrics = made.training_step(EXPERIENCE, 0.0, 0)["metrics"]
        assert (metrics["policy_loss"], metrics["entropy_loss"]) == (2, 3)
        assert metrics["kl"] == (1 if use_loss else 3)  # otherwise it is a mean over tokens already
        assert metrics["ppo_kl"] == 4 and metrics["reward"].tolist() == [1, 2] and metrics["actor_lr"] == 0.1

    def test_of_a_filler_count_for_nothing(self, openrlhfs):
        broken = {name: torch.tensor(math.nan) for name in NUMBERS["metrics"] if name != "actor_lr"}
        openrlhfs(NUMBERS | {"metrics": broken | {"actor_lr": 0.1}, "num_samples": 1.0}, [])
        made = trainer_with(WholeBatchActorTrainer, [MicroBatch(0, True, 4, 2)])
        status = made.training_step(EXPERIENCE, 0.0, 0)
        assert status["metrics"] == dict.fromkeys(broken, 0.0) | {"actor_lr": 0.1}
        assert list(status["metrics"]) == [*broken, "actor_lr"]  # all ranks reduce them in the same order
        assert status["num_samples"] == status["num_action_tokens"] == 0

    @pytest.mark.parametrize(("dynamic", "parts"), [(False, 6), (True, 2)])
    def test_auxiliary_loss_is_a_mean_over_samples(self, openrlhfs, dynamic, parts):
        """DeepSpeed divides the sum of `parts` micro-batches by `parts`: samples of each / samples of the step."""
        seen, plan = [], [MicroBatch(2, False, 5, 3), MicroBatch(1, False, 5, 3), MicroBatch(0, True, 5, 3)]
        openrlhfs(NUMBERS, seen)
        made = trainer_with(WholeBatchActorTrainer, plan, dynamic=dynamic)
        for step in range(3):
            made.training_step(EXPERIENCE, 0.0, step)
        assert [coefficient / parts for coefficient, _ in seen] == pytest.approx([0.5 * 2 / 5, 0.5 * 1 / 5, 0])
        assert made.args.actor.aux_loss_coef == 0.5

    def test_weights_are_averaged_once_an_optimizer_step(self, openrlhfs):
        """OpenRLHF adds one to its count and averages at multiples of its gradient accumulation, which is 3.

        DeepSpeed steps after the same micro-batches, on every rank: also after a filler.
        """
        seen = []
        openrlhfs(NUMBERS, seen)
        parts = ((1, False), (1, True), (1, True), (1, False), (1, False), (0, True))  # the last is a filler
        plan = [MicroBatch(size, last, 4, 2) for size, last in parts]
        made = trainer_with(WholeBatchActorTrainer, plan)
        for step in range(6):
            made.training_step(EXPERIENCE, 0.0, step)
        assert [(count + 1) % 3 == 0 for _, count in seen] == [part.closes for part in plan] == made.marked


class TestAuxiliaryLoss:
    @pytest.mark.parametrize("dynamic", [False, True])
    @pytest.mark.parametrize(("total", "ranks", "size", "accumulated"), [(17, 3, 2, 2), (2, 3, 1, 1), (12, 2, 3, 2)])
    def test_gradient_is_that_of_the_mean_over_samples(self, monkeypatch, total, ranks, size, accumulated, dynamic):
        """A router's balance loss knows no action mask, so a filler's own would pull at the weights.

        OpenRLHF's own training step, with a model whose balance loss is a mean over rows. DeepSpeed divides each
        gradient by the micro-batches of an optimizer step (with dynamic batching by 1) and averages over the ranks.
        """
        monkeypatch.setattr(whole_batch.dist, "get_world_size", lambda group=None: ranks)
        torch.manual_seed(0)
        weight, window = torch.randn(3, dtype=torch.double, requires_grad=True), ranks * size * accumulated
        rows = [torch.randn(len(range(rank, total, ranks)), 3).double() for rank in range(ranks)]
        found: dict[int, torch.Tensor] = {}
        for rank in range(ranks):
            plan = whole_batch.micro_batch_plan(total, len(rows[rank]), ranks, size, window)
            made = trainer_with(WholeBatchActorTrainer, plan, dynamic=dynamic, accumulated=accumulated, total=total)
            made.args.actor.entropy_coef, made.aux_loss, made.ema_model, made.grads = None, True, None, []
            made.actor_loss_fn = PolicyLoss()
            made.actor_optim = None
            made.strategy.ring_attn_group = None
            made.strategy.optimizer_step = lambda *_, **__: None
            made.strategy.get_grad_norm = lambda *_: 0.0
            made.actor_scheduler = SimpleNamespace(get_last_lr=lambda: [0.0])
            made.replay_buffer.dynamic_sample_loss_scale = [1.0] * len(plan)
            made.replay_buffer.dynamic_optimizer_step = [part.closes for part in plan]
            share = 1 if dynamic else accumulated
            taken = 0
            for step, part in enumerate(plan):
                own = rows[rank][taken : taken + part.samples] if part.samples else torch.randn(1, 3).double()
                taken += part.samples
                mask = torch.ones(len(own), 2) * (part.samples > 0)
                experience = Experience(
                    sequences=torch.zeros(len(own), 3), attention_mask=torch.ones(len(own), 3), action_mask=mask,
                    action_log_probs=torch.zeros(len(own), 2), advantages=torch.zeros(len(own), 2),
                )  # fmt: skip
                model = SimpleNamespace(set_gradient_accumulation_boundary=lambda _: None)
                made.actor = ModelWithBalanceLoss(model, (own @ weight).sin().mean(), mask)
                made.strategy.backward = lambda loss, *_, made=made: made.grads.append(
                    torch.autograd.grad(loss, weight)[0]
                )
                made.training_step(experience, 0.0, step, {"dp_size": ranks, "batch_num_tokens": 1.0})
                where = (total - part.step_samples) if part.step_samples < window else step // accumulated * window
                found[where] = found.get(where, 0) + made.grads[-1] / share / ranks
        by_step: dict[int, list[torch.Tensor]] = {}
        for own in rows:
            for number, row in enumerate(own):
                by_step.setdefault(number // (window // ranks) * window, []).append((row @ weight).sin())
        assert found.keys() == by_step.keys()
        for where, terms in by_step.items():
            wanted = torch.autograd.grad(0.5 * torch.stack(terms).mean(), weight)[0]
            assert torch.allclose(found[where].double(), wanted, rtol=1e-5, atol=1e-8)


class ModelWithBalanceLoss:
    """An actor whose log-prob is 0 for every token."""

    def __init__(self, model, balance, mask):
        self.model, self.balance, self.mask = model, balance, mask

    def train(self):
        pass

    def __call__(self, *args, **kwargs):
        return torch.zeros_like(self.mask, requires_grad=True), SimpleNamespace(aux_loss=self.balance)


@pytest.mark.usefixtures("two_ranks")
class TestCriticNumbers:
    @UNHURRIED
    @given(total=st.integers(1, 60), ranks=st.integers(1, 4), size=st.integers(1, 5), accumulated=st.integers(1, 3),
           seed=st.integers(0, 99))  # fmt: skip
    def test_are_means_over_samples_and_steps(self, total, ranks, size, accumulated, seed):
        """Compare OpenRLHF's plain mean of the weighted numbers with the means written out."""
        draw = torch.Generator().manual_seed(seed)
        window = ranks * size * accumulated
        plans = [whole_batch.micro_batch_plan(total, len(range(r, total, ranks)), ranks, size, window)
                 for r in range(ranks)]  # fmt: skip
        logged: list[list[dict]] = [[] for _ in range(ranks)]
        losses, value_sum = {}, 0.0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(whole_batch.dist, "get_world_size", lambda group=None: ranks)
            for rank, plan in enumerate(plans):
                made = trainer_with(WholeBatchCriticTrainer, plan, ranks=ranks, accumulated=accumulated, total=total)
                for step, part in enumerate(plan):
                    loss, value = torch.rand(2, generator=draw).tolist()  # summed loss; mean value
                    if part.samples:
                        where = step // accumulated
                        losses[where] = losses.get(where, 0.0) + loss
                        value_sum += value * part.samples
                    else:
                        loss, value = 0.0, math.nan
                    # OpenRLHF's normaliser: an average micro-batch of a whole step, here with one token a sample
                    raw = {"critic_loss": loss * ranks * accumulated / part.step_samples, "values": value,
                           "critic_lr": 0.1, "critic_grad_norm": 2.0}  # fmt: skip
                    patch.setattr(ppo_critic.CriticPPOTrainer, "training_step", lambda self, *a, raw=raw: dict(raw))
                    logged[rank].append(made.training_step(EXPERIENCE, step))
        mean = {key: sum(row[key] for rows in logged for row in rows) / sum(map(len, logged)) for key in raw}
        step_sizes = [min(window, total - start) for start in range(0, total, window)]
        wanted = sum(losses[n] / count * count / total for n, count in enumerate(step_sizes))
        assert mean["critic_loss"] == pytest.approx(wanted)
        assert mean["values"] == pytest.approx(value_sum / total)
        assert mean["critic_lr"] == pytest.approx(0.1) and mean["critic_grad_norm"] == pytest.approx(2.0)

    def test_of_whole_steps_are_openrlhfs_to_the_last_bit(self, openrlhfs):
        raw = {"critic_loss": 0.1 + 0.2, "values": 1 / 3, "critic_lr": 0.1, "critic_grad_norm": 2.0}
        openrlhfs(raw, [])
        plan = whole_batch.micro_batch_plan(24, 12, 2, 2, 12)
        made = trainer_with(WholeBatchCriticTrainer, plan, accumulated=3, total=24)
        assert [made.training_step(EXPERIENCE, step) for step in range(len(plan))] == [raw] * 6
