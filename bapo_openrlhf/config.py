"""This project's flags: one table of fields with their symbols and equations, for the parser, `check` and the docs.

OpenRLHF's flags are not repeated here. Where a flag of OpenRLHF already says something (group size, rollout batch, KL
coefficient), no second one exists.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from bapo_openrlhf.adapt.arithmetic import BatchArithmetic
from bapo_openrlhf.adapt.group import as_fraction
from bapo_openrlhf.adapt.thresholds import Interval
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.methods import Method, registry

GROUP_ESTIMATORS = ("group_norm", "dr_grpo", "rloo", "reinforce_baseline")


@dataclass(frozen=True)
class Algorithm:
    """What `--algorithm` stands for: an advantage path and a batch adaptation method."""

    estimators: tuple[str, ...]  # the first is the default, the others are allowed too
    method: str
    help: str


ALGORITHMS = {
    "ba_ppo": Algorithm(("gae",), "bapo", "batch adaptation with a critic and GAE (Appendix A.9)"),
    "bapo_grpo": Algorithm(GROUP_ESTIMATORS, "bapo", "batch adaptation with group-relative advantages (Algorithm 1)"),
    "ppo": Algorithm(("gae",), "none", "plain OpenRLHF with a critic and GAE"),
    "grpo": Algorithm(GROUP_ESTIMATORS, "none", "plain OpenRLHF with group-relative advantages"),
}


def _flag(default: Any, help: str, *, symbol: str = "", source: str = "", **argument: Any) -> Any:
    """A dataclass field that is also a flag. `argument` goes to argparse."""
    return field(default=default, metadata={"help": help, "symbol": symbol, "source": source, "argument": argument})


@dataclass
class AdaptConfig:
    """The `--adapt.*` flags. Defaults are the paper's (Table 3) where it gives one."""

    method: str = _flag(
        "none",
        "how training batches are made: none (plain OpenRLHF), bapo, bapo_mini_test (c1 = 0 and c2 = c3 = 1/2, "
        "whatever the flags say: no thresholds to tune), bapo_prioritized (prioritised replay and re-evaluation), one "
        "of the neighbouring methods mopps, dots, repo, remix, arpo, exgrpo, luffy and relift, or FILE.py:CLASS",
        source="Algorithm 1, Sec. 5.2",
    )
    options: list[str] | None = _flag(
        None,
        "NAME=VALUE ...: the method's own options; bapo has none beside these flags",
        source="docs/methods.md",
        nargs="+",
    )
    batch_size: int | None = _flag(
        None,
        "groups a training batch holds at most; default: --rollout.batch_size",
        symbol="B",
        source="Eq. 7",
        type=int,
    )
    filter: str = _flag(
        "range",
        "which fresh groups are trained on: range (drops all-right and all-wrong groups), gaussian, uniform or none",
        symbol="X1",
        source="Def. 3.1, A.3",
        choices=["range", "gaussian", "uniform", "none"],
    )
    gaussian_mean: float = _flag(0.5, "centre of the gaussian filter", symbol="mu", source="A.3, Table 3", type=float)
    gaussian_std: float = _flag(0.2, "width of the gaussian filter", symbol="sigma", source="A.3, Table 3", type=float)
    uniform_fraction: float = _flag(0.6, "share that the uniform filter keeps", source="A.3", type=float)
    c1: str = _flag(
        "1/8", "a prompt is hard when its group mean reward is at most this", symbol="c1", source="Eq. 5, 6"
    )
    c2: list[str] | None = _flag(
        None,
        "least group mean reward worth replaying: LOW HIGH (moves with the average reward) or one fixed value; "
        "default: 1/8 4/8",
        symbol="c2",
        source="Eq. 5, 8",
        nargs="+",
    )
    c3: list[str] | None = _flag(
        None,
        "greatest group mean reward worth replaying: LOW HIGH or one fixed value; default: 2/8 5/8",
        symbol="c3",
        source="Eq. 5, 8",
        nargs="+",
    )
    threshold_direction: str = _flag(
        "eq8",
        "eq8: c2 and c3 rise with the average reward, as printed; text: they fall, as the sentence above Eq. 8 reads",
        source="Eq. 8",
        choices=["eq8", "text"],
    )
    reward_ema: float = _flag(
        0.0, "weight of the past in the average reward, in [0, 1); 0: today's fresh batch alone", symbol="r",
        source="Eq. 8", type=float,
    )  # fmt: skip
    buffer_size: int = _flag(256, "prompts in the hard buffer, and groups in the replay buffer unless "
        "--adapt.replay_buffer_size says otherwise", symbol="|B|", source="Table 3", type=int)  # fmt: skip
    replay_buffer_size: int | None = _flag(
        None, "groups in the replay buffer; default: --adapt.buffer_size", symbol="|B_high|", type=int
    )
    replay_steps: int = _flag(
        3, "groups are replayed for this many trainer steps after their own; 0 turns replay (X3) off", symbol="X3",
        source="Sec. 3.2 (3)", type=int,
    )  # fmt: skip
    rollout_delay: int = _flag(
        5, "the rollout engines get the actor's weights every this many trainer steps; 1: every step", symbol="v",
        source="Algorithm 1, line 3", type=int,
    )  # fmt: skip
    max_tv_rollout: float | None = _flag(
        None,
        "the rollout engines get the actor's weights before v steps are over, once the fresh groups' sampled total "
        "variation distance to today's policy is above this on average; default: no limit",
        symbol="v",
        source="beyond the paper",
        type=float,
    )
    reevaluate_every: int = _flag(
        5, "hard prompts are generated again with today's weights every this many steps; 0 turns X2 off",
        symbol="m", source="Algorithm 1, line 13", type=int,
    )  # fmt: skip
    min_tv_reevaluated: float | None = _flag(
        None,
        "a re-evaluation is left out while the policy has moved less than this since the last one, as the sum of the "
        "fresh groups' sampled total variation distances at weight syncs; for v > 1; default: none is",
        symbol="m",
        source="beyond the paper",
        type=float,
    )
    max_reevaluated_prompts: int = _flag(
        128, "most hard prompts generated again at a time, oldest first", source="Table 3", type=int
    )
    max_tv_fresh: float | None = _flag(
        None,
        "a fresh group of an earlier policy is not trained on when its sampled total variation distance to today's is "
        "above this; default: no limit",
        symbol="delta_1",
        source="Eq. 9",
        type=float,
    )
    max_tv_replayed: float | None = _flag(
        None,
        "the same for a group drawn for replay; default: no limit",
        symbol="delta_3",
        source="Eq. 10",
        type=float,
    )
    returns: str = _flag(
        "gae",
        "critic path: gae: OpenRLHF's returns, as if today's policy had generated every response; vtrace: corrected by "
        "truncated importance weights of the tokens that follow",
        source="A.9; arXiv 1802.01561, Eq. 1",
        choices=["gae", "vtrace"],
    )
    vtrace_rho_max: float = _flag(
        1.0, "truncation of the weight of a temporal difference", symbol="rho", source="arXiv 1802.01561", type=float
    )
    vtrace_c_max: float = _flag(
        1.0, "truncation of the weights that carry it back", symbol="c", source="arXiv 1802.01561", type=float
    )
    ratio: str = _flag(
        "behaviour",
        "behaviour: the PPO clip acts on pi/alpha, alpha being the policy that generated the sample; decoupled: it "
        "acts on pi/prox with log-probs recomputed today, weighted by prox/alpha up to --adapt.max_importance_weight",
        symbol="rho",
        source="Eq. 3; arXiv 2505.24298",
        choices=["behaviour", "decoupled"],
    )
    max_importance_weight: float = _flag(
        5.0, "largest weight prox/alpha of a token in decoupled mode", source="arXiv 2505.24298", type=float
    )
    reevaluated_weight: float = _flag(
        1.0, "factor on the advantages of re-evaluated samples, which weighs their part of the policy loss", type=float
    )
    replayed_weight: float = _flag(1.0, "the same for replayed samples", type=float)
    kl_target: str = _flag(
        "reference",
        "policy that --algo.kl.init_coef pulls towards: reference, or behaviour (Eq. 3; no reference model is loaded)",
        symbol="beta D_KL",
        source="Eq. 1, 3",
        choices=["reference", "behaviour"],
    )
    max_failed_share: float = _flag(
        0.5,
        "the run stops when more than this share of a step's groups cannot be used: no reward, or log-probs that are "
        "no finite numbers; fewer are left out and counted",
        type=float,
    )
    eps: float = _flag(
        1e-6, "smoothing of the group's reward variance", symbol="epsilon", source="Eq. 2, 11-13", type=float
    )

    @property
    def enabled(self) -> bool:
        """Whether batches are adapted at all."""
        return self.method != "none"

    def thresholds(self) -> tuple[Any, Interval, Interval]:
        """c1, and where c2 and c3 move, in exact arithmetic.

        Raises:
            ConfigError: no numbers, outside [0, 1], or c2 above c3.
        """
        if self.method == "bapo_mini_test":
            half = as_fraction("1/2")
            return as_fraction(0), Interval(half, half), Interval(half, half)
        c1 = _unit_fraction("adapt.c1", self.c1)
        c2 = _interval("adapt.c2", self.c2 if self.c2 is not None else ["1/8", "4/8"])
        c3 = _interval("adapt.c3", self.c3 if self.c3 is not None else ["2/8", "5/8"])
        for name, low, high in (("LOW", c2.low, c3.low), ("HIGH", c2.high, c3.high)):
            if low > high:
                raise ConfigError(f"adapt.c2 {name} is {low} and adapt.c3 {name} is {high}; c2 must not be above c3")
        if c1 >= 1:
            raise ConfigError(f"adapt.c1 is {c1}; it must be below 1, or every prompt is hard")
        return c1, c2, c3

    def check(self) -> None:
        """Raise ConfigError for a value out of its range."""
        registry.method_class(self.method)
        self.thresholds()
        for name, low in (
            ("buffer_size", 1),
            ("replay_steps", 0),
            ("rollout_delay", 1),
            ("reevaluate_every", 0),
            ("max_reevaluated_prompts", 1),
        ):
            if getattr(self, name) < low:
                raise ConfigError(f"adapt.{name} is {getattr(self, name)}; it must be at least {low}")
        for name in ("batch_size", "replay_buffer_size"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"adapt.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("max_tv_rollout", "max_tv_fresh", "max_tv_replayed"):
            if getattr(self, name) is not None and not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"adapt.{name} is {getattr(self, name)}; it must be in [0, 1]")
        if self.min_tv_reevaluated is not None:
            if not 0 <= self.min_tv_reevaluated < math.inf:
                raise ConfigError(
                    f"adapt.min_tv_reevaluated is {self.min_tv_reevaluated}; it must be finite and at least 0"
                )
            if self.rollout_delay == 1:
                raise ConfigError(
                    f"adapt.min_tv_reevaluated is {self.min_tv_reevaluated} and adapt.rollout_delay is 1; it must be "
                    "above 1, for fresh groups of today's policy say nothing of how far it moves"
                )
        if not 0 <= self.max_failed_share <= 1:
            raise ConfigError(f"adapt.max_failed_share is {self.max_failed_share}; it must be in [0, 1]")
        if not self.vtrace_rho_max >= self.vtrace_c_max:
            raise ConfigError(
                f"adapt.vtrace_rho_max is {self.vtrace_rho_max} and adapt.vtrace_c_max is {self.vtrace_c_max}; the "
                "first must not be below the second"
            )
        for name in ("reevaluated_weight", "replayed_weight"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"adapt.{name} is {getattr(self, name)}; it must be finite and above 0")
        for name in ("gaussian_std", "max_importance_weight", "eps", "vtrace_c_max"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"adapt.{name} is {getattr(self, name)}; it must be above 0")
        if not 0 <= self.gaussian_mean <= 1:
            raise ConfigError(f"adapt.gaussian_mean is {self.gaussian_mean}; it must be in [0, 1]")
        if not 0 < self.uniform_fraction <= 1:
            raise ConfigError(f"adapt.uniform_fraction is {self.uniform_fraction}; it must be in (0, 1]")
        if not 0 <= self.reward_ema < 1:
            raise ConfigError(f"adapt.reward_ema is {self.reward_ema}; it must be in [0, 1)")

    def make_method(self, arithmetic: BatchArithmetic, seed: int) -> Method:
        """The batch adaptation method of this configuration.

        Raises:
            ConfigError: there is none of this name, or it does not take its options.
        """
        c1, c2, c3 = self.thresholds()
        flags = {item.name: getattr(self, item.name) for item in flag_fields(AdaptConfig)}
        given = flags | {
            "capacity": arithmetic.capacity,
            "group_size": arithmetic.group_size,
            "seed": seed,
            "c1": c1,
            "c2": c2,
            "c3": c3,
            "replay_buffer_size": self.replay_buffer_size or self.buffer_size,
        }
        return registry.build(registry.method_class(self.method), given, self.options or [])


@dataclass
class RunConfig:
    """The `--run.*` flags: where a run keeps its record."""

    name: str = _flag("default", "name of the run")
    dir: str = _flag("runs", "folder of all runs; this one's record is in DIR/NAME: run.json, metrics.jsonl, ...")
    answer_chars: int = _flag(
        1000,
        "characters of a sampled answer in answers.jsonl, which has those of prompts that failed and of those solved "
        "after that; 0: no such file",
        type=int,
    )
    logs: str = _flag(
        "full",
        "full: all of OpenRLHF's output; progress: one progress bar, with the output in DIR/NAME/train.log",
        choices=["full", "progress"],
    )

    profile_steps: int = _flag(
        0,
        "steps that are traced in all processes, after the first two: DIR/NAME/profile has where their time went, and "
        "traces for Perfetto; 0: none",
        type=int,
    )

    def check(self) -> None:
        """Raise ConfigError for a value out of its range."""
        for name in ("answer_chars", "profile_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"run.{name} is {getattr(self, name)}; it must be at least 0")


@dataclass
class VerifierConfig:
    """The `--verifier.*` flags: where the reward function runs, and what it may use."""

    processes: int = _flag(
        4,
        "processes that call the Python reward function (--reward.remote_url FILE.py), for each rollout engine, when "
        "batches are adapted; 0: within the engine, as OpenRLHF does",
        type=int,
    )
    timeout: float = _flag(60.0, "seconds that one call may take; then its process is killed", type=float)
    memory_gib: float = _flag(4.0, "GiB that one process may allocate beyond what importing the file took", type=float)

    def check(self) -> None:
        """Raise ConfigError for a value out of its range."""
        if self.processes < 0:
            raise ConfigError(f"verifier.processes is {self.processes}; it must be at least 0")
        for name in ("timeout", "memory_gib"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"verifier.{name} is {getattr(self, name)}; it must be finite and above 0")


@dataclass(frozen=True)
class Checked:
    """What the checks before a run work out from its flags, its inputs and its checkpoints: `args.checked` of a run.

    Attributes:
        arithmetic: Batch arithmetic of the configuration.
        prompts: Rows of the training data; None if the data is not on this machine.
        candidates: Prompts that the method draws for each prompt for which it generates responses.
        kl_coef: Coefficient of the KL penalty to the behaviour policy; 0 if the penalty is to the reference model.
        resume_tag: Checkpoint from which the run continues; None if it starts from the beginning.
    """

    arithmetic: BatchArithmetic
    prompts: int | None = None
    candidates: int = 1
    kl_coef: float = 0.0
    resume_tag: str | None = None


GROUPS: dict[str, type] = {"adapt": AdaptConfig, "verifier": VerifierConfig, "run": RunConfig}


def flag_fields(config: type) -> list[Any]:
    """The fields of a configuration class that are flags."""
    return [item for item in fields(config) if "help" in item.metadata]


def flags_of(args: Any) -> dict[str, Any]:
    """Every flag by its dotted name, OpenRLHF's included.

    Args:
        args: nested arguments, as `cli.arguments.parse` gives them.
    """
    found: dict[str, Any] = {}
    for name, value in vars(args).items():
        if isinstance(value, tuple(GROUPS.values())):
            found |= {f"{name}.{item.name}": getattr(value, item.name) for item in flag_fields(type(value))}
        elif hasattr(value, "__dict__"):
            found |= {f"{name}.{inner}": item for inner, item in flags_of(value).items()}
        else:
            found[name] = value
    return found


def help_text(item: Any) -> str:
    """Help of one flag: its words, then its symbol and where the paper has it."""
    about = ", ".join(part for part in (item.metadata["symbol"], item.metadata["source"]) if part)
    return str(item.metadata["help"]) + (f" [{about}]" if about else "")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--algorithm`, `--adapt.*`, `--verifier.*` and `--run.*` to a parser."""
    group = parser.add_argument_group("batch adaptation (bapo_openrlhf)")
    names = "; ".join(f"{name}: {algorithm.help}" for name, algorithm in ALGORITHMS.items())
    group.add_argument("--algorithm", choices=list(ALGORITHMS), default=None, help=names)
    for prefix, config in GROUPS.items():
        for item in flag_fields(config):
            default = None if item.default is MISSING else item.default
            text = help_text(item).replace("%", "%%")
            if default is not None:
                text += f" (default: {default})"
            group.add_argument(f"--{prefix}.{item.name}", default=default, help=text, **item.metadata["argument"])


def _unit_fraction(name: str, value: Any) -> Any:
    try:
        number = as_fraction(value)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None
    if not 0 <= number <= 1:
        raise ConfigError(f"{name} is {value}; it must be in [0, 1]")
    return number


def _interval(name: str, values: Any) -> Interval:
    values = values if isinstance(values, (list, tuple)) else [values]
    if len(values) not in (1, 2):
        raise ConfigError(f"{name} has {len(values)} values; it takes LOW HIGH, or one fixed value")
    low, high = _unit_fraction(name, values[0]), _unit_fraction(name, values[-1])
    if low > high:
        raise ConfigError(f"{name} is {values[0]} {values[1]}; LOW must not be above HIGH")
    return Interval(low, high)
