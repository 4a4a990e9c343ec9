"""What to evaluate, and how."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bapo_openrlhf.adapt.rewards import UNIT, Range
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.flags.ranges import check_ranges
from bapo_openrlhf.workbench.evaluation.problems import COLUMNS, Columns

# The ranges of values, in the words of `errors.ALLOWED`.
RANGES = {
    "at least 1": "runs max_new_tokens limit max_num_seqs tensor_parallel_size",
    "at least 2": "max_model_len",
    "finite and at least 0": "temperature",
    "in (0, 1]": "top_p gpu_memory_utilization",
    "in [0, 4294967295]": "seed",
}


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn. settings.json holds all of it, and a resumed evaluation must have the same values."""

    runs: int
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    seed: int


@dataclass(frozen=True)
class Request:
    """What to evaluate: the flags of `bapo-openrlhf evaluate`, which says what each of them means."""

    model: str
    name: str
    benchmarks: Sequence[str]  # the name of a task's, or NAME=FILE
    out: Path
    sampling: Sampling
    ks: Sequence[int]
    data: Path = Path("data")
    reward: Path | None = None
    reward_range: Range = UNIT
    limit: int | None = None
    columns: Columns = COLUMNS
    chat_template: bool | str = True  # or a template with {} in place of the text
    skip_long: bool = False
    max_model_len: int | None = None  # without it the model's own limit, but no more tokens than the prompts need
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int | None = None


def check(request: Request) -> None:
    """Raise ConfigError if a value that needs no file is not allowed."""
    sampling = request.sampling
    names = [spec.partition("=")[0] for spec in request.benchmarks]
    flags = {**vars(sampling), **vars(request)}
    check_ranges(flags, {flag: rule for rule, names in RANGES.items() for flag in names.split()})
    if sampling.top_k < 1 and sampling.top_k != -1:
        raise ConfigError(f"top_k is {sampling.top_k}; it must be at least 1, or -1 for all tokens")
    if sampling.temperature == 0 and sampling.runs > 1:
        raise ConfigError(f"temperature is 0 and runs is {sampling.runs}; all runs would be the same: use --runs 1")
    for k in request.ks:
        if not 1 <= k <= sampling.runs:
            raise ConfigError(f"k is {k}; it must be within 1..{sampling.runs}, the number of runs")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None or not names:
        raise ConfigError(f"benchmark {twice} is named twice" if names else "benchmarks is empty; name at least one")
    if request.reward is not None and not any("=" in spec for spec in request.benchmarks):
        raise ConfigError(
            f"reward is {request.reward}; it is only for benchmarks given as NAME=FILE, and there are none "
            "because tasks have a reward function of their own"
        )
