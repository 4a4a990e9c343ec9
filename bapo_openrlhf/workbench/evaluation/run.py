"""One evaluation: ask, judge and store the problems that are not finished, then make the tables."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bapo_openrlhf.config import VerifierConfig
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.workbench.evaluation import generate as vllm
from bapo_openrlhf.workbench.evaluation import problems, results, store
from bapo_openrlhf.workbench.evaluation.generate import Engine, SampledResponse
from bapo_openrlhf.workbench.evaluation.judge import Judge
from bapo_openrlhf.workbench.evaluation.problems import Benchmark, BenchmarkProblem
from bapo_openrlhf.workbench.evaluation.prompts import EncodedPrompt, Prompter
from bapo_openrlhf.workbench.evaluation.request import Request, check

BACKLOG = 64  # If more problems wait for the judge, generation waits too.

Key = tuple[str, str]  # benchmark and problem id


def evaluate(
    request: Request,
    *,
    prompter: Callable[..., Prompter] = Prompter,
    generate: Callable[..., Iterator[tuple[Key, list[SampledResponse]]]] = vllm.generate,
) -> dict[str, Any]:
    """Ask the problems that are not finished yet, and write the results.

    Args:
        request: What to evaluate.
        prompter, generate: They make prompts and responses. Tests replace them.

    Returns:
        The content of results.json.

    Raises:
        ConfigError: The request is wrong. The model has not been loaded yet.
        RunError: Generation failed. Finished problems are kept.
    """
    check(request)
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
            with _Work(request, benchmarks, left, prompts) as work:  # It loads and tries the judges first.
                store.write_settings(request.out, settings)
                for benchmark in benchmarks:
                    if store.cut_torn_line(request.out, benchmark.name):
                        print(f"{benchmark.name}.jsonl: cut off the last line, which a crash left incomplete")
                work.run(generate)
    store.write_settings(request.out, settings)
    return results.write(request, benchmarks, settings, too_long)


def _settings(request: Request, benchmarks: Sequence[Benchmark]) -> dict[str, Any]:
    """Everything that the responses depend on, in the form of settings.json."""
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
    request: Request, benchmarks: Sequence[Benchmark], prompts: Mapping[Key, EncodedPrompt], longest: int | None
) -> list[Key]:
    """The problems whose prompt leaves no room for a response of max_new_tokens.

    Raises:
        ConfigError: There are some, and the request does not skip them or no problem of a benchmark would be left.
    """
    response = request.sampling.max_new_tokens
    keys = [key for key, prompt in prompts.items() if longest is not None and prompt.length + response > longest]
    nothing_left = any(all((b.name, problem.id) in keys for problem in b.problems) for b in benchmarks)
    if keys and (nothing_left or not request.skip_long):
        shown = ", ".join(problem for _, problem in keys[:20]) + (", ..." if len(keys) > 20 else "")
        most = max(prompts[key].length for key in keys)
        raise ConfigError(
            f"{len(keys)} of {len(prompts)} prompts, with up to {most} tokens, leave no room in {longest} tokens for "
            f"responses of max_new_tokens {response}: {shown}. Lower --max-new-tokens, raise --max-model-len if the "
            "model allows it, or leave these problems out with --skip-long"
        )
    return keys


class _Work:
    """Asks, judges and stores the unfinished problems. It is a context because it holds the judges' processes."""

    def __init__(
        self,
        request: Request,
        benchmarks: Sequence[Benchmark],
        left: Mapping[Key, BenchmarkProblem],
        prompts: Mapping[Key, EncodedPrompt],
    ) -> None:
        self.request, self.problems, self.prompts = request, left, prompts
        self.files = {benchmark.name: benchmark.reward for benchmark in benchmarks}
        self.judges: dict[Path, Judge] = {}
        self.judging: deque[tuple[Key, list[SampledResponse], list[Future]]] = deque()
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

    def run(self, generate: Callable[..., Iterator[tuple[Key, list[SampledResponse]]]]) -> None:
        """Do all the work. If generation fails, the responses so far are still judged and stored."""
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

    def _judge(self, key: Key, responses: list[SampledResponse]) -> None:
        judge, prompt, label = self.judges[self.files[key[0]]], self.prompts[key].text, self.problems[key].label
        scores = [self.threads.submit(judge.score, response.query, prompt, label) for response in responses]
        self.judging.append((key, responses, scores))

    def _oldest_is_judged(self) -> bool:
        return bool(self.judging) and all(score.done() for score in self.judging[0][2])

    def _write(self, bar: tqdm) -> None:
        """Store the problem that has waited longest."""
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
