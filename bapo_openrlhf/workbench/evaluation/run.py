"""One evaluation: what is not finished is asked, judged and written down, then all of it becomes a table."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bapo_openrlhf.config import VerifierConfig
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.workbench.evaluation import generate as vllm
from bapo_openrlhf.workbench.evaluation import problems, results, store
from bapo_openrlhf.workbench.evaluation.generate import Engine, Response, Sampling
from bapo_openrlhf.workbench.evaluation.judge import Judge
from bapo_openrlhf.workbench.evaluation.problems import Benchmark, Problem
from bapo_openrlhf.workbench.evaluation.prompts import Prompt, Prompter

MAX_RUNS = 1000  # majority votes are counted in floats (estimators.majority_at_k)
BACKLOG = 64  # problems that wait for the judge before generation waits, too

Key = tuple[str, str]  # benchmark and problem id


@dataclass(frozen=True)
class Request:
    """What to evaluate.

    Attributes:
        model: folder or hub name.
        name: of this evaluation in the tables.
        benchmarks: names, or NAME=FILE.jsonl.
        out: folder of the results.
        sampling: how responses are drawn.
        ks: k of pass@k and maj@k.
        data: folder that `bapo-openrlhf prepare` wrote.
        reward: reward file of benchmarks given by a file.
        limit: most problems of each benchmark; None means all.
        chat_template: whether to apply the tokenizer's; or one's own, with {} where the text goes.
        skip_long: whether problems that are too long for the model are left out, rather than refused.
        max_model_len: tokens of prompt and response together; None: the model's own limit, and no more than is needed.
        tensor_parallel_size, gpu_memory_utilization, max_num_seqs: vLLM's.
    """

    model: str
    name: str
    benchmarks: Sequence[str]
    out: Path
    sampling: Sampling
    ks: Sequence[int]
    data: Path = Path("data")
    reward: Path | None = None
    limit: int | None = None
    chat_template: bool | str = True
    skip_long: bool = False
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int | None = None


def evaluate(
    request: Request,
    *,
    prompter: Callable[..., Prompter] = Prompter,
    generate: Callable[..., Iterator[tuple[Key, list[Response]]]] = vllm.generate,
) -> dict[str, Any]:
    """Ask what is not finished yet, and write the results.

    Args:
        prompter, generate: what makes prompts and responses; tests replace them.

    Returns:
        The content of results.json.

    Raises:
        ConfigError: before the model is loaded.
        RunError: generation failed; what was finished is kept.
    """
    _check(request)
    benchmarks = [problems.load(spec, request.data, request.reward, request.limit) for spec in request.benchmarks]
    settings = _settings(request, benchmarks)
    store.check_settings(request.out, settings)
    rows = {b.name: store.read_rows(request.out, b.name) for b in benchmarks}
    left = {(b.name, p.id): p for b in benchmarks for p in b.problems if p.id not in rows[b.name]}
    too_long: list[Key] = []
    if left:
        make = prompter(request.model, chat=request.chat_template, images=any(p.images for p in left.values()))
        if make.note:
            print(make.note)
        prompts = {key: make(problem) for key, problem in left.items()}
        too_long = _too_long(request, benchmarks, prompts, request.max_model_len or make.longest)
        prompts = {key: prompt for key, prompt in prompts.items() if key not in set(too_long)}
        if prompts:
            with _Work(request, benchmarks, left, prompts) as work:  # judges are loaded and tried first
                store.write_settings(request.out, settings)
                for benchmark in benchmarks:
                    if store.cut_torn_line(request.out, benchmark.name):
                        print(f"{benchmark.name}.jsonl: cut off a last line that a crash left without its end")
                work.run(generate)
    store.write_settings(request.out, settings)
    return results.write(request, benchmarks, settings, too_long)


def _check(request: Request) -> None:
    sampling = request.sampling
    names = [spec.partition("=")[0] for spec in request.benchmarks]
    limits = {
        "runs": (sampling.runs, 1, MAX_RUNS),
        "max_new_tokens": (sampling.max_new_tokens, 1, None),
        "limit": (request.limit, 1, None),
        "max_model_len": (request.max_model_len, 2, None),
        "max_num_seqs": (request.max_num_seqs, 1, None),
        "tensor_parallel_size": (request.tensor_parallel_size, 1, None),
        "temperature": (sampling.temperature, 0, 100),
        "seed": (sampling.seed, 0, 2**32 - 1),
    }
    for name, (value, low, high) in limits.items():
        if value is not None and not low <= value <= (value if high is None else high):
            allowed = f"at least {low}" if high is None else f"within {low}..{high}"
            raise ConfigError(f"{name} is {value}; it must be {allowed}")
    for name, value in (("top_p", sampling.top_p), ("gpu_memory_utilization", request.gpu_memory_utilization)):
        if not 0 < value <= 1:
            raise ConfigError(f"{name} is {value}; it must be above 0 and at most 1")
    if sampling.top_k < 1 and sampling.top_k != -1:
        raise ConfigError(f"top_k is {sampling.top_k}; it must be at least 1, or -1 for all tokens")
    if sampling.temperature == 0 and sampling.runs > 1:
        raise ConfigError(f"temperature is 0 and runs {sampling.runs}; all runs would be the same: use --runs 1")
    for k in request.ks:
        if not 1 <= k <= sampling.runs:
            raise ConfigError(f"k is {k}; it must be within 1..{sampling.runs}, the runs")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None or not names:
        raise ConfigError(f"benchmark {twice} is named twice" if names else "benchmarks is empty; name at least one")
    if request.reward is not None and not any("=" in spec for spec in request.benchmarks):
        raise ConfigError(
            f"reward is {request.reward}; it judges benchmarks given as NAME=FILE.jsonl, and there is none: tasks have "
            "a reward function of their own"
        )


def _settings(request: Request, benchmarks: Sequence[Benchmark]) -> dict[str, Any]:
    """What the responses depend on, as settings.json has it."""
    return {
        "name": request.name,
        "model": {"path": request.model, "fingerprint": store.fingerprint(request.model)},
        "sampling": asdict(request.sampling),
        "chat_template": request.chat_template,
        "limit": request.limit,
        "benchmarks": {
            benchmark.name: {
                "file": str(benchmark.file),
                "sha256": benchmark.sha256,
                "reward": str(benchmark.reward),
                "reward_sha256": hashlib.sha256(benchmark.reward.read_bytes()).hexdigest(),
            }
            for benchmark in benchmarks
        },
    }


def _too_long(
    request: Request, benchmarks: Sequence[Benchmark], prompts: Mapping[Key, Prompt], longest: int | None
) -> list[Key]:
    """Problems whose prompt leaves no room for a response of max_new_tokens.

    Raises:
        ConfigError: there are some and they are not to be left out, or nothing would be left of a benchmark.
    """
    response = request.sampling.max_new_tokens
    keys = [key for key, prompt in prompts.items() if longest is not None and prompt.length + response > longest]
    nothing_left = any(all((b.name, problem.id) in keys for problem in b.problems) for b in benchmarks)
    if keys and (nothing_left or not request.skip_long):
        shown = ", ".join(problem for _, problem in keys[:20]) + (", ..." if len(keys) > 20 else "")
        most = max(prompts[key].length for key in keys)
        raise ConfigError(
            f"{len(keys)} of {len(prompts)} prompts, with up to {most} tokens, leave no room in {longest} tokens for "
            f"responses of max_new_tokens {response}: {shown}. Lower --max-new-tokens, raise --max-model-len where the "
            "model can take it, or leave these problems out with --skip-long"
        )
    return keys


class _Work:
    """Unfinished problems on their way: asked, judged, written down. A context: it holds the judges' processes."""

    def __init__(
        self,
        request: Request,
        benchmarks: Sequence[Benchmark],
        left: Mapping[Key, Problem],
        prompts: Mapping[Key, Prompt],
    ) -> None:
        self.request, self.problems, self.prompts = request, left, prompts
        self.files = {benchmark.name: benchmark.reward for benchmark in benchmarks}
        self.judges: dict[Path, Judge] = {}
        self.judging: deque[tuple[Key, list[Response], list[Future]]] = deque()
        self.stack = ExitStack()

    def __enter__(self) -> _Work:
        limits = VerifierConfig()
        with ExitStack() as stack:
            for key, prompt in self.prompts.items():
                path = self.files[key[0]]
                if path not in self.judges:
                    judge = self.judges[path] = Judge(path, limits, prompt.text, self.problems[key].label)
                    stack.callback(judge.close)
            self.threads = ThreadPoolExecutor(limits.processes * len(self.judges), "judge")
            stack.callback(self.threads.shutdown, cancel_futures=True)
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.stack.close()

    def run(self, generate: Callable[..., Iterator[tuple[Key, list[Response]]]]) -> None:
        """Everything, to the end. Where generation fails, what it gave before is still judged and written."""
        request = self.request
        needed = max(prompt.length for prompt in self.prompts.values()) + request.sampling.max_new_tokens
        engine = Engine(
            max_model_len=request.max_model_len or needed,
            tensor_parallel_size=request.tensor_parallel_size,
            gpu_memory_utilization=request.gpu_memory_utilization,
            max_num_seqs=request.max_num_seqs,
        )
        with tqdm(total=len(self.prompts), desc=request.name, unit="problem", smoothing=0.05, disable=None) as bar:
            try:
                for key, responses in generate(request.model, self.prompts, request.sampling, engine):
                    self._judge(key, responses)
                    while self._oldest_is_judged() or len(self.judging) > BACKLOG:
                        self._write(bar)
            finally:
                while self.judging:
                    self._write(bar)

    def _judge(self, key: Key, responses: list[Response]) -> None:
        judge, prompt, label = self.judges[self.files[key[0]]], self.prompts[key].text, self.problems[key].label
        scores = [self.threads.submit(judge.score, response.query, prompt, label) for response in responses]
        self.judging.append((key, responses, scores))

    def _oldest_is_judged(self) -> bool:
        return bool(self.judging) and all(score.done() for score in self.judging[0][2])

    def _write(self, bar: tqdm) -> None:
        """Write down the problem that has waited longest."""
        key, responses, futures = self.judging.popleft()
        problem, judge = self.problems[key], self.judges[self.files[key[0]]]
        judged = [future.result() for future in futures]
        row = {
            "id": problem.id,
            "input": problem.input,
            "prompt": self.prompts[key].text,
            "label": problem.label,
            "responses": [response.text for response in responses],
            "scores": [score for score, _ in judged],
            "failures": [failure for _, failure in judged],
            "answers": [judge.answer(response.text) for response in responses] if judge.answers else None,
            "tokens": [response.tokens for response in responses],
            "truncated": [response.truncated for response in responses],
        }
        store.append_row(self.request.out, key[0], row)
        bar.update()
        bar.set_postfix_str(f"{key[0]} {100 * sum(row['scores']) / len(responses):.0f} %")
