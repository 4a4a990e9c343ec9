"""The prompts of the training data, epoch after epoch."""

import itertools
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from bapo_openrlhf.adapt.group import Prompt


def prompts_of(batches: Iterable[Any]) -> Iterator[Prompt]:
    """The prompts of one of OpenRLHF's data loaders, which are made with one prompt in each batch."""
    for _, (text,), (label,), (images,) in batches:
        yield Prompt(text, label, images or None)


class TrainingPrompts:
    """Draws the prompts of the training data in order. It takes the place of OpenRLHF's data loader.

    One thread may draw while another one asks for the position. Without the lock both could create the loader's
    iterator, and a resumed run could then start its data from the beginning.
    """

    def __init__(self, loader: Any) -> None:
        self._loader, self._turn = loader, threading.Lock()
        self._epoch: Iterator[Prompt] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    @property
    def epoch_done(self) -> bool:
        """Whether the end of the data was seen. The next prompts then belong to another epoch."""
        return self._epoch is None

    def draw(self, count: int) -> list[Prompt]:
        """The next prompts of an epoch. There are fewer at its end, and only then."""
        with self._turn:
            if self._epoch is None:
                self._epoch = prompts_of(iter(self._loader))
            prompts = list(itertools.islice(self._epoch, count))
            self._epoch = self._epoch if len(prompts) == count else None
            return prompts

    def state_dict(self) -> dict[str, Any]:
        """The loader's position."""
        with self._turn:
            return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        with self._turn:
            self._loader.load_state_dict(state)
