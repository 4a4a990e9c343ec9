"""What the record of a smoke run shows, and what it cannot show."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bapo_openrlhf.adapt.shift import USUAL_KL
from bapo_openrlhf.adapt.vocabulary import FAILED, STATES
from bapo_openrlhf.flags.sizes import batch_arithmetic
from bapo_openrlhf.record import run_record as record
from bapo_openrlhf.workbench.smoke.model import changed_weights

LOSSES = ("policy_loss", "critic_loss", "actor_grad_norm", "critic_grad_norm")

Row = Mapping[str, Any]


def findings(args: SimpleNamespace, folder: Path, last: int, weights: tuple[Path, Path]) -> Iterator[tuple[str, str]]:
    """Each claim about a run to step `last`, and what contradicts it, or "". `weights` are those before and after."""
    rows = record.read_metrics(folder)
    steps = [row["step"] for row in rows]
    wrong = "" if steps == list(range(1, last + 1)) else f"its steps are {steps}, not 1 to {last}"
    yield f"the killed run was resumed after step {last - 1} and ended after step {last}", wrong
    if args.adapt.enabled:
        sizes = _sizes(args)
        yield "every generated group is counted in one state", _first(rows, lambda row: _uncounted(row, sizes))
        yield (
            "the reward function judged every response",
            _first(rows, lambda row: f"{row[f'groups/{FAILED}']} groups failed" if row[f"groups/{FAILED}"] else ""),
        )
    yield "losses and gradients are finite", _first(rows, _not_finite)
    if not args.train.agent_func_path:  # an agent's own rewards may be 0 for all that a random model does
        trained = any(row.get("actor_grad_norm") for row in rows)
        yield "there are gradients", "" if trained else "no step had a gradient above 0"
        yield "the saved weights are not the first ones", "" if changed_weights(*weights) else "all are as before"
    compared = [row for row in rows if row.get("gap/kl") is not None and not row.get("gap/age")]  # of today's weights
    if args.adapt.enabled and compared:
        when = "" if compared[-1]["step"] == last else " before the kill"
        yield f"actor and engines agree on log-probs after each weight sync{when}", _first(compared, _disagreement)


def _first(rows: Sequence[Row], wrong: Callable[[Row], str]) -> str:
    return next((f"step {row['step']}: {text}" for row in rows if (text := wrong(row))), "")


def _sizes(args: SimpleNamespace) -> range:
    """How many responses a group may have: G, or fewer with a method that asks for them little by little."""
    size = args.rollout.n_samples_per_prompt
    few = args.adapt.make_method(batch_arithmetic(args), args.train.seed).first_responses
    return range(few or size, size + 1)


def _uncounted(row: Row, sizes: range) -> str:
    counted = sum(row.get(f"groups/{state}", 0) for state in (*STATES, FAILED))
    generated = row["groups/generated"]
    if counted == generated and generated * sizes[0] <= row["rollouts/step"] <= generated * sizes[-1]:
        return ""
    return f"{counted} groups are counted, {generated} were generated with {row['rollouts/step']} responses"


def _not_finite(row: Row) -> str:
    bad = [name for name in LOSSES if name in row and not (row[name] is not None and math.isfinite(row[name]))]
    return f"{bad[0]} is not a finite number" if bad else ""


def _disagreement(row: Row) -> str:
    kl = row["gap/kl"]
    return "" if kl <= USUAL_KL else f"their KL divergence is {kl:.2g} a token, and rounding explains {USUAL_KL:g}"
