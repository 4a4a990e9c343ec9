"""How difficult prompts are, judged by their past groups: counts or ratings, and how well these predict."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bapo_openrlhf.adapt.group import Group, Prompt
from bapo_openrlhf.adapt.metric import declare


def successes(group: Group) -> Fraction:
    """s, the number of right responses: the sum of the rewards, each clipped to [0, 1]. A reward of 0.3 adds 0.3."""
    return sum((min(max(reward, Fraction(0)), Fraction(1)) for reward in group.rewards), Fraction(0))


class PromptRows:
    """Two numbers about each prompt that had a group, in 16 bytes a prompt. A subclass says what they mean.

    Args:
        first: The numbers of a prompt without any group.
    """

    def __init__(self, first: tuple[float, float]) -> None:
        self.first = np.array(first)
        self._ids = np.empty(0, np.uint64)  # Prompt.id as a number, ascending
        self._rows = np.empty((0, 2), np.float32)

    def __len__(self) -> int:
        return len(self._ids)

    def of(self, prompts: Sequence[Prompt]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """The numbers of the prompts, shape (P, 2), and whether each had a group, shape (P,)."""
        places, known = self._find(_numbers(prompts))
        rows = np.tile(self.first, (len(places), 1))
        rows[known] = self._rows[places[known]]
        return rows, known

    def _find(self, ids: NDArray[np.uint64]) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """The place of each id, or where it would be inserted, and whether it is known. There may be millions."""
        places = np.searchsorted(self._ids, ids)
        known = np.zeros(len(ids), np.bool_)
        within = places < len(self._ids)
        known[within] = self._ids[places[within]] == ids[within]
        return places, known

    def update(self, groups: Sequence[Group]) -> None:
        """Learn from the groups of a step, in their order. New arrays are made, so those in a saved state stay."""
        ids = _numbers([group.prompt for group in groups])
        new = np.unique(ids[~self._find(ids)[1]])
        places = np.searchsorted(self._ids, new)
        self._ids = np.insert(self._ids, places, new)
        self._rows = np.insert(self._rows, places, self.first, axis=0)
        for place, group in zip(np.searchsorted(self._ids, ids), groups, strict=True):
            self._rows[place] = self.learn(self._rows[place], float(successes(group)), group.size)

    def learn(self, row: NDArray[np.float64], right: float, size: int) -> Any:
        """The numbers of a prompt after a group of `size` responses, `right` of them right."""
        raise NotImplementedError

    def predicted(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """The expected success probability of prompts with these numbers: (P, 2) to (P,)."""
        raise NotImplementedError

    def draw(self, rows: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
        """A success probability drawn from the posterior of each prompt with these numbers: (P, 2) to (P,)."""
        raise NotImplementedError

    def forecast(self, groups: Sequence[Group]) -> dict[str, float]:
        """How well today's numbers predict fresh groups that are not counted yet: see `forecast_metrics`."""
        rows, known = self.of([group.prompt for group in groups])
        return forecast_metrics(groups, self.predicted(rows), known)

    def nearest(self, prompts: Sequence[Prompt], count: int, target: float, rng: np.random.Generator) -> list[int]:
        """Thompson sampling: positions of up to `count` prompts, ascending: those with the least |draw - target|."""
        draws = self.draw(self.of(prompts)[0], rng)
        return sorted(np.argsort(np.abs(draws - target), kind="stable")[:count].tolist())

    def state_dict(self) -> dict[str, Any]:
        """Ids, uint64 of shape (P,), and the numbers, float32 of shape (P, 2)."""
        return {"ids": self._ids, "rows": self._rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`. Parameters are not part of the state: a resume may change them."""
        self._ids, self._rows = state["ids"], state["rows"]


class SuccessCounts(PromptRows):
    """Discounted counts a and b of right and wrong responses of each prompt: its posterior is Beta(a, b).

    A prompt without any group has the counts (a0, b0). A group of n responses, s of them right, updates the counts of
    its prompt: a <- lam a + (1 - lam) a0 + s and b <- lam b + (1 - lam) b0 + (n - s). Those of other prompts stay.

    Args:
        decay: lam, within [0, 1]. 1 forgets nothing; 0 keeps only the last group.
        prior_a, prior_b: a0 and b0.
    """

    def __init__(self, decay: float, prior_a: float, prior_b: float) -> None:
        super().__init__((prior_a, prior_b))
        self.decay = decay

    def learn(self, row: NDArray[np.float64], right: float, size: int) -> Any:
        """See the class."""
        return self.decay * row + (1 - self.decay) * self.first + np.array([right, size - right])

    def predicted(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """a / (a + b)."""
        return np.asarray(rows[:, 0] / rows.sum(axis=1))

    def draw(self, rows: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
        """From Beta(a, b)."""
        return rng.beta(rows[:, 0], rows[:, 1])


class Ratings(PromptRows):
    """A rating of the policy beside a rating of each prompt, so that a prompt becomes easier as the policy learns.

    The success probability of a prompt in step t is 1 / (1 + exp(d - theta_t)) (Rasch's model). theta is the *ability*
    of the policy and d the *difficulty* of the prompt. Both are only known as a mean and a variance. theta begins with
    (0, 4) and its variance grows by `drift` in each step; d begins with (0, `spread`). After a group with s of n
    responses right, x = theta - d goes from its prior Normal(m, V), V = var(theta) + var(d), to the normal
    distribution around the mode of its posterior (Laplace's approximation):

        x* solves s - n p(x*) = (x* - m) / V, with p(x) = 1 / (1 + exp(-x)),    V* = 1 / (1 / V + n p(x*) (1 - p(x*)))

    theta and d take their shares of it, as in the rating systems of chess (Glickman, 1999): with w = var(theta) / V the
    mean of theta moves by w (x* - m), and its variance falls by w^2 (V - V*). With w = var(d) / V, the mean of d moves
    by -w (x* - m), and its variance falls by w^2 (V - V*).

    Args:
        spread: Variance of the difficulties of prompts, above 0.
        drift: Variance of a step of the ability, at least 0.
    """

    def __init__(self, spread: float, drift: float) -> None:
        super().__init__((0.0, spread))
        self.drift = drift
        self.ability, self.uncertainty = 0.0, 4.0  # mean and variance of theta

    def update(self, groups: Sequence[Group]) -> None:
        """Learn from the groups of a step, in their order. The ability may have moved since the step before."""
        self.uncertainty += self.drift
        super().update(groups)

    def learn(self, row: NDArray[np.float64], right: float, size: int) -> Any:
        """See the class."""
        difficulty, variance = map(float, row)
        before, mean = self.uncertainty + variance, self.ability - difficulty
        low, high = mean - size * before, mean + size * before  # the mode lies between, because |s - n p| <= n
        for _ in range(60):
            mode = (low + high) / 2
            p = float(_sigmoid(mode))
            low, high = (mode, high) if right - size * p > (mode - mean) / before else (low, mode)
        lost = before - 1 / (1 / before + size * p * (1 - p))
        of_policy, of_prompt = self.uncertainty / before, variance / before
        self.ability += of_policy * (mode - mean)
        self.uncertainty -= of_policy**2 * lost
        return difficulty - of_prompt * (mode - mean), variance - of_prompt**2 * lost

    def predicted(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """The mean of p(x) for x from Normal(m, V), in the approximation p(m / sqrt(1 + pi V / 8))."""
        mean, variance = self.ability - rows[:, 0], self.uncertainty + rows[:, 1]
        return _sigmoid(mean / np.sqrt(1 + np.pi * variance / 8))

    def draw(self, rows: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
        """With a difficulty drawn for each prompt, and the mean of the ability, which all prompts share."""
        return _sigmoid(self.ability - rng.normal(rows[:, 0], np.sqrt(rows[:, 1])))

    def state_dict(self) -> dict[str, Any]:
        """That of all prompts, and the ability's mean and variance."""
        return {**super().state_dict(), "ability": self.ability, "uncertainty": self.uncertainty}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        super().load_state_dict(state)
        self.ability, self.uncertainty = state["ability"], state["uncertainty"]


def _sigmoid(x: NDArray[np.float64] | float) -> NDArray[np.float64]:
    """1 / (1 + exp(-x)), without overflow."""
    return np.asarray(np.exp(-np.logaddexp(0, -x)))


def _numbers(prompts: Sequence[Prompt]) -> NDArray[np.uint64]:
    return np.array([int(prompt.id, 16) for prompt in prompts], np.uint64)


FORECAST_METRICS = declare("""
    prompts/known | prompts | Known prompts | | Prompts that have had a group so far.
    prompts/predicted | 0 to 1 | Predicted success | | Mean predicted success of this step's prompts.
    prompts/unseen_share | 0 to 1 | Unseen prompts | | Share of this step's prompts that had no group before.
    prompts/prediction_error | 0 to 1 | Prediction error | | Mean |predicted - observed| of this step's other \
        prompts, where observed is the share of right responses.
""")


def forecast_metrics(
    groups: Sequence[Group], predicted: NDArray[np.float64], known: NDArray[np.bool_]
) -> dict[str, float]:
    """How well the groups of a step were predicted: FORECAST_METRICS but the first. Numbers of no group are left out.

    Args:
        groups: Fresh groups, P of them.
        predicted: Success probabilities before these groups were known, shape (P,).
        known: Whether the prompt had a group before, shape (P,).
    """
    if not groups:
        return {}
    metrics = {"prompts/predicted": float(predicted.mean()), "prompts/unseen_share": float(1 - known.mean())}
    if known.any():
        observed = np.array([float(successes(group) / group.size) for group in groups])
        metrics["prompts/prediction_error"] = float(np.abs(predicted - observed)[known].mean())
    return metrics
