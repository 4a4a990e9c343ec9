"""This project's flags: one table of fields with their symbols and equations, for the parser, `check` and the docs.

OpenRLHF's flags are not repeated here. If a flag of OpenRLHF already has the meaning (group size, rollout batch, KL
coefficient), there is no second flag for it.
"""

import argparse
import copy
from collections.abc import Collection, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from bapo_openrlhf.adapt.advantage import GROUP_ESTIMATORS
from bapo_openrlhf.adapt.arithmetic import BatchArithmetic
from bapo_openrlhf.adapt.filters import Between
from bapo_openrlhf.adapt.rewards import Range, as_range
from bapo_openrlhf.adapt.thresholds import Interval
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.flags.ranges import interval, unit_fraction
from bapo_openrlhf.methods import Method, registry


@dataclass(frozen=True)
class Algorithm:
    """What `--algorithm` stands for: an advantage estimator and a batch adaptation method."""

    estimators: tuple[str, ...]  # the first is the default, the others are allowed too
    method: str
    help: str


ALGORITHMS = {
    "ba_ppo": Algorithm(("gae",), "bapo", "batch adaptation with a critic and GAE (Appendix A.9)"),
    "bapo_grpo": Algorithm(GROUP_ESTIMATORS, "bapo", "batch adaptation with group-relative advantages (Algorithm 1)"),
    "ppo": Algorithm(("gae",), "none", "plain OpenRLHF with a critic and GAE"),
    "grpo": Algorithm(GROUP_ESTIMATORS, "none", "plain OpenRLHF with group-relative advantages"),
}

MEASURED = "measured"  # --adapt.reward_range: the first step says what it is
# What this project does in another way than OpenRLHF only because it takes less time (`--run.faster`).
FASTER = ("requests", "weights", "log_probs")
# What a resume changes (`launch.settings.MAY_CHANGE`).
FROM_NOW_ON = "the batch adaptation from now on"
HOW = "how the machines compute it"


def flag(
    default: Any, help: str, *, symbol: str = "", source: str = "", allowed: str | None = None, of_method: bool = False,
    needs: str = "", only: str = "", resumes: str = "", **argument: Any,
) -> Any:  # fmt: skip
    """A dataclass field that is also a flag. Its rules are made of this description.

    Args:
        source: Where the paper, or another one, has it.
        allowed: A key of `errors.ALLOWED`; None if the value is not a number, or if it is checked elsewhere.
        of_method: Whether it is an argument of methods, so that it has no effect with one that does not take it.
        needs: A key of `conflicts.NEEDS`: what must be there if the flag is not its default.
        only: FLAG or FLAG=VALUE: it has no effect if this other --adapt flag is 0, or not that value.
        resumes: A key of `launch.settings.MAY_CHANGE` if a resume may change it.
        argument: Further arguments of `ArgumentParser.add_argument`.
    """
    description = {"help": help, "symbol": symbol, "source": source, "allowed": allowed, "of_method": of_method,
                   "needs": needs, "only": only, "resumes": resumes, "argument": argument}  # fmt: skip
    return field(default=default, metadata=description)


@dataclass
class AdaptConfig:
    """The `--adapt.*` flags. A default is the paper's (Table 3) if the paper gives one."""

    # fmt: off
    method: str = flag("none",
        "how training batches are made: none (plain OpenRLHF), the name of a method that `bapo-openrlhf methods` "
        "lists, or FILE.py:CLASS",
        source="Algorithm 1, Sec. 5.2")
    options: list[str] | None = flag(None,
        "NAME=VALUE ...: the method's own options; bapo has prefix_share (0)",
        source="docs/methods.md", nargs="+")
    batch_size: int | None = flag(None,
        "largest number of groups in a training batch; default: --rollout.batch_size",
        symbol="B", source="Eq. 7", allowed="at least 1", type=int)
    micro_batch_tokens: int | None = flag(None,
        "a micro-batch in training, and a forward pass that makes experience, has as many samples as fit into this "
        "many tokens of one rank, padding included; default: --train.micro_batch_size and --rollout.micro_batch_size "
        "samples", allowed="at least 1", type=int, needs="batch adaptation", resumes=HOW)
    filter: str = flag("range",
        "which fresh groups are trained on: range (drops all-right and all-wrong groups), gaussian, uniform (a random "
        "0.6 of them), top_p (those with the highest reward variance) or none",
        symbol="X1", source="Def. 3.1, A.3", choices=["range", "gaussian", "uniform", "top_p", "none"], of_method=True)
    gaussian_mean: float = flag(0.5,
        "mean of the gaussian filter", symbol="mu", source="A.3, Table 3", allowed="in [0, 1]", type=float,
        of_method=True, only="filter=gaussian")
    gaussian_std: float = flag(0.2,
        "width of the gaussian filter", symbol="sigma", source="A.3, Table 3", allowed="above 0", type=float,
        of_method=True, only="filter=gaussian")
    top_p_share: float = flag(0.9,
        "share of the summed reward variance of a step's fresh groups that the groups of the top_p filter make up",
        symbol="p", source="arXiv 2604.06268", allowed="in (0, 1]", type=float, of_method=True, only="filter=top_p")
    reward_range: list[str] | None = flag(None,
        "LOW HIGH: least and greatest reward of the task; or measured: from the 1st to the 99th percentile of the "
        "rewards of the first step. Rewards are mapped from it to [0, 1] for thresholds, filters and the record of "
        "groups, never for advantages; default: 0 1, or measured with a reward model",
        symbol="r", source="Eq. 5-8", nargs="+")
    c1: str = flag("1/8",
        "a prompt is hard if its group mean reward is at most this", symbol="c1", source="Eq. 5, 6", of_method=True,
        resumes=FROM_NOW_ON)
    c2: list[str] | None = flag(None,
        "smallest group mean reward that is replayed: LOW HIGH (it moves with the average reward) or one fixed value; "
        "default: 1/8 4/8", symbol="c2", source="Eq. 5, 8", nargs="+", of_method=True, resumes=FROM_NOW_ON)
    c3: list[str] | None = flag(None,
        "largest group mean reward that is replayed: LOW HIGH or one fixed value; default: 2/8 5/8",
        symbol="c3", source="Eq. 5, 8", nargs="+", of_method=True, resumes=FROM_NOW_ON)
    threshold_direction: str = flag("eq8",
        "eq8: c2 and c3 rise with the average reward, as printed; text: they fall, as the sentence above Eq. 8 says",
        source="Eq. 8", choices=["eq8", "text"], of_method=True, resumes=FROM_NOW_ON)
    buffer_size: int = flag(256,
        "largest number of prompts in the hard buffer, and of groups in the replay buffer",
        symbol="|B|", source="Table 3", allowed="at least 1", type=int, of_method=True, resumes=FROM_NOW_ON)
    replay_steps: int = flag(3,
        "groups are replayed for this many trainer steps after their own; 0 turns replay (X3) off",
        symbol="X3", source="Sec. 3.2 (3)", allowed="at least 0", type=int, of_method=True)
    rollout_delay: int = flag(5,
        "the rollout engines get the actor's weights once in this many trainer steps; 1: every step",
        symbol="v", source="Algorithm 1, line 3", allowed="at least 1", type=int, resumes=FROM_NOW_ON)
    max_staleness: int | None = flag(None,
        "with --train.async_enable: largest number of trainer steps that generation is ahead of training, in addition "
        "to the v - 1 of the rollout delay; 0: none; default: --train.async_queue_size",
        symbol="eta", source="arXiv 2505.24298", allowed="at least 0", type=int, needs="asynchrony",
        resumes=FROM_NOW_ON)
    partial_rollout_tokens: int | None = flag(None,
        "partial rollouts: a response to a fresh prompt stops after this many tokens, and goes on in the next step "
        "with the weights that the engines hold then. A group is trained on once all of its responses are finished; "
        "default: each response runs to its end", source="arXiv 2501.12599, Sec. 2.6.2", allowed="at least 1", type=int,
        needs="batch adaptation")
    max_shift_rollout: float | None = flag(None,
        "the rollout engines get the actor's weights before v steps are over if the shift of today's policy on the "
        "fresh groups is above this. The shift is the mean of (log pi/alpha)^2 over the tokens, less the same mean of "
        "on-policy groups; default: no limit",
        symbol="v", source="beyond the paper", allowed="finite and at least 0", type=float, resumes=FROM_NOW_ON)
    reevaluate_every: int = flag(5,
        "hard prompts are generated again with today's weights once in this many steps; 0 turns X2 off",
        symbol="m", source="Algorithm 1, line 13", allowed="at least 0", type=int, of_method=True, resumes=FROM_NOW_ON)
    max_reevaluated_prompts: int | None = flag(None,
        "largest number of hard prompts that are generated again at a time, oldest first; default: half of "
        "--rollout.batch_size",
        source="Table 3", allowed="at least 1", type=int, of_method=True, only="reevaluate_every")
    max_shift_fresh: float | None = flag(None,
        "a fresh group of an earlier policy is not trained on if the shift of today's policy on it is above this; "
        "default: no limit",
        symbol="in the place of delta_1", source="Eq. 9", allowed="finite and at least 0", type=float,
        resumes=FROM_NOW_ON)
    max_shift_replayed: float | None = flag(None,
        "the same for a group drawn for replay; default: no limit",
        symbol="in the place of delta_3", source="Eq. 10", allowed="finite and at least 0", type=float,
        only="replay_steps", resumes=FROM_NOW_ON)
    returns: str = flag("gae",
        "critic path: gae: OpenRLHF's returns, as if today's policy had generated every response; vtrace: corrected "
        "by truncated importance weights of the tokens that follow",
        source="A.9; arXiv 1802.01561, Eq. 1", choices=["gae", "vtrace"])
    critic_lambd: float | None = flag(None,
        "critic path: lambda of the returns, which are the critic's targets. --algo.advantage.lambd is then only the "
        "lambda of the advantages. VC-PPO has 1 here and 0.95 there; default: the same lambda for both",
        symbol="lambda_critic", source="arXiv 2503.01491, Sec. 3.3", allowed="in [0, 1]", type=float, needs="a critic")
    length_adaptive_lambd: float | None = flag(None,
        "critic path: alpha of a lambda of the advantages of a response of l tokens, max(0, 1 - 1/(alpha l)); 0.05 in "
        "the paper. That of the returns is then --adapt.critic_lambd, or 1; default: one lambda for all responses",
        symbol="alpha of VAPO", source="arXiv 2504.05118, Sec. 4.2", allowed="finite and above 0", type=float,
        needs="a critic")
    critic_groups: str = flag("batch",
        "critic path: what the critic trains on: batch: the groups that the actor trains on; generated: also all other "
        "groups of the step, whole, whether the filter drops them or not, unless they failed or are not finite",
        source="beyond the paper", choices=["batch", "generated"], needs="a critic")
    critic_baseline: str = flag("critic",
        "critic path: what the actor's advantages are relative to: critic: its values; batch: its values if they "
        "explain any of the variance of the returns of X1, otherwise the batch's mean reward; group: its values if "
        "they leave less of this variance than the mean reward of the group's other responses does, otherwise that "
        "mean. The critic trains either way",
        symbol="EV", source="arXiv 2604.19485", choices=["critic", "batch", "group"], needs="a critic")
    value_pretraining: int = flag(0,
        "critic path: how many times the critic trains on all fresh responses before the actor's first update, with "
        "their Monte Carlo returns (lambda = 1) as targets. It does so in the first trainer step, and in every step in "
        "which --critic.freezing_steps keeps the actor as it is. The critic's warm-up includes it",
        symbol="K", source="arXiv 2503.01491; 2504.05118, Sec. 4.1", allowed="at least 0", type=int, needs="a critic")
    critic_epochs: int = flag(1,
        "critic path: how many epochs the critic makes for each of --train.max_epochs, which the actor makes; also in "
        "--adapt.value_pretraining", source="beyond the paper", allowed="at least 1", type=int, needs="a critic")
    ratio: str = flag("behaviour",
        "behaviour: the PPO clip acts on pi/alpha, where alpha is the policy that generated the sample; decoupled: it "
        "acts on pi/prox with log-probs recomputed today, weighted by prox/alpha. --algo.advantage.is_correction_level "
        "says how; if it is off, each token's weight is truncated at --algo.advantage.is_correction_threshold HIGH",
        symbol="rho", source="Eq. 3; arXiv 2505.24298", choices=["behaviour", "decoupled"])
    max_second_moment: float | None = flag(None,
        "of the tokens that the PPO clip is about, those that moved furthest are left out of the policy loss, until "
        "the mean of (log pi/alpha)^2 over the others is at most this; 0.04 in the paper; default: no limit",
        symbol="M2", source="arXiv 2510.01161", allowed="finite and above 0", type=float, needs="a ratio of tokens")
    veto_ratio: float | None = flag(None,
        "in responses with a negative advantage, the tokens after the first one whose ratio pi/alpha is below this are "
        "left out of the policy loss of an update; 1e-4 in the authors' example; default: no limit",
        symbol="rho", source="arXiv 2605.17570", allowed="in (0, 1)", type=float, needs="a ratio of tokens")
    scale_learning_rate: bool = flag(False,
        "multiply the actor's learning rate by the root of the effective sample size of the batch's weights pi/alpha, "
        "as a share of a full batch", symbol="ESS", source="arXiv 2602.17616", action="store_true")
    skip_zero_advantage: bool = flag(False,
        "no model passes the responses of fresh groups without a signal, and each optimizer step divides as if it "
        "trained on them: by all of its tokens or responses", source="beyond the paper", action="store_true")
    reuse_gate: float | None = flag(None,
        "tau of the gate that ends the uses of a batch (train.max_epochs above 1). It trips if the energy of the "
        "output head's gradient rises by more than the mean of the last increments and tau of their standard "
        "deviations; the authors recommend 0.1 to 0.5; default: no gate",
        symbol="tau", source="arXiv 2605.19425", allowed="finite and at least 0", type=float)
    reuse_gate_window: int = flag(20,
        "optimizer steps in the window of that gate, which does not trip before it is full",
        source="beyond the paper", allowed="at least 2", type=int)
    kl_target: str = flag("reference",
        "policy to which --algo.kl.init_coef pulls: reference, or behaviour (Eq. 3; no reference model is loaded)",
        symbol="beta D_KL", source="Eq. 1, 3", choices=["reference", "behaviour"])
    max_failed_share: float = flag(0.5,
        "the run stops if more than this share of a step's groups cannot be used, because they have no reward or "
        "log-probs that are not finite; fewer are left out and counted", allowed="in [0, 1]", type=float,
        resumes=FROM_NOW_ON)
    max_gap: float = flag(0.02,
        "the run ends before it trains on responses of today's weights if engine and actor differ by more than this in "
        "a token: the mean KL divergence (k3), in nats. It looks in the first step, after the first sync that follows "
        "an update, and after each resume; with a mixture of experts, or top_p below 1, it only warns",
        symbol="gap/kl", source="docs/smoke.md", allowed="finite and above 0", type=float, resumes=FROM_NOW_ON)
    keep_dropout: bool = flag(False,
        "actor and critic keep the dropout of their config.json. Otherwise it is 0, because the first ratio of a step "
        "is 1 only if the actor computes one log-prob for a token", source="beyond the paper", action="store_true")
    eps: float = flag(1e-6,
        "smoothing of the group's reward variance",
        symbol="epsilon", source="Eq. 2, 11-13", allowed="above 0", type=float)

    # fmt: on
    @property
    def enabled(self) -> bool:
        """Whether batches are adapted at all."""
        return self.method != "none"

    def rewards(self) -> Range | None:
        """The least and the greatest reward of the task, in exact arithmetic; None if the run measures them."""
        ends = self.reward_range if self.reward_range is not None else [0, 1]
        if ends == [MEASURED]:
            return None
        try:
            return as_range(ends)
        except ValueError as error:
            raise ConfigError(f"adapt.reward_range is {ends}; {error}, or {MEASURED}") from None

    def thresholds(self) -> tuple[Any, Interval, Interval]:
        """c1, and the intervals in which c2 and c3 move, in exact arithmetic."""
        c1 = unit_fraction("adapt.c1", self.c1)
        c2 = interval("adapt.c2", self.c2 if self.c2 is not None else ["1/8", "4/8"])
        c3 = interval("adapt.c3", self.c3 if self.c3 is not None else ["2/8", "5/8"])
        for name, low, high in (("LOW", c2.low, c3.low), ("HIGH", c2.high, c3.high)):
            if low > high:
                raise ConfigError(f"adapt.c2 {name} is {low} and adapt.c3 {name} is {high}; c2 must not be above c3")
        if c1 >= 1:
            raise ConfigError(f"adapt.c1 is {c1}; it must be below 1, because otherwise every prompt is hard")
        return c1, c2, c3

    def check(self) -> None:
        """Raise ConfigError for a method, a range of rewards or a threshold that is not allowed."""
        registry.method_class(self.method)
        self.rewards()
        self.thresholds()

    def most_reevaluated(self, prompts: int) -> int:
        """Largest number of prompts of a re-evaluation (X2), if a rollout batch has this many prompts."""
        return self.max_reevaluated_prompts or max(prompts // 2, 1)

    def make_method(self, arithmetic: BatchArithmetic, seed: int, signal_between: Between | None = None) -> Method:
        """The batch adaptation method of this configuration."""
        c1, c2, c3 = self.thresholds()
        settings = vars(self) | {
            "capacity": arithmetic.capacity,
            "group_size": arithmetic.group_size,
            "seed": seed,
            "signal_between": signal_between,
            "c1": c1,
            "c2": c2,
            "c3": c3,
            "max_reevaluated_prompts": self.most_reevaluated(arithmetic.rollout_groups),
        }
        return registry.build(registry.method_class(self.method), settings, self.options or [])


@dataclass
class RunConfig:
    """The `--run.*` flags: where a run keeps its record."""

    # fmt: off
    name: str = flag("default",
        "name of the run, also for wandb and TensorBoard unless --logger.wandb.run_name is given")
    dir: str = flag("runs",
        "folder of all runs; this run writes to DIR/NAME: its record (run.json, metrics.jsonl, ...), model/ unless "
        "--ckpt.output_dir is given, checkpoints/ unless --ckpt.path is given")
    overwrite: bool = flag(False,
        "replace an earlier run of this name: delete its record, and model/ and checkpoints/ in DIR/NAME",
        action="store_true")
    answer_chars: int = flag(1000,
        "characters of a sampled answer in answers.jsonl, which has answers to prompts that failed, and to those of "
        "them that were solved later; 0: no such file", allowed="at least 0", type=int)
    grace_seconds: float | None = flag(None,
        "after the first signal, such as SIGTERM, seconds in which the step may end and be saved; then the run ends "
        "at once, and its last checkpoint counts; default: no limit",
        allowed="finite and at least 0", type=float)
    stall_timeout: float | None = flag(None,
        "the run ends with status 75 if a phase of a step takes more seconds than this, so that a scheduler starts it "
        "again; give several times the longest phase; default: it waits without end",
        allowed="finite and above 0", type=float)
    gradient_probe: int = flag(0,
        "every so many steps, compare the policy gradient of each group with that of 512 fresh groups (probes.jsonl); "
        "it needs batch adaptation, an actor on one GPU, synchronous, with ds.zero_stage below 3, no images; 0: never",
        allowed="at least 0", type=int, needs="batch adaptation")
    logs: str = flag("full",
        "full: all of OpenRLHF's output; progress: one progress bar and each warning once, with the output in "
        "DIR/NAME/train.log",
        choices=["full", "progress"])
    faster: list[str] | None = flag(None,
        "parts of a step that are done faster than OpenRLHF does them, with the same results: requests (few calls of "
        "the engines, and all responses to a prompt in one request), weights (a sync in few large messages), log_probs "
        "(of response tokens only, in tiles); all or none of them; default: all with batch adaptation, none without",
        nargs="+", choices=[*FASTER, "all", "none"])

    # fmt: on

    def does_faster(self, part: str) -> bool:
        """Whether a part, one of FASTER, is done in this project's way."""
        return self.faster is not None and (part in self.faster or "all" in self.faster)


@dataclass
class VerifierConfig:
    """The `--verifier.*` flags: where the reward function or the agent runs, and what it may use."""

    # fmt: off
    processes: int = flag(4,
        "processes that call the Python reward function (--reward.remote_url FILE.py), for each rollout engine; 0: the "
        "engine calls it, and an agent, as in OpenRLHF", allowed="at least 0", type=int)
    timeout: float = flag(60.0,
        "seconds that one call may take; then its process is killed. If batches are adapted and "
        "there is an agent (--train.agent_func_path): seconds between two generations; then its response is given up",
        allowed="finite and above 0", type=float)
    memory_gib: float = flag(4.0,
        "GiB that one process may allocate in addition to what importing the file took",
        allowed="finite and above 0", type=float)
    send_responses: bool = flag(False,
        "reward servers also get what the model wrote, as the field responses of a request", action="store_true")

    # fmt: on


@dataclass
class DataConfig:
    """The flags of this project among OpenRLHF's `--data.*` flags."""

    # fmt: off
    solution_key: str | None = flag(None,
        "column of --data.prompt_dataset with a worked solution of the prompt: a text, or null if there is none; for "
        "methods that train on them", symbol="X4", source="arXiv 2504.14945; 2506.07527")

    # fmt: on


class Arguments(SimpleNamespace):
    """The nested arguments of a run: OpenRLHF's, `.algorithm`, `.adapt`, `.verifier`, `.run` and fields of `.data`."""

    __slots__ = ("chosen",)
    # Names of the flags that were given for the algorithm and the method that are in effect. It is no flag, and so not
    # among the others.
    chosen: Collection[str]


GROUPS: dict[str, type[Any]] = {"adapt": AdaptConfig, "data": DataConfig, "verifier": VerifierConfig, "run": RunConfig}
TITLES = {"adapt": "batch adaptation", "data": "data", "verifier": "reward function", "run": "record of the run"}


def described(word: str) -> Iterator[tuple[str, Any, Field[Any]]]:
    """The flags whose description has a word: the dotted name, what the description says, and the field."""
    for prefix, config in GROUPS.items():
        for item in fields(config):
            if item.metadata[word]:
                yield f"{prefix}.{item.name}", item.metadata[word], item


def flags_of(args: Any) -> dict[str, Any]:
    """Every flag by its dotted name, including OpenRLHF's."""
    flags: dict[str, Any] = {}
    for name, value in vars(args).items():
        if hasattr(value, "__dict__"):
            flags |= {f"{name}.{inner}": item for inner, item in flags_of(value).items()}
        else:
            flags[name] = value
    return flags


def with_flags(args: SimpleNamespace, flags: Mapping[str, Any]) -> SimpleNamespace:
    """A copy of nested arguments with other values of some flags, by their dotted names."""
    result = copy.deepcopy(args)
    set_flags(result, flags)
    return result


def set_flags(args: SimpleNamespace, flags: Mapping[str, Any]) -> None:
    """Set some flags of nested arguments, by their dotted names."""
    for dotted, value in flags.items():
        group, _, name = dotted.rpartition(".")
        setattr(attrgetter(group)(args), name, value)


def help_text(item: Any) -> str:
    """The help of one flag, followed by its symbol and the place in the paper."""
    origin = ", ".join(part for part in (item.metadata["symbol"], item.metadata["source"]) if part)
    return str(item.metadata["help"]) + (f" [{origin}]" if origin else "")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--algorithm` and the flags of GROUPS to a parser."""
    names = "; ".join(f"{name}: {algorithm.help}" for name, algorithm in ALGORITHMS.items())
    group = parser.add_argument_group("algorithm")
    group.add_argument("--algorithm", metavar=f"{{{','.join(ALGORITHMS)}}}", help=names)
    for prefix, config in GROUPS.items():
        group = parser.add_argument_group(TITLES[prefix])
        for item in fields(config):
            text = help_text(item).replace("%", "%%")
            if item.default is not None and item.default is not False:
                text += f" (default: {item.default})"
            argument = item.metadata["argument"]
            if not argument.keys() & {"choices", "action"}:
                argument = {"metavar": "VALUE", **argument}
            group.add_argument(f"--{prefix}.{item.name}", default=item.default, help=text, **argument)
