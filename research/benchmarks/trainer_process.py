"""Measures the trainer process at the size of a large cluster: seconds of each part of a step, and its memory.

    python research/benchmarks/trainer_process.py               # 1,024 groups x 8 responses x 8,192 tokens; writes
                                                       # research/benchmarks/results/trainer_process.{json,md}
    python research/benchmarks/trainer_process.py --groups 64 --results /tmp     # a short run

The real classes run as in `AdaptedPPOTrainer.train_step`: answers to groups, BAPO's batch, samples, dealing to
the ranks, experience, metrics, the record. Responses are made up, and so are the answers of the models. Ray does not
run: an object is pickled and copied into a buffer, as Ray does it, and the workers get nothing. The time
that it takes to make responses and answers up does not count; their memory does.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from report import CORES, RESULTS, again, origin, write

from bapo_openrlhf.adapt.arithmetic import BatchArithmetic
from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.adapt.ledger import Ledger, states_of
from bapo_openrlhf.adapt.monitor import Clip, composition, first_update, off_policy, replay_ages, shifts
from bapo_openrlhf.adapt.review import review
from bapo_openrlhf.adapt.shift import Gap
from bapo_openrlhf.cpu import stack as cpu
from bapo_openrlhf.flags.config import AdaptConfig

SIZE, PROMPT_SHARE, DELAY = 8, 8, 5  # G; one in PROMPT_SHARE tokens is the prompt's; v = m
CRITIC = {"grpo": False, "ppo": True}


class Clock:
    """Seconds by name, and the process's peak memory in GiB so far. Time within `away` does not count."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.peaks: dict[str, float] = {}
        self._away = 0.0

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        start, away = time.perf_counter(), self._away
        yield
        self.seconds[name] += time.perf_counter() - start - (self._away - away)
        self.peaks[name] = peak()

    @contextmanager
    def away(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._away += time.perf_counter() - start


class Store:
    """Takes the place of Ray's object store: copies what is put, and forgets it."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.bytes, self.puts = clock, 0, 0
        self._buffer = np.zeros(0, np.uint8)

    def put(self, value: Any) -> Any:
        """The value itself. It is pickled into one buffer, as Ray does."""
        with self.clock.of("put"):
            buffers: list[pickle.PickleBuffer] = []
            pickled = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
            raw = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
            size = sum(map(len, raw)) + len(pickled)
            if size > len(self._buffer):
                self._buffer = np.zeros(size, np.uint8)
            at = 0
            for part in raw:
                self._buffer[at : at + len(part)] = part
                at += len(part)
        self.bytes += size
        self.puts += 1
        return value


def ranks_that_answer(kind: type, ranks: int, clock: Clock, rng: np.random.Generator) -> Any:
    """A group of processes of one model, whose answer to each token is made up."""

    def execute(method: str, chunk: dict, start: int, end: int) -> list[Any]:
        if method != "forward":
            return []
        with clock.away():
            return [-rng.random((len(s), s.shape[1] - 1), dtype=np.float32) for s in chunk["sequences"]]

    group = object.__new__(kind)
    group._actor_handlers = [SimpleNamespace(execute_batch=SimpleNamespace(remote=execute)) for _ in range(ranks)]
    group.duplicate_actors = 1
    return group


def arguments(name: str, micro: int) -> SimpleNamespace:
    """What the experience maker reads of the arguments."""
    one = SimpleNamespace
    estimator = "gae" if CRITIC[name] else "group_norm"
    advantage = one(estimator=estimator, gamma=1.0, lambd=0.95, no_std_norm=False, is_correction_level="off")
    return one(
        adapt=AdaptConfig(),
        algo=one(advantage=advantage, kl=one(use_loss=False, estimator="k1")),
        rollout=one(n_samples_per_prompt=SIZE, micro_batch_size=micro),
        ds=one(ring_attn_size=1, tensor_parallel_size=1),
        train=one(
            dynamic_batch_enable=False, colocate_all=False, colocate_actor_ref=False, colocate_critic_reward=False
        ),
        reward=one(
            clip_range=(-10, 10), overlong_buffer_len=None, overlong_penalty_factor=1.0, stop_properly_penalty_coef=None
        ),
        actor=one(policy_loss_type="ppo"),
    )


class World:
    """Makes up what the engines give back. Half of the prompts are hard."""

    def __init__(self, tokens: int, rng: np.random.Generator) -> None:
        self.rng, self.tokens, self.drawn = rng, tokens, 0

    def answers(self, prompts: int) -> list[tuple[Prompt, list[dict[str, Any]]]]:
        """New prompts, each with an engine's G answers to it, which have the engines' types."""
        prompt, answers = self.tokens // PROMPT_SHARE, []
        for number in range(self.drawn, self.drawn + prompts):
            answers.append((Prompt(f"prompt {number}", "1"), []))
            rewards = (self.rng.random(SIZE) < self.rng.beta(0.7, 0.9)).astype(float)
            for reward in rewards:
                length = int(self.rng.integers(self.tokens - (self.tokens - prompt) // 4, self.tokens + 1))
                log_probs = -self.rng.random(length, dtype=np.float32)
                log_probs[:prompt] = 0
                answers[-1][1].append(
                    {
                        "observation_tokens": self.rng.integers(0, 150_000, length, dtype=np.int32),
                        "action_ranges": [(prompt, length)],
                        "rollout_log_probs": log_probs,
                        "reward": reward,
                        "scores": reward,
                    }
                )
        self.drawn += prompts
        return answers


def peak() -> float:
    """Largest memory of this process so far, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class Trainer:
    """The steps of the trainer process."""

    def __init__(self, name: str, groups: int, tokens: int, ranks: int, micro: int, folder: Path) -> None:
        from openrlhf.trainer.ray import launcher

        from bapo_openrlhf.training.trainer import dealing
        from bapo_openrlhf.training.trainer.experience import ExperienceMaker
        from bapo_openrlhf.training.trainer.recorder import StepRecorder

        self.name, self.groups, self.step, self.clock = name, groups, 0, Clock()
        rng = np.random.default_rng(0)
        self.world, self.store = World(tokens, rng), Store(self.clock)
        launcher.ray = dealing.ray = SimpleNamespace(put=self.store.put, get=lambda answers: answers)
        models = [ranks_that_answer(dealing.DealtActorGroup, ranks, self.clock, rng) for _ in range(3)]
        self.actor, self.critic = models[0], models[1] if CRITIC[name] else None
        self.maker = ExperienceMaker(
            arguments(name, micro), self.actor, self.critic, models[2] if CRITIC[name] else None,
            kl_ctl=SimpleNamespace(value=0.01 * CRITIC[name]), pad=0, reference_name="reference",
        )  # fmt: skip
        config = AdaptConfig(method="bapo", rollout_delay=DELAY, reevaluate_every=DELAY)
        arithmetic = BatchArithmetic(SIZE, groups, groups, groups * SIZE, {"actor": ranks}, micro)
        self.method, self.ledger = config.make_method(arithmetic, seed=0), Ledger()
        (folder / name).mkdir(parents=True, exist_ok=True)
        self.recorder = StepRecorder(folder=folder / name, tokenizer=None, answer_chars=0)

    def take_step(self) -> dict[str, float]:
        """One step. Returns what it handled."""
        from bapo_openrlhf.training.trainer.experience import origins_of
        from bapo_openrlhf.training.trainer.generated import GeneratedStep, reward_numbers
        from bapo_openrlhf.training.trainer.samples import Answers, generated_response

        clock, step, convert = self.clock, self.step, partial(generated_response, max_len=self.world.tokens)
        hard = self.method.begin_step(step)
        fresh, again = self.world.answers(self.groups), self.world.answers(len(hard))
        generated = SIZE * (len(fresh) + len(again))
        kinds = (("fresh", fresh, step - step % DELAY), ("reevaluated", again, step))
        first = self.world.drawn - self.groups - len(hard)
        with clock.of("answers to groups"):
            parts = [
                (source, [Answers(prompt, list(map(convert, responses))) for prompt, responses in answers], version)
                for source, answers, version in kinds
            ]
            step_groups = GeneratedStep.of(parts, first_uid=first, step=step)
        with clock.of("batch adaptation"):
            batch = self.method.build_batch(step, step_groups.fresh, step_groups.reevaluated)
        with clock.of("groups to samples"):
            origins = origins_of(batch, step)
        with clock.of("forward passes: dealing, and gathering the answers"):
            passed = self.maker.forward(origins)
        trained = len(origins)
        with clock.of("experience"):
            reviewed = review(batch, passed.log_ratios, passed.sums, step, Gap(), since=step)
            experience = self.maker.finish(passed, reviewed.kept)
        with clock.of("training: dealing"):
            for group in filter(None, (self.actor, self.critic)):
                group.take(experience.samples)
        with clock.of("metrics"):
            states = states_of(reviewed.batch)
            off_policy(reviewed.batch, experience.log_ratios, self.method.constants(), 1e-6)
            shifts(reviewed.batch, experience.sums, step, reviewed.gap)
            first_update(experience.tokens, Clip(0.2, 0.2))
            replay_ages(reviewed.batch, step, DELAY, self.ledger.uses(reviewed.batch.replayed))
            numbers = (
                composition(reviewed.batch, self.groups * SIZE, len(step_groups.reevaluated)) | self.method.metrics()
            )
            reward_numbers(step_groups.fresh)
        with clock.of("record"):
            self.ledger.settle(step_groups.fresh + step_groups.reevaluated, reviewed.batch)
            self.recorder.add_groups(step + 1, step_groups.recorded, states, trained=numbers["tokens/trained"])
            self.recorder.add_metrics(step + 1, numbers)
        self.step += 1
        return {"generated": generated, "trained": trained, "trained_tokens": float(numbers["tokens/trained"])}


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """The steps of one algorithm, in this process."""
    cpu.prepare_environment()
    cpu.install()
    with tempfile.TemporaryDirectory() as folder:
        run = Trainer(given.one, given.groups, given.tokens, given.ranks, given.micro, Path(folder))
        imported, steps = peak(), []
        profiler = cProfile.Profile() if given.profile else None
        for number in range(given.steps):
            run.clock.seconds.clear()
            run.store.bytes = run.store.puts = 0
            if profiler and number == given.steps - 1:
                profiler.enable()
            handled = run.take_step()
            clock, store = run.clock, run.store
            handled |= {"seconds": dict(clock.seconds), "peaks": dict(clock.peaks)}
            steps.append(handled | {"bytes": store.bytes, "puts": store.puts})
        if profiler:
            profiler.disable()
            profiler.dump_stats(given.profile)
    return {"algorithm": given.one, "steps": steps, "imported_gib": imported, "peak_gib": peak()}


def apart(given: argparse.Namespace, name: str) -> dict[str, Any]:
    """`measure` in a process of its own."""
    words = [f"--{key}={getattr(given, key)}" for key in ("groups", "tokens", "ranks", "micro", "steps")]
    profile = [f"--profile={given.profile}.{name}"] if given.profile else []
    done = subprocess.run(
        [sys.executable, __file__, f"--one={name}", *words, *profile], check=True, stdout=subprocess.PIPE
    )
    return json.loads(done.stdout.splitlines()[-1])


def markdown(result: Mapping[str, Any]) -> str:
    """The page of results."""
    given, algorithms = result["setting"], result["algorithms"]
    lasts = {one["algorithm"]: one["steps"][-1] for one in algorithms}
    lines = ["# The trainer process at the size of a large cluster", "", (__doc__ or "").split("\n\n")[2].strip(), ""]
    lines += [f"| the last of {given['steps']} steps | " + " | ".join(lasts) + " |", "| --- |" + " ---: |" * len(lasts)]
    names = list(next(iter(lasts.values()))["seconds"])
    for name in names:
        lines.append(f"| {name}, s | " + " | ".join(f"{last['seconds'][name]:.2f}" for last in lasts.values()) + " |")
    whole = [sum(last["seconds"].values()) - last["seconds"]["put"] for last in lasts.values()]
    rows = {
        "all of it, s": [f"{seconds:.1f}" for seconds in whole],
        "responses generated": [f"{last['generated']:,}" for last in lasts.values()],
        "responses trained on": [f"{last['trained']:,}" for last in lasts.values()],
        "put into the object store, GiB": [f"{last['bytes'] / 2**30:.2f}" for last in lasts.values()],
        "in so many objects": [f"{last['puts']:,}" for last in lasts.values()],
        **{
            f"peak of the memory until the end of: {name}, GiB": [
                f"{one['steps'][0]['peaks'][name]:.1f}" for one in algorithms
            ]
            for name in names
            if name != "put"
        },
        "peak of the memory in all steps, GiB": [f"{one['peak_gib']:.1f}" for one in algorithms],
        "of it, after the imports, GiB": [f"{one['imported_gib']:.1f}" for one in algorithms],
    }
    lines += [f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows.items()]
    lines += [
        "",
        f"{given['groups']:,} prompts x {SIZE} responses of up to {given['tokens']:,} tokens with their prompts, three "
        f"quarters of it at least; {given['ranks']} data-parallel ranks of each model, {given['micro']} sample(s) in a "
        f"forward pass, v = m = {DELAY}. The peaks of the parts are those of the first step. `ppo` has a critic and a "
        "reference model, `grpo` has neither. Dealing includes `put`, which is also shown by itself. The made-up "
        "samples come with OpenRLHF's types, and take "
        f"{28 * given['groups'] * SIZE * given['tokens'] / 2**30:.1f} GiB if all are of full length. The room into "
        "which objects are copied is in the memory too.",
        "",
        f"{result['machine']}; commit {result['commit']}.",
        "",
        f"`{result['command']}`",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Parse, measure each algorithm in a process of its own, write."""
    parser = argparse.ArgumentParser(description="The trainer process at the size of a large cluster.")
    parser.add_argument("--groups", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=8192, help="of the longest response with its prompt")
    parser.add_argument("--ranks", type=int, default=64, help="data-parallel ranks of each model")
    parser.add_argument("--micro", type=int, default=1, help="samples of a forward pass")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--profile", help="start of the names of the files for profiles of the last steps")
    parser.add_argument("--one", choices=CRITIC, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given)))
        return
    result = origin(again("research/benchmarks/trainer_process.py"), CORES, "no GPU")
    result["setting"] = {key: getattr(given, key) for key in ("groups", "tokens", "ranks", "micro", "steps")}
    result["algorithms"] = [apart(given, name) for name in CRITIC]
    write(given.results, "trainer_process", result, markdown(result))


if __name__ == "__main__":
    main()
