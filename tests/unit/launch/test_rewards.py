"""A reward server is asked once before any model loads."""

import json
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace

import pytest

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.launch import rewards
from bapo_openrlhf.launch.rewards import check_reward_servers

PROBLEM = ("1+1=", "2")
GOOD = json.dumps({"rewards": [0.5], "scores": [1.0], "extra_logs": {"length": [3]}})


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Starts a server with one answer. It returns the address; `requests` of the function has what was asked."""
    servers = []

    def start(body: str = GOOD, status: int = 200, kind: str = "application/json", seconds: float = 0) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                start.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                time.sleep(seconds)
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_: object) -> None: ...

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/get_reward"

    start.requests = []
    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("sent", [False, True])
def test_each_is_asked_once_as_a_run_asks(serve, sent):
    """What it cannot find without the responses is said unless it gets them."""
    first, second = serve(), serve()
    args = SimpleNamespace(
        reward=SimpleNamespace(remote_url=[first, second, first]),
        train=SimpleNamespace(agent_func_path=None),
        verifier=SimpleNamespace(send_responses=sent),
    )
    assert rewards.check_reward(args, PROBLEM, ["what it cannot find"]) == ["what it cannot find"] * (not sent)
    more = {"responses": [""]} if sent else {}
    assert serve.requests == [{"query": ["1+1="], "prompts": ["1+1="], "labels": ["2"], **more}] * 2


def test_none_is_asked_without_a_problem(serve):
    assert check_reward_servers([serve(status=404)], None, send_responses=False) == []
    assert serve.requests == []


@pytest.mark.parametrize(("answer", "error"), [
    ({"status": 404}, "404 Not Found"),
    ({"kind": "text/html"}, "text/html"),
    ({"body": "{"}, "JSONDecodeError"),
    ({"body": '{"score": 1}'}, "{'score': 1}"),
    ({"body": '{"rewards": [NaN]}'}, "rewards = [nan]"),
    ("http://", "Inval"),  # an address of no use
    ("http://host:port/x", "Inval"),
])  # fmt: skip
def test_an_answer_of_no_use_is_an_error(serve, answer, error):
    endpoint = serve(**answer) if isinstance(answer, dict) else answer
    with pytest.raises(ConfigError) as raised:
        check_reward_servers([endpoint], PROBLEM, send_responses=False)
    assert str(raised.value).startswith(f"reward.remote_url is {endpoint}; ") and error in str(raised.value)


def test_a_label_that_is_no_json_is_an_error(serve):
    with pytest.raises(ConfigError, match="TypeError: Object of type object is not JSON serializable"):
        check_reward_servers([serve()], ("1+1=", object()), send_responses=False)


def test_one_that_does_not_answer_yet_is_a_warning(serve, monkeypatch):
    monkeypatch.setattr(rewards, "SECONDS", 3.0)
    refuses = "http://127.0.0.1:9/get_reward"  # nothing listens at this port
    loads, slow, good = serve(status=503), serve(seconds=60), serve()
    warnings = check_reward_servers([refuses, loads, slow, good], PROBLEM, send_responses=False)
    causes = {refuses: "Cannot connect to host", loads: "503", slow: "TimeoutError"}
    for text, (url, cause) in zip(warnings, causes.items(), strict=True):
        assert text.startswith(f"reward.remote_url is {url}; ") and cause in text
