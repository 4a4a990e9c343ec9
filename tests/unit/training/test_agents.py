"""Agents that answer, hang, block and raise, each run by OpenRLHF's own executor beside a stand-in for the engine."""

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor
from vllm import SamplingParams

from bapo_openrlhf.flags.config import VerifierConfig
from bapo_openrlhf.training.engine import agents
from bapo_openrlhf.training.engine.agents import LimitedAgent, NamedAgent
from bapo_openrlhf.training.engine.engines import RolloutEngine
from bapo_openrlhf.training.engine.reward_pool import RewardPool
from bapo_openrlhf.training.engine.single_turn import SingleTurn
from bapo_openrlhf.training.engine.user_agent import load_agent
from bapo_openrlhf.training.wire.failures import Failures

LIMIT = 1.0  # seconds
RESPONSE = {
    "prompt": "p", "label": "l", "observation_tokens": [1, 2], "action_ranges": [(1, 2)],
    "rollout_log_probs": [0.0, -0.5], "reward": 1.0,
}  # fmt: skip


def tokenizer(text, **_):
    return {"input_ids": torch.tensor([[ord(letter) for letter in text]])}


class Engine:
    """Answers each request with "ab" after `seconds`, and notes the request and its thread."""

    def __init__(self, seconds=0.0):
        self.seconds, self.asked, self.threads = seconds, [], []
        self.llm = SimpleNamespace(errored=False)

    async def generate(self, tokens, params, multi_modal_data=None):
        self.asked.append((list(tokens), params))
        self.threads.append(threading.current_thread())
        await asyncio.sleep(self.seconds)
        log_probs = [{token: SimpleNamespace(logprob=-token / 100)} for token in b"ab"]
        output = SimpleNamespace(token_ids=[*b"ab"], text="ab", finish_reason="stop", logprobs=log_probs)
        return SimpleNamespace(outputs=[output])

    def get_num_unfinished_requests(self):
        return 17


def agent(act):
    """An agent of two turns. `act(label)` is awaited in its second one if it returns something to wait for."""

    class Instance(AgentInstanceBase):
        def __init__(self):
            self.turn = 0

        async def step(self, states):
            self.turn += 1
            waits = act(states["label"]) if self.turn == 2 else None
            if waits is not None:
                await waits
            done = self.turn == 2
            return {"rewards": torch.tensor(0.25), "environment_feedback": "." if done else ";", "done": done}

    return MultiTurnAgentExecutor(Instance)


def response_to(limited, engine, label):
    """What waits for the response for a prompt with this label."""
    params = SamplingParams(max_tokens=4, logprobs=1)
    request = {"prompt": "p", "sampling_params": params, "max_length": 32, "hf_tokenizer": tokenizer}
    return limited.execute(**request, label=label, images=None, llm_engine=engine)


def ask(limited, engine, *labels, later=()):
    """The responses for prompts with these labels, which are asked for together; then those for `later`."""

    async def all_of_them():
        result = []
        for batch in (labels, later):
            result += await asyncio.gather(*(response_to(limited, engine, label) for label in batch))
        return result

    return asyncio.run(asyncio.wait_for(all_of_them(), 60))  # a limit that does not work fails, it does not hang


def run(act, *labels, seconds=0.0):
    limited = LimitedAgent(agent(act), Engine(seconds), LIMIT)
    return ask(limited, limited.engine, *labels), limited, limited.engine


def test_an_agent_that_answers_gives_what_it_gives_openrlhf():
    plain = Engine()
    wanted = ask(agent(lambda label: None), plain, "l")
    threads = []
    actual, limited, engine = run(lambda label: threads.append(threading.current_thread()), "l")
    assert actual == wanted and actual[0]["reward"] == 0.5 and actual[0]["action_ranges"] == [(1, 3), (4, 6)]
    assert [tokens for tokens, _ in engine.asked] == [tokens for tokens, _ in plain.asked]
    assert not limited.failures.kinds
    assert set(engine.threads) == {threading.main_thread()}
    assert [thread.name for thread in threads] == ["agents"]


def test_a_generation_does_not_count():
    (result,), limited, _ = run(lambda label: None, "l", seconds=2 * LIMIT)
    assert result["reward"] == 0.5 and not limited.failures.kinds


def test_an_agent_that_hangs_is_given_up_alone(caplog):
    ended = []

    async def hang():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    (hanging, fine), limited, _ = run(lambda label: hang() if label == "bad" else None, "bad", "good")
    assert (hanging["reward"], fine["reward"]) == (None, 0.5)
    assert limited.failures.kinds == {"timeout": 1} and ended == [True]
    assert "took more than 1 s between two generations for prompt 'p'" in caplog.text and "blocks" not in caplog.text
    begins = limited.executor.agent_instance_cls.step.__code__.co_firstlineno
    assert str(limited.failures).endswith(f"took more than 1 s between two generations ({__file__}:{begins})")
    # What it generated is there to be counted: the prompt, a turn, the feedback, a turn.
    assert bytes(hanging["observation_tokens"]) == b"pab;ab" and hanging["action_ranges"] == [(1, 3), (4, 6)]
    assert len(hanging["rollout_log_probs"]) == 6


def test_an_agent_that_hangs_before_its_first_generation_is_given_up():
    class Hanging(AgentExecutorBase):
        async def execute(self, **request):
            await asyncio.Event().wait()

    limited = LimitedAgent(Hanging(), Engine(), LIMIT)
    (result,) = ask(limited, limited.engine, "l")
    assert (result["reward"], result["observation_tokens"]) == (None, [])
    assert limited.failures.kinds == {"timeout": 1} and not limited.engine.asked


@pytest.fixture
def blocking(monkeypatch):
    """An engine, and an agent that blocks its thread until the test ends if a label is "bad"."""
    monkeypatch.setattr(agents, "BLOCKED", 0.2)
    release, engine = threading.Event(), Engine()

    def block(label):
        if label == "bad":
            release.wait()

    yield engine, LimitedAgent(agent(block), engine, LIMIT)
    release.set()


def test_an_agent_that_blocks_its_thread_does_not_block_the_engine(blocking, caplog):
    engine, limited = blocking
    result = ask(limited, engine, "bad", later=["good", "good"])
    assert [one["reward"] for one in result] == [None, 0.5, 0.5]
    assert limited.failures.kinds == {"timeout": 1} and "blocks its thread" in caplog.text


def test_a_thread_that_was_blocked_ends_after_its_last_response(monkeypatch):
    """That one generates meanwhile. A task that the agent leaves behind is cancelled."""
    monkeypatch.setattr(agents, "BLOCKED", 0.2)
    release, threads, left = threading.Event(), [], []

    def act(label):
        threads.append(threading.current_thread())
        if label == "bad":
            left.append(asyncio.create_task(asyncio.Event().wait()))
            release.wait()

    engine = Engine(3 * LIMIT)
    limited = LimitedAgent(agent(act), engine, LIMIT)

    async def asked():
        last = asyncio.create_task(response_to(limited, engine, "good"))
        await asyncio.sleep(LIMIT / 4)
        engine.seconds = 0.0
        rewards = [(await response_to(limited, engine, "bad"))["reward"]]
        assert threads[0].is_alive() and not last.done()
        release.set()
        rewards += [(await one)["reward"] for one in (last, response_to(limited, engine, "good"))]
        await asyncio.to_thread(threads[0].join, 30)
        return rewards

    assert asyncio.run(asyncio.wait_for(asked(), 60)) == [None, 0.5, 0.5]
    assert threads[0] is threads[1] is not threads[2]
    assert not threads[0].is_alive() and left[0].cancelled()


def test_waiting_for_the_code_of_other_agents_does_not_count():
    """Each takes a third of the limit in its second turn, and all have one thread."""
    result, limited, _ = run(lambda label: time.sleep(LIMIT / 3), *["good"] * 6)
    assert [one["reward"] for one in result] == [0.5] * 6 and not limited.failures.kinds


def test_agents_that_a_blocked_thread_does_not_take_up_are_given_up_too(blocking):
    """One waits for its first turn, and one for what it generated. Neither has a deadline of its own."""
    engine, limited = blocking

    async def later():
        engine.seconds = LIMIT  # it still generates when the thread is blocked
        waits = asyncio.create_task(response_to(limited, engine, "good"))
        await asyncio.sleep(LIMIT / 2)
        engine.seconds = 0.0
        blocks = asyncio.create_task(response_to(limited, engine, "bad"))
        await asyncio.sleep(LIMIT / 4)
        return await asyncio.gather(waits, blocks, response_to(limited, engine, "good"))

    result = asyncio.run(asyncio.wait_for(later(), 60))
    assert [one["reward"] for one in result] == [None] * 3 and limited.failures.kinds == {"timeout": 3}


@pytest.mark.parametrize(
    "error", [ValueError("no"), TimeoutError("no answer"), SystemExit("no"), asyncio.CancelledError("no")], ids=repr
)
def test_an_agent_that_raises_is_given_up_and_its_error_is_in_the_log(error, caplog):
    def fail(label):
        if label == "bad":
            raise error

    result, limited, _ = run(fail, "bad", "good", "bad")
    assert [one["reward"] for one in result] == [None, 0.5, None]
    assert limited.failures.kinds == {"raised": 2}
    assert f"{type(error).__name__}: {error}" in caplog.text and "in fail" in caplog.text


def test_a_failure_names_the_commonest_cause_and_its_line(tmp_path):
    """Also if the error is raised in OpenRLHF, which reads what an agent returns."""
    path = tmp_path / "mine.py"
    path.write_text(
        "from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor\n\n"
        "class AgentInstance(AgentInstanceBase):\n"
        "    def __init__(self): ...\n\n"
        "    async def step(self, states):\n"
        "        return {}[states['label']] if states['label'] != 'n' else None\n\n"
        "class AgentExecutor(MultiTurnAgentExecutor):\n"
        "    def __init__(self): super().__init__(AgentInstance)\n"
    )
    engine = Engine()
    limited = LimitedAgent(load_agent(str(path)), engine, LIMIT)
    ask(limited, engine, "a", "n", "b")
    assert limited.failures.kinds == {"raised": 3}
    assert str(limited.failures).endswith(f"cause, 2 of 3: the agent raised KeyError: 'a' ({path}:7)")
    ask(limited, engine, "n", "n")
    says = str(limited.failures)
    assert "3 of 5: the agent raised Invalid: AgentInstance.step returned None" in says and says.endswith(f"({path}:6)")
    with pytest.raises(RuntimeError) as error:
        ask(NamedAgent(load_agent(str(path))), engine, "a")
    assert type(error.value) is RuntimeError and str(error.value) == f"the agent raised KeyError: 'a' ({path}:7)"


def test_an_executor_that_returns_no_response_is_given_up_and_named():
    class Executor(AgentExecutorBase):
        async def execute(self, *, label, **request):
            return RESPONSE | {"rollout_log_probs": None} if label == "no log-probs" else {}

    engine = Engine()
    limited = LimitedAgent(Executor(), engine, LIMIT)
    assert [one["reward"] for one in ask(limited, engine, "empty", "no log-probs")] == [None, None]
    says, begins = str(limited.failures), f"({__file__}:{Executor.execute.__code__.co_firstlineno})"
    assert "2 of 2: the agent raised Invalid: returned no prompt" in says and says.endswith(begins)
    with pytest.raises(RuntimeError, match="the agent raised Invalid: returned no prompt"):
        ask(NamedAgent(Executor()), engine, "empty")
    assert ask(NamedAgent(Executor()), engine, "no log-probs")[0]["reward"] == 1.0  # OpenRLHF may need none


def test_a_dead_engine_is_no_failure_of_the_agent():
    engine = Engine()

    def die(label):
        engine.llm.errored = True
        raise RuntimeError("the engine is dead")

    limited = LimitedAgent(agent(die), engine, LIMIT)
    with pytest.raises(RuntimeError, match="the engine is dead"):
        ask(limited, engine, "l")
    assert not limited.failures.kinds


def test_each_response_has_parameters_of_its_own():
    """OpenRLHF's executor writes the rest of the length into them, from which another response computes its prompt."""
    given = []

    class Executor(AgentExecutorBase):
        async def execute(self, *, sampling_params, **request):
            given.append(sampling_params.max_tokens)
            sampling_params.max_tokens = 1
            return RESPONSE

    engine = Engine()
    ask(LimitedAgent(Executor(), engine, LIMIT), engine, "l", "l")
    assert given == [4, 4]


def test_a_response_keeps_the_beginning_of_its_observation_beside_a_shorter_one():
    """Without limits and without a seed."""
    lengths = iter((3, 12))

    class Instance(AgentInstanceBase):
        def __init__(self): ...

        async def reset(self, states):
            return {"observation": "abcdefghijkl"[: next(lengths)]}

        async def step(self, states):
            return {"rewards": torch.tensor(1.0), "environment_feedback": "", "done": True}

    engine, asked = object.__new__(RolloutEngine), Engine()
    engine.executor, engine.generate, engine.tokenizer = MultiTurnAgentExecutor(Instance), asked.generate, tokenizer
    params = SamplingParams(max_tokens=4, logprobs=1)
    asyncio.run(engine.generate_responses("p", "l", params, 32, num_samples=2))
    assert [len(tokens) for tokens, _ in asked.asked] == [3, 12]


def test_an_executor_may_keep_the_engine_and_ask_it_from_a_thread_of_its_own():
    class Executor(AgentExecutorBase):
        engine = None

        async def execute(self, *, llm_engine, sampling_params, **request):
            self.engine = self.engine or llm_engine
            work = lambda: asyncio.run(self.engine.generate([1, 2], sampling_params))  # noqa: E731
            output = await asyncio.get_running_loop().run_in_executor(None, work)
            return RESPONSE | {"text": output.outputs[0].text, "left": self.engine.get_num_unfinished_requests()}

    engine = Engine()
    limited = LimitedAgent(Executor(), engine, LIMIT)
    assert ask(limited, engine, "l", "l") == [RESPONSE | {"text": "ab", "left": 17}] * 2
    assert set(engine.threads) == {threading.main_thread()}


@pytest.mark.parametrize(("executor", "processes", "adapted", "limited", "rewards"), [
    (agent(lambda label: None), 4, True, LimitedAgent, LimitedAgent),
    (agent(lambda label: None), 4, False, NamedAgent, type(None)),
    (agent(lambda label: None), 0, True, NamedAgent, type(None)),
    (SingleTurn(), 4, True, SingleTurn, SingleTurn),
    ("reward.py", 4, True, SingleTurn, RewardPool),
    ("reward.py", 0, True, SingleTurn, SingleTurn),
])  # fmt: skip
def test_what_the_engine_limits(tmp_path, executor, processes, adapted, limited, rewards):
    if executor == "reward.py":
        (tmp_path / "reward.py").write_text("def reward_func(queries, prompts, labels): ...")
        executor = SingleTurn(str(tmp_path / "reward.py"))
    engine = object.__new__(RolloutEngine)
    engine.executor, engine.rewards = executor, None
    engine.set_up("the tokenizer", VerifierConfig(processes=processes, timeout=17.0), adapted)
    assert engine.tokenizer == "the tokenizer"
    assert (type(engine.executor), type(engine.rewards)) == (limited, rewards)
    assert engine.reward_failures() == Failures()
    if rewards in (LimitedAgent, RewardPool):
        assert getattr(engine.rewards, "limits", engine.rewards).timeout == 17
    if engine.rewards:
        assert engine.rewards in (engine.executor, getattr(engine.executor, "reward_func", None))
