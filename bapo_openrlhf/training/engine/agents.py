"""Runs the user's agent (`--train.agent_func_path`) beside the rollout engine, with a time limit.

OpenRLHF runs an agent in the event loop of its rollout engine, where a call that blocks would stop the whole engine.
Here agents run in a thread with an event loop of its own. An agent that raises an error, or whose code takes longer
than allowed between two generations, is given up: its response has no reward, so its group is left out. Waiting for the
code of other agents does not count.
"""

import asyncio
import threading
import traceback
from collections.abc import Coroutine
from contextlib import suppress
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from openrlhf.utils.agent import AgentExecutorBase, MultiTurnAgentExecutor
from openrlhf.utils.logging_utils import init_logger

from bapo_openrlhf import user_file
from bapo_openrlhf.errors import one_line
from bapo_openrlhf.host import extends
from bapo_openrlhf.training.engine.reward_worker import Invalid
from bapo_openrlhf.training.engine.user_agent import check_response
from bapo_openrlhf.training.wire.failures import Failures

logger = init_logger(__name__)

BLOCKED = 1.0  # seconds after which an event loop that does not answer counts as blocked


@dataclass(eq=False)
class _Progress:
    """What one response has generated so far, and the deadline of the code that runs between its generations."""

    deadline: asyncio.Timeout
    engine: asyncio.AbstractEventLoop  # in which the deadline is set
    agents: asyncio.AbstractEventLoop  # in which its code runs
    generations: int = 0  # that are going on
    tokens: list[int] = field(default_factory=list)
    ranges: list[tuple[int, int]] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def end_in(self, seconds: float | None) -> None:
        """Set the deadline, or none, unless the response has ended or still generates."""
        with suppress(RuntimeError):  # it has ended
            if not self.generations:
                self.deadline.reschedule(None if seconds is None else self.engine.time() + seconds)


_progress: ContextVar[_Progress | None] = ContextVar("_progress", default=None)  # of the response of this task


class _Engine:
    """The rollout engine as agents see it. Each of their generations stops the clock of its response."""

    def __init__(self, engine: Any, loop: asyncio.AbstractEventLoop, timeout: float) -> None:
        self._engine, self._loop, self._timeout = engine, loop, timeout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, prompt_token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """Generate in the engine's own event loop."""
        work = self._generate(prompt_token_ids, *args, **kwargs)
        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        finally:
            _end_in(self._timeout)

    async def _generate(self, prompt_token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        response = _progress.get()
        if response is None:  # a thread of the agent's own asks, so it is not known for which response
            return await self._engine.generate(prompt_token_ids, *args, **kwargs)
        response.deadline.reschedule(None)
        response.generations += 1
        try:
            output = await self._engine.generate(prompt_token_ids, *args, **kwargs)
        finally:
            response.generations -= 1
        response.tokens = [*prompt_token_ids, *output.outputs[0].token_ids]
        response.ranges.append((len(prompt_token_ids), len(response.tokens)))
        return output


def _end_in(seconds: float | None) -> None:
    """Set the deadline of the response whose code calls this, if that is known, or none."""
    if (response := _progress.get()) is not None:
        response.engine.call_soon_threadsafe(response.end_in, seconds)


async def _outcome(work: Coroutine[Any, Any, Any], seconds: float) -> Any:
    """What the work returns or raises. An error that crosses threads may lose its traceback, so it is returned."""
    _end_in(seconds)
    try:
        return await work
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        return error
    finally:
        _end_in(None)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run an event loop until it is stopped. Then cancel its tasks and close it."""
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.get_loop().run_forever()


async def _answers(loop: asyncio.AbstractEventLoop, seconds: float) -> bool:
    """Whether the event loop of another thread answers in time."""
    try:
        async with asyncio.timeout(seconds):
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop))
    except TimeoutError:
        return False
    return True


class NamedAgent(AgentExecutorBase):
    """The user's agent executor without limits. An error ends the run, and has the agent's file and line."""

    def __init__(self, executor: AgentExecutorBase) -> None:
        self.executor = executor

    @extends(AgentExecutorBase)
    async def execute(self, **request: Any) -> dict[str, Any]:
        """The agent's response.

        Raises:
            RuntimeError: The agent raised an error. Another class could be one that other processes do not know.
        """
        try:
            result = await self.executor.execute(**request)
            check_response(result, log_probs=False)
            return result
        except Exception as error:
            raise RuntimeError(f"the agent raised {user_file.described(error)}") from error


class LimitedAgent(AgentExecutorBase):
    """The user's agent executor, with a limit on the time that its code takes between two generations.

    The limit also holds before the first generation, and after the last one. `failures` counts the responses that were
    given up, as "timeout" or "raised".
    """

    def __init__(self, executor: AgentExecutorBase, engine: Any, timeout: float) -> None:
        self.executor, self.engine, self.timeout = executor, engine, timeout
        self.failures = Failures()
        self._proxy: _Engine | None = None  # the same for all responses, because an executor may keep the first one
        self._loop: asyncio.AbstractEventLoop | None = None
        self._responses: set[_Progress] = set()
        self._tasks: set[asyncio.Task] = set()  # that give up the agents of a blocked thread

    @extends(AgentExecutorBase)
    async def execute(self, *, sampling_params: Any, llm_engine: Any, **request: Any) -> dict[str, Any]:
        """The agent's response; a response without a reward if the agent is given up.

        Raises:
            Exception: What the agent raised, if the engine is dead.
        """
        if self._proxy is None:
            self._proxy = _Engine(self.engine, asyncio.get_running_loop(), self.timeout)
        loop = self._agents_loop()
        # Each response has its own parameters, because OpenRLHF's executor changes them after each turn.
        work = self.executor.execute(sampling_params=deepcopy(sampling_params), llm_engine=self._proxy, **request)
        response = _Progress(asyncio.timeout(None), asyncio.get_running_loop(), loop)
        _progress.set(response)  # the tasks of this response inherit it, also in the other thread
        self._responses.add(response)
        try:
            try:
                async with response.deadline:
                    future = asyncio.run_coroutine_threadsafe(_outcome(work, self.timeout), loop)
                    outcome = await asyncio.wrap_future(future)
                    if not isinstance(outcome, BaseException):
                        check_response(outcome, log_probs=True)
                        return outcome
            except (TimeoutError, Invalid) as error:
                outcome = error
            if self.engine.llm.errored:
                raise outcome
            await self._count(outcome, response.deadline.expired(), request["prompt"], loop)
        finally:
            self._responses.remove(response)
            response.ended.set()
        return {
            "prompt": request["prompt"],
            "label": request["label"],
            "images": request.get("images"),
            "reward": None,
            "observation_tokens": response.tokens,
            "action_ranges": response.ranges,
            "rollout_log_probs": [0.0] * len(response.tokens),
        }

    async def _count(self, error: BaseException, late: bool, prompt: str, loop: asyncio.AbstractEventLoop) -> None:
        """Count and log a response that was given up. If its code blocks all others, the next ones get a new thread."""
        has_turns = isinstance(self.executor, MultiTurnAgentExecutor)
        function = self.executor.agent_instance_cls.step if has_turns else self.executor.execute
        if not late:
            self.failures.add("raised", f"the agent raised {one_line(error)}", user_file.place(error, function))
            message = "".join(traceback.format_exception(error)[-4:]).rstrip()
            logger.warning(f"the agent raised an error for prompt {prompt!r}:\n{message}")
            return
        message = f"the agent took more than {self.timeout:g} s between two generations"
        self.failures.add("timeout", message, user_file.definition(function))
        logger.warning(f"{message} for prompt {prompt!r}")
        if not await _answers(loop, BLOCKED) and self._loop is loop:
            self._loop = None
            logger.warning("the agent blocks its thread, and with it all agents there: it should await instead")
            task = asyncio.create_task(self._give_up_all(loop))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _give_up_all(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give up the agents of a thread if it stays blocked, and end the thread after the last one.

        Those that it has not taken up have no time limit yet.
        """
        responses = [response for response in self._responses if response.agents is loop]
        try:
            if not await _answers(loop, self.timeout):
                for response in responses:
                    response.generations = 0
                    response.end_in(0)
            for response in responses:
                await response.ended.wait()
        finally:
            loop.call_soon_threadsafe(loop.stop)

    def _agents_loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the agents, in a thread of its own."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_serve, args=[self._loop], name="agents", daemon=True).start()
        return self._loop
