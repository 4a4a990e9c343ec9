"""Whether the reward function of a built-in task finds an answer right that is made of the label of a row."""

from typing import Any

from bapo_openrlhf.data.findings import Findings, shown
from bapo_openrlhf.tasks import task_of_file


class Labels:
    """Tries the labels of rows, if the reward file is that of a built-in task. Other files are not tried.

    Args:
        reward: The reward file; None if there is none.
    """

    def __init__(self, reward: str | None) -> None:
        task = task_of_file(reward) if reward and reward.endswith(".py") else None
        self._task = task.name if task else ""
        self._takes = task and task.takes
        self._refused: list[tuple[str, Any]] = []  # place and label
        self._tried = 0

    def look(self, place: str, label: Any) -> None:
        """Try the label of a row, unless it is empty."""
        if self._takes is not None and label != "":
            self._tried += 1
            if not self._takes(label):
                self._refused.append((place, label))

    def say(self, findings: Findings) -> None:
        """An error if no label can be answered, and a warning if some cannot."""
        if not self._refused:
            return
        place, label = self._refused[0]
        text = (
            f"{place}: the label is {shown(label)}, and the reward function of the task {self._task} gives 0 to it as "
            "an answer"
        )
        if len(self._refused) == self._tried:
            findings.error("label of the task", f"{text}; so it is with all {self._tried} rows")
        else:
            findings.warn(f"{text}; so it is with {len(self._refused)} of {self._tried} rows")
