"""One episode of the user's agent with a scripted answer, which `check` and `train` play before any model loads."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch
from openrlhf.utils.agent import MultiTurnAgentExecutor

from bapo_openrlhf import user_file
from bapo_openrlhf.launch.apart import Begins, Trial
from bapo_openrlhf.training.engine.user_agent import FLAG, check_response, load_agent

ANSWER = "I do not know."  # what the model says in each turn
EPISODE = f"in an episode with the first prompt in which the model always says {ANSWER!r}"
TURNS = 3  # after which an episode that goes on counts as played
LENGTH = 2**20  # tokens that an episode may have, so that no text is cut


class Enough(BaseException):
    """The agent asked for a turn after the last one. No Exception, because an agent may catch those and try again."""


class ScriptedEngine:
    """A rollout engine that gives the same answer in each turn, and then says that it is the agent's turn again."""

    def __init__(self, tokenizer: Any, answered: Callable[[], None]) -> None:
        self._tokenizer, self._answered, self._turns = tokenizer, answered, 0

    async def generate(self, prompt_token_ids: Any, sampling_params: Any, multi_modal_data: Any = None) -> Any:
        """The answer, in the form of vLLM's output."""
        self._turns += 1
        if self._turns > TURNS:
            raise Enough
        tokens = self._tokenizer(text=ANSWER, add_special_tokens=False, return_tensors="pt")["input_ids"][0].tolist()
        log_probs = [{token: SimpleNamespace(logprob=-1.0)} for token in tokens]
        output = SimpleNamespace(token_ids=tokens, text=ANSWER, finish_reason="stop", logprobs=log_probs)
        self._answered()
        return SimpleNamespace(outputs=[output])


class Letters:
    """A tokenizer whose tokens are bytes. It has what OpenRLHF's own executor asks of a tokenizer."""

    def __call__(self, text: str, **_: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([list(text.encode())])}

    def decode(self, tokens: Any, **_: Any) -> str:
        return bytes(tokens).decode(errors="replace")


def check_agent(args: SimpleNamespace, problem: tuple[str, Any] | None) -> list[str]:
    """Load the agent, and play an episode if there is a problem. Returns a warning if a tokenizer is not here."""
    sampling = None if problem is None else _sampling(args)
    limited = args.verifier.processes and args.adapt.enabled  # otherwise an agent of the run has no limit
    seconds = args.verifier.timeout if limited else None  # between two generations
    trial = Trial(FLAG, args.train.agent_func_path, "the agent", EPISODE, seconds)
    return trial.run(lambda begins: _played(args, problem, sampling, begins))


def _played(args: SimpleNamespace, problem: tuple[str, Any] | None, sampling: Any, begins: Begins) -> list[str]:
    path = args.train.agent_func_path
    executor = load_agent(path)
    if problem is None:
        return []
    execute = type(executor).execute
    tokenizer, model = Letters(), user_file.at_home(args.actor.model_name_or_path)
    if execute is not MultiTurnAgentExecutor.execute:
        if not model.is_dir():
            return [f"{FLAG} is {path}; it was loaded and not tried, because the tokenizer of {model} is not here"]
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=True)
    place = user_file.definition(getattr(getattr(executor, "agent_instance_cls", None), "step", execute))
    begins(place)
    engine = ScriptedEngine(tokenizer, lambda: begins(place))
    arguments = {"prompt": problem[0], "label": problem[1], "images": None, "max_length": LENGTH}
    episode = executor.execute(**arguments, sampling_params=sampling, hf_tokenizer=tokenizer, llm_engine=engine)
    with suppress(Enough):
        check_response(asyncio.run(episode), log_probs=args.adapt.enabled)
    return []


def _sampling(args: SimpleNamespace) -> Any:
    """What vLLM is asked. It is made before a child, because the import takes seconds."""
    logging.disable(logging.WARNING)  # because what vLLM says of this machine as it is imported is no matter here
    from vllm import SamplingParams

    logging.disable(logging.NOTSET)
    rollout = args.rollout
    return SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        max_tokens=rollout.max_new_tokens,
        min_tokens=1,
        skip_special_tokens=False,
        logprobs=1 if args.adapt.enabled else None,
    )
