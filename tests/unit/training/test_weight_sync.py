"""The weight sync in parcels: every engine gets what OpenRLHF's own loop would have sent it, tensor by tensor."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bapo_openrlhf.cpu import stack as cpu

cpu.prepare_environment()
cpu.install()

from openrlhf.trainer.ray import ppo_actor  # noqa: E402

from bapo_openrlhf.training import weight_sync  # noqa: E402
from bapo_openrlhf.training.weight_sync import Parcels, receive  # noqa: E402
from bapo_openrlhf.training.workers import WholeBatchActorTrainer  # noqa: E402


class Remote:
    """A method of a Ray actor that runs at once and returns its result instead of a reference."""

    def __init__(self, method):
        self.remote = method


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
        self.weights, self.messages, self.resets, self.waiting = {}, 0, 0, None
        model = SimpleNamespace(load_weights=self.load)
        self.worker = SimpleNamespace(
            device=torch.device("cpu"),
            model_config=SimpleNamespace(dtype=dtype),
            model_runner=SimpleNamespace(model=model),
            _model_update_group=wire.receiver(),
        )
        self.update_weights = Remote(self.expect)
        self.reset_prefix_cache = Remote(self.reset)

    def load(self, weights):
        self.messages += 1
        for name, weight in weights:
            assert name not in self.weights
            self.weights[name] = weight.clone()
        return set(self.weights)

    def expect(self, pieces, dtype):
        self.waiting = (list(pieces), dtype)
        return self

    def reset(self):
        self.resets += 1
        return None

    def finish(self):
        receive(self.worker, *self.waiting)
        self.waiting = None


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    def get(references):
        for reference in references:
            if isinstance(reference, Engine):
                reference.finish()

    fake = SimpleNamespace(get=get, put=lambda value: value)
    monkeypatch.setattr(weight_sync, "ray", fake)
    monkeypatch.setattr(ppo_actor, "ray", fake)
    monkeypatch.setattr(ppo_actor, "torch_dist_barrier_and_cuda_sync", lambda: None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)


def made_trainer(model, engines, group, *, rank=0, ipc=False, is_vlm=False, prefix_cache=False):
    """The part of OpenRLHF's actor trainer that the sync needs."""
    trainer = object.__new__(WholeBatchActorTrainer)
    trainer.actor = SimpleNamespace(model=SimpleNamespace(module=model), is_vlm=is_vlm)
    vllm = SimpleNamespace(enable_prefix_caching=prefix_cache, sync_with_ray=False)
    ds = SimpleNamespace(zero_stage=2, tensor_parallel_size=1)
    trainer.strategy = SimpleNamespace(args=SimpleNamespace(vllm=vllm, ds=ds))
    trainer.vllm_engines, trainer.use_cuda_ipc = engines, ipc
    if rank == 0:
        trainer._model_update_group = group
    return trainer


def made_model():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3, bias=False))


@pytest.mark.parametrize(("limit", "messages"), [(1 << 20, 1), (4 * 64, 2), (4 * 30, 3), (4, 5)])
def test_openrlhfs_sync_in_parcels(monkeypatch, limit, messages):
    """Tensors of 35, 7, 7, 7 and 21 numbers of 4 bytes, in parcels of so many bytes."""
    monkeypatch.setattr(weight_sync, "PARCEL_BYTES", limit)
    model, wire = made_model(), Wire()
    engines = [Engine(wire), Engine(wire)]
    trainer = made_trainer(model, engines, wire, prefix_cache=True)
    trainer.broadcast_to_vllm()
    for engine in engines:
        assert list(engine.weights) == [name for name, _ in model.named_parameters()]
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(engine.weights[name], parameter.data, rtol=0, atol=0)
        assert engine.resets == 1  # what is not about weights reaches the engine as before
        assert engine.messages == messages
    assert len(wire.sent) == messages
    assert trainer.vllm_engines is engines and trainer._model_update_group is wire


def test_frozen_vision_weights_stay_out():
    model, wire = made_model(), Wire()
    model[0].requires_grad_(False)
    engine = Engine(wire)
    made_trainer(model, [engine], wire, is_vlm=True).broadcast_to_vllm()
    assert list(engine.weights) == ["1.weight", "1.bias", "2.weight"]


@pytest.mark.parametrize("kind", ["other rank", "shared GPU", "through Ray"])
def test_openrlhfs_own_way_elsewhere(kind):
    trainer = made_trainer(
        made_model(),
        ["engine"],
        "the name of a group" if kind == "through Ray" else Wire(),
        rank=1 if kind == "other rank" else 0,
        ipc=kind == "shared GPU",
    )
    before = dict(vars(trainer))
    with weight_sync.in_parcels(trainer):
        assert vars(trainer) == before


def test_nothing_is_sent_after_an_error_and_the_engines_are_back():
    wire = Wire()
    engines = [Engine(wire)]
    trainer = made_trainer(made_model(), engines, wire)
    with pytest.raises(KeyError, match="gather"), weight_sync.in_parcels(trainer):
        trainer.vllm_engines[0].update_weight.remote("w", dtype=torch.float32, shape=(2,))
        trainer._model_update_group.broadcast(torch.ones(2), src=0)
        raise KeyError("gather")
    assert not wire.sent and trainer.vllm_engines is engines and trainer._model_update_group is wire


@given(
    shapes=st.lists(st.lists(st.integers(0, 6), max_size=3), min_size=1, max_size=12),
    halves=st.lists(st.booleans(), min_size=12, max_size=12),
    limit=st.integers(1, 400),
)
def test_any_tensors_arrive_in_parcels_of_the_limit(shapes, halves, limit):
    wire = Wire()
    engine = Engine(wire)
    engine.worker.model_config.dtype = None
    received = {}

    def expect(pieces, dtype):
        engine.worker.model_config.dtype = dtype
        engine.waiting = (pieces, dtype)
        return engine

    engine.update_weights = Remote(expect)
    parcels = Parcels([engine], wire, limit)
    for number, shape in enumerate(shapes):
        tensor = torch.rand(shape).to(torch.bfloat16 if halves[number] else torch.float32)
        received[str(number)] = tensor.clone()
        assert parcels.engines[0].update_weight.remote(str(number), dtype=tensor.dtype, shape=tensor.shape) is None
        parcels.broadcast(tensor, src=0)
        tensor.zero_()  # under ZeRO-3 the gathered tensor is gone
    parcels.send()
    assert list(engine.weights) == list(received)
    for name, tensor in received.items():
        assert engine.weights[name].dtype == tensor.dtype and torch.equal(engine.weights[name], tensor)
    sizes = {tensor.nbytes for tensor in received.values()}
    assert all(flat.nbytes <= limit or flat.nbytes in sizes for flat in wire.sent)


def test_a_large_tensor_is_not_copied():
    places = []
    group = SimpleNamespace(broadcast=lambda tensor, src, stream: places.append(tensor.data_ptr()))
    parcels, tensor = Parcels([], group, 100), torch.ones(30)
    parcels.broadcast(tensor, src=0)
    assert places == [tensor.data_ptr()]


@pytest.mark.parametrize(
    ("dtype", "loads", "message"),
    [
        (torch.bfloat16, True, "float32 in the actor and torch.bfloat16 in vLLM"),
        (torch.float32, False, "none of .* a, b"),
    ],
)
def test_what_the_engine_cannot_take_is_an_error(dtype, loads, message):
    wire = Wire()
    engine = Engine(wire, dtype)
    if not loads:
        engine.worker.model_runner.model.load_weights = lambda weights: set()
    parcels = Parcels([engine], wire, 100)
    for name in "ab":
        parcels.engines[0].update_weight.remote(name, dtype=torch.float32, shape=(2,))
        parcels.broadcast(torch.ones(2), src=0)
    with pytest.raises(RuntimeError, match=message):
        parcels.send()
