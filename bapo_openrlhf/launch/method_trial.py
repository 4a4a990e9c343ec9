"""A few steps of a method with made-up groups: what is wrong with it shows before any model loads."""

import tempfile
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np

from bapo_openrlhf.adapt.batch import Batch, drop
from bapo_openrlhf.adapt.group import Group, Prompt, Response
from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.adapt.rewards import UNIT, Range, exact_rewards
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.methods.base import Method, are_positions
from bapo_openrlhf.record.metrics import DECLARED, names
from bapo_openrlhf.record.state_file import load_state, save_state
from bapo_openrlhf.training.wire.failures import OWN
from bapo_openrlhf.user_file import described

PLAIN = (str, bytes, int, float, complex, type(None))  # types of values that are compared as they are
STEPS = 12
MOST_RESPONSES = 256  # of a step, so that a trial takes less than a second
ROUNDS = 3  # after so many steps the same prompts come again
SAVED = "its state is saved and loaded"
TRIED = "adapt.method, tried with made-up groups, in step"
# Names of the run's own metrics. A method may report those that built-in methods declare.
TAKEN = (names("ba_ppo", optional=True) | OWN) - {metric.name for metrics in DECLARED.values() for metric in metrics}


def try_method(
    make: Callable[[], Method],
    *,
    capacity: int,
    group_size: int,
    prompts: int | None = None,
    prompt: Prompt | None = None,
    reward_range: Range = UNIT,
    steps: int = STEPS,
) -> list[Batch]:
    """Take a few steps of a method with made-up groups, as the trainer takes them. Returns their batches.

    Rewards are the two ends of the range. Some groups have no signal, some prompts that are named again give no group,
    and some groups leave the batch, because their log-probs are not finite. (A batch is returned as it was before.)
    After each step the state is saved to a file. A second method loads it, and has to make the same batch in the next
    step, and hold the same after it.

    Args:
        capacity, group_size: B and G, as the method knows them.
        prompts: Prompts of a rollout batch. B without it, and fewer if they have more than 256 responses.
        prompt: The made-up prompts are this one, followed by a number of spaces.
        reward_range: The least and the greatest reward of the task.

    Raises:
        ConfigError: The method raised an error, or it breaks the contract of `Method`: the batch is too large, a group
            is lost or counted twice, the state cannot be saved or is not all, or a metric is no number.
    """
    count = max(min(prompts or capacity, MOST_RESPONSES // group_size), 1)
    trial = _Trial(capacity * group_size, group_size, prompt or Prompt("prompt", "1"), reward_range)
    with tempfile.TemporaryDirectory() as name:
        method, resumed, batches = make(), make(), []
        for trial.step in range(steps):
            draws = trial.draws(count * max(method.candidates, 1))
            batch, account = trial.take(method, count, draws)
            if trial.take(resumed, count, draws)[1] != account:
                trial.refuse(
                    "a method that a checkpoint brings back makes another batch. STATE must name all attributes that "
                    f"later steps depend on, also the generator of all random numbers, and is {method.STATE}"
                )
            if names := differing(method, resumed, without=method.STATE):
                trial.refuse(
                    f"{', '.join(names)}: a method that a checkpoint brings back has another value after the same "
                    "step. STATE must name each attribute that a step reads before it sets it anew, and is "
                    f"{method.STATE}"
                )
            batches.append(batch)
            resumed = make()
            trial.call(SAVED, _hand_over, method, resumed, Path(name))
    return batches


def _hand_over(method: Method, resumed: Method, folder: Path) -> None:
    save_state(folder, method.state_dict())
    resumed.load_state_dict(load_state(folder))


@dataclass
class _Trial:
    """What a trial knows beside the method."""

    most: int  # responses that a batch holds at most
    group_size: int
    prompt: Prompt
    reward_range: Range
    step: int = 0  # the step that it is in
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def refuse(self, what: str) -> None:
        raise ConfigError(f"{TRIED} {self.step}: {what}")

    def call(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{TRIED} {self.step}: {what}: {described(error)}") from error

    def listed(self, what: str, kind: type, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        result: list[Any] = self.call(what, lambda: list(function(*arguments)))
        if others := [item for item in result if not isinstance(item, kind)]:
            self.refuse(f"{what} returned {others[0]!r}, a {type(others[0]).__name__}; it must be a {kind.__name__}")
        return result

    def draws(self, candidates: int) -> Mapping[str, Any]:
        """Prompts, first uid and right responses of a step, which do not depend on what the method does."""
        first, text, label = self.step % ROUNDS * candidates, self.prompt.text, self.prompt.label
        return {
            "uid": 4 * candidates * self.step,  # a step has fewer groups
            "prompts": [Prompt(text + " " * (first + place), label) for place in range(candidates)],
            "right": self.rng.integers(0, self.group_size + 1, 4 * candidates).tolist(),
        }

    def take(self, method: Method, count: int, draws: Mapping[str, Any]) -> tuple[Batch, str]:
        prompts, right = draws["prompts"], draws["right"]
        self.call("wanted", lambda: int(method.wanted(self.step, count)))
        solved_prompts = prompts[::2] if method.demonstrates or method.prefixed else []
        method.solutions = {prompt.id: np.arange(2) for prompt in solved_prompts}
        positions = list(range(count))
        if method.candidates > 1:
            positions = self.listed("choose_prompts", Integral, method.choose_prompts, self.step, prompts, count)
            if not are_positions(positions, count, len(prompts)):
                self.refuse(f"choose_prompts returned {positions}; it must be {count} of {len(prompts)} positions")
        hard_prompts = self.listed("begin_step", Prompt, method.begin_step, self.step)
        # In every second step one prompt gives no group.
        responders = hard_prompts[: len(hard_prompts) - self.step % 2]
        sizes = self._sizes(method, right, len(positions))
        uids = iter(range(draws["uid"], draws["uid"] + len(positions) + len(responders)))
        fresh = [self._group(next(uids), prompts[place], right[n], sizes[n]) for n, place in enumerate(positions)]
        again = [self._group(next(uids), prompt, right[-1 - n % len(right)]) for n, prompt in enumerate(responders)]
        self.call("unanswered", method.unanswered, hard_prompts[len(responders) :])
        batch = self.call("build_batch", method.build_batch, self.step, fresh, again)
        distances = self.call("build_batch", self._review, batch, [*fresh, *again])
        self.call("observe_distances", method.observe_distances, self.step, distances)
        numbers = self._numbers(method)
        lists = {item.name: getattr(batch, item.name) for item in fields(batch)}
        uids_by_list = {name: [getattr(member, "uid", member) for member in members] for name, members in lists.items()}
        return batch, repr((positions, [prompt.id for prompt in hard_prompts], uids_by_list, numbers))

    def _review(self, batch: Batch, generated: Sequence[Group]) -> dict[Group, float]:
        """Check the batch, and settle it without a group in every fourth step. Returns the distances of its groups."""
        if not isinstance(batch, Batch):
            self.refuse(f"build_batch returned {type(batch).__name__}; it must be a Batch")
        if batch.samples > self.most:
            self.refuse(f"build_batch made a batch of {batch.samples} responses; it may hold at most {self.most}")
        trained = [group for _, group in batch.with_sources()]
        reviewed = drop(batch, nonfinite={group.uid for group in trained[-1:] if self.step % 4 == 3})
        Ledger().settle(generated, reviewed)
        return {group: 0.01 * (group.uid % 7) for _, group in reviewed.with_sources()}

    def _sizes(self, method: Method, right: Sequence[int], groups: int) -> list[int]:
        if method.first_responses is None:
            return [self.group_size] * groups
        sizes = [method.first_responses] * groups
        for _ in range(self.group_size):
            so_far = [exact_rewards(self._rewards(right[n], sizes[n]), self.reward_range) for n in range(groups)]
            more = self.listed("more_responses", Integral, method.more_responses, so_far)
            sizes = [size + one for size, one in zip(sizes, more, strict=False)]
            if len(more) != groups or min(more) < 0 or max(sizes) > self.group_size:
                self.refuse(f"more_responses returned {more}; it must be a number for each prompt, at most G in all")
            if not any(more):
                break
        return sizes

    def _rewards(self, right: int, size: int) -> list[float]:
        low, high = map(float, self.reward_range)
        return [high if place < right else low for place in range(size)]

    def _group(self, uid: int, prompt: Prompt, right: int, size: int | None = None) -> Group:
        responses = (
            Response(np.arange(5) + place, ((3, 5),), np.full(2, -0.5), reward)
            for place, reward in enumerate(self._rewards(right, size or self.group_size))
        )
        return Group(uid, prompt, tuple(responses), self.step, self.step, self.reward_range)

    def _numbers(self, method: Method) -> dict[str, float]:
        numbers: dict[str, float] = self.call("metrics", lambda: dict(method.metrics()))
        constants = self.listed("constants", Real, method.constants)
        if len(constants) != 3:
            self.refuse(f"constants returned {constants}; it must be K1, K2 and K3")
        for name, value in numbers.items():
            if not isinstance(name, str) or not isinstance(value, Real):
                self.refuse(f"the metric {name!r} is {value!r}, a {type(value).__name__}; it must be a number")
            if name in TAKEN:
                self.refuse(f"the metric {name} has the name of one of the run's own; give it another name")
        return numbers


def differing(one: Any, other: Any, without: Container[str]) -> list[str]:
    """Names of the attributes that only one of two objects has, or that have different values in the two."""
    left, right = vars(one), vars(other)
    memo: set[tuple[int, int]] = {(id(one), id(other))}
    return [
        name
        for name in sorted(left.keys() | right.keys())
        if name not in without and (name not in left or name not in right or not _same(left[name], right[name], memo))
    ]


def _same(one: Any, other: Any, memo: set[tuple[int, int]]) -> bool:
    """Objects are by their attributes. What has neither attributes nor a comparison, as a lock, is the same."""
    if one is other or (id(one), id(other)) in memo:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, PLAIN):
        return bool(one == other) or (one != one and other != other)  # nan is not equal to itself
    memo.add((id(one), id(other)))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, np.random.Generator):
        return str(one.bit_generator.state) == str(other.bit_generator.state)
    if isinstance(one, Mapping):
        pairs = zip(one.items(), other.items(), strict=False)
        return len(one) == len(other) and all(_same(a, b, memo) and _same(x, y, memo) for (a, x), (b, y) in pairs)
    if isinstance(one, Set) and not all(isinstance(member, PLAIN) for member in one):
        return len(one) == len(other)  # members in no order, which may be equal without being the same
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(_same(*pair, memo) for pair in zip(one, other, strict=True))
    if not callable(one) and hasattr(one, "__dict__"):
        both = vars(one).keys() & vars(other).keys()  # a property may be worked out and kept in one of them
        return all(_same(getattr(one, name), getattr(other, name), memo) for name in both)
    return type(one).__eq__ is object.__eq__ or callable(one) or bool(one == other)
