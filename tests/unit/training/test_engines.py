"""What this project asks of vLLM in each request."""

import asyncio
import os
from types import SimpleNamespace

import pytest
import torch
import vllm
from openrlhf.utils.agent import AgentExecutorBase
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from bapo_openrlhf.training.engine import engines
from bapo_openrlhf.training.engine.engines import RolloutEngine
from bapo_openrlhf.training.engine.single_turn import SingleTurn


class Llm:
    """A stand-in for vLLM that notes its requests, and gives two outputs for each."""

    def __init__(self):
        self.asked = []

    async def generate(self, prompt, params, request_id):
        self.asked.append((prompt, params, request_id))
        yield "an output"
        yield "the last"


class OwnExecutor(AgentExecutorBase):
    async def execute(self, *args, **kwargs): ...


def ask(executor, *, faster=True, pads=None, **sampling):
    engine = object.__new__(RolloutEngine)
    engine.executor, engine.faster, engine._mm_pad_token_ids, engine.llm = executor, faster, pads, Llm()
    given = {"logprobs": 1, "seed": 5, "max_tokens": 7} | sampling
    params = SamplingParams(**given)
    assert asyncio.run(engine.generate([1, 2, 3], params)) == "the last"
    assert params == SamplingParams(**given)  # the caller's own
    ((_, asked, _),) = engine.llm.asked
    assert (asked.seed, asked.max_tokens) == (5, 7)
    assert asked.output_kind == (RequestOutputKind.FINAL_ONLY if faster else RequestOutputKind.CUMULATIVE)
    return asked


@pytest.mark.parametrize("faster", [True, False])
@pytest.mark.parametrize("pads", [None, set(), {7, 8}])
def test_no_response_has_a_part_of_an_image(pads, faster):
    assert ask(OwnExecutor(), faster=faster, pads=pads).logit_bias == ({7: -100, 8: -100} if pads else None)


@pytest.mark.parametrize("images", [None, {"image": ["a picture", "another"]}])
@pytest.mark.parametrize("pads", [None, set(), {7, 8}])
def test_vllm_gets_the_prompt_that_openrlhf_gives_it(images, pads):
    llm = Llm()
    for kind in (RolloutEngine, engines.Engine):
        engine = object.__new__(kind)
        engine.executor, engine._mm_pad_token_ids, engine.llm = OwnExecutor(), pads, llm
        for _ in range(2):
            asyncio.run(engine.generate([1, 7, 7, 7, 2, 8, 8, 3], SamplingParams(max_tokens=4), images))
    (prompt, params, _), *others = llm.asked
    assert [(other, more.n, more.max_tokens) for other, more, _ in others] == [(prompt, params.n, 4)] * 3
    assert len({name for *_, name in llm.asked}) == 4  # a name for each request


@pytest.mark.parametrize("given", [
    {"num_gpus": 1, "remote_rm_url": "http://judge", "seed": 5, "distributed_executor_backend": "uni"},
    {"num_gpus": 0.2, "bundle_indices": [2, 3], "full_determinism": True, "distributed_executor_backend": "ray"},
    {"num_gpus": 1, "mm_pad_token_ids": {4}, "max_logprobs": 1},
])  # fmt: skip
@pytest.mark.parametrize("faster", [True, False])
def test_an_engine_is_made_as_openrlhf_makes_it(monkeypatch, given, faster):
    """But for the class of the executor, and for statistics that nobody reads."""
    ours = made_by(RolloutEngine, monkeypatch, given | {"faster": faster})
    theirs = made_by(engines.Engine, monkeypatch, given)
    executors = [actual.pop("executor") for actual, _ in (ours, theirs)]
    assert type(executors[0]) is SingleTurn and executors[0].endpoints == executors[1].reward_endpoints
    assert ours[0]["llm"].pop("disable_log_stats", False) is faster and theirs[0].pop("kwargs")
    assert ours[0].pop("rewards") is None and ours[1].pop(engines.ENGINE) and ours[0].pop("faster") is faster
    assert ours[1].pop("interrupts") == "blocked"
    assert ours[0]["llm"].pop("ends_with_its_process")
    assert ours == theirs


def made_by(kind, monkeypatch, given):
    """The attributes of an engine that a class made on a machine with GPUs, and the environment that it left."""

    class Llm(dict):
        async def is_sleeping(self):
            self["waited"] = True

    with monkeypatch.context() as patched:
        patched.setattr(vllm, "AsyncEngineArgs", lambda **settings: settings)
        patched.setattr(vllm, "AsyncLLMEngine", SimpleNamespace(from_engine_args=lambda settings: Llm(settings)))
        patched.setattr(engines, "end_with", lambda llm: llm.update(ends_with_its_process=not llm.get("waited")))
        patched.setattr(engines, "leave_to_driver", lambda: os.environ.update(interrupts="blocked"))
        patched.setattr(torch.cuda, "is_available", lambda: False)  # Ray hides the GPUs if workers have their own
        patched.setattr(os, "environ", {"RAY_ADDRESS": "here", "CUDA_VISIBLE_DEVICES": ""})
        engine = object.__new__(kind)
        asyncio.run(kind.__init__(engine, **given))
        return vars(engine), dict(os.environ)


def test_an_engine_loads_the_users_agent_with_this_projects_function(monkeypatch):
    monkeypatch.setattr(engines, "load_agent", lambda path: f"agent of {path}")
    monkeypatch.setattr(engines, "SingleTurn", None)
    given = {"num_gpus": 1, "agent_func_path": "agent.py", "remote_rm_url": "x"}
    result, _ = made_by(RolloutEngine, monkeypatch, given)
    assert result["executor"] == "agent of agent.py"


@pytest.mark.parametrize(("executor", "given", "detokenize", "log_probs", "flat"), [
    (SingleTurn(), {}, False, 0, True),  # only tokens and their log-probs
    (SingleTurn(), {"logprobs": None}, False, None, False),
    (SingleTurn(), {"stop": ["\n"]}, True, 0, True),
    (SingleTurn(), {"faster": False}, True, 1, False),  # as OpenRLHF asks
    (OwnExecutor(), {}, True, 1, False),
])  # fmt: skip
def test_only_what_the_executor_needs_is_made(executor, given, detokenize, log_probs, flat):
    asked = ask(executor, **given)
    assert (asked.detokenize, asked.logprobs, asked.flat_logprobs) == (detokenize, log_probs, flat)
