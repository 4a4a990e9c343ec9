"""The weight sync in parcels: every engine gets each of the actor's weights once, in either way."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from openrlhf.trainer.ray import ppo_actor
from openrlhf.trainer.ray import utils as ray_utils

from bapo_openrlhf.flags.config import RunConfig
from bapo_openrlhf.training.engine.weight_receipt import borrow, load, receive
from bapo_openrlhf.training.worker import weight_sync
from bapo_openrlhf.training.worker.weight_sync import ParcelActorTrainer, parcels


class Wire:
    """A process group in which the other ranks receive what rank 0 broadcasts."""

    def __init__(self):
        self.sent = []

    def broadcast(self, tensor, src, stream=None):
        assert src == 0
        self.sent.append(tensor.clone())

    def receiver(self):
        """The group of a receiving rank, which gets the tensor that was sent last."""

        def broadcast(tensor, src, stream=None):
            assert (tensor.shape, tensor.dtype) == (self.sent[-1].shape, self.sent[-1].dtype)
            tensor.copy_(self.sent[-1])

        return SimpleNamespace(broadcast=broadcast)


class Engine:
    """An engine with one worker, whose model notes the weights that it gets."""

    def __init__(self, wire, dtype=torch.float32):
        self.weights, self.messages, self.resets, self.waiting = {}, 0, 0, []
        self.worker = SimpleNamespace(
            device=torch.device("cuda", 3),
            model_config=SimpleNamespace(dtype=dtype),
            model_runner=SimpleNamespace(model=SimpleNamespace(load_weights=self.load)),
        )
        if wire:
            self.worker.device, self.worker._model_update_group = torch.device("cpu"), wire.receiver()
        self.update_weights = SimpleNamespace(remote=lambda *given: self.later(receive, given))
        self.borrow_weights = SimpleNamespace(remote=lambda *given: self.later(borrow, given))
        self.reset_prefix_cache = SimpleNamespace(remote=lambda: setattr(self, "resets", self.resets + 1))

    def load(self, weights):
        self.messages += 1
        for name, weight in weights:
            assert name not in self.weights
            self.weights[name] = weight.clone()
        return set(self.weights)

    def later(self, call, given):
        self.waiting.append(lambda: call(self.worker, *given))
        return self

    def finish(self):
        self.waiting.pop()()


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """No Ray and no process group. Memory that is lent to another process stays in this one."""

    def get(references):
        for reference in filter(None, references):
            reference.finish()

    monkeypatch.setattr(weight_sync, "ray", SimpleNamespace(get=get))
    monkeypatch.setattr(weight_sync, "torch_dist_barrier_and_cuda_sync", lambda: None)
    monkeypatch.setattr(weight_sync.dist, "get_rank", lambda: 0)


@pytest.fixture
def two_gpus(monkeypatch):
    """Two ranks on GPUs of their own; an engine's worker on the second. The handle's seventh argument is the GPU."""
    monkeypatch.setattr(weight_sync.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(weight_sync, "get_physical_gpu_id", lambda: "second")
    monkeypatch.setattr(ray_utils, "get_physical_gpu_id", lambda: "second")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def gather(result, handle):
        result[:] = [("first", None), handle]

    monkeypatch.setattr(weight_sync.dist, "all_gather_object", gather)

    def rebuild(tensor, *rest):
        assert rest[5] == 3  # as the engine's process numbers it
        return tensor

    monkeypatch.setattr(weight_sync, "reduce_tensor", lambda flat: (rebuild, (flat, 1, 2, 3, 4, 5, 0, 7)))


def made_trainer(model, engines, group, *, ipc=False, is_vlm=False, prefix_cache=False, with_ray=False, faster="all"):
    """The part of OpenRLHF's actor trainer that the sync needs."""
    trainer = object.__new__(ParcelActorTrainer)
    trainer.actor = SimpleNamespace(model=SimpleNamespace(module=model), is_vlm=is_vlm)
    vllm = SimpleNamespace(enable_prefix_caching=prefix_cache, sync_with_ray=with_ray)
    ds = SimpleNamespace(zero_stage=2, tensor_parallel_size=1)
    trainer.strategy = SimpleNamespace(args=SimpleNamespace(vllm=vllm, ds=ds, run=RunConfig(faster=[faster])))
    trainer.vllm_engines, trainer.use_cuda_ipc, trainer._model_update_group = engines, ipc, group
    return trainer


def made_model():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3, bias=False))


def assert_has_all(engine, model):
    assert list(engine.weights) == [name for name, _ in model.named_parameters()]
    assert all(torch.equal(engine.weights[name], parameter.data) for name, parameter in model.named_parameters())


@pytest.fixture
def three_parcels(monkeypatch):
    """Tensors of 35, 7, 7, 7 and 21 numbers of 4 bytes come in three parcels."""
    monkeypatch.setattr(weight_sync, "PARCEL_BYTES", 4 * 30)


def test_broadcast(three_parcels):
    model, wire = made_model(), Wire()
    engines = [Engine(wire), Engine(wire)]
    made_trainer(model, engines, wire, prefix_cache=True).broadcast_to_vllm()
    for engine in engines:
        assert_has_all(engine, model)
        assert engine.resets == 1 and engine.messages == 3
    assert len(wire.sent) == 3


def test_engines_on_the_same_gpus_open_the_parcels(two_gpus, three_parcels):
    model, engine = made_model(), Engine(None)
    made_trainer(model, [engine], None, ipc=True).broadcast_to_vllm()
    assert_has_all(engine, model)
    assert engine.resets == 0 and engine.messages == 3


@pytest.mark.parametrize("ipc", [False, True])
def test_other_ranks_call_no_engine(monkeypatch, two_gpus, ipc):
    """They gather each weight, and lend parcels if they share a GPU with an engine."""
    monkeypatch.setattr(weight_sync.dist, "get_rank", lambda: 1)
    gathered = []
    monkeypatch.setattr(
        ParcelActorTrainer, "_gathering", lambda self, weight: gathered.append(weight) or torch.no_grad()
    )
    model, lent = made_model(), []
    monkeypatch.setattr(weight_sync, "reduce_tensor", lambda flat: lent.append(flat.numel()))
    made_trainer(model, ["no engine"], None, ipc=ipc, prefix_cache=True).broadcast_to_vllm()
    assert [id(weight) for weight in gathered] == [id(weight) for weight in model.parameters()]
    assert lent == ([77] if ipc else [])


def test_frozen_vision_weights_stay_out():
    model, wire = made_model(), Wire()
    model[0].requires_grad_(False)
    engine = Engine(wire)
    made_trainer(model, [engine], wire, is_vlm=True).broadcast_to_vllm()
    assert list(engine.weights) == ["1.weight", "1.bias", "2.weight"]


@pytest.mark.parametrize("how", [{"with_ray": True}, {"faster": "requests"}])
def test_through_ray_or_if_asked_it_is_openrlhfs(monkeypatch, how):
    called = []
    monkeypatch.setattr(ppo_actor.ActorPPOTrainer, "broadcast_to_vllm", lambda self: called.append(self))
    trainer = made_trainer(made_model(), ["engine"], "the name of a group", **how)
    trainer.broadcast_to_vllm()
    assert called == [trainer]


@given(
    shapes=st.lists(st.lists(st.integers(0, 6), max_size=3), min_size=1, max_size=12),
    halves=st.lists(st.booleans(), min_size=12, max_size=12),
    limit=st.integers(1, 400),
)
def test_any_tensors_are_in_parcels_of_the_limit(shapes, halves, limit):
    sent = {
        str(n): torch.rand(shape).to(torch.bfloat16 if halves[n] else torch.float32) for n, shape in enumerate(shapes)
    }

    def gathered():
        for name, tensor in sent.items():
            whole = tensor.clone()
            yield name, whole
            whole.zero_()  # under ZeRO-3 the gathered tensor is gone

    engine, sizes = Engine(Wire()), {tensor.nbytes for tensor in sent.values()}
    for pieces, flat in parcels(gathered(), limit):
        assert flat.nbytes <= limit or flat.nbytes in sizes
        engine.worker.model_config.dtype = flat.dtype
        load(engine.worker, pieces, flat)
    assert list(engine.weights) == list(sent)
    for name, tensor in sent.items():
        assert engine.weights[name].dtype == tensor.dtype and torch.equal(engine.weights[name], tensor)


def test_a_large_tensor_is_not_copied():
    tensor = torch.ones(30)
    ((_, flat),) = parcels([("large", tensor)], 100)
    assert flat.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(("dtype", "loads", "message"), [
    (torch.bfloat16, True, "float32 in the actor and torch.bfloat16 in vLLM"),
    (torch.float32, False, "none of .* a, b"),
])  # fmt: skip
def test_what_the_engine_cannot_take_is_an_error(dtype, loads, message):
    engine = Engine(Wire(), dtype)
    if not loads:
        engine.worker.model_runner.model.load_weights = lambda weights: set()
    (parcel,) = parcels([(name, torch.ones(2)) for name in "ab"], 100)
    with pytest.raises(RuntimeError, match=message):
        load(engine.worker, *parcel)
