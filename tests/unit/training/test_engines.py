"""What this project asks of vLLM in each request."""

import asyncio

import pytest
from openrlhf.utils.agent import AgentExecutorBase, SingleTurnAgentExecutor
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from bapo_openrlhf.training.engines import RolloutEngine


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
    params = SamplingParams(logprobs=1, seed=5, max_tokens=7, **sampling)
    assert asyncio.run(engine.generate([1, 2, 3], params)) == "the last"
    assert (params.output_kind, params.detokenize) == (RequestOutputKind.CUMULATIVE, True)  # the caller's own
    (asked,) = engine.llm.asked
    assert (asked.logprobs, asked.seed, asked.max_tokens) == (1, 5, 7)
    assert asked.output_kind == RequestOutputKind.FINAL_ONLY
    return asked


def test_text_is_not_made_for_an_executor_that_reads_tokens():
    assert not ask(SingleTurnAgentExecutor()).detokenize


@pytest.mark.parametrize(
    ("executor", "sampling"), [(OwnExecutor(), {}), (SingleTurnAgentExecutor(), {"stop": ["\n"]})], ids=["own", "stop"]
)
def test_text_is_made_where_it_may_be_read(executor, sampling):
    assert ask(executor, **sampling).detokenize
