"""One evaluation: ask, judge and store the problems that are not finished, then make the tables."""

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bapo_openrlhf import machine, user_file
from bapo_openrlhf.errors import ConfigError, RunError
from bapo_openrlhf.flags.config import VerifierConfig
from bapo_openrlhf.record.owner import owned
from bapo_openrlhf.tasks import judge_digest
from bapo_openrlhf.tasks.task import texts_of
from bapo_openrlhf.training.engine.reward_pool import RewardFailure, RewardPool
from bapo_openrlhf.workbench.evaluation import generate, problems, results, store
from bapo_openrlhf.workbench.evaluation.estimators import scores_of
from bapo_openrlhf.workbench.evaluation.generate import EncodedPrompt, Key, Prompter, SampledResponse
from bapo_openrlhf.workbench.evaluation.problems import Benchmark, BenchmarkProblem, Request, check

BACKLOG = 64  # If more problems wait for the judge, generation waits too.


def evaluate(request: Request) -> dict[str, Any]:
    """Ask what is not finished, write the results, and return results.json.

    A ConfigError comes before a model is loaded. After a RunError of the generation, finished problems are kept.
    """
    machine.prepare()  # before the hub's library is loaded, which reads its variables only once
    check(request)
    with owned(request.out, field=f"--out is {request.out}", what="evaluation", instead="give another --out"):
        benchmarks = [problems.load(spec, request) for spec in request.benchmarks]
        settings = _settings(request, benchmarks)
        store.check_settings(request.out, settings)
        rows = {b.name: store.read_rows(request.out, b.name) for b in benchmarks}
        unfinished = {(b.name, p.id): p for b in benchmarks for p in b.problems if p.id not in rows[b.name]}
        too_long: list[Key] = []
        if unfinished:
            images = any(problem.images for problem in unfinished.values())
            make = Prompter(request.model, chat=request.chat_template, images=images)
            if make.note:
                print(make.note)
            prompts = {key: make(problem) for key, problem in unfinished.items()}
            too_long = _too_long(request, benchmarks, prompts, request.max_model_len or make.longest)
            for key in too_long:
                del prompts[key]
            if prompts:
                _ask(request, benchmarks, settings, unfinished, prompts)
        store.write_settings(request.out, settings)
        return results.write(request, benchmarks, settings, too_long)


def _settings(request: Request, benchmarks: Sequence[Benchmark]) -> dict[str, Any]:
    return {
        "name": request.name,
        "model": {"path": request.model, "files": store.files_of(request.model)},
        "sampling": asdict(request.sampling),
        "chat_template": request.chat_template,
        "limit": request.limit,
        "benchmarks": {
            benchmark.name: {
                "file": str(benchmark.file),
                "sha256": benchmark.sha256,
                "columns": list(benchmark.columns),
                "reward": str(benchmark.reward),
                "reward_sha256": judge_digest(benchmark.reward),
                "reward_range": [str(end) for end in benchmark.reward_range],
            }
            for benchmark in benchmarks
        },
    }


def _too_long(
    request: Request, benchmarks: Sequence[Benchmark], prompts: Mapping[Key, EncodedPrompt], longest: int | None
) -> list[Key]:
    """The problems whose prompt leaves no room for a response.

    They are a ConfigError if the request does not skip them, or if a benchmark would have no other problem.
    """
    response = request.sampling.max_new_tokens
    keys = [key for key, prompt in prompts.items() if longest is not None and prompt.length + response > longest]
    nothing_left = any(all((b.name, problem.id) in keys for problem in b.problems) for b in benchmarks)
    if keys and (nothing_left or not request.skip_long):
        names = ", ".join(problem for _, problem in keys[:20]) + (", ..." if len(keys) > 20 else "")
        most = max(prompts[key].length for key in keys)
        raise ConfigError(
            f"{len(keys)} of {len(prompts)} prompts, with up to {most} tokens, leave no room in {longest} tokens for "
            f"responses of max_new_tokens {response}: {names}. Lower --max-new-tokens, raise --max-model-len if the "
            "model allows it, or leave these problems out with --skip-long"
        )
    return keys


class Judge:
    """A reward file. Its `reward_func` judges one response at a time, with limits of time and memory."""

    def __init__(self, path: Path, limits: VerifierConfig, prompt: str, label: Any) -> None:
        """Load the file, and let it judge an empty response to one problem. A ConfigError says that it cannot."""
        self.path = path
        self._pool = RewardPool(path, limits)
        try:
            self.submit(prompt, prompt, label, "").result()
            self._answer = getattr(user_file.load("reward file", path), "answer", None)
        except Exception as error:
            self.close()
            raise ConfigError(f"reward file gives no reward for an empty response: {error}") from error

    def submit(self, query: str, prompt: str, label: Any, response: str) -> Future:
        """Let it judge a response. See `outcome`."""
        return self._pool.submit(query, prompt, label, response)

    def answers(self, prompt: str, responses: Sequence[str]) -> list[str | None] | None:
        """The final answers of the responses to a prompt, which majority votes need. None: the file has no `answer`.

        It gets the texts that are judged. A response may have no answer (None).
        """
        if self._answer is None:
            return None
        answers = []
        for text in texts_of((), [prompt] * len(responses), responses):
            try:
                answer = self._answer(text)
            except Exception as error:
                raise RunError(f"{self.path}: answer raised {user_file.described(error)}") from error
            if not isinstance(answer, (str, type(None))):
                raise RunError(f"{self.path}: answer returned {answer!r:.80}; it must return a text or None")
            answers.append(answer)
        return answers

    def close(self) -> None:
        """End the processes."""
        self._pool.close()


def outcome(call: Future) -> tuple[float, str | None]:
    """(reward, None), or (0.0, kind of failure) if the judge failed. The response then counts as wrong."""
    try:
        return call.result()["rewards"], None
    except RewardFailure as failure:
        return 0.0, failure.kind


def _ask(
    request: Request,
    benchmarks: Sequence[Benchmark],
    settings: Mapping[str, Any],
    problems: Mapping[Key, BenchmarkProblem],
    prompts: Mapping[Key, EncodedPrompt],
) -> None:
    """Ask, judge and store problems. If generation fails, the responses so far are still judged and stored."""
    limits, files = VerifierConfig(), {benchmark.name: benchmark.reward for benchmark in benchmarks}
    ranges = {benchmark.name: benchmark.reward_range for benchmark in benchmarks}
    judges: dict[Path, Judge] = {}
    judging: deque[tuple[Key, list[SampledResponse], list[Future]]] = deque()
    with ExitStack() as stack:
        for key, prompt in prompts.items():  # The judges are tried before the model is loaded.
            path = files[key[0]]
            if path not in judges:
                judges[path] = Judge(path, limits, prompt.text, problems[key].label)
                stack.callback(judges[path].close)
        store.write_settings(request.out, settings)
        for name in files:
            store.cut_torn_line(request.out, name)
        bar = tqdm(total=len(prompts), desc=request.name, unit="problem", smoothing=0.05, disable=None)
        stack.enter_context(bar)

        def store_oldest() -> None:
            key, responses, calls = judging.popleft()
            problem, judge = problems[key], judges[files[key[0]]]
            scores, failures = zip(*map(outcome, calls), strict=True)
            said = [response.text for response in responses]
            row = {
                "id": problem.id,
                "input": problem.input,
                "prompt": prompts[key].text,
                "label": problem.label,
                "responses": said,
                "scores": scores,
                "failures": failures,
                "answers": judge.answers(prompts[key].text, said),
                "tokens": [response.tokens for response in responses],
                "truncated": [response.truncated for response in responses],
            }
            store.append_row(request.out, key[0], row)
            bar.update()
            bar.set_postfix_str(f"{key[0]} {100 * scores_of([row], ranges[key[0]]).mean():.0f} %")

        longest = max(prompt.length for prompt in prompts.values()) + request.sampling.max_new_tokens
        try:
            for key, responses in generate.generate(request, prompts, request.max_model_len or longest):
                judge, prompt, label = judges[files[key[0]]], prompts[key].text, problems[key].label
                calls = [judge.submit(sample.query, prompt, label, sample.text) for sample in responses]
                judging.append((key, responses, calls))
                while judging and (len(judging) > BACKLOG or all(call.done() for call in judging[0][2])):
                    store_oldest()
        finally:
            while judging:
                store_oldest()
