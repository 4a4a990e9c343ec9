"""Generation with engines that answer at once: seeds of requests, hard prompts sent along, order, missing rewards."""

import math
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from openrlhf.trainer.ppo_trainer import compute_eval_metrics
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
from test_samples import assert_same

from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.flags.config import RunConfig
from bapo_openrlhf.training.engine.engines import request_seed
from bapo_openrlhf.training.trainer import engine_calls
from bapo_openrlhf.training.trainer.engine_calls import EngineCalls, prompt_seed
from bapo_openrlhf.training.trainer.fresh import OneRound, TrainingPrompts
from bapo_openrlhf.training.trainer.generated import groups_of
from bapo_openrlhf.training.trainer.generator import Generator
from bapo_openrlhf.training.trainer.samples import Answers, generated_response, reward_of, sample_of

pytestmark = pytest.mark.usefixtures("values_for_refs")

SEED = 42


class Responses(list):
    """The responses to a prompt, which are their own reference."""

    __hash__, __eq__ = object.__hash__, object.__eq__


class Engine:
    """A rollout engine as a Ray handle: every method has a `remote`, which answers at once, and is noted in `calls`."""

    def __init__(self, calls: list, reward=lambda prompt, sample: 1.0, name: int = 0, busy: int = 0) -> None:
        self.calls, self.reward, self.name, self.busy = calls, reward, name, busy

    def __getattr__(self, method: str):
        if method.startswith("_"):
            raise AttributeError(method)
        remote = getattr(self, f"_{method}", lambda **_: self.calls.append(SimpleNamespace(method=method)))
        return SimpleNamespace(remote=remote, options=lambda num_returns: SimpleNamespace(remote=remote))

    def _get_num_unfinished_requests(self) -> int:
        return self.busy

    def _generate_groups(self, requests: list[dict], **shared) -> list:
        groups = [self._generate_responses(**request, **shared) for request in requests]
        return groups if len(groups) > 1 else groups[0]

    def _generate_responses(self, **kwargs) -> list[dict]:
        self.calls.append(SimpleNamespace(method="generate", engine=self.name, **kwargs))
        return Responses(
            {
                "prompt": kwargs["prompt"],
                "label": kwargs["label"],
                "images": kwargs["images"],
                "observation_tokens": [7, 7, 10 + sample],
                "action_ranges": [(2, 3)],
                "rollout_log_probs": [0.0, 0.0, -0.5],
                "truncated": False,
                "reward": self.reward(kwargs["prompt"], sample),
                "scores": self.reward(kwargs["prompt"], sample),
                "extra_logs": {},
            }
            for sample in range(kwargs["num_samples"])
        )


def arguments(*, deterministic: bool = True, batch_size: int = 3, sleep: bool = False) -> SimpleNamespace:
    train = {"seed": SEED, "full_determinism_enable": deterministic, "agent_func_path": None, "num_episodes": 9}
    return SimpleNamespace(
        run=RunConfig(faster=["all"]),
        train=SimpleNamespace(**train),
        rollout=SimpleNamespace(batch_size=batch_size, n_samples_per_prompt=2),
        algo=SimpleNamespace(advantage=SimpleNamespace(is_correction_level="off"), dynamic_filtering_enable=False),
        vllm=SimpleNamespace(enable_sleep=sleep),
        adapt=SimpleNamespace(enabled=True, rewards=lambda: None),
    )


def rows(*prompts: str) -> list:
    """A data loader's items: data source, prompt, label and image, in lists of one."""
    return [(["data"], [prompt], [f"label of {prompt}"], [None]) for prompt in prompts]


def hard(*prompts: str) -> list[Prompt]:
    return [Prompt(prompt, f"label of {prompt}") for prompt in prompts]


class Clock:
    """Where the run is. The engines hold the weights of its step."""

    def __init__(self, step: int) -> None:
        self.step = step

    @property
    def weights_version(self) -> int:
        return self.step


def generator_of(kind: type, args, data: list, evaluation: list, engines: list, clock: Clock, *, method, **options):
    """A generator. `kind` is how it asks for fresh prompts, and `method` has the attributes of its method."""
    method = SimpleNamespace(**{"candidates": 1, "first_responses": None} | method)
    return Generator(
        EngineCalls(engines, args, "the tokenizer"),
        evaluation=evaluation,
        fresh=kind(args, method, TrainingPrompts(data), **options),
        method=method,
        state=clock,
        rollout_weights=clock,
        reward_model=SimpleNamespace(score=lambda samples: None),
    )


def rollout_of(run):
    """The rollout of the next step; None if the data of an epoch has ended."""
    return next(iter(run.generator.generate_samples()[0]), None)


class Generation(SimpleNamespace):
    """A generator with its engines; `calls` is what they were asked."""

    def requests(self) -> list[SimpleNamespace]:
        return [call for call in self.calls if call.method == "generate"]

    def seeds(self) -> dict[str, int | None]:
        seeds = {call.prompt: call.seed for call in self.requests()}
        assert len(seeds) == len(self.requests())
        return seeds


def generation(
    *prompts: str, with_fresh=(), engines: int = 1, evaluation=(), reward=lambda prompt, sample: 1.0, **changed
) -> Generation:
    calls, asked, clock, args = [], [], Clock(5), arguments(**changed)
    engines = [Engine(calls, reward, name, busy=engines - name) for name in range(engines)]
    method = {"begin_step": lambda step: asked.append(step) or with_fresh}
    generator = generator_of(OneRound, args, rows(*prompts), rows(*evaluation), engines, clock, method=method)
    return Generation(generator=generator, calls=calls, asked=asked, clock=clock, args=args)


def test_seeds_are_the_same_everywhere():
    # by coreutils: printf 42/7/fresh/3 | b2sum -l 64
    assert prompt_seed(42, 7, "fresh", 3) == 0xF72ED39B8EB7481D
    assert prompt_seed(0, 0, "reevaluated", 0) == 0x6709C7DE9FE2D5CF
    assert prompt_seed(42, 7, "evaluation", 11) == 0x46A3C65F86048861
    assert request_seed(12345678901234567890, 7) == 0x45AE39EB1A309F13 >> 2  # vLLM takes at most 63 bits


class TestSeedsOfAStep:
    def test_only_where_the_run_is_to_be_repeatable(self):
        run = generation("a", "b", with_fresh=hard("h"), deterministic=False)
        run.generator.generate_samples()
        run.generator.generate("reevaluated", hard("i"), {})
        assert run.seeds() == {"a": None, "b": None, "h": None, "i": None}

    @pytest.mark.parametrize("engines", [1, 2])
    @pytest.mark.parametrize("together", [True, False])
    def test_by_hand(self, engines, together):
        along = hard("h", "i") if together else ()
        run = generation("a", "b", "c", with_fresh=along, engines=engines, evaluation="v")
        run.generator.generate_samples()
        if not together:
            run.generator.generate("reevaluated", hard("h", "i"), {})
        run.generator.generate_eval_samples(n_samples_per_prompt=1)
        assert run.asked == [5]  # only the rollout asks for the method's hard prompts
        assert {call.engine for call in run.requests()} == set(range(engines))
        assert run.seeds() == {
            "a": prompt_seed(SEED, 5, "fresh", 0),
            "b": prompt_seed(SEED, 5, "fresh", 1),
            "c": prompt_seed(SEED, 5, "fresh", 2),
            "h": prompt_seed(SEED, 5, "reevaluated", 0),
            "i": prompt_seed(SEED, 5, "reevaluated", 1),
            "v": prompt_seed(SEED, 5, "evaluation", 0),
        }


def texts(answers: list[Answers]) -> list[str]:
    return [each.prompt.text for each in answers for _ in each.responses]


def last_tokens(answers: list[Answers]) -> list[list[int]]:
    return [[int(response.token_ids[-1]) for response in each.responses] for each in answers]


class TestAlong:
    def test_wait_if_the_engines_hold_older_weights(self):
        run = generation("a", "b", "c", with_fresh=hard("h"))
        run.generator.rollouts.rollout_weights = SimpleNamespace(weights_version=4)
        assert rollout_of(run).hard_prompts_left == hard("h")
        assert rollout_of(run) is None
        assert rollout_of(run).hard_prompts_left == hard("h")  # of another epoch
        assert {request.prompt for request in run.requests()} == set("abc")

    def test_are_sampled_as_the_fresh_ones(self):
        run = generation("a", with_fresh=[Prompt("h", "l", ["image.png"])])
        run.generator.generate_samples(temperature=0.3, top_p=0.8, max_new_tokens=17, max_len=64)
        fresh, again = run.requests()
        assert (again.prompt, again.label, again.images) == ("h", "l", ["image.png"])
        assert fresh.sampling_params == again.sampling_params
        assert (again.sampling_params.temperature, again.sampling_params.top_p) == (0.3, 0.8)
        assert again.sampling_params.logprobs == 1  # a response may be trained on later
        assert (again.sampling_params.max_tokens, again.max_length, again.num_samples) == (17, 64, 2)

    def test_seconds_of_waiting_are_those_after_the_fresh_ones(self, monkeypatch):
        from bapo_openrlhf.training.trainer import generator

        heard, get = [], ray.get  # each answer takes a second to come
        monkeypatch.setattr(ray, "get", lambda refs, **kwargs: heard.append(refs) or get(refs, **kwargs))
        monkeypatch.setattr(generator.time, "perf_counter", lambda: float(len(heard)))
        assert rollout_of(generation("a", with_fresh=hard("h", "i"))).added_seconds == 2.0


class TestOrder:
    @given(prompts=st.lists(st.sampled_from("abc"), min_size=1, max_size=6), data=st.data())
    @settings(derandomize=True, database=None)
    def test_is_that_of_the_data_whichever_is_done_first(self, prompts, data):
        """A prompt may come twice. Its groups are then in the order of their requests, which also have other seeds."""
        count, along, order = len(prompts), hard("i", "h", "j"), []
        finished = data.draw(st.permutations(range(count + 3)))
        run = generation(*prompts, with_fresh=along, batch_size=count)

        def wait(refs, **_):
            order.extend(ref for ref in refs if ref not in order)  # as they were sent
            first = min(refs, key=lambda ref: finished[order.index(ref)])
            return [first], [ref for ref in refs if ref is not first]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ray, "wait", wait)
            (rollout,), *rest = run.generator.generate_samples()
        assert texts(rollout.fresh) == [text for text in prompts for _ in range(2)]
        assert [each.prompt for each in rollout.hard] == along
        assert last_tokens([*rollout.fresh, *rollout.hard]) == [[10, 11]] * (count + 3)  # the G of a prompt in order
        assert rest == [None, count, False]
        assert len(groups_of(rollout.fresh, first_uid=0, step=0, weights_version=0)) == count

    def test_samples_are_made_while_others_are_generated(self, monkeypatch):
        order, wait, make = [], ray.wait, engine_calls.generated_response
        monkeypatch.setattr(ray, "wait", lambda refs, **how: (order.append("wait"), wait(refs, **how))[1])
        monkeypatch.setattr(
            engine_calls, "generated_response", lambda *what, **how: (order.append("make"), make(*what, **how))[1]
        )
        generation("a", "b", "c").generator.generate_samples()
        assert order == ["wait", "make", "make"] * 3


NUMBERS = [
    # a reward function's answer for one response, and the number in it
    (-3.5, -3.5),
    (True, 1.0),
    ([[0.5]], 0.5),
    (np.array([[1]]), 1.0),
    (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
    ([torch.tensor(0.5, requires_grad=True)], 0.5),
    (Fraction(1, 2), 0.5),
    (1 / 3, float(np.float32(1 / 3))),
]
NONE = [
    None,
    math.nan,
    -1e39,  # not in float32, as which OpenRLHF would take it
    10**400,  # no float holds it
    "1.0",
    [],
    [1.0, 2.0],
    [[1.0], [2.0, 3.0]],
    {"rewards": 1.0},
    np.array("x"),
    torch.tensor([math.nan]),
]


def response(**changed) -> dict:
    return Engine([])._generate_responses(prompt="p", label="l", images=None, num_samples=1)[0] | changed


def answers(**changed) -> Answers:
    """One response to a prompt."""
    return Answers(Prompt("p", "l"), [generated_response(response(**changed))])


class TestRewardOf:
    @pytest.mark.parametrize(("value", "number"), NUMBERS, ids=repr)
    def test_one_finite_number(self, value, number):
        result = reward_of(value)
        assert type(result) is float and result == number

    @pytest.mark.parametrize("value", NONE, ids=lambda value: repr(value)[:30])
    def test_anything_else_is_none(self, value):
        assert reward_of(value) is None


class TestResponses:
    @pytest.mark.parametrize("score", [None, "x", 1.0])
    def test_without_one_have_nan_and_no_score_either(self, score):
        one = answers(reward=math.inf, scores=score)
        (own,) = one.responses
        assert not one.usable and math.isnan(own.reward)
        assert own.extras["score"] is None and not {"reward", "score"} & set(own.extras["info"])
        assert own.token_ids.tolist() == [7, 7, 10]

    def test_that_say_nothing_of_a_reward(self):
        answer = response()
        del answer["reward"], answer["scores"]
        assert math.isnan(generated_response(answer).reward)

    def test_with_no_score_take_the_reward_for_it(self):
        (own,) = answers(reward=0.25, scores=math.nan).responses
        assert own.reward == own.extras["score"] == 0.25

    @given(
        length=st.integers(1, 12),
        turns=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), max_size=3),
        max_len=st.integers(1, 14),
        logs=st.sampled_from([{}, {"format": 0.1}, {"depth": 3, "done": True}, {"x": torch.tensor([[0.3]])}]),
        truncated=st.sampled_from([None, False, True]),
        reward=st.floats(-10, 10),
        score=st.none() | st.floats(-1, 1),
        more=st.sampled_from([{}, {"label": None}, {"images": ["a.png"], "mm_train_inputs": {"pixel_values": 1.5}}]),
        seed=st.integers(0, 99),
    )
    @settings(derandomize=True, database=None)
    def test_are_otherwise_openrlhfs(self, length, turns, max_len, logs, truncated, reward, score, more, seed):
        rng = np.random.default_rng(seed)
        ranges = [(start, min(start + size, length)) for start, size in turns if start < length]
        tokens, log_probs = rng.integers(0, 99, length).tolist(), (-rng.exponential(size=length)).tolist()
        about = {"observation_tokens": tokens, "rollout_log_probs": log_probs, "action_ranges": ranges}
        answer = response(reward=reward, scores=score, extra_logs=logs, **about) | more | {"truncated": truncated}
        if truncated is None:
            del answer["truncated"]
        prompt = Prompt(answer["prompt"], answer["label"], answer["images"])
        result = sample_of(prompt, generated_response(answer, max_len=max_len, temperature=1.0))
        scored = answer | {"scores": reward if score is None else score}
        theirs = SamplesGenerator._process_response_into_experience(None, scored, max_len=max_len)
        theirs.rollout_log_probs *= theirs.action_mask  # those of other tokens are not kept
        assert_same(result, theirs)


class TestUsable:
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_log_probs_of_generated_tokens_must_be_finite(self, bad):
        assert answers().usable is True
        for place in range(3):  # only the last one is generated
            log_probs = [bad if n == place else -1.0 for n in range(3)]
            assert answers(rollout_log_probs=log_probs).usable is (place < 2)

    def test_a_response_without_tokens(self):
        assert answers(action_ranges=[], rollout_log_probs=[math.nan, 0.0, 0.0]).usable


class TestEvaluation:
    """OpenRLHF makes one tensor of all rewards: a response without one would end the run."""

    def test_all_prompts_are_asked_at_once_and_those_without_all_rewards_are_left_out(self, monkeypatch):
        """A group has 4 responses here, and 2 in training. A step of training has 3 prompts."""
        waiting = []
        monkeypatch.setattr(ray, "wait", lambda refs, **_: (waiting.append(len(refs)) or refs[-1:], refs[:-1]))
        rewards = {"v": [1, 0, 1, 0], "w": [1, 1, 1, None], "x": [0] * 4, "y": [math.nan, 1, 1, 1], "z": [1] * 4}
        run = generation(evaluation="vwxyz", reward=lambda prompt, sample: rewards[prompt][sample])
        samples = run.generator.generate_eval_samples(n_samples_per_prompt=4)
        result = compute_eval_metrics(run.generator.evaluation, samples, 4)
        assert result["eval_data_pass1"] == pytest.approx(1 / 2)  # v, x and z: 1/2, 0, 1
        assert result["eval_data_pass4"] == pytest.approx(2 / 3)
        assert result["eval_num_samples"] == 12 and waiting == [5, 4, 3, 2, 1]

    def test_the_engines_sleep_after_it_also_if_it_fails(self):
        def reward(prompt, sample):
            raise RuntimeError("the engine is gone")

        run = generation(evaluation="v", reward=reward, sleep=True)
        with pytest.raises(RuntimeError, match="the engine is gone"):
            run.generator.generate_eval_samples(n_samples_per_prompt=1)
        assert [call.method for call in run.calls] == ["wake_up", "generate", "sleep"]


class TestChosenPrompts:
    """Three prompts of twice as many."""

    @staticmethod
    def run(count, choose):
        seen = []
        method = {"candidates": 2, "choose_prompts": lambda *about: seen.append(about) or choose(*about)}
        data = [(["data"], [f"p{n}"], [f"l{n}"], [[f"i{n}.png"] if n % 2 else None]) for n in range(count)]
        generator = generator_of(
            OneRound, arguments(), data, [], [Engine([])], Clock(5), method=method | {"begin_step": lambda step: []}
        )
        return Generation(generator=generator, seen=seen)

    @pytest.mark.parametrize("positions", [[5, 0, 3], [0, 1, 2]])
    def test_are_those_at_the_positions_in_that_order(self, positions):
        run = self.run(10, lambda *_: positions)
        (rollout,), *rest = run.generator.generate_samples()
        prompts = [each.prompt for each in rollout.fresh]
        wanted = [Prompt(f"p{n}", f"l{n}", [f"i{n}.png"] if n % 2 else None) for n in range(6)]
        assert prompts == [wanted[n] for n in positions] and run.seen == [(5, wanted, 3)]
        assert rollout.passed_over == 3 and rest == [None, 6, False]
        assert [prompt.text for prompt in run.generator.fresh.prompts.draw(2)] == ["p6", "p7"]

    @pytest.mark.parametrize(("there", "taken"), [(5, 3), (3, 3), (2, 2)])
    def test_at_the_end_of_the_data_as_many_as_there_are(self, there, taken):
        (rollout,), _, drawn, ended = self.run(there, lambda *_: range(3)).generator.generate_samples()
        assert (rollout.passed_over, drawn, ended) == (there - taken, there, True)
        assert [each.prompt.text for each in rollout.fresh] == [f"p{n}" for n in range(taken)]

    @pytest.mark.parametrize("positions", [[0, 1], [0, 1, 1], [0, 1, 6], [0, 1, -1], [0, 1, 2, 3]])
    def test_a_wrong_choice_is_refused(self, positions):
        with pytest.raises(ValueError, match=r"3 of 6 prompts .* \[0, 1"):
            self.run(6, lambda *_: positions).generator.generate_samples()
