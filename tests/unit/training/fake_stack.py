"""A stack that answers at once, for tests of the trainer's own part of a run: it has no Ray, vLLM or DeepSpeed.

`World` plays the rollout engines and the models. Its weights are the number of updates behind them. It notes what was
generated, trained, kept and saved. The trainer, the generator, the experience maker and the data loader are real.
"""

from __future__ import annotations

import hashlib
import math
import pickle
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from openrlhf.trainer import ppo_trainer
from torchdata.stateful_dataloader import StatefulDataLoader

from bapo_openrlhf.adapt import vocabulary
from bapo_openrlhf.adapt.group import Prompt, Response
from bapo_openrlhf.adapt.rewards import UNIT
from bapo_openrlhf.cli import arguments
from bapo_openrlhf.flags.checked import Checked, set_openrlhf_flags
from bapo_openrlhf.flags.rule import Flags
from bapo_openrlhf.launch.resume import choose_start, take
from bapo_openrlhf.record.run_record import read_metrics
from bapo_openrlhf.training.engine.engines import request_seed
from bapo_openrlhf.training.trainer import mended_trainer
from bapo_openrlhf.training.trainer.generated import generated_groups
from bapo_openrlhf.training.trainer.samples import Answers, spans_of
from bapo_openrlhf.training.trainer.trainer import AdaptedPPOTrainer
from bapo_openrlhf.training.wire.failures import Failures
from bapo_openrlhf.training.wire.responses import STOPPED, VERSIONS

STATES = (*vocabulary.STATES, vocabulary.FAILED)


def digest(*what: Any) -> int:
    """A number that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=4).digest(), "big")


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


def wait(refs: list[Ref], *, num_returns: int = 1, timeout: float | None = None, **_: Any) -> tuple[list, list]:
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

        def options(num_returns: int) -> SimpleNamespace:
            def remotes(*args: Any, **kwargs: Any) -> Any:
                ref = remote(*args, **kwargs)
                if num_returns == 1:
                    return ref
                return [Ref(error=ref.error) if ref.error else Ref(ref.value[place]) for place in range(num_returns)]

            return SimpleNamespace(remote=remotes)

        return SimpleNamespace(remote=remote, options=options)


class Engine:
    """A rollout engine. Its responses depend on prompt, weights and the request's seed, if there is one."""

    PARTS = frozenset({"weights", "kv_cache"})  # what sleeps and wakes up

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.weights, self.weights_version, self.kept, self.alive = 0, 0, None, Ref(pending=True)
        self.awake = set() if world.args.vllm.enable_sleep else set(self.PARTS)

    def live(self) -> Ref:
        return self.alive

    def set_up(self, *settings: Any) -> None:
        self.world.note("set_up", settings)

    def reward_failures(self) -> Failures:
        return self.world.reward_failures[self.number]

    def get_num_unfinished_requests(self) -> int:
        return 0

    def wake_up(self, tags: Any = None) -> None:
        self.awake |= set(tags or self.PARTS)
        self.world.note("wake_up", tags)

    def sleep(self) -> None:
        if self.awake == self.PARTS:  # otherwise vLLM logs that it sleeps already, and does nothing
            self.awake = set()
        self.world.note("sleep")

    def keep_weights(self) -> None:
        self.world.fail_at("keep_weights")
        self.kept = self.weights
        self.world.note("keep", self.weights)

    def restore_weights(self, version: int) -> None:
        assert self.kept is not None, "no weights were kept"
        self.weights, self.weights_version = self.kept, version
        self.world.note("restore", self.weights)

    def changed(self, version: int) -> None:
        self.weights_version = version

    def save_weights(self, folder: str) -> None:
        self.world.note("save_weights", self.number)
        (Path(folder) / "rollout_weights_rank0.safetensors").write_text(str(self.weights))

    def load_weights(self, folder: str, version: int) -> None:
        self.weights_version = version
        self.weights = int((Path(folder) / "rollout_weights_rank0.safetensors").read_text())
        self.world.note("load", self.weights)

    def generate_groups(self, requests: list[dict], **shared: Any) -> Any:
        groups = [self.generate_responses(**request, **shared) for request in requests]
        return groups if len(groups) > 1 else groups[0]

    def generate_responses(
        self, *, prompt, label, sampling_params, max_length, num_samples, images, seed=None,
        budget=None, prefix=None,
    ) -> list[dict]:  # fmt: skip
        self.world.fail_at("generate")
        begun = prefix and SimpleNamespace(tokens=prefix.tokens.tolist(), is_context=prefix.is_context)
        self.world.requests.append(
            SimpleNamespace(prompt=prompt, weights=self.weights, step=self.world.step, seed=seed, prefix=begun)
        )
        before = [3, 4, *begun.tokens] if begun else [3, 4]
        first = len(before) if begun and begun.is_context else 2  # where what is trained on begins
        known = [0.0] * len(before)
        if begun and not begun.is_context:
            known[2:] = prefix.log_probs.tolist()
        answers, about = [], {"prompt": prompt, "label": label, "images": images, "truncated": False}
        for sample in range(num_samples):
            drawn = digest(prompt, self.weights, sample, None if seed is None else request_seed(seed, sample))
            count = 1 + drawn % 4
            stopped = budget is not None and count > budget
            tokens = before + [5 + drawn // 7**place % 40 for place in range(budget if stopped else count)]
            reward = None if stopped or self.world.judge else self.world.reward(prompt, self.weights, sample)
            answer = about | {"observation_tokens": tokens, "action_ranges": [(first, len(tokens))]}
            answer["rollout_log_probs"] = [*known, *self.world.log_probs(tokens, self.weights)[len(before) - 1 :]]
            answer["extra_logs"] = dict.fromkeys(VERSIONS, self.weights_version) | ({STOPPED: 1} if stopped else {})
            answers.append(answer | {"reward": reward, "scores": reward})
        return answers


class Worker:
    """A rank of the actor or the critic."""

    def __init__(self, world: World, model: str) -> None:
        self.world, self.model = world, model
        self.rng = torch.tensor([digest(model) % 200])
        self.gate = {"energy": None, "increments": []}

    def rng_state(self) -> list[torch.Tensor]:
        return [self.rng.clone()]

    def set_rng_state(self, states: list[torch.Tensor]) -> None:
        self.rng = states[0]

    def seed_rng(self, seed: int) -> None:
        self.rng = torch.tensor([seed])

    def empty_cache(self) -> None:
        pass

    def take(self, experiences: list) -> None:
        (self.world.trained if self.model == "actor" else self.world.taught).append((self.world.step, experiences))

    def fit(self, **_: Any) -> dict[str, float]:
        self.world.fail_at("fit")
        self.world.note("fit", [sorted(engine.awake) for engine in self.world.engines])
        self.world.updates[self.model] += 1
        self.rng = self.rng + 1  # it shuffles
        self.gate = {"energy": 0.5, "increments": [*self.gate["increments"], 0.25]}
        if self.model == "critic":
            loss = {"critic_loss": 1 / self.world.updates["critic"]}
        else:
            real = any(experience.action_mask.any() for experience in self.world.trained[-1][1])
            loss = {"actor_lr": 1e-6} | ({"policy_loss": 0.5} if real else {})
        kl = {"kl": self.world.updates["actor"] % 3} if self.model == "actor" and self.world.reference else {}
        return loss | kl | self.world.norms

    def fine_tune(self) -> dict[str, float]:
        self.world.note("fine-tune", self.world.step)
        return self.fit()

    def gate_state(self) -> dict:
        return {"energy": self.gate["energy"], "increments": list(self.gate["increments"])}

    def set_gate_state(self, state: dict) -> None:
        self.gate = state

    def scale_learning_rate(self, factor: float) -> None:
        self.world.note("scale", factor)

    def probe_gradients(self, *, reference: dict, groups: dict, sources: dict) -> dict:
        self.world.note("probe", reference)
        return dict.fromkeys(("halves", *groups, *sources.values()), (0.5, 1.0))

    def expect_first_ratio(self, limit: float | None) -> None:
        self.world.note("first ratio", limit)

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
            return self.take(kwargs["experience"])
        assert method_name == "forward"
        self.world.fail_at("forward")
        mask = "attention_mask" if self.model == "reward" else "action_mask"
        calls = list(zip(kwargs["sequences"], kwargs[mask], strict=True))
        if self.model == "reward":
            self.world.note("score", [sorted(engine.awake) for engine in self.world.engines])
        share, left = divmod(len(calls), len(self.workers))
        assert share and not left  # a rank with a call less than another would wait for it for ever
        answers = [self.answer(*call) for call in calls]
        return [Ref(answers[start : start + share]) for start in range(0, len(calls), share)]

    def take(self, experiences: list) -> list[Ref]:
        self.world.skipped.append((self.world.step, getattr(self, "skipped", ())))
        return [self._actor_handlers[0].take.remote(experiences)]

    def answer(self, sequences: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.model == "reward":
            rows = [row[on.bool()].tolist() for row, on in zip(sequences, mask, strict=True)]
            self.world.scored += [(self.world.step, row) for row in rows]
            return torch.tensor([self.world.score(row) for row in rows]).bfloat16()
        return self.reference(sequences, mask) if self.model == "reference" else self.forward(sequences)

    def reference(self, sequences: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        pairs = zip(sequences.tolist(), mask, strict=True)
        real = [row[: int(on.nonzero().max()) + 2] for row, on in pairs if on.any()]  # not a filler
        self.world.referred += [(self.world.step, row) for row in real]
        return torch.tensor([self.world.log_probs(row, -1) for row in sequences.tolist()]) * mask

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:
        if self.model == "critic":
            return torch.sin(sequences[:, 1:].float() + self.world.updates["critic"])
        result = torch.tensor([self.world.log_probs(row, self.world.updates["actor"]) for row in sequences.tolist()])
        return result.masked_fill(torch.isin(sequences[:, 1:], torch.tensor(sorted(self.world.spoilt))), math.nan)


DYNAMIC = {"algo.dynamic_filtering_enable": True}
SCORED = {"reward.remote_url": None, "reward.model_name_or_path": "reward", "reward.num_gpus_per_node": 1}
CHOOSING = f"{Path(__file__).parent}/choosing_method.py:First"


class World:
    """Everything outside the trainer's process.

    Attributes:
        requests: what was generated: prompt, weights, step, seed and prefix.
        trained: the step and the experiences of each update.
        taught: the same for the critic, also if the actor is not updated.
        skipped: the step and the samples that are dealt with what is sent to be trained on, and that no model passes.
        referred: the step and the tokens of each sample that the reference model was asked for.
        scored: the same for the reward model, with fillers.
        events: what else happened, in order: (name, argument).
    """

    def __init__(
        self, folder: Path, words: dict[str, Any], *, prompts: int = 16, evaluation: int = 0, engines: int = 1
    ) -> None:
        self.requests, self.trained, self.taught, self.skipped = [], [], [], []
        self.referred, self.scored, self.events = [], [], []
        self.updates = {"actor": 0, "critic": 0}
        self.norms = {"actor_grad_norm": 1.0}
        self.reward_failures = [Failures() for _ in range(engines)]
        self.faults: dict[str, tuple[int, Exception]] = {}  # what fails, in which step, and how
        self.spoilt: set[int] = set()  # tokens whose log-prob the actor cannot compute
        self.checkpoints = folder / "checkpoints"
        self.args = self.arguments(folder, words | ({"eval.dataset": "eval.jsonl"} if evaluation else {}))
        self.record.mkdir(parents=True, exist_ok=True)
        self.engines = [Engine(self, number) for number in range(engines)]
        sizes = {name: getattr(self.args, name).num_gpus_per_node for name in ("actor", "critic", "ref", "reward")}
        models = ("actor", "critic") if self.args.critic.model_name_or_path else ("actor",)
        self.groups = {model: Group(self, model, sizes[model]) for model in models}
        self.reference = Group(self, "reference", sizes["ref"]) if "ref" in Flags.of(self.args).loaded else None
        self.judge = None if self.args.reward.remote_url else Group(self, "reward", sizes["reward"])
        rows = [("data", f"prompt {n}", str(n), None) for n in range(prompts)]
        self.data = lambda: StatefulDataLoader(rows, batch_size=1, shuffle=True, drop_last=True, collate_fn=columns)
        self.evaluation = [columns([("data", f"eval {n}", str(n), None)]) for n in range(evaluation)] or None
        self.trainer: Any = None

    @staticmethod
    def arguments(folder: Path, words: dict[str, Any]) -> SimpleNamespace:
        flags = {
            "algorithm": "bapo_grpo", "actor.model_name_or_path": "model", "reward.remote_url": "reward.py",
            "actor.num_gpus_per_node": 1, "critic.num_gpus_per_node": 1, "ref.num_gpus_per_node": 1,
            "rollout.batch_size": 4, "rollout.n_samples_per_prompt": 4, "rollout.micro_batch_size": 3,
            "train.batch_size": 8, "train.micro_batch_size": 2, "train.num_episodes": 2, "train.seed": 7,
            "vllm.num_engines": 1, "algo.kl.init_coef": 0, "adapt.c1": "1/4", "adapt.c2": "1/4", "adapt.c3": "3/4",
            "adapt.rollout_delay": 3, "adapt.reevaluate_every": 2, "adapt.buffer_size": 6, "data.max_len": 64,
            "ckpt.path": folder / "checkpoints", "run.dir": folder / "runs",
        } | words  # fmt: skip
        argv = []
        for name, value in flags.items():
            if isinstance(value, (list, tuple)):
                argv += [f"--{name}", *map(str, value)]
            elif value is not None:
                argv.append(f"--{name}" if value is True else f"--{name}={value}")
        args = arguments.parse(argv)
        args.checked = Checked()
        set_openrlhf_flags(args)
        return args

    def choose_start(self) -> str | None:
        """Choose the checkpoint as a start does, and return its tag."""
        start = choose_start(self.args)
        take(start, self.args)
        self.args.checked = replace(self.args.checked, resume_tag=start.tag)
        return start.tag

    @property
    def step(self) -> int | None:
        """The trainer's step; None without batch adaptation."""
        state = getattr(self.trainer, "state", None)
        return state and state.step

    def note(self, name: str, argument: Any = None) -> None:
        self.events.append((name, argument))

    def noted(self, *names: str) -> list[Any]:
        return [argument for name, argument in self.events if name in names]

    def fail_at(self, what: str) -> None:
        step, error = self.faults.get(what, (-1, None))
        if error and step == self.step:
            raise error

    def reward(self, prompt: str, weights: int, sample: int) -> Any:
        """Some prompts are always too hard, some become easier; most groups have both."""
        hardness = digest(prompt) % 8
        return float(digest(prompt, weights // 2, sample) % 8 >= hardness)

    def score(self, tokens: Sequence[int]) -> float:
        """The reward model's, which bfloat16 holds: from -3 to 5."""
        return digest([*tokens]) % 33 / 4 - 3

    def log_probs(self, tokens: list[int], weights: int) -> list[float]:
        """Of all tokens but the first."""
        return [-1.0 - digest(token, place, weights) % 64 / 512 for place, token in enumerate(tokens[1:])]

    def make_trainer(self, kind: type = AdaptedPPOTrainer) -> AdaptedPPOTrainer:
        with pytest.MonkeyPatch.context() as patch:
            tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=2, decode=decode)
            patch.setattr(mended_trainer, "leave_to_driver", lambda: None)  # this process is no worker
            patch.setattr(ppo_trainer, "get_tokenizer", lambda *_, **__: tokenizer)
            patch.setattr(ppo_trainer, "prepare_datasets", lambda *_: (self.data(), self.evaluation, 10))
            models = self.groups["actor"], self.groups.get("critic"), self.judge, self.reference
            sizes = {"max_len": 64, "max_new_tokens": 8, "n_samples_per_prompt": self.args.rollout.n_samples_per_prompt}
            self.trainer = kind(
                "model", SimpleNamespace(args=self.args), *models, [*map(Handle, self.engines)], **sizes
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
        result = [request for request in self.requests if request.step == step and request.prompt.startswith("prompt")]
        return result[: self.args.rollout.batch_size], result[self.args.rollout.batch_size :]


def decode(tokens: torch.Tensor | list[int], **_: Any) -> Any:
    """Token ids as words; a row of several texts becomes a list, as transformers has it."""
    several = isinstance(tokens, torch.Tensor) and tokens.dim() > 1
    return [decode(row) for row in tokens] if several else " ".join(str(int(token)) for token in tokens)


def columns(rows: list[tuple]) -> tuple[list, ...]:
    return tuple(map(list, zip(*rows, strict=True)))


def by_position(samples: list) -> dict[int, list]:
    """What each sample of a batch was trained with, by its position in the batch."""
    names = ("action_log_probs", "rollout_log_probs", "values", "advantages", "returns")
    return {place: [list(row[0]), *row[2:]] for place, row in enumerate(rows_of(samples, *names))}


def rows_of(experiences: list, *names: str) -> list[tuple]:
    """Tokens, reward and some numbers of the generated tokens of each sample."""
    return [
        (
            tuple(e.sequences[row][e.attention_mask[row].bool()].tolist()),
            float(e.rewards[row]),
            *(getattr(e, name)[row][e.action_mask[row].bool()].tolist() for name in names),
        )
        for e in experiences
        for row in range(len(e.sequences))
    ]


def responses_to(request: SimpleNamespace) -> list[tuple[int, ...]]:
    """The tokens of a request's four responses."""
    seeds = [request.seed and request_seed(request.seed, n) for n in range(4)]
    drawn = [digest(request.prompt, request.weights, n, seed) for n, seed in enumerate(seeds)]
    return [(3, 4, *(5 + d // 7**place % 40 for place in range(1 + d % 4))) for d in drawn]


def tokens_of(request: SimpleNamespace) -> int:
    """Number of generated tokens of a request's four responses."""
    return sum(len(tokens) - 2 for tokens in responses_to(request))


def groups_in_flight(run: World) -> int:
    """Number of groups that were begun ahead of training, and have not reached the trainer yet."""
    generator = run.trainer.samples_generator
    return generator.rollouts.in_flight(generator.last_rollout)


def watched(run: World) -> list[tuple]:
    """What `build_batch` gets in each step, and how many updates the actor has made by then."""
    seen, build = [], run.trainer.method.build_batch

    def build_batch(step, fresh, reevaluated):
        seen.append((step, list(fresh), list(reevaluated), run.updates["actor"]))
        return build(step, fresh, reevaluated)

    run.trainer.method.build_batch = build_batch
    return seen


def numbers(rows: list[dict]) -> list[dict]:
    """Rows of the record without times."""
    return [{k: v for k, v in row.items() if "seconds" not in k and not k.startswith("timing/")} for row in rows]


def without_times(run: World) -> list[dict]:
    """The record without times, and without what depends on how far the engines are when a step ends."""
    return [{k: v for k, v in row.items() if k != "groups/in_flight"} for row in numbers(run.metrics())]


def trained(run: World, first: int) -> list[tuple]:
    """What each update from step `first` on was made with."""
    names = ("sequences", "action_mask", "action_log_probs", "rollout_log_probs", "advantages", "returns", "rewards")
    return [
        (step, [[getattr(experience, name).tolist() for name in names] for experience in experiences])
        for step, experiences in run.trained
        if step >= first
    ]


SOURCES = ("fresh", "reevaluated", "replayed")
EXTRAS = {"info": {}, "score": None, "truncated": False, "mm_train_inputs": None}


def answer(prompt: str, reward: float | None, mask: list[int]) -> Answers:
    """One response to a prompt. Its tokens are 100, 101, ..., and `mask` says which after the first are generated."""
    response = Response(
        np.arange(100, 101 + len(mask)), spans_of(np.array([0, *mask])), np.full(sum(mask), -1.0),
        math.nan if reward is None else float(np.float32(reward)), extras=EXTRAS | {"info": {}},
    )  # fmt: skip
    return Answers(Prompt(prompt, "label"), [response])


def in_groups(answers: list[Answers], size: int) -> list[Answers]:
    """So many answers in a row as those to one prompt."""
    rows = [answers[start : start + size] for start in range(0, len(answers), size)]
    return [Answers(row[0].prompt, [response for each in row for response in each.responses]) for row in rows]


def generated_rows(answers: list[Answers], size: int, **changed: Any) -> list:
    """These answers as groups for the record."""
    options = {"source": "fresh", "first_uid": 0, "usable": lambda one: one.usable, "reward_range": UNIT}
    return generated_groups(in_groups(answers, size), **options | changed)


def copied(run: World, folder: Path, tag: str) -> None:
    """What a crash right after the checkpoint `tag` leaves behind: newer ones were never written.

    Of one step the regular checkpoint is preferred to the best one, which then has to be the only one.
    """

    def written(name: str) -> tuple[int, bool]:
        return int(name.rpartition("step")[2]), name.startswith("best_")

    shutil.copytree(run.checkpoints, folder / "checkpoints")
    shutil.copytree(run.args.run.dir, folder / "runs")
    for saved in (folder / "checkpoints").glob("*/*global_step*"):
        if written(saved.name) > written(tag) or saved.name == tag.removeprefix("best_") != tag:
            shutil.rmtree(saved)
