"""Responses of one turn, against what OpenRLHF's own engine and executor make of the same generations."""

import asyncio
import itertools
import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from bapo_openrlhf.cpu import stack as cpu

cpu.prepare_environment()
cpu.install()

import torch  # noqa: E402
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator  # noqa: E402
from openrlhf.utils import agent  # noqa: E402
from openrlhf.utils.agent import SingleTurnAgentExecutor  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.logprobs import FlatLogprobs, Logprob  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402

from bapo_openrlhf.training.faster.single_turn import SingleTurn  # noqa: E402
from bapo_openrlhf.training.generate.engines import Engine, RolloutEngine, request_seed  # noqa: E402
from bapo_openrlhf.training.reward.reward_pool import RewardPool  # noqa: E402

SIZE = 3
REWARD = """
def reward_func(queries, prompts, labels):
    size = float(len(queries[0]))
    return {"rewards": size, "scores": size / 2, "extra_logs": {"label": float(labels[0])}}
"""


class Tokenizer:
    """Each character is a token. It notes what it was asked."""

    def __init__(self):
        self.asked, self.decoded = [], []

    def __call__(self, text, add_special_tokens, return_tensors):
        self.asked.append(text)
        return {"input_ids": torch.tensor([[ord(character) for character in text]])}

    def decode(self, tokens, skip_special_tokens):
        assert not skip_special_tokens
        self.decoded.append(list(tokens))
        return "".join(map(chr, tokens))


def response_to(prompt, place):
    """Tokens, log-probs and finish reason of a response: 1, 4, 7 tokens."""
    count = 1 + 3 * place
    tokens = [97 + (sum(prompt) + place * index) % 26 for index in range(count)]
    return tokens, [-0.1 * (index + 1) / (place + 1) for index in range(count)], "length" if place == 1 else "stop"


class Llm:
    """vLLM, which gives the response in the place of a request, or all of them to one request."""

    errored = False

    def __init__(self, gate=None):
        self.asked, self.gate = [], gate
        self.places = {}  # next place of a request for one response, by prompt

    async def generate(self, prompt, params, request_id):
        tokens = prompt["prompt_token_ids"]
        self.asked.append((tokens, params))
        if params.n == 1:
            place = next(self.places.setdefault(tuple(tokens), itertools.count()))
            yield self.output(tokens, place, params, 0, 99, index=0)
            return
        assert params.output_kind == RequestOutputKind.DELTA and params.stream_interval > 10**6
        for place in range(params.n):
            yield self.output(tokens, place, params, 0, 1)
        for place in range(params.n):
            if len(response_to(tokens, place)[0]) > 1:
                if self.gate:
                    await self.gate(place)
                yield self.output(tokens, place, params, 1, 99)

    def output(self, prompt, place, params, start, end, index=None):
        tokens, log_probs, reason = response_to(prompt, place)
        if params.max_tokens < len(tokens):
            tokens, log_probs, reason = tokens[: params.max_tokens], log_probs[: params.max_tokens], "length"
        chosen, given = tokens[start:end], None
        if params.logprobs is not None:
            given = FlatLogprobs() if params.flat_logprobs else []
            for token, value in zip(chosen, log_probs[start:end], strict=True):
                given.append({token: Logprob(value)} | ({1: Logprob(-9.0)} if params.logprobs else {}))
        return SimpleNamespace(
            outputs=[
                SimpleNamespace(
                    index=place if index is None else index,
                    token_ids=chosen,
                    logprobs=given,
                    text="",
                    finish_reason=reason if end >= len(tokens) else None,
                )
            ]
        )


def engine_of(kind, executor, llm=None):
    engine = object.__new__(kind)
    engine.executor, engine.llm, engine._mm_pad_token_ids = executor, llm or Llm(), None
    engine.tokenizer = Tokenizer()
    return engine


def request(prompt="abc", label="7", **more):
    return {"prompt": prompt, "label": label, "images": None, **more}


def theirs(executor, prompts, **shared):
    """What OpenRLHF's own engine makes."""
    engine = engine_of(Engine, executor)

    async def make():
        return [
            await engine.generate_responses(**request(prompt), hf_tokenizer=engine.tokenizer, **shared)
            for prompt in prompts
        ]

    return asyncio.run(make())


def ours(engine, prompts, **shared):
    result = asyncio.run(
        engine.generate_groups([request(prompt, number=place) for place, prompt in enumerate(prompts)], **shared)
    )
    return result if len(prompts) > 1 else [result]


def shared(max_length=30, **sampling):
    given = {"logprobs": 1, "max_tokens": 9} | sampling
    return {"sampling_params": SamplingParams(**given), "max_length": max_length, "num_samples": SIZE}


def assert_equal(response, wanted):
    assert set(response) == {*wanted, "number"}
    for name, value in wanted.items():
        actual = response[name]
        if isinstance(actual, np.ndarray):
            assert actual.dtype == (np.int32 if name == "observation_tokens" else np.float32)
            assert actual.tolist() == torch.tensor(value).tolist()
        else:
            assert actual == value, name


@pytest.mark.parametrize("prompts", [["abc"], ["abc", "defgh"]])
@pytest.mark.parametrize(
    "asked",
    [
        shared(),
        shared(logprobs=None),
        shared(max_tokens=2),
        shared(max_tokens=None),
        shared(max_length=11),  # the prompt loses all but two tokens
        shared() | {"num_samples": 1},
    ],
    ids=["plain", "no log-probs", "cut", "to the end", "long prompt", "one"],
)
@pytest.mark.parametrize("rewarded", ["not", "in the engine", "in processes"])
def test_is_what_openrlhf_makes(tmp_path, prompts, asked, rewarded):
    (tmp_path / "reward.py").write_text(REWARD)
    path = None if rewarded == "not" else str(tmp_path / "reward.py")
    wanted = theirs(SingleTurnAgentExecutor(path), prompts, **asked)
    engine, pool = engine_of(RolloutEngine, SingleTurn(path)), None
    if rewarded == "in processes":
        pool = engine.executor.reward_func = RewardPool(path, processes=2, timeout=60, memory_gib=0.25)
    groups = ours(engine, prompts, **asked)
    if pool is not None:
        pool.close()
    for number, (group, group_wanted) in enumerate(zip(groups, wanted, strict=True)):
        for response, response_wanted in zip(pickle.loads(pickle.dumps(group)), group_wanted, strict=True):
            assert_equal(response, response_wanted)
            assert response["number"] == number
    assert engine.tokenizer.asked == prompts  # each once
    assert len(engine.llm.asked) == len(prompts)
    assert len(engine.tokenizer.decoded) == (0 if path is None else len(prompts) * asked["num_samples"])


def test_samples_are_those_of_openrlhfs_lists():
    generator = object.__new__(SamplesGenerator)
    for asked in (shared(), shared(logprobs=None)):
        (wanted,) = theirs(SingleTurnAgentExecutor(), ["abc"], **asked)
        (group,) = ours(engine_of(RolloutEngine, SingleTurn()), ["abc"], **asked)
        for response, plain in zip(group, wanted, strict=True):
            for length in (30, 5):
                created = generator._process_response_into_experience(response, max_len=length)
                theirs_sample = generator._process_response_into_experience(plain, max_len=length)
                for name, value in vars(theirs_sample).items():
                    actual = getattr(created, name)
                    if isinstance(value, torch.Tensor):
                        assert actual.dtype == value.dtype and torch.equal(actual, value), name
                    else:
                        assert actual == value, name


def test_a_finished_response_does_not_wait_for_the_others():
    rewarded = asyncio.Event()

    async def judge(queries, prompts, labels):
        rewarded.set()
        return [{"rewards": 1.0}]

    async def gate(place):
        await asyncio.wait_for(rewarded.wait(), 60)  # the others go on once the first one has its reward

    executor = SingleTurn()
    executor.reward_endpoints, executor.reward_func, executor._fetch_rewards_via_func = ["reward.py"], print, judge
    (group,) = ours(engine_of(RolloutEngine, executor, Llm(gate)), ["abc"], **shared())
    assert [response["reward"] for response in group] == [1.0] * SIZE


VERDICT = """from __future__ import annotations
import dataclasses

@dataclasses.dataclass
class Verdict:
    right: bool
    kind: dataclasses.KW_ONLY

def reward_func(queries, prompts, labels):
    return {"rewards": [float(Verdict(queries[0] == labels[0]).right / len(prompts[0]))]}
"""


def test_a_reward_file_in_the_engine_is_loaded_as_everywhere_and_its_failures_are_counted(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(VERDICT)
    executor = SingleTurn([str(path)])
    assert executor.reward_endpoints == [str(path)]
    assert asyncio.run(executor._fetch_rewards_via_func(["a"], ["b"], ["a"])) == [{"rewards": [1.0]}]
    for query in "ab":
        with pytest.raises(ZeroDivisionError):
            asyncio.run(executor._fetch_rewards_via_func([query], [""], ["a"]))
    assert executor.failures.kinds == {"raised": 2}
    assert str(executor.failures).endswith(f"reward_func raised ZeroDivisionError: division by zero ({path}:10)")


def test_failures_of_an_endpoint_are_counted(monkeypatch):
    async def no_sleep(seconds): ...

    monkeypatch.setattr(agent.asyncio, "sleep", no_sleep)
    executor = SingleTurn("http://127.0.0.1:1/judge")  # where nobody listens
    with pytest.raises(RuntimeError):
        asyncio.run(executor._fetch_rewards_via_http(["a"], ["b"], ["a"]))
    assert executor.failures.kinds == {"raised": 1}
    text = str(executor.failures)
    assert "no reward came: RuntimeError: Request error for 5 times" in text
    assert text.endswith("(http://127.0.0.1:1/judge)")


def test_responses_with_seeds_have_requests_of_their_own():
    engine = engine_of(RolloutEngine, SingleTurn())
    asked = [request("abc", seed=99, number=4), request("def", seed=100, number=5)]
    groups = asyncio.run(engine.generate_groups(asked, **shared()))
    wanted = [theirs(SingleTurnAgentExecutor(), [prompt], **shared())[0] for prompt in ("abc", "def")]
    for group, group_wanted in zip(groups, wanted, strict=True):
        for response, response_wanted in zip(group, group_wanted, strict=True):
            assert_equal(response, response_wanted)
    seeds = [request_seed(seed, sample) for seed in (99, 100) for sample in range(SIZE)]
    assert [params.seed for _, params in engine.llm.asked] == seeds
    assert {params.n for _, params in engine.llm.asked} == {1}


def test_an_error_of_vllm_comes_through():
    async def gate(place):
        raise FloatingPointError("no number")

    with pytest.raises(FloatingPointError, match="no number"):
        ours(engine_of(RolloutEngine, SingleTurn(), Llm(gate)), ["abc", "def"], **shared())


def test_responses_that_vllm_forgets_are_an_error():
    class Forgetful(Llm):
        async def generate(self, prompt, params, request_id):
            yield self.output(prompt["prompt_token_ids"], 0, params, 0, 1)

    with pytest.raises(RuntimeError, match="did not finish all 3 responses"):
        ours(engine_of(RolloutEngine, SingleTurn(), Forgetful()), ["abc"], **shared())


def test_log_probs_of_other_tokens_are_an_error():
    class Wrong(Llm):
        def output(self, *args, **kwargs):
            created = super().output(*args, **kwargs)
            created.outputs[0].logprobs.token_ids[0] += 1
            return created

    with pytest.raises(RuntimeError, match="not those of the tokens"):
        ours(engine_of(RolloutEngine, SingleTurn(), Wrong()), ["abc"], **shared())
