"""Responses of one turn, against what OpenRLHF's own engine and executor make of the same generations."""

import asyncio
import itertools
import pickle
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from openrlhf.utils.agent import SingleTurnAgentExecutor
from PIL import Image
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.sampling_params import RequestOutputKind

from bapo_openrlhf.flags.config import VerifierConfig
from bapo_openrlhf.training.engine import reward_server
from bapo_openrlhf.training.engine.engines import Engine, RolloutEngine, request_seed
from bapo_openrlhf.training.engine.reward_pool import RewardPool
from bapo_openrlhf.training.engine.single_turn import SingleTurn
from bapo_openrlhf.training.wire.responses import STOPPED, Prefix

SIZE = 3
REWARD = """
def reward_func(queries, prompts, labels):
    size = float(len(queries[0]))
    return {"rewards": size, "scores": size / 2, "extra_logs": {"label": float(labels[0])}}
"""
NONE = {"reward": None, "scores": None, "extra_logs": {}}  # the verdict of a call that failed


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
        self.asked, self.images, self.gate = [], [], gate
        self.places = {}  # next place of a request for one response, by prompt

    async def generate(self, prompt, params, request_id):
        tokens = prompt["prompt_token_ids"]
        self.asked.append((tokens, params))
        self.images.append(prompt.get("multi_modal_data", {}).get("image"))
        if params.n == 1:
            place = next(self.places.setdefault(tuple(tokens), itertools.count()))
            yield self.output(tokens, place, params, 0, 99, index=0)
            return
        assert params.output_kind == RequestOutputKind.DELTA and params.stream_interval > 10**6
        for place in range(params.n):
            yield self.output(tokens, place, params, 0, 1)
        for place in range(params.n):
            if min(len(self.response(tokens, place)[0]), params.max_tokens) > 1:
                if self.gate:
                    await self.gate(place)
                yield self.output(tokens, place, params, 1, 99)

    def response(self, prompt, place):
        return response_to(prompt, place)

    def output(self, prompt, place, params, start, end, index=None):
        tokens, log_probs, reason = self.response(prompt, place)
        if params.max_tokens < len(tokens):
            tokens, log_probs, reason = tokens[: params.max_tokens], log_probs[: params.max_tokens], "length"
        chosen, given = tokens[start:end], None
        if params.logprobs is not None:
            given = FlatLogprobs() if params.flat_logprobs else []
            for token, value in zip(chosen, log_probs[start:end], strict=True):
                given.append({token: Logprob(value)} | ({1: Logprob(-9.0)} if params.logprobs else {}))
        part = SimpleNamespace(
            index=place if index is None else index,
            token_ids=chosen,
            logprobs=given,
            text="",
            finish_reason=reason if end >= len(tokens) else None,
        )
        return SimpleNamespace(outputs=[part])


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
    make = partial(engine.generate_responses, hf_tokenizer=engine.tokenizer, **shared)
    return [asyncio.run(make(**request(prompt))) for prompt in prompts]


def ours(engine, prompts, **shared):
    result = asyncio.run(engine.generate_groups([request(prompt) for prompt in prompts], **shared))
    return result if len(prompts) > 1 else [result]


def shared(max_length=30, **sampling):
    given = {"logprobs": 1, "max_tokens": 9} | sampling
    return {"sampling_params": SamplingParams(**given), "max_length": max_length, "num_samples": SIZE}


def assert_equal(responses, all_wanted):
    for response, wanted in zip(responses, all_wanted, strict=True):
        assert set(response) == {*wanted}
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
        pool = engine.executor.reward_func = RewardPool(path, VerifierConfig(processes=2, timeout=60, memory_gib=0.25))
    groups = ours(engine, prompts, **asked)
    if pool is not None:
        pool.close()
    for group, group_wanted in zip(groups, wanted, strict=True):
        assert_equal(pickle.loads(pickle.dumps(group)), group_wanted)
    assert engine.tokenizer.asked == prompts  # each once
    assert len(engine.llm.asked) == len(prompts)
    assert len(engine.tokenizer.decoded) == (0 if path is None else 2 * len(prompts) * asked["num_samples"])


@pytest.mark.parametrize("seed", [None, 99, 0])
@pytest.mark.parametrize("long", [False, True])
def test_one_response_a_request_is_what_openrlhf_makes(tmp_path, long, seed):
    """Without `requests` among `run.faster`. The function also gets what the model wrote."""
    (tmp_path / "reward.py").write_text(REWARD)
    written = REWARD.replace("labels):", "labels, **more):")
    (tmp_path / "written.py").write_text(written.replace("float(labels[0])", "float(len(more['responses'][0]))"))
    asked = shared(max_length=11) if long else shared()
    (wanted,) = theirs(SingleTurnAgentExecutor(str(tmp_path / "reward.py")), ["abc"], **asked)
    engine = engine_of(RolloutEngine, SingleTurn(str(tmp_path / "written.py")))
    making = engine.generate_responses(**request("abc"), hf_tokenizer=engine.tokenizer, seed=seed, **asked)
    for response, other in zip(asyncio.run(making), wanted, strict=True):
        start, end = other["action_ranges"][0]
        assert response == other | {"extra_logs": {"label": end - start}}
    seeds = [None if seed is None else request_seed(seed, sample) for sample in range(SIZE)]
    assert [params.seed for _, params in engine.llm.asked] == seeds
    assert asked["sampling_params"].seed is None  # as it was given


def test_a_finished_response_does_not_wait_for_the_others():
    rewarded = asyncio.Event()

    async def judge(query, prompt, label, response):
        rewarded.set()
        return {"rewards": 1.0}

    async def gate(place):
        await asyncio.wait_for(rewarded.wait(), 60)  # the others go on once the first one has its reward

    executor = SingleTurn()
    executor.endpoints, executor.reward_func, executor.by_function = ["reward.py"], print, judge
    (group,) = ours(engine_of(RolloutEngine, executor, Llm(gate)), ["abc"], **shared())
    assert [response["reward"] for response in group] == [1.0] * SIZE


def test_a_function_in_the_engine_is_checked_and_its_failures_are_counted(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(
        "def reward_func(queries, prompts, labels):\n"
        "    return {labels[0]: [float((queries[0] == 'a') / len(prompts[0]))]}\n"
    )
    executor = SingleTurn([str(path)])
    right = asyncio.run(executor.by_function("a", "b", "rewards", ""))
    assert right == {"rewards": 1.0, "scores": 1.0, "extra_logs": {}}
    judged = asyncio.run(executor.judged(Tokenizer(), [97], [], "a", "reward"))
    assert judged == NONE
    assert str(executor.failures).endswith(f"({path}:1)")  # it returned no rewards
    for query in "ab":
        with pytest.raises(ZeroDivisionError):
            asyncio.run(executor.by_function(query, "", "rewards", ""))
    assert executor.failures.kinds == {"invalid": 1, "raised": 2}
    assert str(executor.failures).endswith(f"2 of 3: reward_func raised ZeroDivisionError: division by zero ({path}:2)")


def test_failures_of_an_endpoint_are_counted(monkeypatch):
    async def no_sleep(seconds): ...

    monkeypatch.setattr(reward_server.asyncio, "sleep", no_sleep)
    executor = SingleTurn("http://127.0.0.1:1/judge")  # where nobody listens
    with pytest.raises(RuntimeError):
        asyncio.run(executor.by_server("a", "b", "a", ""))
    assert executor.failures.kinds == {"raised": 1}
    text = str(executor.failures)
    assert "ClientConnectorError" in text and "asked 5 times" in text and text.endswith("(http://127.0.0.1:1/judge)")


@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize("bad", [{"score": 1}, {"rewards": ["0.5"]}])
def test_an_answer_of_a_server_is_checked_as_that_of_a_function(monkeypatch, bad, sent):
    """serve_rm.py answers with lists of one entry. Real servers are asked in tests/unit/launch/test_rewards.py."""
    full = {"rewards": [0.25], "scores": [0.5], "extra_logs": {"dummy_scores": [0.75]}}
    asked, answers = [], [bad, full, bad, {"rewards": [0.5]}]

    async def answer_of(*request):
        asked.append(request)
        return answers[len(asked) - 1]

    monkeypatch.setattr(reward_server, "answer_of", answer_of)
    executor = SingleTurn("http://judge/")
    executor.send_responses = sent
    judged = [asyncio.run(executor.judged(Tokenizer(), [97, 98], [99], "AB", "7")) for _ in answers]
    plain = {"reward": 0.5, "scores": 0.5, "extra_logs": {}}
    assert judged == [NONE, {"reward": 0.25, "scores": 0.5, "extra_logs": {"dummy_scores": 0.75}}, NONE, plain]
    request = {"query": ["abc"], "prompts": ["AB"], "labels": ["7"], **({"responses": ["c"]} if sent else {})}
    assert asked == [("http://judge/", request)] * 4
    text = str(executor.failures)
    assert "2 x invalid" in text and str(bad.get("rewards", bad)) in text and text.endswith("(http://judge/)")


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


class Processor(Tokenizer):
    """It makes a token and a tensor of each image."""

    image_processor = True

    def __call__(self, text, images=None, **options):
        if images is None:
            return super().__call__(text, **options)
        encoded = super().__call__(text[0], **options)["input_ids"]
        marks = torch.full((1, len(images)), 7)
        return {"input_ids": torch.cat([marks, encoded], dim=1), "pixel_values": torch.full((len(images), 3), 0.5)}


def test_a_prompt_with_images_is_what_openrlhf_makes_of_it():
    asked, made = request("abc", images=[Image.new("RGB", (2, 2))]), {}
    for kind, executor in ((Engine, SingleTurnAgentExecutor()), (RolloutEngine, SingleTurn())):
        engine = engine_of(kind, executor)
        engine.tokenizer = Processor()
        if kind is Engine:
            making = engine.generate_responses(**asked, hf_tokenizer=engine.tokenizer, **shared())
        else:
            making = engine.generate_groups([asked], **shared())
        made[kind] = list(asyncio.run(making))
        assert engine.llm.images == [asked["images"]] * (SIZE if kind is Engine else 1)
    for response, wanted in zip(made[RolloutEngine], made[Engine], strict=True):
        pixels, pixels_wanted = (one.pop("mm_train_inputs") for one in (response, wanted))
        assert list(pixels) == list(pixels_wanted) == ["pixel_values"]
        assert torch.equal(pixels["pixel_values"], pixels_wanted["pixel_values"])
    assert_equal(made[RolloutEngine], made[Engine])
    engine.tokenizer.decode = None  # the prompt is too long, and cannot be cut as text can
    with pytest.raises(ValueError, match="4 tokens, and 9 of 12 are for the response"):
        asyncio.run(engine.generate_groups([asked], **shared(max_length=12)))


class GoingOn(Llm):
    """vLLM, which generates the last response to "abc" from where its tokens end."""

    def response(self, prompt, place):
        tokens, log_probs, reason = response_to(prompt[:3], SIZE - 1)
        done = len(prompt) - 3
        assert list(prompt[3:]) == tokens[:done]
        return tokens[done:], log_probs[done:], reason


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize(("most", "budget", "ends", "cut"), [
    (9, 3, (3, 6, 7), False),
    (9, 7, (7,), False),  # its last token is its end
    (6, 4, (4, 6), True),
    (4, 4, (4,), True),  # all that it may have, which is no stop
    (9, None, (7,), False),
])  # fmt: skip
def test_a_response_stops_after_its_budget_and_goes_on(tmp_path, seed, most, budget, ends, cut):
    (tmp_path / "reward.py").write_text(REWARD)
    engine = engine_of(RolloutEngine, SingleTurn(str(tmp_path / "reward.py")), GoingOn())
    prompt = [97, 98, 99]
    tokens, log_probs, _ = response_to(prompt, SIZE - 1)
    one, done, part = shared(max_tokens=most, min_tokens=4) | {"num_samples": 1, "budget": budget}, 0, {}
    for end in ends:
        (response,) = asyncio.run(engine.generate_groups([request("abc", seed=seed) | part], **one))
        # what it had keeps the log-probs of the weights that sampled it
        known = [-5.0 - place for place in range(done)] + log_probs[done:end]
        assert response["observation_tokens"].tolist() == prompt + tokens[:end]
        assert response["rollout_log_probs"].tolist() == pytest.approx([0.0] * 3 + known)
        assert response["action_ranges"] == [(3, 3 + end)]
        _, params = engine.llm.asked[-1]
        left = most - done
        assert params.max_tokens == (left if budget is None else min(left, budget))
        assert params.min_tokens == min(max(4 - done, 0), params.max_tokens)
        if end != ends[-1]:
            assert (response["reward"], response["scores"], response["truncated"]) == (None, None, False)
            assert response["extra_logs"] == {STOPPED: 1} and engine.tokenizer.decoded == []
        done = end
        before = np.array(tokens[:end], dtype=np.int32), np.array([-5.0 - place for place in range(end)])
        part = {"prefix": Prefix(*before)}
    assert (response["reward"], response["truncated"]) == (3.0 + done, cut)  # the length of prompt and response
    assert engine.tokenizer.decoded == [prompt + tokens[:done], prompt]


def test_only_the_responses_of_a_group_that_are_finished_are_judged(tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    engine = engine_of(RolloutEngine, SingleTurn(str(tmp_path / "reward.py")))
    (group,) = ours(engine, ["abc"], **shared() | {"budget": 2})
    responses = list(group)
    assert [response["action_ranges"][0][1] - 3 for response in responses] == [1, 2, 2]
    assert [response["reward"] for response in responses] == [4.0, None, None]
    assert len(engine.llm.asked) == 1 and len(engine.tokenizer.decoded) == 2


def test_a_response_that_fills_the_context_has_not_stopped():
    class Full(Llm):
        def response(self, prompt, place):
            return [97, 98], [-1.0, -2.0], "length"

    (group,) = ours(engine_of(RolloutEngine, SingleTurn(), Full()), ["abc"], **shared() | {"budget": 5})
    assert [(response["truncated"], response["extra_logs"]) for response in group] == [(True, {})] * SIZE


@pytest.mark.parametrize("seed", [None, 5], ids=["one request", "seeded"])
@pytest.mark.parametrize("length", [30, 14])  # with 14, the prompt loses its first two tokens, and the prefix none
def test_all_responses_begin_with_a_prefix_that_is_context(tmp_path, seed, length):
    (tmp_path / "reward.py").write_text(REWARD)
    engine = engine_of(RolloutEngine, SingleTurn(str(tmp_path / "reward.py")))
    part = {"prefix": Prefix(np.array([120, 121], dtype=np.int32)), "seed": seed}
    asked = shared(max_length=length, max_tokens=9)
    group = asyncio.run(engine.generate_groups([request("abcdefg") | part], **asked))
    prompt = [ord(letter) for letter in "abcdefg"][7 - min(7, length - 9) :]
    context, most = [*prompt, 120, 121], 9 - 2
    assert all(tokens == context and params.max_tokens == most for tokens, params in engine.llm.asked)
    seeds = [None] if seed is None else [request_seed(seed, sample) for sample in range(SIZE)]
    assert [params.seed for _, params in engine.llm.asked] == seeds
    for place, response in enumerate(pickle.loads(pickle.dumps(group))):
        tokens, log_probs, reason = response_to(context, place)
        assert response["observation_tokens"].tolist() == context + tokens[:most]
        assert response["rollout_log_probs"].tolist() == pytest.approx([0.0] * len(context) + log_probs[:most])
        assert response["action_ranges"] == [(len(context), len(context) + len(tokens[:most]))]
        assert response["prompt"] == "abcdefg"
        assert response["reward"] == len(context) + len(tokens[:most])  # the verifier sees all of it
        assert response["truncated"] == (reason == "length")
