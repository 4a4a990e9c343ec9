"""What this project asks of vLLM in each request."""

import asyncio

import pytest
from openrlhf.trainer.ray import vllm_engine
from openrlhf.utils.agent import AgentExecutorBase
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from bapo_openrlhf.training import engines
from bapo_openrlhf.training.engines import RolloutEngine
from bapo_openrlhf.training.single_turn import SingleTurn
from bapo_openrlhf.training.user_agent import load_agent


class Stream:
    """A stand-in for vLLM that notes the parameters of each request."""

    def __init__(self):
        self.asked = []

    async def generate(self, prompt, params, request_id):
        self.asked.append(params)
        yield "an output"
        yield "the last"


class OwnExecutor(AgentExecutorBase):
    async def execute(self, *args, **kwargs): ...


def ask(executor, **sampling):
    engine = object.__new__(RolloutEngine)
    engine.executor = executor
    engine._mm_pad_token_ids = None
    engine.llm = Stream()
    given = {"logprobs": 1, "seed": 5, "max_tokens": 7} | sampling
    params = SamplingParams(**given)
    assert asyncio.run(engine.generate([1, 2, 3], params)) == "the last"
    assert params == SamplingParams(**given)  # the caller's own
    (asked,) = engine.llm.asked
    assert (asked.seed, asked.max_tokens) == (5, 7)
    assert asked.output_kind == RequestOutputKind.FINAL_ONLY
    return asked


@pytest.mark.parametrize("images", [None, {"image": ["a picture", "another"]}])
@pytest.mark.parametrize("pads", [None, set(), {7, 8}])
def test_vllm_gets_the_prompt_that_openrlhf_gives_it(images, pads):
    class Llm:
        async def generate(self, prompt, params, request_id):
            prompts.append((prompt, params.n, params.max_tokens))
            yield request_id

    prompts, names = [], []
    for kind in (RolloutEngine, engines.Engine):
        engine = object.__new__(kind)
        engine.executor, engine._mm_pad_token_ids, engine.llm = OwnExecutor(), pads, Llm()
        for _ in range(2):
            names.append(asyncio.run(engine.generate([1, 7, 7, 7, 2, 8, 8, 3], SamplingParams(max_tokens=4), images)))
    assert prompts[0] == prompts[1] == prompts[2] == prompts[3]
    assert len(set(names)) == 4  # a name for each request


def test_openrlhf_loads_user_files_with_this_projects_functions(monkeypatch):
    """While its `__init__` makes the executor. What they do has tests of its own."""
    bound, before = {}, vars(vllm_engine).copy()

    async def init(self, *args, **kwargs):
        bound.update(vars(vllm_engine))

    monkeypatch.setattr(engines.Engine, "__init__", init)
    monkeypatch.setenv(engines.ENGINE, "")
    asyncio.run(RolloutEngine.__init__(object.__new__(RolloutEngine)))
    assert bound["SingleTurnAgentExecutor"] is SingleTurn and bound["_load_agent_executor"] is load_agent
    assert vars(vllm_engine) == before


def test_only_tokens_and_their_log_probs_are_made_for_openrlhfs_executor():
    asked = ask(SingleTurn())
    assert (asked.detokenize, asked.logprobs, asked.flat_logprobs) == (False, 0, True)


def test_no_log_probs_are_made_if_none_are_wanted():
    assert ask(SingleTurn(), logprobs=None).logprobs is None


def test_an_executor_of_the_user_gets_all():
    asked = ask(OwnExecutor())
    assert (asked.detokenize, asked.logprobs, asked.flat_logprobs) == (True, 1, False)


@pytest.mark.parametrize("executor", [OwnExecutor(), SingleTurn()])
def test_stop_strings_need_text(executor):
    assert ask(executor, stop=["\n"]).detokenize
