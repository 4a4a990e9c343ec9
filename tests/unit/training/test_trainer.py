"""The trainer's own part of a run: engines and models that answer at once stand in the place of Ray's actors.

`World` plays the stack: weights are the number of updates behind them, and what was generated, trained, kept and saved
is noted. OpenRLHF's trainer, generator, experience maker and data loader are its own.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import pickle
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bapo_openrlhf.cpu import stack as cpu

cpu.prepare_environment()
cpu.install()

import ray  # noqa: E402
import torch  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from openrlhf.trainer import ppo_trainer  # noqa: E402
from openrlhf.trainer.ray import ppo_actor, ppo_critic  # noqa: E402
from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402

from bapo_openrlhf.adapt.arithmetic import BatchArithmetic, batch_arithmetic  # noqa: E402
from bapo_openrlhf.adapt.batch import Batch  # noqa: E402
from bapo_openrlhf.adapt.group import REFERENCE, Prompt  # noqa: E402
from bapo_openrlhf.adapt.schedule import RolloutSchedule  # noqa: E402
from bapo_openrlhf.cli import arguments  # noqa: E402
from bapo_openrlhf.config import Checked  # noqa: E402
from bapo_openrlhf.launch.openrlhf_flags import behaviour_kl, set_openrlhf_flags  # noqa: E402
from bapo_openrlhf.launch.resume import choose_checkpoint  # noqa: E402
from bapo_openrlhf.record import metrics  # noqa: E402
from bapo_openrlhf.record.checkpoint_store import CheckpointStore  # noqa: E402
from bapo_openrlhf.record.run_record import read_answers, read_groups, read_metrics  # noqa: E402
from bapo_openrlhf.training import checkpoints, samples, trainer, workers  # noqa: E402
from bapo_openrlhf.training.engines import request_seed  # noqa: E402
from bapo_openrlhf.training.samples import samples_of  # noqa: E402
from bapo_openrlhf.training.trainer import AdaptedPPOTrainer, brief, timed  # noqa: E402

STATES = ("fresh", "reevaluated", "filtered", "unimproved", "solved", "cut", "too_far", "nonfinite", "failed")


def digest(*what: Any) -> int:
    """A number that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=4).digest(), "big")


# --- Ray, engines and models that answer at once ----------------------------------------------------------------------


class Ref:
    """A reference to what a call gave or raised; `pending`: to what never comes."""

    def __init__(self, value: Any = None, *, error: Exception | None = None, pending: bool = False) -> None:
        self.value, self.error, self.pending = value, error, pending


def get(refs: Any, **_: Any) -> Any:
    if isinstance(refs, list):
        return [get(ref) for ref in refs]
    assert not refs.pending, "a run would wait for ever"
    if refs.error is not None:
        raise refs.error
    return refs.value


def wait(
    refs: list[Ref], *, num_returns: int = 1, timeout: float | None = None, **_: Any
) -> tuple[list[Ref], list[Ref]]:
    ready = [ref for ref in refs if not ref.pending][-num_returns:]  # what was sent last is done first
    assert ready or timeout is not None, "a run would wait for ever"
    return ready, [ref for ref in refs if ref not in ready]


class Handle:
    """An actor's handle: each of its methods has a `remote`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        method = getattr(self._actor, name)

        def remote(*args: Any, **kwargs: Any) -> Ref:
            try:
                value = method(*args, **kwargs)
            except Exception as error:
                return Ref(error=error)
            return value if isinstance(value, Ref) else Ref(value)

        return SimpleNamespace(remote=remote)


class Engine:
    """A rollout engine. Its responses depend on prompt, weights and, where there is one, the request's seed."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.weights, self.kept, self.alive = 0, None, Ref(pending=True)

    def live(self) -> Ref:
        return self.alive

    def isolate_rewards(self, verifier: Any) -> None:
        self.world.note("isolate_rewards", verifier)

    def reward_failures(self) -> dict[str, int]:
        return self.world.reward_failures[self.number]

    def get_num_unfinished_requests(self) -> int:
        return 0

    def wake_up(self, tags: Any = None) -> None:
        self.world.note("wake_up", tags)

    def sleep(self) -> None:
        self.world.note("sleep")

    def keep_weights(self) -> None:
        self.world.fail_at("keep_weights")
        self.kept = self.weights
        self.world.note("keep", self.weights)

    def restore_weights(self) -> None:
        assert self.kept is not None, "no weights were kept"
        self.weights = self.kept
        self.world.note("restore", self.weights)

    def forget_caches(self) -> None:
        pass

    def save_weights(self, folder: str) -> None:
        self.world.note("save_weights", self.number)
        (Path(folder) / "rollout_weights_rank0.safetensors").write_text(str(self.weights))

    def load_weights(self, folder: str) -> None:
        self.weights = int((Path(folder) / "rollout_weights_rank0.safetensors").read_text())
        self.world.note("load", self.weights)

    def generate_responses(
        self, *, prompt, label, sampling_params, max_length, hf_tokenizer, num_samples, images, seed=None
    ) -> list[dict]:
        self.world.fail_at("generate")
        self.world.requests.append(
            SimpleNamespace(
                prompt=prompt, weights=self.weights, step=getattr(self.world.trainer, "step", None), seed=seed
            )
        )
        answers = []
        for sample in range(num_samples):
            drawn = digest(prompt, self.weights, sample, None if seed is None else request_seed(seed, sample))
            tokens = [3, 4, *(5 + drawn // 7**place % 40 for place in range(1 + drawn % 4))]
            reward = self.world.reward(prompt, self.weights, sample)
            answers.append(
                {
                    "prompt": prompt,
                    "label": label,
                    "images": images,
                    "observation_tokens": tokens,
                    "action_ranges": [(2, len(tokens))],
                    "rollout_log_probs": [0.0, 0.0, *self.world.log_probs(tokens, self.weights)[1:]],
                    "truncated": False,
                    "reward": reward,
                    "scores": reward,
                    "extra_logs": {},
                }
            )
        return answers


class Worker:
    """A rank of the actor or the critic."""

    def __init__(self, world: World, model: str) -> None:
        self.world, self.model = world, model
        self.rng = torch.full((4,), digest(model) % 200, dtype=torch.uint8)

    def rng_state(self) -> list[torch.Tensor]:
        return [self.rng.clone()]

    def set_rng_state(self, states: list[torch.Tensor]) -> None:
        self.rng = states[0]

    def empty_cache(self) -> None:
        pass

    def append(self, experience: list) -> None:
        if self.model == "actor":
            self.world.trained.append((getattr(self.world.trainer, "step", None), experience))

    def fit(self, **_: Any) -> dict[str, float]:
        self.world.fail_at("fit")
        self.world.updates[self.model] += 1
        self.rng = self.rng + 1  # it shuffles
        return dict(self.world.norms)

    def shape_traces(self, gamma: float) -> None:
        self.world.note("shape", gamma)

    def finetune(self, demonstrations: list, tokens: int, ranks: int, weight: float) -> float:
        self.world.fail_at("finetune")
        self.world.note("finetune", (self.world.trainer.step, demonstrations, tokens, ranks, weight))
        return 0.5

    def reload_states(self) -> None:
        self.world.note("reload")

    def offload_states(self) -> None:
        self.world.note("offload")

    def broadcast_to_vllm(self) -> None:
        self.world.fail_at("broadcast")
        self.world.note("sync", self.world.updates["actor"])
        for engine in self.world.engines:
            engine.weights = self.world.updates["actor"]

    def save_checkpoint(self, *, tag: str, client_states: Any = None, **_: Any) -> None:
        self.world.fail_at("save_checkpoint")
        self.world.note(f"save {self.model}", tag)
        if self.world.args.ckpt.disable_ds:
            return
        folder = self.world.checkpoints / f"_{self.model}" / tag
        folder.mkdir(parents=True)
        states = {"updates": self.world.updates[self.model], "client_states": client_states}
        (folder / "model.pt").write_bytes(pickle.dumps(states))
        (folder.parent / "latest").write_text(tag)

    def load_checkpoint(self) -> None:
        folder = self.world.checkpoints / f"_{self.model}"
        states = pickle.loads((folder / (folder / "latest").read_text() / "model.pt").read_bytes())
        self.world.updates[self.model] = states["updates"]
        self.client_states = states["client_states"]

    def get_checkpoint_states(self) -> dict:
        return self.client_states


class Group:
    """All ranks of a model, as OpenRLHF's RayActorGroup."""

    duplicate_actors = 1

    def __init__(self, world: World, model: str, ranks: int = 1) -> None:
        self.world, self.model = world, model
        self.workers = [Worker(world, model) for _ in range(ranks)]
        self._actor_handlers = [Handle(worker) for worker in self.workers]

    def async_run_method(self, method_name: str, **kwargs: Any) -> list[Ref]:
        # In a process of its own each rank would do its part of the same thing.
        refs = [getattr(handle, method_name).remote(**kwargs) for handle in self._actor_handlers[:1]]
        if method_name == "rng_state":
            refs += [handle.rng_state.remote() for handle in self._actor_handlers[1:]]
        return refs

    def async_run_method_batch(self, method_name: str, **kwargs: Any) -> list[Ref]:
        if method_name == "append":
            return [self._actor_handlers[0].append.remote(**kwargs)]
        if method_name == "finetune":  # of each rank, what it did for its items
            items = [dict(zip(kwargs, values, strict=True)) for values in zip(*kwargs.values(), strict=True)]
            refs = [handle.finetune.remote(**item) for handle, item in zip(self._actor_handlers, items, strict=True)]
            return [Ref(error=ref.error) if ref.error else Ref([ref.value]) for ref in refs]
        assert method_name == "forward"
        self.world.fail_at("forward")
        calls = list(zip(kwargs["sequences"], kwargs["action_mask"], strict=True))
        share, left = divmod(len(calls), len(self.workers))
        assert share and not left  # a rank with a call less than another would wait for it for ever
        return [
            Ref([self.answer(*call) for call in calls[start : start + share]]) for start in range(0, len(calls), share)
        ]

    def answer(self, sequences: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.reference(sequences, mask) if self.model == "reference" else self.forward(sequences)

    def reference(self, sequences: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        pairs = zip(sequences.tolist(), mask, strict=True)
        real = [row[: int(on.nonzero().max()) + 2] for row, on in pairs if on.any()]  # not a filler
        self.world.referred += [(self.world.trainer.step, row) for row in real]
        return torch.tensor([self.world.log_probs(row, -1) for row in sequences.tolist()]) * mask

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:
        if self.model == "critic":
            return torch.sin(sequences[:, 1:].float() + self.world.updates["critic"])
        found = torch.tensor([self.world.log_probs(row, self.world.updates["actor"]) for row in sequences.tolist()])
        return found.masked_fill(torch.isin(sequences[:, 1:], torch.tensor(sorted(self.world.spoilt))), math.nan)


DYNAMIC = {"algo.dynamic_filtering_enable": True}


class Tokenizer:
    """Each character is a token, from 100 on."""

    pad_token_id, eos_token_id = 0, 2

    def __init__(self) -> None:
        self.decode = decode

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [100 + ord(character) for character in text]}


TRACES = f"traces={Path(__file__).parent}/traces.jsonl"
CHOOSING = f"{Path(__file__).parent}/choosing_method.py:First"


class World:
    """Everything outside the trainer's process.

    Attributes:
        requests: what was generated: prompt, weights, step and seed.
        trained: the step and the experiences of each update.
        referred: the step and the tokens of each sample that the reference model was asked for.
        events: what else happened, in order: (name, argument).
    """

    def __init__(self, folder: Path, words: dict[str, Any], *, prompts: int, evaluation: int, engines: int) -> None:
        self.requests: list[SimpleNamespace] = []
        self.trained: list[tuple[int, list]] = []
        self.referred: list[tuple[int, list[int]]] = []
        self.events: list[tuple[str, Any]] = []
        self.updates = {"actor": 0, "critic": 0}
        self.norms = {"actor_grad_norm": 1.0}
        self.reward_failures: list[dict[str, int]] = [{} for _ in range(engines)]
        self.faults: dict[str, tuple[int, Exception]] = {}  # what fails, in which step, and how
        self.spoilt: set[int] = set()  # tokens whose log-prob the actor cannot compute
        self.checkpoints = folder / "checkpoints"
        self.args = self.arguments(folder, words)
        self.engines = [Engine(self, number) for number in range(engines)]
        critic = bool(self.args.critic.model_name_or_path)
        self.groups = {
            model: Group(self, model, getattr(self.args, model).num_gpus_per_node)
            for model in ("actor", "critic")[: 1 + critic]
        }
        with_reference = self.args.algo.kl.init_coef > 0
        self.reference = Group(self, "reference", self.args.ref.num_gpus_per_node) if with_reference else None
        rows = [("data", f"prompt {n}", str(n), None) for n in range(prompts)]
        self.data = lambda: StatefulDataLoader(rows, batch_size=1, shuffle=True, drop_last=True, collate_fn=columns)
        self.evaluation = [columns([("data", f"eval {n}", str(n), None)]) for n in range(evaluation)] or None
        self.trainer: Any = None

    @staticmethod
    def arguments(folder: Path, words: dict[str, Any]) -> SimpleNamespace:
        flags = {
            "algorithm": "bapo_grpo",
            "actor.model_name_or_path": "model",
            "actor.num_gpus_per_node": 1,
            "critic.num_gpus_per_node": 1,
            "ref.num_gpus_per_node": 1,
            "reward.remote_url": "reward.py",
            "rollout.batch_size": 4,
            "rollout.n_samples_per_prompt": 4,
            "rollout.micro_batch_size": 3,
            "train.batch_size": 8,
            "train.micro_batch_size": 2,
            "train.num_episodes": 2,
            "train.seed": 7,
            "vllm.num_engines": 1,
            "algo.kl.init_coef": 0,
            "adapt.c1": "1/4",
            "adapt.c2": "1/4",
            "adapt.c3": "3/4",
            "adapt.rollout_delay": 3,
            "adapt.reevaluate_every": 2,
            "adapt.buffer_size": 6,
            "ckpt.path": folder / "checkpoints",
            "run.dir": folder / "runs",
            "data.max_len": 64,
        } | words
        argv = []
        for name, value in flags.items():
            many = [*map(str, value)] if isinstance(value, (list, tuple)) else None
            argv += [f"--{name}", *many] if many else [f"--{name}"] if value is True else [f"--{name}={value}"]
        args = arguments.parse(argv)
        args.checked = Checked(batch_arithmetic(args), kl_coef=behaviour_kl(args))
        set_openrlhf_flags(args)
        return args

    def note(self, name: str, argument: Any = None) -> None:
        self.events.append((name, argument))

    def noted(self, *names: str) -> list[Any]:
        return [argument for name, argument in self.events if name in names]

    def fail_at(self, what: str) -> None:
        step, error = self.faults.get(what, (-1, None))
        if error and step == self.trainer.step:
            raise error

    def reward(self, prompt: str, weights: int, sample: int) -> Any:
        """Some prompts are always too hard, some become easier; most groups have both."""
        hardness = digest(prompt) % 8
        return float(digest(prompt, weights // 2, sample) % 8 >= hardness)

    def log_probs(self, tokens: list[int], weights: int) -> list[float]:
        """Of all tokens but the first."""
        return [-1.0 - digest(token, place, weights) % 64 / 512 for place, token in enumerate(tokens[1:])]

    def make_trainer(self, kind: type = AdaptedPPOTrainer) -> AdaptedPPOTrainer:
        with pytest.MonkeyPatch.context() as patch:
            tokenizer = Tokenizer()
            patch.setattr(ppo_trainer, "get_tokenizer", lambda *_, **__: tokenizer)
            patch.setattr(ppo_trainer, "prepare_datasets", lambda *_: (self.data(), self.evaluation, 10))
            self.trainer = kind(
                "model",
                SimpleNamespace(args=self.args),
                self.groups["actor"],
                self.groups.get("critic"),
                None,
                self.reference,
                [Handle(engine) for engine in self.engines],
                max_len=64,
                max_new_tokens=8,
                n_samples_per_prompt=self.args.rollout.n_samples_per_prompt,
            )
        if self.args.ckpt.load_enable:
            for group in self.groups.values():
                group.workers[0].load_checkpoint()
        return self.trainer

    @property
    def record(self) -> Path:
        return Path(self.args.run.dir) / self.args.run.name

    def metrics(self) -> list[dict]:
        return read_metrics(self.record)

    def of_step(self, step: int) -> tuple[list, list]:
        """The requests of a step: those of its fresh prompts, and those of hard prompts."""
        made = [request for request in self.requests if request.step == step and request.prompt.startswith("prompt")]
        return made[: self.args.rollout.batch_size], made[self.args.rollout.batch_size :]


def decode(tokens: torch.Tensor, **_: Any) -> Any:
    """Token ids as words; a row of several texts becomes a list, as transformers has it."""
    return [decode(row) for row in tokens] if tokens.dim() > 1 else " ".join(map(str, tokens.tolist()))


def columns(rows: list[tuple]) -> tuple[list, ...]:
    return tuple(map(list, zip(*rows, strict=True)))


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "put", lambda value: Ref(value))


@pytest.fixture
def world(tmp_path):
    """Makes a world with a trainer in it; `world(**{"adapt.c1": 0})` changes flags."""
    numbers = itertools.count()

    def make(
        *,
        prompts: int = 16,
        evaluation: int = 0,
        engines: int = 1,
        folder: Path | None = None,
        kind: type = AdaptedPPOTrainer,
        **words: Any,
    ) -> World:
        made = World(
            folder or tmp_path / str(next(numbers)), words, prompts=prompts, evaluation=evaluation, engines=engines
        )
        made.make_trainer(kind)
        return made

    return make


def by_position(experiences: list) -> dict[int, list]:
    """What each sample of a batch was trained with, by its position in the batch."""
    names = ("action_log_probs", "rollout_log_probs", "values", "advantages", "returns")
    return {
        index: [
            experience.sequences[row][experience.attention_mask[row].bool()].tolist(),
            *(getattr(experience, name)[row][experience.action_mask[row].bool()].tolist() for name in names),
        ]
        for experience in experiences
        for row, index in enumerate(experience.index)
    }


# --- whole runs -------------------------------------------------------------------------------------------------------


def heard_of(rows, step):
    """Distance of the fresh groups of the step before `step`, 0 where they were of today's policy."""
    row = rows[step - 1]
    return row.get("tv/fresh", 0.0) if row["staleness/rollout_policy"] else 0.0


class TestRun:
    @pytest.mark.parametrize(
        ("delay", "again", "evaluation"),
        [(1, 1, 0), (1, 2, 2), (2, 2, 0), (3, 2, 0), (3, 0, 2), (4, 3, 3), (3, 3, 1), (5, 1, 2), (20, 3, 5)],
    )
    def test_every_group_is_of_the_weights_that_algorithm_1_says(self, world, delay, again, evaluation):
        words = {"adapt.rollout_delay": delay, "adapt.reevaluate_every": again, "train.num_episodes": 3}
        made = world(**words, **{"eval.steps": evaluation or -1}, evaluation=2 if evaluation else 0)
        made.trainer.fit()
        assert made.trainer.step == 12 and len(made.metrics()) == 12
        reevaluated = 0
        for step in range(12):
            fresh, hard = made.of_step(step)
            assert len(fresh) == 4 and {request.weights for request in fresh} == {step - step % delay}
            assert {request.weights for request in hard} <= {step}
            assert not hard or (again and step and step % again == 0)
            reevaluated += len(hard)
        assert bool(reevaluated) == bool(again)
        evaluated = [request for request in made.requests if request.prompt.startswith("eval")]
        due = [step for step in range(1, 13) if evaluation and step % evaluation == 0]
        assert [(request.step, request.weights) for request in evaluated] == [(s, s) for s in due for _ in range(2)]
        # The engines keep weights only where they will be needed.
        assert len(made.noted("keep")) <= 12 // delay + 1
        if delay == 1 or (not evaluation and (not again or again % delay == 0)):
            assert not made.noted("keep", "restore")

    def test_the_numbers_of_ranks_change_nothing(self, world):
        """The groups of a batch are seldom a multiple of anything; each model deals them to its own ranks."""
        words = {"algorithm": "ba_ppo", "train.batch_size": 12, "algo.kl.init_coef": 0.02, "rollout.batch_size": 5}
        words |= {"prompts": 24, "rollout.n_samples_per_prompt": 5, "adapt.batch_size": 9}
        runs = []
        for ranks in ((1, 1, 1), (3, 2, 1), (2, 1, 3)):
            models = {f"{name}.num_gpus_per_node": n for name, n in zip(("actor", "critic", "ref"), ranks, strict=True)}
            made = world(**words, **models)
            made.trainer.fit()
            runs.append(made)
        one, *others = runs
        counts = [5 * sum(row[f"groups/{source}"] for source in SOURCES) for row in one.metrics()]
        assert all({count % ranks for count in counts} == set(range(ranks)) for ranks in (2, 3))
        for made in others:
            assert sorted(tokens for _, tokens in made.referred) == sorted(tokens for _, tokens in one.referred)
            for found, wanted in zip(numbers(made.metrics()), numbers(one.metrics()), strict=True):
                assert found.keys() == wanted.keys()
                for name, value in wanted.items():
                    assert found[name] == (value if value is None else pytest.approx(value, rel=1e-4, abs=1e-5)), name
            for (step, found), (at, wanted) in zip(made.trained, one.trained, strict=True):
                samples_found, samples_wanted = by_position(found), by_position(wanted)
                assert step == at and samples_found.keys() == samples_wanted.keys()
                for index, (tokens, *numbers_) in samples_wanted.items():
                    assert samples_found[index][0] == tokens
                    for ours, theirs in zip(samples_found[index][1:], numbers_, strict=True):
                        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)

    @pytest.mark.parametrize("algorithm", ["bapo_grpo", "ba_ppo"])
    def test_ledger_and_record_balance(self, world, algorithm):
        made = world(algorithm=algorithm, prompts=18)
        made.trainer.fit()
        rows = made.metrics()
        assert [row["step"] for row in rows] == list(range(1, 11))  # 4, 4, 4, 4 and 2 prompts, twice
        for step, row in enumerate(rows):
            asked = [request for request in made.requests if request.step == step]
            assert row["groups/generated"] == len(asked) == sum(row[f"groups/{state}"] for state in STATES)
            assert row["rollouts/total"] == 4 * sum(request.step <= step for request in made.requests)
            assert row["groups/reevaluation_attempts"] == len(asked) - (4, 4, 4, 4, 2)[step % 5]
            assert row["staleness/rollout_policy"] == step % 3
            (experiences,) = [experiences for at, experiences in made.trained if at == step]
            trained = sum(len(experience.index) for experience in experiences)
            assert trained == 4 * sum(row[f"groups/{source}"] for source in ("fresh", "reevaluated", "replayed"))
            assert row["rollout/num_samples"] == trained
        assert made.trainer.ledger.counts["generated"] == made.trainer.generated == len(made.requests)
        assert any(row["groups/replayed"] for row in rows) and any(row["groups/reevaluated"] for row in rows)
        assert made.updates == {"actor": 10, "critic": 10 if algorithm == "ba_ppo" else 0}

    def test_mean_reward_is_that_of_the_fresh_responses(self, world):
        made = world()
        made.trainer.fit()
        for step, row in enumerate(made.metrics()):
            fresh, _ = made.of_step(step)
            rewards = [made.reward(request.prompt, request.weights, n) for request in fresh for n in range(4)]
            assert row["reward/fresh_mean"] == pytest.approx(sum(rewards) / len(rewards), abs=1e-12)

    @pytest.mark.parametrize("limit", [0.0, 0.008, 0.012, 1.0])
    def test_weights_come_early_where_the_rollout_policy_is_far(self, world, limit):
        """By the distances that the run itself logs: after a step above the limit, and at multiples of v."""
        words = {"adapt.rollout_delay": 6, "adapt.reevaluate_every": 0, "adapt.max_tv_rollout": limit}
        made = world(prompts=32, **words)
        made.trainer.fit()
        held, early = 0, 0
        for step, row in enumerate(made.metrics()):
            assert {request.weights for request in made.requests if request.step == step} == {held}
            assert row["staleness/rollout_policy"] == step - held
            far = held < step and row.get("tv/fresh", 0.0) > limit
            if (step + 1) % 6 == 0 or far:
                early += (step + 1) % 6 != 0
                held = step + 1
        assert (early > 0) is (limit < 1)

    @pytest.mark.parametrize("limit", [None, 0.012])
    def test_method_hears_how_far_the_policy_moved_at_each_sync(self, world, limit):
        """As the run itself logs it: of a step whose responses are of older weights, the fresh groups' distance."""
        made = world(prompts=32, **{"adapt.rollout_delay": 3, "adapt.max_tv_rollout": limit} if limit else {})
        heard = []
        made.trainer.method.policy_moved = lambda distance: heard.append((made.trainer.step, distance))
        made.trainer.fit()
        rows = made.metrics()
        synced = [step for step in range(1, len(rows) + 1) if step % 3 == 0]
        early = [step for step in range(1, len(rows) + 1) if limit and step % 3 and heard_of(rows, step) > limit]
        assert [step for step, _ in heard] == sorted(synced + early) and bool(early) is bool(limit)
        assert [distance for _, distance in heard] == pytest.approx([heard_of(rows, step) for step, _ in heard])
        assert any(distance > 0 for _, distance in heard)

    def test_hard_prompts_go_along_where_no_sync_is_saved(self, world):
        # v = 2, m = 3: in step 3 the engines hold older weights, in step 6 today's
        made = world(prompts=40, **{"adapt.rollout_delay": 2, "adapt.reevaluate_every": 3, "train.num_episodes": 1})
        made.trainer.fit()
        rows = made.metrics()
        assert [bool(row["groups/reevaluation_attempts"]) for row in rows] == [n in (3, 6, 9) for n in range(10)]
        assert ["timing/reevaluation" in row for row in rows] == [n in (3, 9) for n in range(10)]
        assert all(row["reevaluation/added_seconds"] >= 0 for row in rows)
        # synced for the hard prompts, the engines keep today's weights where the next rollout needs them
        assert made.noted("sync") == [2, 3, 4, 6, 8, 9, 10] and not made.noted("keep", "restore")

    def test_delayed_weights_come_back_after_hard_prompts(self, world):
        made = world(prompts=32, **{"adapt.rollout_delay": 4, "adapt.reevaluate_every": 2, "train.num_episodes": 1})
        made.trainer.fit()
        found = [event for event in made.events if event[0] in ("sync", "keep", "restore")]
        assert found == [
            ("keep", 0),
            ("sync", 2),
            ("restore", 0),
            ("sync", 4),
            ("keep", 4),
            ("sync", 6),
            ("restore", 4),
            ("sync", 8),
            ("keep", 8),
        ]

    @pytest.mark.parametrize("sleep", [False, True])
    def test_weights_are_awake_when_they_are_kept_or_restored(self, world, sleep):
        changed = {"vllm.enable_sleep": True, "train.colocate_all": True} if sleep else {}
        made = world(prompts=32, **{"adapt.rollout_delay": 4, "train.num_episodes": 1}, **changed)
        made.trainer.fit()
        before = [made.events[n - 1] for n, (name, _) in enumerate(made.events) if name in ("keep", "restore", "sync")]
        assert len(before) == 9
        assert all(event == ("wake_up", ["weights"]) for event in before) is sleep
        assert bool(made.noted("wake_up")) is sleep

    def test_each_engine_gets_the_verifier_once_before_anything_is_generated(self, world):
        made = world(engines=3, **{"verifier.timeout": 17})
        made.trainer.fit()
        assert made.noted("isolate_rewards") == [made.args.verifier] * 3
        assert [name for name, _ in made.events][:3] == ["isolate_rewards"] * 3

    def test_seeds_of_a_repeatable_run_are_all_different(self, world):
        made = world(evaluation=2, **{"train.full_determinism_enable": True, "eval.steps": 2})
        made.trainer.fit()
        seeds = [request.seed for request in made.requests]
        assert len(set(seeds)) == len(seeds) and None not in seeds
        again = world(evaluation=2, engines=3, **{"train.full_determinism_enable": True, "eval.steps": 2})
        again.trainer.fit()
        assert {(r.prompt, r.step, r.seed) for r in again.requests} == {
            (r.prompt, r.step, r.seed) for r in made.requests
        }

    def test_learning_rate_schedule_spans_full_batches(self, world):
        # 16 / 4 steps, twice; B = 6 groups of 4 are 3 optimizer steps of 8 samples; 2 epochs over each batch
        made = world(**{"adapt.batch_size": 6, "train.max_epochs": 2})
        assert made.trainer.get_max_steps() == 8 * 3 * 2

    @pytest.mark.parametrize(("method", "more"), [("luffy", 0), ("relift", 1)])
    def test_learning_rate_schedule_has_room_for_fine_tuning(self, world, method, more):
        made = world(**{"adapt.batch_size": 6, "adapt.method": method, "adapt.options": TRACES})
        assert made.trainer.get_max_steps() == 8 * (3 + more)

    def test_kl_to_the_behaviour_policy_keeps_its_coefficient(self, world):
        made = world(**{"algo.kl.init_coef": 0.02, "adapt.kl_target": "behaviour"})
        assert made.trainer.kl_ctl.value == 0.02 and made.args.algo.kl.init_coef == 0.0


class TestObserve:
    @pytest.mark.parametrize("algorithm", ["bapo_grpo", "ba_ppo"])
    def test_the_method_hears_of_each_group_that_was_trained_on(self, world, algorithm):
        words = {"adapt.max_tv_fresh": 0.02, "adapt.replayed_weight": 3}
        made = world(algorithm=algorithm, prompts=40, **words)
        heard = []

        def observe(step, errors):
            groups = [group for _, group in made.trainer.batch.with_sources()]
            heard.append((step, errors, groups, made.trainer.experience_maker.tokens))

        made.trainer.method.observe = observe
        made.trainer.fit()
        rows = made.metrics()
        assert [step for step, *_ in heard] == [row["step"] - 1 for row in rows if "skipped_update" not in row]
        for _, errors, groups, tokens in heard:
            assert list(errors) == [group.uid for group in groups]
            sizes = [sum(len(response.log_probs) for response in group.responses) for group in groups]
            total = sum(error * size for error, size in zip(errors.values(), sizes, strict=True))
            kind = "value_errors" if algorithm == "ba_ppo" else "advantages"
            weights = {"replayed": 3 if kind == "advantages" else 1}  # errors are without the weight
            parts = {name: np.abs(getattr(part, kind)).sum() / weights.get(name, 1) for name, part in tokens.items()}
            assert total == pytest.approx(sum(parts.values()), rel=1e-5)
        assert any(row["groups/too_far"] for row in rows) and any(row["groups/replayed"] for row in rows)

    def test_not_of_a_step_without_an_update(self, world):
        made = world(**{"train.num_episodes": 1})
        made.reward = lambda *_: 1.0
        made.trainer.method.observe = lambda *_: pytest.fail("nothing was trained on")
        made.trainer.fit()

    def test_a_run_replays_by_errors(self, world):
        made = world(algorithm="ba_ppo", prompts=24, **{"adapt.method": "bapo_prioritized"})
        made.trainer.fit()
        method = made.trainer.method
        assert method.errors and set(method.errors) <= {group.uid for group in method.replay}
        assert any(row["groups/replayed"] for row in made.metrics())


class TestChoice:
    def test_prompts_are_generated_for_that_the_method_chose(self, world):
        made = world(prompts=19, **{"adapt.method": CHOOSING}, **{"eval.steps": 2}, evaluation=3)
        made.trainer.fit()
        assert made.trainer.step == 6  # 8, 8 and 3 prompts are drawn, twice
        asked = made.trainer.method.asked
        assert [(step, len(drawn), count) for step, drawn, count in asked] == [
            (step, 8, 4) for step in (0, 1, 3, 4)
        ]  # of 3 prompts nothing is to be chosen
        for epoch in (0, 3):
            drawn = [prompt for step, prompts, _ in asked for prompt in prompts if epoch <= step < epoch + 3]
            last = {request.prompt for request in made.of_step(epoch + 2)[0][:3]}  # then hard ones
            assert len(last) == 3 and sorted([*drawn, *last]) == sorted(f"prompt {n}" for n in range(19))
        for step, prompts, _ in asked:
            assert sorted(request.prompt for request in made.of_step(step)[0]) == sorted(prompts)[:4]
        assert [row["prompts/passed_over"] for row in made.metrics()] == [4, 4, 0] * 2
        # An evaluation asks all of its prompts.
        assert sum(request.prompt.startswith("eval") for request in made.requests) == 3 * 3


class TestReference:
    """A replayed response is not sent to the reference model again, and nothing else of the run changes."""

    METHODS = (
        {},
        {"algo.kl.use_loss": True, "algo.kl.estimator": "k3"},
        {"adapt.method": "bapo_prioritized", "algorithm": "ba_ppo"},
        {"adapt.method": "remix", "adapt.batch_size": 8},
        {"adapt.method": "dots", "adapt.batch_size": 8},
        {"adapt.method": "repo", "adapt.batch_size": 8},
        {"adapt.method": "arpo"},
        {"adapt.method": "exgrpo", "adapt.batch_size": 8, "adapt.options": "start_above=0"},
        {"adapt.method": "luffy", "adapt.options": [TRACES]},
    )

    @pytest.mark.parametrize("words", METHODS, ids=lambda words: " ".join(map(str, words.values())) or "bapo")
    def test_is_asked_once_for_each_response(self, world, words):
        method, use_loss = words.get("adapt.method"), "algo.kl.use_loss" in words
        again = method in ("arpo", "exgrpo", "repo")  # which replay responses to prompts that come again
        words = {"algo.kl.init_coef": 0.02, **words}
        words |= {"train.num_episodes": 6, "adapt.reevaluate_every": 1} if again else {}
        sent, every = (world(prompts=8 if again else 24, **words) for _ in range(2))
        maker = every.trainer.experience_maker
        make = maker.make_experience_batch

        def forgetful(samples):
            for response in maker.responses:
                response.extras.pop(REFERENCE, None)
            return make(samples)

        maker.make_experience_batch = forgetful
        asked = []
        for made in (sent, every):
            made.reward = TestMixedGroups.reward if again else made.reward
            made.trainer.fit()
            asked.append(Counter(tuple(tokens) for _, tokens in made.referred))
        differ = {"tokens/reference_kept", "buffer/replay_bytes", "cache/bytes", "experience/bytes"}
        for ours, theirs in zip(numbers(sent.metrics()), numbers(every.metrics()), strict=True):
            assert {k: v for k, v in ours.items() if k not in differ} == {
                k: v for k, v in theirs.items() if k not in differ
            }
        assert repr(trained(sent, 0)) == repr(trained(every, 0))
        for (_, ours), (_, theirs) in zip(sent.trained, every.trained, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert (one.base_action_log_probs is None) is not use_loss
                assert not use_loss or torch.equal(one.base_action_log_probs, other.base_action_log_probs)
        # Whatever was trained on without being asked for was asked for before.
        rows = {row["step"]: row for row in sent.metrics()}
        for step, row in rows.items():
            if "skipped_update" in row:
                continue
            new = sum(len(tokens) - 2 for at, tokens in sent.referred if at == step - 1)
            if method != "luffy":  # whose prompts are longer
                assert row["tokens/reference_kept"] == row["tokens/trained"] - new
        saved = sum(asked[1].values()) - sum(asked[0].values())
        assert set(asked[0]) == set(asked[1]) and (saved > 0) is (method != "luffy")

    def test_says_which_model_it_is(self, world):
        made = world(**{"algo.kl.init_coef": 0.02, "rollout.temperature": 0.7})
        assert made.trainer.experience_maker.reference == "model at temperature 0.7"


class TestMixedGroups:
    """Groups with a stored response among those of this step: each goes by the weights that generated it."""

    @staticmethod
    def rounding(weights: int) -> float:
        """What the engines' log-probs differ from the actor's by: it tells weights apart; exact in float32."""
        return 2.0**-10 + weights * 2.0**-16

    @staticmethod
    def reward(prompt: str, weights: int, sample: int) -> float:
        """Now and then all of a group fail."""
        return float(digest("mixed", prompt, weights, sample) % 8 >= 6)

    @pytest.mark.parametrize("algorithm", ["bapo_grpo", "ba_ppo"])
    @pytest.mark.parametrize(
        ("method", "delay"), [("arpo", 1), ("arpo", 2), ("exgrpo", 1), ("exgrpo", 3)], ids=lambda value: str(value)
    )
    def test_each_response_by_its_own_weights(self, world, monkeypatch, method, delay, algorithm):
        words = {"adapt.rollout_delay": delay, "adapt.reevaluate_every": 1, "adapt.method": method}
        words |= {"train.num_episodes": 6, "adapt.filter": "none"}
        if method == "exgrpo":
            words |= {"adapt.options": "start_above=0", "adapt.batch_size": 8}
        if algorithm == "ba_ppo":
            words["adapt.returns"] = "vtrace"
        plain = Engine.generate_responses

        def rounded(engine, **arguments):
            answers = plain(engine, **arguments)
            more = self.rounding(engine.weights)
            for answer in answers:
                answer["rollout_log_probs"] = [0.0, 0.0, *(x + more for x in answer["rollout_log_probs"][2:])]
            return answers

        monkeypatch.setattr(Engine, "generate_responses", rounded)
        made = world(algorithm=algorithm, prompts=8, **words)
        made.reward = self.reward
        maker, seen = made.trainer.experience_maker, []
        make_experience = maker.make_experience

        def spy(samples):
            experiences = make_experience(samples)
            seen.append((made.trainer.step, maker.origins, experiences, maker._token_log_ratios))
            return experiences

        monkeypatch.setattr(maker, "make_experience", spy)
        made.trainer.fit()
        mixed: Counter = Counter()
        for step, origins, experiences, token_log_ratios in seen:
            weights_of = {}
            for experience, log_ratios in zip(experiences, token_log_ratios, strict=True):
                for row, index in enumerate(experience.index):
                    mask = experience.action_mask[row].bool()
                    tokens = experience.sequences[row].tolist()
                    stored = experience.rollout_log_probs[row][mask]
                    by_weights = {w: torch.tensor(made.log_probs(tokens, w))[mask] for w in range(step + 1)}
                    weights = [w for w, x in by_weights.items() if torch.equal(x + self.rounding(w), stored)]
                    assert len(weights) == 1  # which the test finds out from the numbers alone
                    today = weights == [step]
                    assert origins[index].on_policy == today
                    old = by_weights[step] if today else stored
                    assert torch.equal(experience.action_log_probs[row][mask], old)
                    wanted = (by_weights[step].double() - stored.double()) * (not today)
                    assert np.array_equal(log_ratios[row][mask.numpy()], wanted.numpy())
                    weights_of[index] = weights[0]
            for group in range(len(weights_of) // 4):
                of_group = [weights_of[4 * group + n] for n in range(4)]
                assert len(set(of_group[1:])) == 1
                mixed[origins[4 * group].source] += of_group[0] < of_group[1]
        assert mixed["fresh" if method == "arpo" else "reevaluated"] >= 4 and len(+mixed) == 1

    def test_the_record_has_what_was_generated_and_the_log_what_was_trained_on(self, world):
        made = world(prompts=8, **{"adapt.method": "arpo", "adapt.rollout_delay": 1, "train.num_episodes": 6})
        made.reward = self.reward
        made.trainer.fit()
        rows, metrics = read_groups(made.record), made.metrics()
        helped = 0
        for row, request in zip(rows, made.requests, strict=True):
            rewards = [made.reward(request.prompt, request.weights, n) for n in range(4)]
            assert row["mean"] == sum(rewards) / 4
            helped += row["state"] == "fresh" and row["mean"] == 0
        assert helped == sum(metric["exchange/groups"] for metric in metrics) >= 4
        for step, metric in enumerate(metrics):
            of_step = [row for row in rows if row["step"] == step + 1]
            assert metric["groups/generated"] == len(of_step) == sum(metric[f"groups/{state}"] for state in STATES)
            assert metric["reward/fresh_mean"] == pytest.approx(np.mean([row["mean"] for row in of_step]))
            trained = [experience for at, batch in made.trained if at == step for experience in batch]
            assert metric["tokens/trained"] == sum(int(experience.action_mask.sum()) for experience in trained)


def traces_file(folder: Path, prompts: Any) -> Path:
    """A trace of 1 to 5 characters for each of these prompts, and one of a prompt that is not in the data."""
    path = folder / "traces.jsonl"
    rows = [{"prompt": f"prompt {n}", "response": "abcde"[: 1 + n % 5]} for n in prompts]
    rows.append({"prompt": "another", "response": "x"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class TestTraces:
    def luffy(self, world, tmp_path, **words):
        options = {"adapt.method": "luffy", "adapt.options": f"traces={traces_file(tmp_path, range(0, 16, 2))}"}
        return world(**options | words)

    def test_their_tokens(self, world, tmp_path):
        traces = self.luffy(world, tmp_path).trainer.method.trace_of
        assert sorted(traces) == sorted(f"prompt {n}" for n in range(0, 16, 2))
        assert traces["prompt 2"].tolist() == [197, 198, 199, 2] and traces["prompt 2"].dtype == np.int32

    @pytest.mark.parametrize(("length", "new", "kept"), [(64, 4, 3), (64, 3, 2), (13, None, 4), (12, None, 3)])
    def test_those_that_are_too_long_are_left_out(self, world, tmp_path, length, new, kept):
        """The prompts have 8 tokens, the traces 2, 3, 4, 5 and 6 with the end."""
        path = tmp_path / "traces.jsonl"
        rows = [{"prompt": f"prompt {n}", "response": "abcdefg"[: n + 1]} for n in range(5)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = {"data.max_len": length, "adapt.method": "luffy", "adapt.options": f"traces={path}"}
        made = world(**words | ({"rollout.max_new_tokens": new} if new else {}))
        assert sorted(made.trainer.method.trace_of) == [f"prompt {n}" for n in range(kept)]

    def test_a_whole_run_of_luffy(self, world, tmp_path):
        made = self.luffy(world, tmp_path)
        made.trainer.fit()
        assert made.noted("shape") == [0.1]
        rows = made.metrics()
        found = {name for row in rows for name in row} - {"step"}
        assert found <= metrics.names("bapo_grpo", optional=True) and len(rows) == 8
        for step, row in enumerate(rows):
            fresh, hard = made.of_step(step)
            mixed = [request.prompt for request in fresh if int(request.prompt[7:]) % 2 == 0]
            assert not hard and row["traces/mixed"] == len(mixed) and row["traces/prompts"] == 8
            assert row["groups/generated"] == 4 == sum(row[f"groups/{state}"] for state in STATES)
            for experience in (e for at, batch in made.trained if at == step for e in batch):
                for at, prompt in enumerate(experience.prompts):
                    external = (
                        bool(experience.info[samples.EXTERNAL][at]) if samples.EXTERNAL in experience.info else False
                    )
                    text = [token for token in experience.sequences[at].tolist() if token]
                    n = int(prompt[7:])
                    trace = [100 + ord(character) for character in "abcde"[: 1 + n % 5]] + [2]
                    assert (text == [3, 4, *trace]) is external
                    assert external is (prompt in mixed and experience.index[at] % 4 == 3)
                    assert not external or experience.rewards[at] == 1.0
            # the record has what was generated
            responses = [row for row in read_groups(made.record) if row["step"] == step + 1]
            assert {row["responses"] for row in responses} == {4}
        assert sum(row["groups/fresh"] for row in rows) > 8

    def test_a_run_without_traces_tells_the_actor_nothing(self, world):
        made = world()
        made.trainer.fit()
        assert not made.noted("shape", "finetune")
        assert all(samples.EXTERNAL not in e.info for _, batch in made.trained for e in batch)

    @pytest.mark.parametrize("solved", [False, True])
    def test_a_whole_run_of_relift(self, world, tmp_path, solved):
        """`solved`: some groups have a signal; otherwise every update is skipped, and fine-tuning is not."""
        path = traces_file(tmp_path, range(16))
        options = ["traces=" + str(path), "finetune_batch=3", "finetune_weight=0.5"]
        made = world(**{"adapt.method": "relift", "adapt.rollout_delay": 1, "adapt.options": options})
        hard = {f"prompt {n}" for n in range(0, 16, 1 + solved)}
        made.reward = lambda prompt, weights, n: float(prompt not in hard and n == 1)
        made.trainer.fit()
        rows, waiting, due = made.metrics(), [], {}
        for step, row in enumerate(rows):
            for request in made.of_step(step)[0]:
                if request.prompt in hard and request.prompt not in waiting:
                    waiting.append(request.prompt)
            if len(waiting) >= 3:
                due[step], waiting = waiting[:3], waiting[3:]
            assert row.get("finetune/demonstrations") == (3 if step in due else None)
            assert row.get("finetune/loss") == (0.5 if step in due else None)
            assert row["finetune/waiting"] == len(waiting) and row.get("skipped_update") == (None if solved else 1)
        assert {step for step, *_ in made.noted("finetune")} == set(due) and len(due) >= 3
        for step, batches, tokens, ranks, weight in made.noted("finetune"):
            by_length = sorted(due[step], key=lambda prompt: int(prompt[7:]) % 5)
            assert [prompt for batch in batches for prompt in batch.prompts] == by_length
            wanted = [[100 + ord(c) for c in "abcde"[: 1 + int(p[7:]) % 5]] + [2] for p in by_length]
            shown = [
                [int(token) for token, counts in zip(row[1:], mask, strict=True) if counts]
                for batch in batches
                for row, mask in zip(batch.sequences, batch.action_mask, strict=True)
            ]
            assert shown == wanted and tokens == sum(map(len, wanted)) and (ranks, weight) == (1, 0.5)
            assert [len(batch.prompts) for batch in batches] == [2, 1]  # micro-batches of 2
        # before the weights are synced, and after the update
        names = [name for name, _ in made.events if name in ("finetune", "sync")]
        assert all(names[at + 1] == "sync" for at, name in enumerate(names) if name == "finetune")
        assert made.trainer.step == len(rows) == 8

    @pytest.mark.parametrize(
        ("ranks", "prompts"),
        [
            (1, [[["p0", "p1"], ["p2", "p3"], ["p4"]]]),
            (2, [[["p0", "p2"], ["p4"]], [["p1", "p3"], []]]),
            (3, [[["p0", "p3"]], [["p1", "p4"]], [["p2"]]]),
            (4, [[["p0", "p4"]], [["p1"]], [["p2"]], [["p3"]]]),
            (7, [[["p0"]], [["p1"]], [["p2"]], [["p3"]], [["p4"]], [[]], [[]]]),
        ],
    )
    def test_ranks_get_shares_that_differ_by_one(self, world, make_group, ranks, prompts):
        """There are 5 demonstrations, of 1 to 5 tokens, in micro-batches of 2; [] stands for a filler."""
        made = world()
        made.trainer.arithmetic = BatchArithmetic(4, 4, 4, 8, {"actor": ranks}, 2, 3)
        made.trainer.actor_model_group = made.groups["actor"] = Group(made, "actor", ranks)
        groups = [make_group([1.0], prompt=f"p{n}", extras=EXTRAS, response_tokens=n + 1) for n in range(5)]
        made.trainer.method.demonstrations = lambda step: [groups[n] for n in (3, 0, 4, 1, 2)]
        assert made.trainer._finetune() == {"finetune/demonstrations": 5, "finetune/loss": 0.5 * ranks}
        given_ = made.noted("finetune")
        assert {call[2:] for call in given_} == {(15, ranks, 1.0)}
        found = [[batch.prompts if batch.action_mask.any() else [] for batch in batches] for _, batches, *_ in given_]
        assert found == prompts
        counted = [
            (prompt, int(mask.sum()))
            for _, batches, *_ in given_
            for batch in batches
            for prompt, mask in zip(batch.prompts, batch.action_mask, strict=True)
        ]
        fillers = sum(batch == [] for batches in prompts for batch in batches)
        # a filler is like the shortest demonstration
        assert sorted(counted) == [("p0", 0)] * fillers + [(f"p{n}", n + 1) for n in range(5)]

    def test_models_that_sleep_are_woken_for_it(self, world, make_group):
        made = world()
        made.args.ds.enable_sleep = True
        made.trainer.method.demonstrations = lambda step: [make_group([1.0], extras=EXTRAS)]
        made.trainer._finetune()
        assert [name for name, _ in made.events] == ["reload", "finetune", "offload"]

    def test_a_failure_says_where(self, world, make_group):
        made = world()
        made.trainer.method.demonstrations = lambda step: [make_group([1.0], extras=EXTRAS)] if step == 2 else []
        made.faults["finetune"] = (2, FloatingPointError("the loss is nan"))
        with pytest.raises(RuntimeError, match="step 2, fine-tuning: FloatingPointError: the loss is nan"):
            made.trainer.fit()

    def test_distances_leave_traces_out(self, world, tmp_path):
        """A trace is far from any policy: with its ratio, each mixed group would be too far."""
        made = self.luffy(world, tmp_path, **{"adapt.max_tv_fresh": 0.6, "adapt.rollout_delay": 2})
        made.trainer.fit()
        assert sum(row["groups/too_far"] for row in made.metrics()) == 0
        assert all(row["tv/fresh"] < 0.5 for row in made.metrics() if "tv/fresh" in row)


class TestRecord:
    """What a run leaves, against what the engines were asked for and what was trained on."""

    def tokens(self, made: World, request: SimpleNamespace) -> int:
        """Generated tokens of a request's four responses."""
        return sum(1 + digest(request.prompt, request.weights, n, None) % 4 for n in range(4))

    @pytest.mark.parametrize(
        "case", [{}, {"algorithm": "ba_ppo", "adapt.filter": "gaussian", "adapt.max_tv_fresh": 0.02}]
    )
    def test_every_group_has_its_line(self, world, case):
        made = world(prompts=40, **{"adapt.max_failed_share": 1}, **case)
        plain = made.reward
        made.reward = lambda prompt, weights, n: None if prompt == "prompt 3" and n == 1 else plain(prompt, weights, n)
        made.trainer.fit()
        rows, metrics = read_groups(made.record), made.metrics()
        assert [row["uid"] for row in rows] == list(range(len(made.requests)))
        ids = {Prompt(f"prompt {n}", str(n)).id: f"prompt {n}" for n in range(40)}
        for step, metric in enumerate(metrics):
            of_step = [row for row in rows if row["step"] == step + 1]
            fresh, hard = made.of_step(step)
            for source, requests in (("fresh", fresh), ("reevaluated", hard)):
                found = [row for row in of_step if row["source"] == source]
                assert sorted(ids[row["prompt"]] for row in found) == sorted(request.prompt for request in requests)
                for row in found:
                    (request,) = (request for request in requests if request.prompt == ids[row["prompt"]])
                    rewards = [plain(request.prompt, request.weights, n) for n in range(4)]
                    failed = request.prompt == "prompt 3"
                    assert row["mean"] == (None if failed else sum(rewards) / 4)
                    assert (row["state"] == "failed") == failed
                    assert row["responses"] == 4 and row["tokens"] == self.tokens(made, request)
            for state in STATES:
                assert metric[f"groups/{state}"] == sum(row["state"] == state for row in of_step), state
            reasons = {None: "by_draw", 0: "none_right", 1: "all_right"}
            dropped = [row["mean"] if row["mean"] in (0, 1) else None for row in of_step if row["state"] == "filtered"]
            assert {name: metric[f"filtered/{name}"] for name in reasons.values()} == {
                name: dropped.count(mean) for mean, name in reasons.items()
            }
            assert metric["rollouts/step"] == 4 * len(of_step)
            assert metric["tokens/generated"] == sum(row["tokens"] for row in of_step)
            assert metric["tokens/generated_total"] == sum(row["tokens"] for row in rows if row["step"] <= step + 1)
            trained = [experience for at, batch in made.trained if at == step for experience in batch]
            assert metric["tokens/trained"] == sum(int(experience.action_mask.sum()) for experience in trained)
            assert metric["tokens/trained_total"] == sum(row["tokens/trained"] for row in metrics[: step + 1])
            used = sum(metric[f"groups/{source}"] for source in ("fresh", "reevaluated", "replayed"))
            assert metric["groups/capacity_used"] == used / metric["groups/capacity"] <= 1
            again = metric["groups/reevaluation_attempts"]
            assert metric.get("reevaluation/improved_share") == (
                metric["groups/reevaluated"] / again if again else None
            )
        assert {row["state"] for row in rows} >= {"fresh", "filtered", "failed", "unimproved"}

    def test_answers_of_prompts_that_failed_and_were_solved(self, world):
        made = world(prompts=12, **{"train.num_episodes": 4})
        made.reward = lambda prompt, weights, n: float(weights >= int(prompt[7:]) and n == 2)
        decoded = []
        made.trainer.tokenizer.decode = lambda tokens, **_: decoded.append(tokens) or decode(tokens)
        made.trainer.fit()
        rows, groups = read_answers(made.record), read_groups(made.record)
        wanted = set()
        for prompt in {row["prompt"] for row in groups}:
            of_prompt = [row for row in groups if row["prompt"] == prompt]
            failed = [row["step"] for row in of_prompt if row["mean"] == 0]
            wanted |= {(prompt, "failed", step) for step in failed[:1]}
            solved = [row["uid"] for row in of_prompt if row["mean"] > 0 and failed and row["step"] > failed[0]]
            wanted |= {(prompt, "solved", row["step"]) for row in of_prompt if row["uid"] in solved[:1]}
        assert {(row["prompt"], row["kind"], row["step"]) for row in rows} == wanted
        assert len(rows) == len(wanted) and {kind for _, kind, _ in wanted} == {"failed", "solved"}
        for row in rows:
            number = int(row["text"].removeprefix("prompt "))
            assert row["prompt"] == Prompt(row["text"], row["label"]).id and row["label"] == str(number)
            assert row["reward"] == (row["kind"] == "solved")
            # the third response is the right one; of equally wrong ones it is the first
            answers = {w: digest(row["text"], w, 2 * (row["kind"] == "solved"), None) for w in range(13)}
            made_by = [" ".join(str(5 + d // 7**p % 40) for p in range(1 + d % 4)) for d in answers.values()]
            assert row["response"] in made_by
        single = [tokens for tokens in decoded if tokens.dim() == 1]
        assert len(single) == len(rows)  # nothing else is decoded but OpenRLHF's sample of a step

    @pytest.mark.parametrize("chars", [0, 5])
    def test_how_long_answers_are(self, world, chars):
        made = world(**{"run.answer_chars": chars})
        made.reward = lambda *_: 0.0
        made.trainer.tokenizer.decode = lambda tokens, **_: ["x"] if tokens.dim() > 1 else "123456789"
        made.trainer.fit()
        assert {row["response"] for row in read_answers(made.record)} == ({" ... "} if chars else set())
        assert (made.record / "answers.jsonl").exists() == bool(chars)
        assert len(read_groups(made.record)) == len(made.requests)

    @pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
    def test_of_a_run_without_batch_adaptation(self, world, algorithm):
        made = world(algorithm=algorithm, kind=trainer.RecordedPPOTrainer, prompts=10)
        made.trainer.fit()
        rows, metrics = read_groups(made.record), made.metrics()
        assert [row["uid"] for row in rows] == list(range(20)) and {row["state"] for row in rows} == {"fresh"}
        asked = [Prompt(request.prompt, request.prompt[7:]).id for request in made.requests]
        assert sorted(row["prompt"] for row in rows) == sorted(asked)
        assert {(row["source"], row["responses"]) for row in rows} == {("fresh", 4)}
        for step, metric in enumerate(metrics, 1):
            of_step = [row for row in rows if row["step"] == step]
            assert metric["groups/fresh"] == metric["groups/generated"] == len(of_step) == (4, 4, 2)[(step - 1) % 3]
            assert metric["reward/fresh_mean"] == pytest.approx(np.mean([row["mean"] for row in of_step]))
            assert metric["rollouts/step"] == 4 * len(of_step)
            assert metric["tokens/generated"] == metric["tokens/trained"] == sum(row["tokens"] for row in of_step)
            assert metric["length/fresh"] == metric["tokens/generated"] / metric["rollouts/step"]
            assert metric["groups/capacity_used"] == len(of_step) / 4
        assert metrics[-1]["rollouts/total"] == 80
        assert metrics[-1]["tokens/trained_total"] == sum(row["tokens"] for row in rows)
        assert read_answers(made.record)

    @pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
    def test_of_groups_that_dynamic_filtering_dropped(self, world, algorithm):
        made = world(algorithm=algorithm, kind=trainer.RecordedPPOTrainer, prompts=30, **DYNAMIC)
        made.trainer.fit()
        rows, metrics = read_groups(made.record), made.metrics()
        assert [row["uid"] for row in rows] == list(range(len(made.requests))) == list(range(60))
        ids = {Prompt(f"prompt {n}", str(n)).id: f"prompt {n}" for n in range(30)}
        found, wanted = [], []
        for request in made.requests:
            rewards = [made.reward(request.prompt, request.weights, n) for n in range(4)]
            state = "fresh" if 0 < sum(rewards) < 4 else "filtered"
            wanted.append((request.weights + 1, request.prompt, state, sum(rewards) / 4, self.tokens(made, request)))
        for row in rows:
            found.append((row["step"], ids[row["prompt"]], row["state"], row["mean"], row["tokens"]))
            assert row["responses"] == 4 and row["source"] == "fresh"
        assert sorted(found) == sorted(wanted)
        for step, metric in enumerate(metrics, 1):
            of_step = [row for row in rows if row["step"] == step]
            dropped = [row["mean"] for row in of_step if row["state"] == "filtered"]
            assert metric["groups/generated"] == len(of_step) == metric["groups/fresh"] + metric["groups/filtered"]
            assert metric["groups/filtered"] == len(dropped)
            assert metric["filtered/none_right"] == dropped.count(0) and metric["filtered/by_draw"] == 0
            assert metric["filtered/all_right"] == dropped.count(1)
            assert metric["groups/capacity_used"] == metric["groups/fresh"] / 4 <= 1
            assert metric["reward/fresh_mean"] == pytest.approx(np.mean([row["mean"] for row in of_step]))
            assert metric["rollouts/step"] == 4 * len(of_step)
            assert metric["tokens/generated"] == sum(row["tokens"] for row in of_step)
            tokens = [row["tokens"] for row in of_step if row["state"] == "fresh"]
            assert metric["tokens/trained"] == sum(tokens)
            assert metric["length/fresh"] == sum(tokens) / (4 * len(tokens))
        assert metrics[-1]["rollouts/total"] == 4 * len(made.requests)
        assert {row["mean"] for row in rows if row["state"] == "filtered"} == {0, 1}

    def test_of_a_range_that_drops_groups_with_a_signal(self, world):
        changed = {"algo.dynamic_filtering_range": (0.3, 0.6), "train.num_episodes": 1}
        made = world(algorithm="grpo", kind=trainer.RecordedPPOTrainer, prompts=40, **DYNAMIC, **changed)
        made.trainer.fit()
        rows, metrics = read_groups(made.record), made.metrics()
        assert {row["mean"] for row in rows if row["state"] == "fresh"} == {0.5}
        kinds = {None: "by_draw", 0: "none_right", 1: "all_right"}
        dropped = [row["mean"] if row["mean"] in (0, 1) else None for row in rows if row["state"] == "filtered"]
        counts = {name: sum(metric[f"filtered/{name}"] for metric in metrics) for name in kinds.values()}
        assert counts == {name: dropped.count(mean) for mean, name in kinds.items()} and min(counts.values()) > 0

    def test_of_batches_that_were_filtered_whole(self, world):
        made = world(algorithm="grpo", kind=trainer.RecordedPPOTrainer, prompts=8, evaluation=3, **DYNAMIC,
                     **{"eval.steps": 1})  # fmt: skip
        made.reward = lambda prompt, weights, n: float(weights == 0 and n == 0)
        made.trainer.fit()
        first, last = made.metrics()  # 4 groups, then 4 and the 8 of the second episode, none of them trained on
        assert "skipped_update" not in first and first["groups/fresh"] == first["groups/generated"] == 4
        assert (last["skipped_update"], last["step"], last["groups/fresh"], last["groups/filtered"]) == (1, 2, 0, 12)
        assert last["rollouts/total"] == 4 * 16 and last["tokens/trained"] == 0 and last["reward/fresh_mean"] == 0
        assert set(last) - {"step"} <= metrics.names("grpo", optional=True)
        assert len(read_groups(made.record)) == 16 and made.updates["actor"] == 1

    def test_of_such_a_batch_after_a_resume(self, world):
        folder, flags = None, {"ckpt.save_steps": 2, "train.num_episodes": 1} | DYNAMIC
        made = world(algorithm="grpo", kind=trainer.RecordedPPOTrainer, prompts=16, **flags)
        made.reward = lambda prompt, weights, n: float(weights < 3 and n == 0)
        made.trainer.fit()
        assert [row["groups/filtered"] for row in made.metrics()] == [0, 0, 0, 4]
        folder = made.record.parent.parent
        again = world(algorithm="grpo", kind=trainer.RecordedPPOTrainer, prompts=16, folder=folder,
                      **flags, **{"ckpt.load_enable": True})  # fmt: skip
        again.reward = lambda *_: 0.0
        again.trainer.fit()
        rows = again.metrics()
        assert [row["step"] for row in rows] == [1, 2, 3]
        assert [row["groups/filtered"] for row in rows] == [0, 0, 8] and rows[-1]["rollouts/total"] == 4 * 16
        assert [row["uid"] for row in read_groups(again.record)] == list(range(16))

    def test_of_samples_that_fill_no_micro_batch(self, world):
        made = world(algorithm="grpo", kind=trainer.RecordedPPOTrainer, prompts=5,
                     **{"train.num_episodes": 1, "train.micro_batch_size": 8})  # fmt: skip
        made.trainer.fit()
        assert [row["rollouts/left_over"] for row in made.metrics()] == [0, 4]

    def test_of_a_plain_run_with_a_reward_that_is_no_number(self, world):
        made = world(algorithm="grpo", kind=trainer.RecordedPPOTrainer, prompts=4, **{"train.num_episodes": 1})
        made.reward = lambda prompt, weights, n: math.nan if (prompt, n) == ("prompt 2", 1) else 0.5
        made.trainer.fit()
        means = {row["prompt"]: row["mean"] for row in read_groups(made.record)}
        assert means.pop(Prompt("prompt 2", "2").id) is None and set(means.values()) == {0.5} and len(means) == 3
        assert made.metrics()[0]["reward/fresh_mean"] is None

    def test_of_rewards_that_a_model_gives(self, world):
        made = world(algorithm="grpo", kind=trainer.RecordedPPOTrainer, prompts=4, **{"train.num_episodes": 1})
        made.reward = lambda *_: None
        made.trainer.experience_maker.reward_model_group = SimpleNamespace(
            async_run_method_batch=lambda sequences, **_: [Ref([torch.full((len(rows),), 0.25) for rows in sequences])]
        )
        made.trainer.fit()
        assert {row["mean"] for row in read_groups(made.record)} == {None} and read_answers(made.record) == []
        assert {row["state"] for row in read_groups(made.record)} == {"fresh"}
        assert made.metrics()[0]["reward/fresh_mean"] == 0.25


# What OpenRLHF's workers report comes from `World.norms` here: it is looked at on the real stack.
WORKERS = {metric.name for metric in metrics.OPENRLHF if "/" not in metric.name}


class TestCatalogue:
    """The metrics that a run writes and those that the catalogue says it writes."""

    @pytest.mark.parametrize("algorithm", metrics.ALL)
    def test_is_what_a_run_writes(self, world, algorithm):
        kind = AdaptedPPOTrainer if algorithm in metrics.ADAPTED else trainer.RecordedPPOTrainer
        made = world(algorithm=algorithm, kind=kind, prompts=24, **{"train.num_episodes": 3})
        made.trainer.fit()
        found = {name for row in made.metrics() for name in row} - {"step"}
        wanted = metrics.names(algorithm, optional=False) - WORKERS
        assert found - WORKERS >= wanted
        assert found <= metrics.names(algorithm, optional=True)

    def test_has_what_a_step_without_an_update_writes(self, world):
        made = world(**{"train.num_episodes": 1})
        made.reward = lambda *_: 1.0
        made.trainer.fit()
        found = {name for row in made.metrics() for name in row} - {"step"}
        assert "skipped_update" in found and found <= metrics.names("bapo_grpo", optional=True)

    def test_has_what_re_evaluation_on_its_own_writes(self, world):
        made = world(prompts=40, **{"adapt.rollout_delay": 2, "adapt.reevaluate_every": 3, "train.num_episodes": 1})
        made.trainer.fit()
        found = {name for row in made.metrics() for name in row} - {"step"}
        assert "timing/reevaluation" in found and found <= metrics.names("bapo_grpo", optional=True)


# --- groups without reward --------------------------------------------------------------------------------------------


class TestFailedGroups:
    @pytest.mark.parametrize("odd", [None, math.nan, math.inf, "x", [], [1.0, 2.0]], ids=repr)
    def test_are_left_out_and_counted(self, world, odd):
        made = world(prompts=40, **{"train.num_episodes": 1, "adapt.max_failed_share": 1})
        plain, failing = made.reward, {f"prompt {n}" for n in range(0, 40, 5)}
        made.reward = lambda prompt, weights, sample: (
            odd if prompt in failing and sample == 2 else plain(prompt, weights, sample)
        )
        made.trainer.fit()
        rows = made.metrics()
        for step, row in enumerate(rows):
            asked = [request.prompt for request in made.requests if request.step == step]
            assert row["groups/failed"] == sum(prompt in failing for prompt in asked)
            assert row["groups/generated"] == len(asked) == sum(row[f"groups/{state}"] for state in STATES)
        assert sum(row["groups/failed"] for row in rows) == 8
        assert made.trainer.ledger.counts["generated"] == made.trainer.generated == len(made.requests)
        # nothing of them was trained on or stored
        trained = {prompt for _, batch in made.trained for experience in batch for prompt in experience.prompts}
        assert trained and not trained & failing
        assert not failing & {entry.prompt.text for entry in made.trainer.method.hard.oldest(99)}
        assert rows[-1]["rollouts/total"] == 4 * len(made.requests)

    def test_the_mean_reward_is_that_of_the_others(self, world):
        made = world(**{"adapt.max_failed_share": 1})
        made.reward = lambda prompt, weights, sample: None if sample == 1 and int(prompt[7:]) % 2 else 0.25
        made.trainer.fit()
        assert {row["reward/fresh_mean"] for row in made.metrics()} <= {0.25, None}

    def test_numbers_of_groups_are_never_used_twice(self, world):
        made = world(**{"adapt.max_failed_share": 1})
        plain = made.reward
        made.reward = lambda prompt, weights, sample: None if prompt == "prompt 3" else plain(prompt, weights, sample)
        seen, build = [], made.trainer.method.build_batch

        def build_batch(step, fresh, reevaluated):
            seen.extend(group.uid for group in [*fresh, *reevaluated])
            return build(step, fresh, reevaluated)

        made.trainer.method.build_batch = build_batch
        made.trainer.fit()
        assert len(set(seen)) == len(seen) == made.trainer.generated - made.trainer.ledger.counts["failed"]
        assert seen == sorted(seen) and max(seen) < made.trainer.generated

    def test_hard_prompts_that_fail_count_too(self, world):
        made = world(prompts=8, **{"adapt.max_failed_share": 1, "adapt.reevaluate_every": 1, "adapt.rollout_delay": 1})

        def reward(prompt, weights, sample):
            if prompt == "prompt 1" and weights:
                return None
            return 0.0 if int(prompt[7:]) % 2 else float(sample % 2)  # one half is too hard, one is just right

        made.reward = reward
        made.trainer.fit()
        rows = made.metrics()
        for step, row in enumerate(rows):
            asked = [request for request in made.requests if request.step == step]
            assert row["groups/failed"] == sum(r.prompt == "prompt 1" and r.weights > 0 for r in asked)
            assert row["groups/generated"] == sum(row[f"groups/{state}"] for state in STATES)
        assert sum(row["groups/failed"] for row in rows) > 1

    @pytest.mark.parametrize(
        ("share", "failing", "stops"), [(0.5, 2, False), (0.5, 3, True), (0.0, 0, False), (0.0, 1, True), (1, 4, False)]
    )
    def test_too_many_stop_the_run(self, world, share, failing, stops):
        made = world(prompts=4, **{"adapt.max_failed_share": share, "train.num_episodes": 1})
        names = {f"prompt {n}" for n in range(failing)}
        made.reward = lambda prompt, weights, sample: None if prompt in names else float(sample % 2)
        if not stops:
            made.trainer.fit()
            assert made.metrics()[0]["groups/failed"] == failing
            return
        with pytest.raises(RuntimeError) as error:
            made.trainer.fit()
        text = str(error.value)
        assert text.startswith("step 0, ")
        assert f"{failing} of 4 groups gave no reward or no finite log-probs" in text
        assert f"adapt.max_failed_share is {float(share)}" in text and "log of the rollout engine" in text
        assert "Failed calls" not in text  # the reward function runs where nobody counts
        assert made.updates["actor"] == 0 and made.metrics() == []

    def test_the_message_says_how_the_calls_of_all_engines_failed(self, world):
        made = world(prompts=4, engines=3)
        made.reward_failures = [{"timeout": 2, "raised": 1}, {}, {"timeout": 3, "memory": 4}]
        made.reward = lambda *_: None
        with pytest.raises(RuntimeError) as error:
            made.trainer.fit()
        for counted in ("5 x timeout", "1 x raised", "4 x memory"):
            assert counted in str(error.value)

    def test_samples_that_are_not_whole_groups(self, world, make_group):
        made = world()
        with pytest.raises(ValueError, match="3 samples are not whole groups of 4"):
            made.trainer._groups(samples_of([make_group(1, size=3, extras=EXTRAS)]), 0)

    def test_groups_know_their_step_and_policy(self, world, make_group):
        made = world()
        made.trainer.step, made.trainer.generated = 7, 30
        groups = made.trainer._groups(samples_of([make_group(n, size=4, extras=EXTRAS) for n in range(3)]), 5)
        assert [(group.uid, group.step, group.policy_step) for group in groups] == [(30, 7, 5), (31, 7, 5), (32, 7, 5)]
        assert made.trainer.generated == 33


EXTRAS = {"info": {}, "score": None, "truncated": False, "mm_train_inputs": None}


# --- one step ---------------------------------------------------------------------------------------------------------


class TestEmptyBatch:
    def test_the_update_is_skipped_and_the_step_counts(self, world):
        made = world(prompts=12, **{"train.num_episodes": 1})
        made.reward = lambda *_: 1.0  # all right: no signal
        made.trainer.fit()
        rows = made.metrics()
        assert [row["skipped_update"] for row in rows] == [1, 1, 1]
        assert [row["groups/filtered"] for row in rows] == [4, 4, 4]
        assert made.trainer.step == 3 and made.trained == [] and made.updates["actor"] == 0
        assert made.noted("sync") == [0]  # v = 3, before step 3
        assert not any(key.startswith(("tv/", "importance/")) for row in rows for key in row)

    def test_where_nothing_is_left_after_the_review(self, world):
        off = {"adapt.reevaluate_every": 0, "adapt.replay_steps": 0}
        made = world(prompts=12, **{"train.num_episodes": 1, "adapt.max_tv_fresh": 0, "adapt.rollout_delay": 2}, **off)
        made.log_probs = lambda tokens, weights: [-1.0 - weights / 8] * (len(tokens) - 1)
        made.trainer.fit()
        rows = made.metrics()
        # in steps 1 and 3 the rollout policy is not today's
        assert rows[0].get("skipped_update") is None and rows[0]["groups/fresh"] > 0
        assert rows[1]["skipped_update"] == 1 and rows[1]["groups/too_far"] > 0
        assert rows[1]["groups/fresh"] == rows[1]["groups/reevaluated"] == rows[1]["groups/replayed"] == 0
        assert sum(rows[1][f"groups/{state}"] for state in STATES) == rows[1]["groups/generated"]
        assert made.trainer.step == 3 and made.updates["actor"] == 2

    def test_all_groups_failed(self, world):
        made = world(prompts=4, **{"train.num_episodes": 1, "adapt.max_failed_share": 1})
        made.reward = lambda *_: None
        made.trainer.fit()
        (row,) = made.metrics()
        assert (row["skipped_update"], row["groups/failed"], row["groups/generated"]) == (1, 4, 4)
        assert row["reward/fresh_mean"] is None and row["rollouts/total"] == 16


class TestCounts:
    @pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (2, 3), (3, 2)])
    @pytest.mark.parametrize("count", [1, 2, 3, 5])
    def test_a_batch_may_have_any_number_of_groups(self, world, make_group, ranks, count):
        """On models with these numbers of ranks; one of its groups leaves in the review, if there are several."""
        words = {"actor.num_gpus_per_node": ranks[0], "critic.num_gpus_per_node": ranks[1], "train.batch_size": 12}
        made = world(algorithm="ba_ppo", **words, **{"adapt.max_failed_share": 1, "adapt.batch_size": 5})
        extras = EXTRAS | {"info": {"reward": 0.5}}
        batch = Batch(fresh=[make_group(1, size=4, prompt=f"p{n}", extras=extras, uid=n) for n in range(count)])
        made.trainer.method.build_batch = lambda *_: batch
        made.trainer.method.observe = lambda *_: None
        made.trainer.ledger.settle = lambda *_, **__: made.trainer.ledger.counts
        review = made.trainer._review
        if count > 1:
            made.trainer.experience_maker.review = lambda log_ratios: review(
                np.where(np.arange(len(log_ratios)) == 5, math.nan, log_ratios)
            )
        made.trainer.train_step([], 0)
        ((_, experiences),) = made.trained
        stay = [n for n in range(count) if count == 1 or n != 1]
        prompts = [prompt for experience in experiences for prompt in experience.prompts]
        assert sorted(prompts) == [f"p{n}" for n in stay for _ in range(4)]
        assert sorted(index for e in experiences for index in e.index) == list(range(4 * len(stay)))
        assert made.updates == {"actor": 1, "critic": 1} and len(made.trainer.batch) == len(stay)
        made.updates.update(actor=0, critic=0)
        for experience in experiences:  # the models' answers came back to their own samples
            for found, wanted in (
                (experience.action_log_probs, made.groups["actor"].forward(experience.sequences)),
                (experience.values, made.groups["critic"].forward(experience.sequences)),
            ):
                mask = experience.action_mask.bool()
                assert mask.any() and torch.equal(found[mask], wanted[mask])

    @pytest.mark.parametrize(("words", "capacity"), [({}, 4), ({"adapt.batch_size": 6}, 6)])
    def test_a_batch_may_not_be_larger_than_its_capacity(self, world, make_group, words, capacity):
        made = world(**words)
        made.trainer.method.build_batch = lambda *_: Batch(
            fresh=[make_group(1, size=4) for _ in range(capacity - 2)],
            reevaluated=[make_group(1, size=4)],
            replayed=[make_group(1, size=4) for _ in range(2)],
        )
        with pytest.raises(
            ValueError, match=f"^BAPO made a batch of {capacity + 1} groups; it may hold at most {capacity} "
        ):
            made.trainer.train_step([], 0)
        assert made.trained == []

    def test_a_group_that_the_method_loses(self, world):
        made = world()
        build = made.trainer.method.build_batch

        def build_batch(step, fresh, reevaluated):
            batch = build(step, fresh, reevaluated)
            if step == 1:
                (batch.filtered or batch.fresh).pop()
            return batch

        made.trainer.method.build_batch = build_batch
        with pytest.raises(RuntimeError, match=r"^step 2, .*in the states \[\]; every group must end in exactly one"):
            made.trainer.fit()

    def test_groups_that_nobody_accounts_for(self, world):
        made = world()
        made.trainer.ledger.counts.update(generated=1, filtered=1)
        with pytest.raises(RuntimeError, match="4 groups were generated, 5 are accounted for"):
            made.trainer.fit()

    def test_a_step_without_a_rollout_trains_on_what_is_stored(self, world):
        made = world(prompts=8, **{"train.num_episodes": 1})
        made.trainer.fit()
        assert len(made.trainer.method.replay)
        status, step = made.trainer.train_step([], 2)
        assert status["groups/generated"] == 0 and math.isnan(status["reward/fresh_mean"]) and step == 3


FAULTS = [
    # what fails, in which step; the step and the phase that the message names
    ("generate", 1, "step 1, generating: "),
    ("forward", 1, "step 1, making experience: "),
    ("fit", 1, "step 1, training: "),
    ("broadcast", 4, "step 4, syncing weights: "),  # v = 4, m = 2
    ("broadcast", 2, "step 2, generating hard prompts again: "),
    ("keep_weights", 0, "step 0, starting: "),
    ("keep_weights", 4, "step 4, syncing weights: "),
    ("save_checkpoint", 2, "step 2, saving checkpoint global_step2: "),
]


class TestPhases:
    """A failed run says in which step and doing what."""

    @pytest.mark.parametrize(("what", "step", "says"), FAULTS)
    def test_of_an_error(self, world, what, step, says):
        made = world(**{"ckpt.save_steps": 2, "adapt.rollout_delay": 4})
        made.faults[what] = (step, OSError("no more of it"))
        with pytest.raises(RuntimeError) as error:
            made.trainer.fit()
        assert str(error.value) == f"{says}OSError: no more of it"
        assert isinstance(error.value.__cause__, OSError)

    def test_of_an_evaluation(self, world):
        made = world(evaluation=1, **{"eval.steps": 1, "adapt.rollout_delay": 1})
        plain = made.reward

        def reward(prompt, weights, sample):
            if prompt == "eval 0":
                raise OSError("no more of it")
            return plain(prompt, weights, sample)

        made.reward = reward
        with pytest.raises(RuntimeError, match=r"^step 1, evaluating: OSError: no more of it$"):
            made.trainer.fit()

    def test_an_engine_that_dies_in_a_sync_is_noticed_although_the_actor_waits(self, world):
        made = world()
        worker = made.groups["actor"].workers[0]

        def broadcast():
            made.engines[0].alive.pending, made.engines[0].alive.error = False, OSError("the engine died")
            return Ref(pending=True)

        worker.broadcast_to_vllm = broadcast
        with pytest.raises(RuntimeError, match="OSError: the engine died"):
            made.trainer.fit()

    @pytest.mark.parametrize("dies", [True, False])
    def test_an_engines_death_is_the_reason_where_the_actor_is_heard_of_first(self, world, dies):
        """Its collective breaks when an engine dies; Ray tells of the death a little later."""

        class Later(Ref):
            """Pending when it is first looked at."""

            looks = 0

            @property
            def pending(self) -> bool:
                self.looks += 1
                return self.looks == 1 or not dies

            @pending.setter
            def pending(self, value: bool) -> None:
                pass

        made = world(**{"adapt.rollout_delay": 1, "adapt.reevaluate_every": 0})
        made.engines[0].alive = Later(error=OSError("the engine died"))
        made.groups["actor"].workers[0].broadcast_to_vllm = lambda: Ref(error=remote_error(RuntimeError("reset")))
        says = "OSError: the engine died" if dies else "RuntimeError: reset"
        with pytest.raises(RuntimeError, match=f"^step 1, syncing weights: {says}$"):
            made.trainer.fit()

    @pytest.mark.parametrize("name", ["actor_grad_norm", "critic_grad_norm"])
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_a_gradient_that_is_not_finite_stops_the_run(self, world, name, value):
        made = world(algorithm="ba_ppo")
        made.norms = {"actor_grad_norm": 1.0, "critic_grad_norm": 2.0, name: value}
        with pytest.raises(RuntimeError, match=f"^step 0, training: FloatingPointError: {name} is {value}$"):
            made.trainer.fit()


def remote_error(cause: Exception) -> Exception:
    """What `ray.get` raises for an error in an actor."""
    ip = {"ip": "127.0.0.1", "pid": 1, "proctitle": "worker"}
    return ray.exceptions.RayTaskError("fit()", "Traceback: many lines", cause, **ip).as_instanceof_cause()


class TestBrief:
    def test_of_a_plain_error(self):
        assert brief(ValueError("  adapt.c1 is 2\n")) == "ValueError: adapt.c1 is 2"

    def test_of_an_error_in_a_worker_it_is_without_the_traceback(self):
        error = remote_error(FloatingPointError("the loss is nan"))
        assert "many lines" in str(error)
        assert brief(error) == "FloatingPointError: the loss is nan"

    def test_of_an_error_that_says_nothing(self):
        assert brief(KeyError()) == "KeyError: "

    def test_of_an_actor_that_died(self):
        found = brief(ray.exceptions.ActorDiedError())
        assert found.startswith("ActorDiedError: ") and "died" in found


def test_timed_adds_up_also_after_an_error(monkeypatch):
    clock = itertools.count(0.0, 2.5)
    monkeypatch.setattr(trainer.time, "perf_counter", lambda: next(clock))
    timing = {"other": 1.0}
    with timed(timing, "name"):
        pass
    with pytest.raises(KeyError), timed(timing, "name"):
        raise KeyError
    assert timing == {"other": 1.0, "name": 5.0}


# --- groups that must not be trained on -------------------------------------------------------------------------------


def reviewer(batch: Batch, size: int, *, step: int = 9, share: float = 1.0, **limits: float | None):
    """A trainer with only what the review needs."""
    made = object.__new__(AdaptedPPOTrainer)
    adapt = {"max_tv_fresh": None, "max_tv_replayed": None, "max_failed_share": share} | limits
    made.args = SimpleNamespace(adapt=SimpleNamespace(**adapt), rollout=SimpleNamespace(n_samples_per_prompt=size))
    made.batch, made.step, made.vllm_engines = batch, step, []
    return made


def uids(groups: list) -> list[int]:
    return [group.uid for group in groups]


SOURCES = ("fresh", "reevaluated", "replayed")


class TestReview:
    @given(data=st.data())
    @settings(max_examples=200, deadline=None, derandomize=True, database=None)
    def test_against_the_conditions_group_by_group(self, make_group, data):
        size, step, batch = data.draw(st.integers(1, 4)), 9, Batch()
        log_ratio = st.floats(-3, 3) | st.sampled_from([0.0, -1000.0, 1000.0, math.nan, math.inf, -math.inf])
        ratios = {}
        for source in SOURCES:
            for _ in range(data.draw(st.integers(0, 4))):
                policy = data.draw(st.sampled_from([5, 9])) if source == "fresh" else 9 if source != "replayed" else 6
                group = make_group(data.draw(st.integers(0, size)), size=size, step=9, policy_step=policy)
                getattr(batch, source).append(group)
                ratios[group.uid] = data.draw(st.lists(log_ratio, min_size=size, max_size=size))
        limit = st.none() | st.sampled_from([0.0, 0.25, 1.0]) | st.floats(0, 1)
        limits = {"max_tv_fresh": data.draw(limit), "max_tv_replayed": data.draw(limit)}
        before = batch.with_sources()
        made = reviewer(batch, size, step=step, **limits)
        found = made._review(np.array([ratio for _, group in before for ratio in ratios[group.uid]]))

        broken = {group.uid for _, group in before if not all(map(math.isfinite, ratios[group.uid]))}
        far = set()
        for source, group in before:
            of_source = limits.get(f"max_tv_{source}")  # none for re-evaluated groups: today's weights generated them
            if of_source is not None and not (source == "fresh" and group.policy_step == step):
                with np.errstate(over="ignore"):
                    tv = np.mean([max(0.0, 1.0 - np.exp(ratio)) for ratio in ratios[group.uid]])
                if abs(tv - of_source) < 1e-12:
                    return  # rounding decides; equality is tested below
                far |= {group.uid} if tv > of_source else set()
        after = made.batch
        unfit = broken | far
        fit = [group for _, group in before if group.uid not in unfit]
        staying = [group for _, group in after.with_sources()]
        assert uids(staying) == uids(fit)  # whatever their number is
        # positions of the samples that stay, in the order of the batch before
        order = uids([group for _, group in before])
        assert found == [position * size + row for position, uid in enumerate(order) if uid in uids(staying)
                         for row in range(size)]  # fmt: skip
        assert [order[position // size] for position in found[::size]] == uids(staying)
        # and where the others went
        own = uids(batch.fresh + batch.reevaluated)
        assert set(uids(after.nonfinite)) == broken & set(own)
        assert set(uids(after.too_far)) == (far - broken) & set(own)
        assert set(uids(after.unused)) == set(uids(batch.replayed)) - set(uids(staying))
        assert after.cut == []
        # nothing is looked at twice: a second review of what stayed lets all of it stay
        rest = np.array([ratio for group in staying for ratio in ratios[group.uid]])
        assert reviewer(after, size, step=step, **limits)._review(rest) == list(range(len(rest)))

    @pytest.mark.parametrize("source", SOURCES)
    @pytest.mark.parametrize(
        ("limit", "stays"), [(None, True), (1.0, True), (0.5, True), (0.4999, False), (0.0, False)]
    )
    def test_the_limit_itself_is_allowed(self, make_group, source, limit, stays):
        # TV = (1 + 0) / 2, exactly
        group = make_group(
            1, size=2, step=9 if source != "replayed" else 7, policy_step=9 if source == "reevaluated" else 6
        )
        name = "max_tv_replayed" if source == "replayed" else "max_tv_fresh"
        made = reviewer(Batch(**{source: [group]}), 2, **{name: limit})
        wanted = stays or source == "reevaluated"
        assert made._review(np.array([-1000.0, 0.0])) == ([0, 1] if wanted else [])
        assert len(made.batch) == wanted

    def test_each_source_has_its_own_limit(self, make_group):
        def batch():
            return Batch(
                fresh=[make_group(1, size=2, step=9, policy_step=6)],
                replayed=[make_group(1, size=2, step=7, policy_step=6)],
            )

        log_ratios = np.array([-1000.0, 0.0] * 2)
        assert reviewer(batch(), 2, max_tv_fresh=0.3)._review(log_ratios) == [2, 3]
        assert reviewer(batch(), 2, max_tv_replayed=0.3)._review(log_ratios) == [0, 1]
        assert reviewer(batch(), 2, max_tv_fresh=0.3, max_tv_replayed=0.3)._review(log_ratios) == []

    def test_today_and_the_engines_differ_by_rounding_alone(self, make_group):
        # a fresh group right after a sync is on-policy, whatever engine and actor make of it
        batch = Batch(
            fresh=[make_group(1, size=2, step=9, policy_step=9), make_group(1, size=2, step=9, policy_step=8)]
        )
        made = reviewer(batch, 2, max_tv_fresh=0.0)
        assert made._review(np.array([-0.01, 0.01, -0.01, 0.01])) == [0, 1]

    def test_in_a_mixed_group_each_response_counts_with_its_own_policy(self, make_group):
        # TV = (1 + 0) / 2: the first response is of step 5, the other is of today, and differs by rounding alone
        old, group = make_group(1, step=5), make_group(0, size=2, step=9)
        mixed = group.exchange(0, old.standalone(old.responses[0]))
        log_ratios = np.array([-1000.0, -1000.0])
        for source, limit, stays in (
            ("fresh", 0.5, True),
            ("fresh", 0.49, False),
            ("reevaluated", 0.0, True),  # no limit is of X2
        ):
            made = reviewer(Batch(**{source: [mixed]}), 2, max_tv_fresh=limit)
            assert made._review(log_ratios) == ([0, 1] if stays else [])
        # and the other way round: with an old policy behind the group, that one counts
        delayed = replace(mixed, policy_step=6)
        assert reviewer(Batch(fresh=[delayed]), 2, max_tv_fresh=0.99)._review(log_ratios) == []

    def test_of_a_sound_batch_changes_nothing(self, make_group):
        batch = Batch(fresh=[make_group(1, size=2)], cut=[make_group(1, size=2)])
        made = reviewer(batch, 2)
        assert made._review(np.zeros(2)) == [0, 1] and made.batch is batch

    def test_one_group_leaves_by_itself(self, make_group):
        batch = Batch(fresh=[make_group(n, size=4, step=9, policy_step=9) for n in (1, 2, 3, 2)])
        made = reviewer(batch, 4)
        log_ratios = np.zeros(16)
        log_ratios[5] = math.nan  # in the second group
        assert made._review(log_ratios) == [0, 1, 2, 3, *range(8, 16)]
        assert made.batch.nonfinite == [batch.fresh[1]] and made.batch.cut == []
        assert made.batch.fresh == [batch.fresh[0], *batch.fresh[2:]]

    @pytest.mark.parametrize(
        ("share", "bad", "stops"), [(0.5, 2, False), (0.5, 3, True), (0.0, 1, True), (1.0, 4, False)]
    )
    def test_too_many_broken_groups_stop_the_run(self, make_group, share, bad, stops):
        made = reviewer(Batch(fresh=[make_group(1, size=2) for _ in range(4)]), 2, share=share)
        log_ratios = np.array([math.nan, 0.0] * bad + [0.0, 0.0] * (4 - bad))
        if not stops:
            assert made._review(log_ratios) == list(range(2 * bad, 8))
            return
        with pytest.raises(RuntimeError) as error:
            made._review(log_ratios)
        text = f"{bad} of 4 groups have log-probs under today's policy that are not finite; adapt.max_failed_share is "
        assert f"{text}{share}" in str(error.value)
        assert len(made.batch) == 4

    def test_groups_that_are_too_far_are_no_fault(self, make_group):
        batch = Batch(fresh=[make_group(1, size=2, step=9, policy_step=6) for _ in range(4)])
        assert reviewer(batch, 2, share=0.0, max_tv_fresh=0.1)._review(np.full(8, -5.0)) == []

    def test_in_a_run_what_is_dropped_is_counted_and_not_trained_on(self, world):
        words = {"adapt.max_tv_replayed": 0.02, "adapt.max_tv_fresh": 0.03, "adapt.batch_size": 6}
        made = world(prompts=40, **words)
        made.trainer.fit()
        rows = made.metrics()
        assert sum(row["groups/too_far"] for row in rows) > 2 and sum(row["groups/unused"] for row in rows) > 2
        for step, row in enumerate(rows):
            assert row["groups/generated"] == sum(row[f"groups/{state}"] for state in STATES)
            assert row.get("tv/fresh", 0.0) <= 0.03 and row.get("tv/replayed", 0.0) <= 0.02
            trained = sum(len(e.index) for at, experiences in made.trained if at == step for e in experiences)
            assert trained == 4 * sum(row[f"groups/{source}"] for source in SOURCES)

    def test_in_a_run_groups_with_broken_log_probs_leave_the_batch(self, world):
        made = world(prompts=24, **{"adapt.max_failed_share": 1})
        made.spoilt = {5, 6}
        made.trainer.fit()
        rows = made.metrics()
        assert sum(row["groups/nonfinite"] for row in rows) > 3 and sum(row["groups/unused"] for row in rows) > 0
        assert all(row["groups/generated"] == sum(row[f"groups/{state}"] for state in STATES) for row in rows)
        assert len(made.trained) > 3
        for _, experiences in made.trained:
            for experience in experiences:
                tokens = experience.sequences[:, 1:][experience.action_mask.bool()]
                assert len(tokens) and not set(tokens.tolist()) & made.spoilt
                assert experience.advantages.isfinite().all()


# --- which weights the engines hold -----------------------------------------------------------------------------------


class TestBroadcast:
    @pytest.mark.parametrize("delay", [1, 2, 3, 5])
    def test_counts_updates_and_syncs_at_multiples_of_v(self, world, delay):
        made = world(**{"adapt.rollout_delay": delay, "adapt.reevaluate_every": 0})
        made.trainer._engines_live = []
        for step in range(1, 13):
            made.updates["actor"] += 1
            made.trainer.broadcast_to_vllm()
            assert made.trainer.step == step
            assert made.trainer.engine_step == made.engines[0].weights == step - step % delay
        assert made.noted("sync") == [step for step in range(1, 13) if step % delay == 0]


def resuming(made: World, *, step: int, saved: int) -> World:
    """The world, at the start of a resumed run whose checkpoint of `step` has rollout weights of step `saved`."""
    made.updates["actor"] = made.trainer.step = step
    made.trainer.resumed_engine_step = saved
    made.trainer._engines_live = []
    made.args.checked = replace(made.args.checked, resume_tag=f"global_step{step}")
    if saved != step:
        folder = made.checkpoints / "_adapt" / f"global_step{step}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rollout_weights_rank0.safetensors").write_text(str(saved))
    return made


class TestResumeEngines:
    @pytest.mark.parametrize(
        ("delay", "again", "step", "saved", "events"),
        [
            # the engines held today's weights
            (1, 0, 7, 7, [("sync", 7)]),
            (4, 0, 8, 8, [("sync", 8)]),
            (4, 2, 8, 8, [("sync", 8), ("keep", 8)]),  # needed again after step 10
            # they held delayed ones
            (4, 0, 9, 8, [("load", 8)]),
            (4, 0, 11, 8, [("load", 8)]),
            (4, 4, 9, 8, [("load", 8)]),
            (4, 2, 9, 8, [("load", 8), ("keep", 8)]),
            # v is another one: the saved ones are not those of Algorithm 1
            (4, 0, 8, 5, [("sync", 8)]),
            (4, 0, 9, 5, [("sync", 9)]),
            (3, 0, 7, 5, [("sync", 7)]),
            (7, 0, 9, 5, [("sync", 9)]),
            (2, 0, 9, 9, [("sync", 9)]),  # was v = 3
            (7, 5, 9, 5, [("sync", 9), ("keep", 9)]),  # hard prompts in step 10, the next sync before step 14
        ],
    )
    def test_by_hand(self, world, delay, again, step, saved, events):
        words = {"adapt.rollout_delay": delay, "adapt.reevaluate_every": again}
        made = resuming(world(engines=2, **words), step=step, saved=saved)
        made.trainer.broadcast_to_vllm()
        each = [(name, argument) for name, argument in events for _ in range(1 if name == "sync" else 2)]
        assert made.events == each
        assert made.trainer.step == step and made.trainer.resumed_engine_step is None
        wanted = events[0][1]
        assert made.trainer.engine_step == wanted and {engine.weights for engine in made.engines} == {wanted}
        # once: the next broadcast is after an update
        made.updates["actor"] += 1
        made.trainer.broadcast_to_vllm()
        assert made.trainer.step == step + 1

    def test_weights_of_step_0_are_weights(self, world):
        made = resuming(world(**{"adapt.rollout_delay": 5, "adapt.reevaluate_every": 0}), step=2, saved=0)
        made.trainer.broadcast_to_vllm()
        assert made.noted("load") == [0] and made.trainer.engine_step == 0 and made.trainer.step == 2

    @pytest.mark.parametrize("before", [1, 2, 3, 5])
    @pytest.mark.parametrize("delay", [1, 2, 3, 4, 7])
    def test_no_weights_are_missing_whatever_the_schedule_was_and_is(self, world, before, delay):
        """Every rollout of the resumed run has the weights it should, and none asks for some that were not kept."""
        made = world()
        for step, again, evaluation in itertools.product(range(1, 13), (0, 1, 2, 3, 5), (0, 1, 3)):
            made.engines[0].weights, made.engines[0].kept = 0, None  # another process
            made.trainer.schedule = RolloutSchedule(delay, again, evaluation)
            del made.events[:]
            resuming(made, step=step, saved=step - step % before)
            self.goes_on(made, delay=delay, again=again, evaluation=evaluation)

    @pytest.mark.parametrize(
        ("step", "saved", "events"),
        [
            (11, 8, [("load", 8)]),  # synced at a multiple of v = 4
            (11, 10, [("load", 10)]),  # and here before that
            (9, 7, [("sync", 9)]),  # v was greater
            (10, 10, [("sync", 10)]),
        ],
    )
    def test_weights_that_came_early_are_used(self, world, step, saved, events):
        words = {"adapt.rollout_delay": 4, "adapt.reevaluate_every": 0, "adapt.max_tv_rollout": 0.5}
        made = resuming(world(**words), step=step, saved=saved)
        made.trainer.broadcast_to_vllm()
        assert made.events == events and made.trainer.engine_step == events[0][1]

    @staticmethod
    def goes_on(made: World, *, delay: int, again: int, evaluation: int) -> None:
        run, (engine,), start = made.trainer, made.engines, made.trainer.step
        first = start - start % delay
        run.broadcast_to_vllm()
        assert engine.weights == (first if made.noted("load") else start)
        held = engine.weights
        for step in range(start, start + 2 * delay + 2):
            held = step if step % delay == 0 else held
            assert engine.weights == run.engine_step == held
            if again and step % again == 0:
                with run._engines_hold_today(next_rollout=step + 1):
                    assert engine.weights == step
            made.updates["actor"] += 1
            run.broadcast_to_vllm()
            if evaluation and (step + 1) % evaluation == 0:
                with run._engines_hold_today(next_rollout=step + 1):
                    assert engine.weights == step + 1


# --- checkpoints ------------------------------------------------------------------------------------------------------


def watch_store(made: World) -> None:
    """Note what is asked of the store of checkpoints and when the state is written, among the other events."""
    store = made.trainer.checkpoints
    for name in ("begin", "complete", "abandon", "forget_rotated"):
        method = getattr(store, name)

        def noted(*args: Any, name: str = name, method: Any = method) -> Any:
            made.note(name, args[0] if args else None)
            return method(*args)

        setattr(store, name, noted)


SAVING = ("begin", "save actor", "save critic", "save_state", "save_weights", "complete", "abandon", "forget_rotated")


@pytest.fixture
def watched_state(monkeypatch):
    """Note when the layer's state is written."""
    worlds: list[World] = []
    save = checkpoints.save_state

    def noted(folder, state, **kwargs):
        worlds[-1].note("save_state", state["step"])
        return save(folder, state, **kwargs)

    monkeypatch.setattr(checkpoints, "save_state", noted)
    return worlds


class TestSaving:
    def saving(self, made: World, watched_state: list) -> list[tuple[str, Any]]:
        watched_state.append(made)
        watch_store(made)
        made.trainer.fit()
        return [event for event in made.events if event[0] in SAVING]

    @pytest.mark.parametrize("algorithm", ["bapo_grpo", "ba_ppo"])
    def test_in_this_order(self, world, watched_state, algorithm):
        words = {"ckpt.save_steps": 2, "train.num_episodes": 1, "adapt.rollout_delay": 4, "adapt.reevaluate_every": 0}
        made = world(algorithm=algorithm, engines=2, **words)
        critic = [("save critic", "global_step2")] if algorithm == "ba_ppo" else []
        again = [("save critic", "global_step4")] if algorithm == "ba_ppo" else []
        assert self.saving(made, watched_state) == [
            ("begin", "global_step2"),
            ("save actor", "global_step2"),
            *critic,
            ("save_state", 2),
            ("save_weights", 0),  # delayed ones; the first engine's, all hold the same
            ("complete", "global_step2"),
            ("forget_rotated", None),
            ("begin", "global_step4"),
            ("save actor", "global_step4"),
            *again,
            ("save_state", 4),  # right after a sync
            ("complete", "global_step4"),
            ("forget_rotated", None),
        ]
        store = CheckpointStore(made.checkpoints, critic=algorithm == "ba_ppo")
        assert store.newest_whole(pytest.fail) == "global_step4" and store.tags() == ["global_step4", "global_step2"]

    def test_not_in_between(self, world, watched_state):
        made = world(prompts=12, **{"ckpt.save_steps": 2, "train.num_episodes": 1})
        assert {argument for name, argument in self.saving(made, watched_state) if name == "begin"} == {"global_step2"}
        assert [row["step"] for row in made.metrics()] == [1, 2, 3]

    def test_never(self, world, watched_state):
        made = world(**{"ckpt.save_steps": -1})
        assert self.saving(made, watched_state) == [] and not made.checkpoints.exists()

    def test_what_openrlhf_saves_without_deepspeeds_is_no_checkpoint(self, world, watched_state):
        made = world(prompts=8, **{"ckpt.save_steps": 1, "ckpt.disable_ds": True, "train.num_episodes": 1})
        assert self.saving(made, watched_state) == [("save actor", "global_step1"), ("save actor", "global_step2")]
        assert not made.checkpoints.exists()

    def test_best_evaluations(self, world, watched_state):
        # the second of three evaluations is worse
        right = {1: 1, 2: 0, 3: 4}
        words = {"eval.steps": 1, "eval.n_samples_per_prompt": 4, "adapt.rollout_delay": 1, "train.num_episodes": 1}
        made = world(prompts=12, evaluation=1, **words, **{"ckpt.save_steps": -1})
        plain = made.reward
        made.reward = lambda prompt, weights, sample: (
            float(sample < right[weights]) if prompt == "eval 0" else plain(prompt, weights, sample)
        )
        first, third = "best_global_step1", "best_global_step3"
        assert self.saving(made, watched_state) == [
            ("begin", first),
            ("save actor", first),
            ("save_state", 1),
            ("complete", first),
            ("forget_rotated", None),
            ("begin", third),
            ("save actor", third),
            ("save_state", 3),
            ("complete", third),
            ("forget_rotated", None),
        ]
        assert made.trainer.checkpoints.tags() == [third, first]
        assert not list(made.checkpoints.glob("*/best_global_step2"))

    def test_the_best_evaluations_checkpoint_has_the_weights_that_the_engines_got_back(self, world, watched_state):
        words = {"eval.steps": 1, "adapt.rollout_delay": 4, "adapt.reevaluate_every": 0, "train.num_episodes": 1}
        made = world(prompts=4, evaluation=1, **words, **{"ckpt.save_steps": -1})
        made.reward = lambda prompt, weights, sample: float(sample % 2)
        assert ("save_weights", 0) in self.saving(made, watched_state)
        folder = made.checkpoints / "_adapt" / "best_global_step1"
        assert (folder / "rollout_weights_rank0.safetensors").read_text() == "0"
        assert made.noted("sync") == [1] and made.noted("restore") == [0]

    def test_an_evaluation_without_rewards_is_not_the_best(self, world, watched_state):
        words = {"eval.steps": 1, "train.num_episodes": 1, "ckpt.save_steps": -1}
        made = world(prompts=4, evaluation=2, **words)
        made.reward = lambda prompt, weights, sample: None if prompt.startswith("eval") else float(sample % 2)
        assert self.saving(made, watched_state) == [] and not made.checkpoints.exists()

    def test_an_evaluation_as_good_as_the_best_is_not_better(self, world, watched_state):
        words = {"eval.steps": 1, "train.num_episodes": 1, "ckpt.save_steps": -1}
        made = world(prompts=12, evaluation=2, **words)
        made.reward = lambda prompt, weights, sample: float(sample % 2)
        begun = [argument for name, argument in self.saving(made, watched_state) if name == "begin"]
        assert begun == ["best_global_step1"]

    @pytest.mark.parametrize("key", ["none", "eval_data_pass1", "eval_other_pass1"])
    def test_what_the_best_evaluation_is_measured_by(self, world, watched_state, key):
        words = {"eval.steps": 1, "train.num_episodes": 1, "ckpt.save_steps": -1, "ckpt.best_metric_key": key}
        made = world(prompts=4, evaluation=1, **words)
        made.reward = lambda prompt, weights, sample: float(sample % 2)
        assert bool(self.saving(made, watched_state)) is (key == "eval_data_pass1")

    def test_models_that_were_not_saved_after_all_leave_nothing(self, world, watched_state):
        made = world(**{"ckpt.save_steps": -1})
        watched_state.append(made)
        watch_store(made)
        with made.trainer._whole_checkpoint("global_step3"):
            pass
        assert made.events == [("begin", "global_step3"), ("abandon", "global_step3")]
        assert not list(made.checkpoints.glob("*/global_step3"))

    @pytest.mark.parametrize("name", ["begin", "complete", "forget_rotated"])
    def test_an_error_names_the_checkpoint(self, world, name):
        made = world(**{"ckpt.save_steps": 3})

        def fails(*_: Any) -> None:
            raise OSError(28, "No space left on device", "file")

        setattr(made.trainer.checkpoints, name, fails)
        with pytest.raises(RuntimeError) as error:
            made.trainer.fit()
        text = "step 3, saving checkpoint global_step3: OSError: [Errno 28] No space left on device: 'file'"
        assert str(error.value) == text
        store = CheckpointStore(made.checkpoints, critic=False)
        assert (store.newest_whole(lambda _: None) == "global_step3") is (name == "forget_rotated")

    @pytest.mark.parametrize(("prompts", "ends"), [(8, [0, 0, 1, 1]), (7, [0, 1, 1, 2]), (3, [1, 2])])
    def test_the_episode_to_go_on_in(self, world, prompts, ends):
        # OpenRLHF sees the end of the data when it asks for more than is left: with 8 prompts, in the next step
        made = world(prompts=prompts, **{"ckpt.save_steps": 1})
        made.trainer.fit()
        found = []
        for step in range(1, len(ends) + 1):
            path = made.checkpoints / "_actor" / f"global_step{step}" / "model.pt"
            states = pickle.loads(path.read_bytes())["client_states"]
            assert states["global_step"] == step and states["total_consumed_prompts"]
            found.append(states["episode"])
        assert found == ends and made.trainer.step == len(ends)


# --- a run that goes on -----------------------------------------------------------------------------------------------

REPEATABLE = {"train.full_determinism_enable": True, "ckpt.save_steps": 1, "ckpt.max_num": 99}


def copied(made: World, folder: Path, tag: str) -> None:
    """What a crash right after the checkpoint `tag` leaves behind: newer ones were never written.

    Of one step the regular checkpoint is preferred to the best one, which then has to be the only one.
    """

    def written(name: str) -> tuple[int, bool]:
        return int(name.removeprefix("best_").removeprefix("global_step")), name.startswith("best_")

    shutil.copytree(made.checkpoints, folder / "checkpoints")
    shutil.copytree(made.args.run.dir, folder / "runs")
    for part in (folder / "checkpoints").iterdir():
        for found in part.iterdir():
            if found.is_dir() and (
                written(found.name) > written(tag) or found.name == tag.removeprefix("best_") != tag
            ):
                shutil.rmtree(found)


def resumed(made: World, folder: Path, tag: str, **words: Any) -> World:
    """The world of a run that goes on from `tag`, up to its trainer."""
    copied(made, folder, tag)
    sizes = {"prompts": len(made.data().dataset), "evaluation": len(made.evaluation or []), "engines": 1}
    again = World(folder, words | {"ckpt.load_enable": True}, **sizes)
    again.reward = made.reward
    again.args.checked = replace(again.args.checked, resume_tag=choose_checkpoint(again.args))
    assert again.args.checked.resume_tag == tag
    again.make_trainer()
    return again


def numbers(rows: list[dict]) -> list[dict]:
    """Rows of the record without times."""
    return [{k: v for k, v in row.items() if "seconds" not in k and not k.startswith("timing/")} for row in rows]


def trained(made: World, first: int) -> list[tuple]:
    """What each update from step `first` on was made with."""
    names = ("sequences", "action_mask", "action_log_probs", "rollout_log_probs", "advantages", "returns", "rewards")
    return [
        (step, [[getattr(experience, name).tolist() for name in names] for experience in experiences])
        for step, experiences in made.trained
        if step >= first
    ]


class TestResume:
    CASES = (
        {"prompts": 16},  # the last batch of an epoch is a full one
        {"prompts": 14, "algorithm": "ba_ppo"},  # it is not
        {"prompts": 13, "eval.steps": 2, "evaluation": 2, "adapt.rollout_delay": 4, "adapt.returns": "gae"},
        {"prompts": 12, "algorithm": "ba_ppo", "adapt.returns": "vtrace", "adapt.max_tv_replayed": 0.1},
        {"prompts": 16, "adapt.rollout_delay": 1, "adapt.filter": "gaussian", "eval.steps": 3, "evaluation": 1},
        {"prompts": 27, "adapt.method": CHOOSING},
        {"prompts": 16, "adapt.rollout_delay": 7, "adapt.max_tv_rollout": 0.0},
        {"prompts": 8, "train.num_episodes": 4, "adapt.method": "arpo"},
        {"prompts": 8, "train.num_episodes": 4, "adapt.method": "exgrpo", "adapt.options": "start_above=0"},
        {"prompts": 16, "algo.kl.init_coef": 0.02},  # the reference's log-probs of stored responses are stored
        {"prompts": 8, "train.num_episodes": 4, "adapt.method": "arpo", "algo.kl.init_coef": 0.02},
        {"prompts": 16, "adapt.method": "luffy", "adapt.options": [TRACES]},
        {"prompts": 16, "adapt.method": "relift", "adapt.options": [TRACES, "finetune_batch=2"]},
    )

    @pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(Path(str(value)).name for value in case.values()))
    def test_is_the_run_that_was_never_stopped(self, world, tmp_path, case):
        made = world(**REPEATABLE, **case)
        made.trainer.fit()
        words = REPEATABLE | {name: value for name, value in case.items() if name not in ("prompts", "evaluation")}
        tags = sorted(made.trainer.checkpoints.tags())
        assert len(tags) >= 6
        if made.evaluation:
            assert any(tag.startswith("best") for tag in tags)
        for tag in tags:
            again = resumed(made, tmp_path / f"from {tag}", tag, **words)
            again.trainer.fit()
            step = int(tag.rpartition("step")[2])
            wanted = [request for request in made.requests if request.step >= step]
            if made.evaluation:  # the one of that step was before the checkpoint, or is not made up for
                wanted = [r for r in wanted if r.step > step or not r.prompt.startswith("eval")]
            assert again.requests == wanted, tag
            assert trained(again, 0) == trained(made, step)
            assert numbers(again.metrics()) == numbers(made.metrics())
            for name in ("groups.jsonl", "answers.jsonl"):
                assert (again.record / name).read_text() == (made.record / name).read_text()
            assert again.updates == made.updates and again.engines[0].weights == made.engines[0].weights
            shown = [
                [(at, [batch.prompts for batch in batches]) for at, batches, *_ in w.noted("finetune")]
                for w in (again, made)
            ]
            assert shown[0] == [(at, prompts) for at, prompts in shown[1] if at >= step]
            if step < made.trainer.step:
                assert repr(again.trainer.state_dict()) == repr(made.trainer.state_dict())

    def test_of_one_that_had_ended_trains_nothing(self, world, tmp_path, monkeypatch):
        said = []
        monkeypatch.setattr(checkpoints.logger, "warning", said.append)
        made = world(prompts=6, **REPEATABLE)
        made.trainer.fit()
        again = resumed(made, tmp_path / "again", "global_step4", **REPEATABLE)
        again.trainer.fit()
        assert again.requests == [] and again.trained == [] and numbers(again.metrics()) == numbers(made.metrics())
        assert said == ["global_step4 is the end of all 2 episodes (train.num_episodes): nothing is left to train"]
        # more episodes are
        more = resumed(made, tmp_path / "more", "global_step4", **REPEATABLE | {"train.num_episodes": 3})
        more.trainer.fit()
        assert [row["step"] for row in more.metrics()] == [1, 2, 3, 4, 5, 6]

    def test_the_first_start_is_not_told_to_load(self, world):
        made = world(**REPEATABLE)
        made.trainer.fit()
        assert made.noted("load") == [] and made.trainer.resumed_engine_step is None

    def test_the_weights_of_a_resumed_run_are_kept_where_they_are_needed(self, world, tmp_path):
        words = REPEATABLE | {"adapt.rollout_delay": 4, "train.num_episodes": 1}
        made = world(prompts=32, **words)
        made.trainer.fit()
        again = resumed(made, tmp_path / "again", "global_step5", **words)
        again.trainer.fit()
        found = [event for event in again.events if event[0] in ("sync", "load", "keep", "restore")]
        assert found == [("load", 4), ("keep", 4), ("sync", 6), ("restore", 4), ("sync", 8), ("keep", 8)]

    @pytest.mark.parametrize(
        "changed",
        [
            {"adapt.rollout_delay": 2},
            {"adapt.rollout_delay": 7},
            {"adapt.reevaluate_every": 0},
            {"adapt.buffer_size": 1},
            {"adapt.c3": "1/2"},
            {"vllm.num_engines": 1, "adapt.max_tv_fresh": 0.5},
        ],
    )
    def test_what_may_change(self, world, tmp_path, changed):
        made = world(**REPEATABLE)
        made.trainer.fit()
        for step in (1, 4, 5):
            again = resumed(made, tmp_path / f"from {step}", f"global_step{step}", **REPEATABLE | changed)
            again.trainer.fit()
            rows = again.metrics()
            assert [row["step"] for row in rows] == list(range(1, 9))
            assert numbers(rows[:step]) == numbers(made.metrics()[:step])
            assert all(row["groups/generated"] == sum(row[f"groups/{state}"] for state in STATES) for row in rows)
            assert again.trainer.generated == again.trainer.ledger.counts["generated"]
            delay = again.args.adapt.rollout_delay
            for at in range(delay * (step // delay + 1), 8):  # from the next sync on as if it had always been so
                assert {request.weights for request in again.of_step(at)[0]} == {at - at % delay}

    def test_another_group_size_is_refused(self, world, tmp_path):
        made = world(**REPEATABLE)
        made.trainer.fit()
        other = {"rollout.n_samples_per_prompt": 2}
        again = resumed(made, tmp_path / "again", "global_step3", **REPEATABLE | other)
        text = r"^step 0, resuming: ValueError: rollout.n_samples_per_prompt is 2, and was 4; it must not change$"
        with pytest.raises(RuntimeError, match=text):
            again.trainer.fit()
        assert again.requests == []

    def test_an_actor_of_another_step_is_refused(self, world, tmp_path):
        made = world(**REPEATABLE)
        made.trainer.fit()
        again = resumed(made, tmp_path / "again", "global_step3", **REPEATABLE)
        again.groups["actor"].workers[0].client_states["global_step"] = 2
        with pytest.raises(RuntimeError, match="global_step3 has the layer of step 3 and the actor of step 2"):
            again.trainer.fit()


class TestState:
    @pytest.fixture
    def run(self, world):
        made = world(algorithm="ba_ppo", **{"adapt.rollout_delay": 3})
        made.trainer.fit()
        return made

    def test_says_all_that_the_next_step_depends_on(self, run):
        state = run.trainer.state_dict()
        assert (state["step"], state["engine_step"], state["group_size"]) == (8, 6, 4)
        assert state["generated"] == len(run.requests) and state["rollouts"] == 4 * len(run.requests)
        assert state["ledger"]["generated"] == state["generated"]
        assert torch.equal(state["torch_rng"], torch.get_rng_state())
        assert [len(state["worker_rng"][name]) for name in ("actor", "critic")] == [1, 1]
        assert len(state["method"]["replay"]["groups"]) == len(run.trainer.method.replay) > 0
        assert len(state["method"]["hard"]["entries"]) == len(run.trainer.method.hard) > 0

    def test_load_is_the_inverse(self, run, world):
        state = run.trainer.state_dict()
        other = world(algorithm="ba_ppo")
        other.trainer.load_state_dict(state)
        other.trainer.engine_step = state["engine_step"]  # the engines get these weights later
        other.trainer._epoch_done = state["epoch_done"]
        torch.set_rng_state(state["torch_rng"])
        assert repr(other.trainer.state_dict()) == repr(state)

    def test_is_of_a_run_without_a_critic_too(self, world):
        state = world().trainer.state_dict()
        assert list(state["worker_rng"]) == ["actor"]
        world().trainer.load_state_dict(state)

    @pytest.mark.parametrize(
        ("changed", "text"),
        [
            ({"version": 2}, "the state is of format 2; this version reads 1"),
            ({"version": 0}, "the state is of format 0; this version reads 1"),
            ({"group_size": 8}, "rollout.n_samples_per_prompt is 4, and was 8; it must not change"),
            ({"method": {"method": "other", "version": 1}}, "state of method 'other', version 1; expected 'bapo'"),
        ],
    )
    def test_of_something_else_is_refused(self, run, world, changed, text):
        state = run.trainer.state_dict() | changed
        other = world(algorithm="ba_ppo")
        with pytest.raises(ValueError, match=text):
            other.trainer.load_state_dict(state)
        assert (other.trainer.step, other.trainer.generated, other.trainer.ledger.counts["generated"]) == (0, 0, 0)

    @pytest.mark.parametrize("epoch_done", [False, True])
    def test_this_processs_generator_goes_on_where_it_was(self, run, world, epoch_done):
        state = run.trainer.state_dict() | {"epoch_done": epoch_done}
        other = world(algorithm="ba_ppo")
        torch.manual_seed(99)
        before = torch.get_rng_state()
        other.trainer.load_state_dict(state)
        waiting = other.trainer.samples_generator.rng_after_first_draw
        if epoch_done:  # the next thing drawn is another epoch
            assert torch.equal(torch.get_rng_state(), state["torch_rng"]) and waiting is None
        else:  # OpenRLHF makes the data loader's iterator first, which draws
            assert torch.equal(torch.get_rng_state(), before) and torch.equal(waiting, state["torch_rng"])

    def test_each_ranks_generator_goes_on_where_it_was(self, world):
        made = world()
        ranks = Group(made, "actor", ranks=3)
        made.trainer.actor_model_group = ranks
        for number, worker in enumerate(ranks.workers):
            worker.rng = torch.tensor([number, 7])
        state = made.trainer.state_dict()
        for worker in ranks.workers:
            worker.rng = torch.zeros(2)
        made.trainer.load_state_dict(state)
        assert [worker.rng.tolist() for worker in ranks.workers] == [[0, 7], [1, 7], [2, 7]]

    @pytest.mark.parametrize(("saved", "now"), [(2, 1), (1, 2)])
    def test_another_number_of_ranks_shuffles_otherwise(self, world, monkeypatch, saved, now):
        said = []
        monkeypatch.setattr(checkpoints.logger, "warning", said.append)
        made = world()
        made.trainer.actor_model_group = Group(made, "actor", ranks=saved)
        state = made.trainer.state_dict()
        other = world()
        other.trainer.actor_model_group = ranks = Group(other, "actor", ranks=now)
        before = [worker.rng.tolist() for worker in ranks.workers]
        for worker in ranks.workers:
            worker.rng = worker.rng.clone()
        other.trainer.load_state_dict(state)
        assert said == [f"{saved} actor ranks wrote the checkpoint, {now} resume: other shuffles"]
        assert [worker.rng.tolist() for worker in ranks.workers] == before


# --- the workers' own part --------------------------------------------------------------------------------------------


class TestFiniteLoss:
    """A loss that is no number stops the run before its gradient is made."""

    @pytest.fixture(params=["actor", "critic"])
    def made(self, request, monkeypatch):
        """The backward pass of a worker's trainer, and what arrives at DeepSpeed's."""
        calls = []
        strategy = SimpleNamespace(
            backward=lambda *args, **kwargs: calls.append((args, kwargs)),
            args=SimpleNamespace(adapt=SimpleNamespace(kl_target="reference")),
        )
        module, kind = {
            "actor": (ppo_actor.ActorPPOTrainer, workers.WholeBatchActorTrainer),
            "critic": (ppo_critic.CriticPPOTrainer, workers.WholeBatchCriticTrainer),
        }[request.param]
        monkeypatch.setattr(
            module,
            "__init__",
            lambda self, strategy, *_, **__: vars(self).update(strategy=strategy, actor_loss_fn=None),
        )
        return kind(strategy), calls

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_raises_before_the_backward_pass(self, made, value):
        worker, calls = made
        with pytest.raises(FloatingPointError) as error:
            worker.strategy.backward(torch.tensor(value), "model", "optimizer")
        assert str(error.value) == f"the loss of {type(worker).__name__} is {value}; its gradient was not applied"
        assert calls == []

    @pytest.mark.parametrize("value", [0.0, -1.5, 3e38])
    def test_passes_a_finite_one_on(self, made, value):
        worker, calls = made
        loss = torch.tensor(value, requires_grad=True)
        worker.strategy.backward(loss, "model", "optimizer", scale=2)
        (((found, *rest), kwargs),) = calls
        assert found is loss and rest == ["model", "optimizer"] and kwargs == {"scale": 2}

    def test_what_came_before_is_done(self, made):
        worker, calls = made
        worker.strategy.backward(torch.tensor(1.0), "model", "optimizer")
        with pytest.raises(FloatingPointError):
            worker.strategy.backward(torch.tensor(math.nan), "model", "optimizer")
        assert len(calls) == 1


class TestWorkerGenerators:
    @pytest.mark.parametrize("kind", [workers.PolicyWorker, workers.CriticWorker])
    def test_shuffle_as_they_would_have(self, kind):
        worker = object.__new__(kind)
        torch.manual_seed(5)
        saved = worker.rng_state()
        wanted = torch.randperm(50).tolist()
        torch.manual_seed(6)
        worker.set_rng_state(saved)
        assert torch.randperm(50).tolist() == wanted
        worker.set_rng_state(saved)
        assert torch.randperm(50).tolist() == wanted  # the state that was saved is not used up
        assert len(saved) == 1 or torch.cuda.is_available()
