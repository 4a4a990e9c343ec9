"""How prompts reach the engines: which engine, in how many calls, and which reference comes back for which prompt."""

import itertools
from types import SimpleNamespace

import pytest
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

from bapo_openrlhf.flags.config import RunConfig
from bapo_openrlhf.training.trainer.engine_calls import CALLS, EngineCalls
from bapo_openrlhf.training.trainer.plain_trainer import RecordedSamplesGenerator

pytestmark = pytest.mark.usefixtures("values_for_refs")


class Engine:
    """Notes its calls. The reference to the responses of a prompt is (engine, prompt)."""

    def __init__(self, name, busy):
        self.name, self.calls = name, []
        self.get_num_unfinished_requests = SimpleNamespace(remote=lambda: busy)
        self.generate_responses = SimpleNamespace(remote=self.one)
        self.generate_groups = SimpleNamespace(options=self.options)

    def one(self, **request):
        self.calls.append([request])
        return self.name, request["prompt"]

    def options(self, num_returns):
        def many(requests, **shared):
            assert len(requests) == num_returns
            self.calls.append([shared | request for request in requests])
            refs = [(self.name, request["prompt"]) for request in requests]
            return refs if num_returns > 1 else refs[0]

        return SimpleNamespace(remote=many)


def arguments(*, agent=None, dynamic=False, adapted=False, faster="all"):
    return SimpleNamespace(
        run=RunConfig(faster=[faster]),
        train=SimpleNamespace(agent_func_path=agent),
        rollout=SimpleNamespace(batch_size=3, n_samples_per_prompt=4),
        algo=SimpleNamespace(advantage=SimpleNamespace(is_correction_level="token"), dynamic_filtering_enable=dynamic),
        adapt=SimpleNamespace(enabled=adapted),
        vllm=SimpleNamespace(enable_sleep=False),
    )


def plain_generator(args, engines, prompts=(), evaluation=()):
    return RecordedSamplesGenerator(
        strategy=SimpleNamespace(args=args), prompts_dataloader=prompts, eval_dataloader=evaluation,
        tokenizer="the tokenizer", vllm_engines=engines, calls=EngineCalls(engines, args, "the tokenizer"),
        before_samples=lambda: None,
    )  # fmt: skip


def dispatch(kind, prompts, *, busy=(0, 3), **how):
    args, engines = arguments(**how), [Engine(name, load) for name, load in enumerate(busy)]
    texts = [f"prompt {number}" for number in range(prompts)]
    columns = texts, [f"label {text}" for text in texts], [[text] for text in texts]
    options = {"max_len": 64, "max_new_tokens": 8}
    if how.get("adapted"):
        names = ("prompt", "label", "images", "seed")
        requests = [dict(zip(names, row, strict=True)) for row in zip(*columns, itertools.count(), strict=False)]
        return EngineCalls(engines, args, "the tokenizer").send(requests, **options), engines
    if kind is SamplesGenerator:
        generator = kind(SimpleNamespace(args=args), [], [], "the tokenizer", engines)
    else:
        generator = plain_generator(args, engines)
    return generator._dispatch_prompts_to_vllm(*columns[:2], images=columns[2], **options), engines


@pytest.mark.parametrize("busy", [(0,), (0, 3), (9, 0, 4)])
@pytest.mark.parametrize("prompts", [1, 2, 7, 64, 100])
@pytest.mark.parametrize(
    "how",
    [{}, {"dynamic": True, "adapted": True}, {"dynamic": True}, {"agent": "agent.py"}, {"faster": "weights"}],
    ids=str,
)
def test_engines_and_requests_are_those_of_openrlhf(busy, prompts, how):
    wanted_refs, wanted = dispatch(SamplesGenerator, prompts, busy=busy)
    refs, engines = dispatch(RecordedSamplesGenerator, prompts, busy=busy, **how)
    assert refs == wanted_refs
    seeds = []
    for engine, theirs in zip(engines, wanted, strict=True):
        requests = [dict(request) for call in engine.calls for request in call]
        seeds += [(request["prompt"], request.pop("seed")) for request in requests if "seed" in request]
        plain = [request for call in theirs.calls for request in call]
        assert all(request.pop("hf_tokenizer") == "the tokenizer" for request in plain)
        assert requests == plain
        most = max(map(len, engine.calls), default=0)
        if how and "adapted" not in how:
            assert most <= 1
        else:
            assert len(engine.calls) <= CALLS and most == -(-len(requests) // CALLS)
    wanted_seeds = [(f"prompt {n}", n) for n in range(prompts)] if how.get("adapted") else []
    assert sorted(seeds) == sorted(wanted_seeds)


@pytest.mark.parametrize(("faster", "evaluated"), [("all", [5]), ("none", [3, 2])])
def test_only_an_evaluation_asks_for_all_prompts_at_once(monkeypatch, faster, evaluated):
    asked = []

    def generate(self, dataloader_iter, num_prompts, **kwargs):
        result = list(itertools.islice(dataloader_iter, num_prompts))
        asked.append((result[0], len(result)))
        return [], num_prompts, result[0] == "trained" or sum(count for _, count in asked[1:]) % 5 == 0

    monkeypatch.setattr(SamplesGenerator, "_generate_vllm", generate)
    generator = plain_generator(arguments(faster=faster), ["engine"], ["trained"] * 9, ["evaluated"] * 5)
    for _ in range(2):
        asked.clear()
        generator.generate_samples()
        generator.generate_eval_samples()
        assert asked == [("trained", 3), *(("evaluated", count) for count in evaluated)]
