"""What a method is: it makes the batch of each step, and it has a state. A new method needs only `build_batch`."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from fractions import Fraction
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from bapo_openrlhf.adapt import filters
from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.group import Group, Prompt
from bapo_openrlhf.adapt.metric import Metric
from bapo_openrlhf.adapt.rewards import as_fraction
from bapo_openrlhf.errors import ALLOWED


class Method(ABC):
    """Chooses the groups that a step trains on. Pure: no Ray, no torch, no files; all randomness from one generator.

    The trainer calls a method in this order in step t: `wanted` with dynamic filtering, `choose_prompts` if more
    prompts are drawn than needed, `begin_step`, and `more_responses` with `first_responses`. After generation come
    `unanswered`, `build_batch` and `observe_distances`.

    With `--train.async_enable`, generation is q steps ahead: `begin_step(t)` comes right before `build_batch(t)`, and
    the groups of the prompts that it names come to `build_batch(t + q)`.

    Attributes:
        NAME: Name of the method in its state. "" stands for that of its file if it is built in, or of its class.
        USE, SOURCE: When to use it and where it comes from, for `bapo-openrlhf methods`. What it does is the first line
            of its docstring.
        VERSION: Format version of its state.
        STATE: Names of the attributes that make up its state. Each holds plain data, numpy arrays, a random generator,
            or an object with `state_dict` and `load_state_dict`.
        METRICS: Every metric that it can report.
        candidates: Prompts drawn from the data for each prompt that is generated for. 1 means that none are chosen.
        asynchronous: Whether groups of prompts that it names may come in a later step.
        related_to_generated: Whether it trains on groups without some of the responses that their means are over.
        adds_rewards: Whether its filter sees fresh groups with a reward of a worked solution or of a stored success.
        demonstrates: Whether it trains on worked solutions (`Batch.demonstrations`, `Batch.fine_tuned`).
        prefixed: Whether `begin_step` names prompts with a prefix (`adapt.prefixes`).
        first_responses: Responses to each prompt that are generated first. None means that all G are.
        measured: Metrics of the last step. `build_batch` sets it.
        solutions: Token ids of the worked solution of each prompt that has one, by prompt id (`--data.solution_key`).
            The trainer sets it.
    """

    NAME: ClassVar[str] = ""
    USE: ClassVar[str] = ""
    SOURCE: ClassVar[str] = ""
    VERSION: ClassVar[int] = 1
    STATE: ClassVar[tuple[str, ...]] = ()
    METRICS: ClassVar[tuple[Metric, ...]] = ()
    candidates: int = 1
    asynchronous: ClassVar[bool] = True
    related_to_generated: ClassVar[bool] = False
    adds_rewards: ClassVar[bool] = False
    demonstrates: ClassVar[bool] = False
    prefixed: bool = False
    first_responses: int | None = None
    measured: Mapping[str, float] = MappingProxyType({})
    solutions: Mapping[str, np.ndarray] = MappingProxyType({})

    def choose_prompts(self, step: int, candidates: Sequence[Prompt], count: int) -> list[int]:
        """The prompts to generate for in this step: positions of exactly `count` of the candidates, each at most once.

        Called before `begin_step`, and only if the attribute `candidates` is above 1. The candidates are that many
        times `count`, or fewer at the data's end, but more than `count`. A step with several rounds of prompts
        (`wanted`) calls it again for each further round.
        """
        return list(range(count))

    def more_responses(self, rewards: Sequence[Sequence[Fraction]]) -> list[int]:
        """How many more responses to generate for each prompt of a round; at most G in all.

        Called if `first_responses` is set, again and again, until it is 0 for each prompt. `rewards` are those of the
        responses so far, as `Group.rewards`. A prompt with a reward that failed is not among them.
        """
        return [0] * len(rewards)

    def wanted(self, step: int, prompts: int) -> int:
        """How many fresh groups with a signal this step wants (--algo.dynamic_filtering_enable).

        Called before `begin_step`, and only with this flag. While fewer are there, the step generates for `prompts`
        more.
        """
        return prompts

    def begin_step(self, step: int) -> list[Prompt]:
        """Start trainer step `step` (0, 1, ...): the prompts to re-evaluate with today's policy, oldest first."""
        return []

    def unanswered(self, prompts: Sequence[Prompt]) -> None:
        """Called before `build_batch` with prompts of `begin_step` that gave no group, because it failed."""
        return

    @abstractmethod
    def build_batch(self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group]) -> Batch:
        """The batch of this step: X1, X2 and X3 (Eq. 5), and what became of every other group that is given here.

        The run stops if the batch has more than B x G responses, or if a group is in none of its lists or in two. The
        rollout policy generated the groups in `fresh`. Those in `reevaluated` are of prompts that `begin_step` named,
        generated by the policy of the step that named them.
        """

    def observe_distances(self, step: int, distances: Mapping[Group, float]) -> None:
        """Called after `build_batch` and before the update, with the TV distance of each group to today's policy.

        The distances are sampled (Eq. 9, 10; from 0 on, no unit). Groups that are too far to be trained on have one,
        and those whose log-probs are not finite have none.
        """
        return

    def constants(self) -> tuple[float, float, float]:
        """K1, K2, K3 of Theorem 3.2 for the theory monitor (Eq. 11-13). nan if it does not cover the method."""
        return math.nan, math.nan, math.nan

    def metrics(self) -> dict[str, float]:
        """Numbers of the last step for the log, by name. Empty before the first step."""
        return dict(self.measured)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next steps depend on, as plain data and numpy arrays, with a format version."""
        saved: dict[str, Any] = {"method": self._name(), "version": self.VERSION}
        for name in self.STATE:
            value = getattr(self, name)
            if isinstance(value, np.random.Generator):
                value = value.bit_generator.state
            saved[name] = value.state_dict() if hasattr(value, "state_dict") else value
        return saved

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`.

        Raises:
            ValueError: The state belongs to another method or has another format version.
        """
        if (state.get("method"), state.get("version")) != (self._name(), self.VERSION):
            raise ValueError(
                f"state of method {state.get('method')!r}, version {state.get('version')!r}; "
                f"expected {self._name()!r}, version {self.VERSION}"
            )
        for name in self.STATE:
            value = getattr(self, name)
            if isinstance(value, np.random.Generator):
                value.bit_generator.state = state[name]
            elif hasattr(value, "load_state_dict"):
                value.load_state_dict(state[name])
            else:
                setattr(self, name, state[name])

    def _name(self) -> str:
        package, _, file = type(self).__module__.rpartition(".")
        return self.NAME or (file if package == __package__ else type(self).__name__)


def are_positions(positions: Sequence[int], count: int, candidates: int) -> bool:
    """Whether `choose_prompts` returned `count` different positions among so many `candidates`."""
    return len(positions) == len(set(positions)) == count and set(positions) <= set(range(candidates))


AS_FIELDS = "@dataclass(eq=False, kw_only=True) above the class makes it of the fields"


def option(default: Any, allowed: str) -> Any:
    """A field of a `FilteredMethod`: its default, and its range, such as "at least 1" (a key of `errors.ALLOWED`).

    Raises:
        ValueError: There is no such range. The message has all of them.
    """
    if allowed not in ALLOWED:
        raise ValueError(f"option({default!r}, {allowed!r}): the range must be one of {', '.join(map(repr, ALLOWED))}")
    return field(default=default, metadata={"allowed": allowed})


@dataclass(eq=False, kw_only=True)
class FilteredMethod(Method):
    """A method whose fresh groups pass one of the fresh filters. Its fields are the parameters of the constructor.

    A subclass with fields needs `@dataclass(eq=False, kw_only=True)` above it, too. A field whose default is a Fraction
    takes any number exactly as it was written.

    Args:
        capacity, group_size: B and G. A batch holds at most B x G responses.
        filter, gaussian_mean, gaussian_std, top_p_share: The fresh filter, as the `--adapt` flags of these names.
        signal_between: The filter `range` takes only groups whose mean is strictly between these two numbers.

    Raises:
        ValueError: A field is out of its range (`option`), or a subclass with fields is no dataclass.
        KeyError: There is no such filter.
    """

    STATE: ClassVar[tuple[str, ...]] = ("rng",)

    capacity: int
    group_size: int
    seed: int = 0
    filter: str = "range"
    gaussian_mean: float = 0.5
    gaussian_std: float = 0.2
    top_p_share: Fraction = Fraction(9, 10)
    signal_between: filters.Between | None = None

    def __post_init__(self) -> None:
        for kind in type(self).__mro__:
            if loose := [name for name, value in vars(kind).items() if isinstance(value, Field)]:
                raise ValueError(f"{kind.__name__}.{loose[0]} is no parameter of its constructor; {AS_FIELDS}")
        for item in fields(self):
            value, allowed = getattr(self, item.name), item.metadata.get("allowed")
            if isinstance(item.default, Fraction):
                value = as_fraction(value)
                setattr(self, item.name, value)
            if allowed and not ALLOWED[allowed](value):
                raise ValueError(f"{item.name} is {value}; it must be {allowed}")
        self.max_responses = self.capacity * self.group_size
        self.rng = np.random.Generator(np.random.PCG64(self.seed))
        fresh_filters: dict[str, filters.FreshFilter] = {
            "range": filters.range_filter(self.signal_between),
            "gaussian": filters.gaussian_filter(self.gaussian_mean, self.gaussian_std),
            "uniform": filters.uniform_filter,
            "top_p": filters.top_p_filter(self.top_p_share),
            "none": filters.keep_all,
        }
        self.fresh_filter = fresh_filters[self.filter]

    def keeps(self, fresh: Sequence[Group]) -> list[bool]:
        """Which of the fresh groups pass the filter."""
        return self.fresh_filter(fresh, self.rng)
