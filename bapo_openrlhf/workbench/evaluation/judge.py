"""A reward file judges responses in processes of its own."""

from pathlib import Path
from typing import Any

from bapo_openrlhf import user_file
from bapo_openrlhf.errors import ConfigError, RunError
from bapo_openrlhf.flags.config import VerifierConfig
from bapo_openrlhf.training.engine.reward_pool import RewardFailure, RewardPool


class Judge:
    """A reward file. Its `reward_func` judges one response at a time, with limits of time and memory."""

    def __init__(self, path: Path, limits: VerifierConfig, prompt: str, label: Any) -> None:
        """Load the file, and let it judge an empty response to one problem. A ConfigError says that it cannot."""
        self.path = path
        self._pool = RewardPool(path, processes=limits.processes, timeout=limits.timeout, memory_gib=limits.memory_gib)
        try:
            self._pool(prompt, prompt, label, "")
            self._answer = getattr(user_file.load("reward file", path), "answer", None)
        except Exception as error:
            self.close()
            raise ConfigError(f"reward file gives no reward for an empty response: {error}") from error
        self.answers = self._answer is not None  # which majority votes need

    def score(self, query: str, prompt: str, label: Any, response: str) -> tuple[float, str | None]:
        """(reward, None), or (0.0, kind of failure) if the judge failed. The response then counts as wrong."""
        try:
            return self._pool(query, prompt, label, response)["rewards"], None
        except RewardFailure as failure:
            return 0.0, failure.kind

    def answer(self, response: str) -> str | None:
        """The final answer of a response, if the file has `answers`. None means that it has none."""
        try:
            answer = self._answer(response)
        except Exception as error:
            raise RunError(f"{self.path}: answer raised {user_file.described(error)}") from error
        if not isinstance(answer, (str, type(None))):
            raise RunError(f"{self.path}: answer returned {answer!r:.80}; it must return a text or None")
        return answer

    def close(self) -> None:
        """End the processes."""
        self._pool.close()
