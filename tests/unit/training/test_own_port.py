"""The port of the workers' process group is chosen early and kept until torch listens on it."""

import socket

import pytest
from torch.distributed import TCPStore

from bapo_openrlhf.host import plain_class
from bapo_openrlhf.training.worker import workers

ACTORS = [
    workers.AdaptedPolicyActor,
    workers.AdaptedCriticActor,
    workers.ReferenceActor,
    workers.RewardActor,
    workers.PlainPolicyActor,
    workers.PlainCriticActor,
]


@pytest.fixture(params=ACTORS, ids=lambda actor: plain_class(actor).__name__)
def worker(request, monkeypatch):
    """A worker of rank 0, made by OpenRLHF's constructor."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")
    return plain_class(request.param)(1, 0, "127.0.0.1", None)


def test_only_torch_can_listen_on_the_port(worker):
    _, port = worker.get_master_addr_port()
    other = socket.socket()  # of a process that sets SO_REUSEADDR only when it listens itself
    with pytest.raises(OSError, match="Address already in use"):
        other.bind(("", port))
    store = TCPStore("127.0.0.1", port, world_size=1, is_master=True)
    store.set("key", "value")
    assert store.get("key") == b"value"
