"""When a run starts a Ray of its own, and what it then sets. tests/stack/test_own_ray.py starts one for real."""

import os
import signal

import pytest
import ray
from ray._raylet import AuthenticationTokenLoader, Config

from bapo_openrlhf.training.driver import own_ray
from bapo_openrlhf.training.driver.own_ray import MODE, TOKEN, connect, token
from bapo_openrlhf.training.wire.signals import NUMBERS


@pytest.fixture
def ray_start(monkeypatch, tmp_path):
    """What `ray.init` got, and which signals were blocked meanwhile. Nobody has a token yet."""
    calls = []
    for name in (MODE, TOKEN, "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    AuthenticationTokenLoader.instance().reset_cache()
    blocked = lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [])  # noqa: E731
    monkeypatch.setattr(ray, "init", lambda **given: calls.append((given, blocked())))
    monkeypatch.setattr(own_ray, "get_ray_address_from_environment", lambda *_: os.environ.get("RAY_ADDRESS"))
    yield calls
    monkeypatch.undo()
    AuthenticationTokenLoader.instance().reset_cache()
    Config.initialize("")


@pytest.mark.parametrize("address", [None, "local"])
def test_a_ray_of_its_own_asks_for_a_token_and_blocks_signals(ray_start, monkeypatch, address):
    connect(address, num_cpus=2)
    [(given, blocked)] = ray_start
    assert given == {"address": "local", "num_cpus": 2}
    assert blocked >= {*NUMBERS} and not signal.pthread_sigmask(signal.SIG_BLOCK, []) & {*NUMBERS}
    assert token()[MODE] == "token" and len(token()[TOKEN]) >= 32
    assert AuthenticationTokenLoader.instance().get_raw_token(False) == token()[TOKEN]
    first = token()
    connect()
    assert token() == first  # a second one in this process
    monkeypatch.delenv(TOKEN)
    AuthenticationTokenLoader.instance().reset_cache()
    connect()
    assert token()[TOKEN] != first[TOKEN]  # another run


@pytest.mark.parametrize("variable", [MODE, TOKEN, "file"])
def test_what_the_user_has_decided_stays(ray_start, monkeypatch, tmp_path, variable):
    if variable == "file":
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("mine" * 8)
    else:
        monkeypatch.setenv(variable, "disabled" if variable == MODE else "mine" * 8)
    AuthenticationTokenLoader.instance().reset_cache()
    connect()
    assert token() == {
        MODE: {MODE: "disabled"}, TOKEN: {MODE: "token", TOKEN: "mine" * 8}, "file": {MODE: "token"},
    }[variable]  # fmt: skip


@pytest.mark.parametrize("how", ["variable", "argument"])
def test_a_ray_that_is_there_is_joined_as_it_is(ray_start, monkeypatch, how):
    if how == "variable":
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.7:6379")
        connect(num_cpus=2)
    else:
        connect("10.0.0.7:6379", num_cpus=2)
    [(given, blocked)] = ray_start
    assert given == {"address": "10.0.0.7:6379", "num_cpus": 2} and not blocked & {*NUMBERS} and token() == {}
