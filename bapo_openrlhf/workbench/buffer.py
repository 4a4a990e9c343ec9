"""What a checkpoint's hard and replay buffers hold: read, chosen from, listed, exported. The checkpoint stays as it is.

Needs numpy and safetensors alone, not torch.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bapo_openrlhf.adapt.group import Group, Prompt, Response
from bapo_openrlhf.adapt.staleness import sync_age
from bapo_openrlhf.adapt.state import group_from_state
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.methods import BAPO
from bapo_openrlhf.record.checkpoint_store import ACTOR, ADAPT, CRITIC, TAG, CheckpointStore
from bapo_openrlhf.record.run_record import read_run
from bapo_openrlhf.record.state_file import CheckpointError, load_state

if TYPE_CHECKING:
    from rich.table import Table

BUFFERS = ("hard", "replay")
MOST_MEANS = 12  # different ones that the histogram has a line each for
BAR = 30  # columns of its longest bar


@dataclass(frozen=True)
class Entry:
    """One entry of a buffer.

    Attributes:
        buffer: hard or replay.
        prompt: its prompt.
        mean: group mean reward, exact.
        step: trainer step that generated the group.
        age: trainer steps from then to the checkpoint's last step, as in the metrics buffer/*_age_mean.
        syncs: of the rollout engines, by that step, since the weights that generated it; None where not known.
        group: the stored group; None in the hard buffer, which keeps prompts alone.
    """

    buffer: str
    prompt: Prompt
    mean: Fraction
    step: int
    age: int
    syncs: int | None = None
    group: Group | None = None

    @property
    def source(self) -> str | None:
        """Where the group came from: only fresh ones are stored for replay. Of a hard prompt it is not kept."""
        return "fresh" if self.group else None

    @property
    def tokens(self) -> int | None:
        """Generated tokens of all responses."""
        return sum(len(response.log_probs) for response in self.group.responses) if self.group else None


@dataclass(frozen=True)
class Stored:
    """Both buffers of a checkpoint.

    Attributes:
        folder: _adapt/TAG.
        steps: trainer steps done; the last one was step `steps` - 1.
        engine_step: updates behind the weights that the rollout engines hold.
        entries: the hard buffer, then the replay buffer, each the oldest first.
    """

    folder: Path
    steps: int
    engine_step: int
    entries: list[Entry]


def find_state(path: Path, report: Callable[[str], None]) -> Path:
    """The folder with the state of the batch adaptation, from any folder that may stand for a checkpoint.

    Args:
        path: ckpt.path, for its newest whole checkpoint; _adapt, _actor or _critic in it; one of their folders TAG; a
            copy of _adapt/TAG; or a run's folder with its checkpoints in it.
        report: is called with what is wrong with a checkpoint that is read all the same, or passed over.

    Raises:
        ConfigError: there is none.
        CheckpointError: a folder cannot be read.
    """
    top = Path(os.path.abspath(path))
    if not top.is_dir():
        raise ConfigError(f"checkpoint {str(path)!r} {'is no folder' if top.exists() else 'does not exist'}")
    tag = top.name if TAG.fullmatch(top.name) and top.parent.name in (ACTOR, CRITIC, ADAPT) else None
    if tag is None and (top / "state.json").is_file():
        return top
    if tag is not None:
        top = top.parent
    if top.name in (ACTOR, CRITIC, ADAPT):
        top = top.parent
    if (top / "checkpoints" / ADAPT).is_dir():
        top = top / "checkpoints"
    store = CheckpointStore(top, critic=False)
    tags = store.tags()
    if not tags and store.has_foreign():
        raise ConfigError(f"checkpoints in {top} were written without batch adaptation, and have no buffers")
    if not tags:
        raise ConfigError(f"{top} has no checkpoint with a state of batch adaptation ({ADAPT}/TAG)")
    if tag is not None:
        if tag not in tags:
            raise ConfigError(f"checkpoint {tag} in {top} has no state of batch adaptation; {', '.join(tags)} have one")
        try:
            store.check(tag)
        except CheckpointError as error:
            report(f"checkpoint {tag} is not whole, a run would pass it over: {error}")
        return store.folder(tag)
    newest = store.newest_whole(report)
    if newest is None:
        raise ConfigError(f"no checkpoint in {top} is whole: {', '.join(tags)}; name one to look into it all the same")
    return store.folder(newest)


def read_buffers(folder: Path, delay: int | None = None) -> Stored:
    """Read both buffers.

    Args:
        folder: _adapt/TAG, as `find_state` gives it.
        delay: v, for the ages in syncs; None: as run.json beside the checkpoints says.

    Raises:
        ConfigError: the state is of another method.
        CheckpointError: a file is missing or damaged.
    """
    state = load_state(folder, tensors=False)
    method = state.get("method")
    found = (method.get("method"), method.get("version")) if isinstance(method, dict) else (None, None)
    if found != ("bapo", BAPO.VERSION):
        raise ConfigError(
            f"checkpoint {folder} has the state of method {found[0]!r}, version {found[1]!r}; what can be listed is "
            f"'bapo', version {BAPO.VERSION}"
        )
    last, delay = state["step"] - 1, delay or _delay(folder)
    entries = []
    for item in method["hard"]["entries"]:
        prompt, mean, step = Prompt(**item["prompt"]), Fraction(item["mean"]), item["step"]
        entries.append(Entry("hard", prompt, mean, step, last - step))
    for group in map(group_from_state, method["replay"]["groups"]):
        syncs = None if delay is None else sync_age(group.policy_step, last, delay)
        entries.append(Entry("replay", group.prompt, group.mean, group.step, last - group.step, syncs, group))
    return Stored(folder, state["step"], state["engine_step"], entries)


def _delay(folder: Path) -> int | None:
    """v, from the run.json in ckpt.path or beside it."""
    for top in list(folder.parents)[1:3]:
        delay = read_run(top).get("config", {}).get("adapt.rollout_delay")
        if isinstance(delay, int) and delay > 0:
            return delay
    return None


SORTS: dict[str, Callable[[Entry], Any]] = {
    "stored": lambda entry: 0,
    "mean": lambda entry: entry.mean,
    "age": lambda entry: entry.age,
    "tokens": lambda entry: entry.tokens or 0,
    "uid": lambda entry: entry.group.uid if entry.group else -1,
    "prompt": lambda entry: entry.prompt.text,
}


def select(
    entries: Sequence[Entry],
    *,
    buffer: str | None = None,
    mean: tuple[Fraction, Fraction] | None = None,
    age: tuple[int, int] | None = None,
    contains: str | None = None,
    sort: str = "stored",
    reverse: bool = False,
) -> list[Entry]:
    """The entries that meet all that is given, in order; bounds are included.

    Args:
        entries: of a checkpoint.
        buffer: hard or replay.
        mean: least and greatest group mean reward.
        age: least and greatest age, in trainer steps.
        contains: text that the prompt has, upper or lower case.
        sort: one of SORTS; entries that are equal there keep their order.
        reverse: greatest first.
    """

    def wanted(entry: Entry) -> bool:
        return (
            (buffer is None or entry.buffer == buffer)
            and (mean is None or mean[0] <= entry.mean <= mean[1])
            and (age is None or age[0] <= entry.age <= age[1])
            and (contains is None or contains.casefold() in entry.prompt.text.casefold())
        )

    return sorted(filter(wanted, entries), key=SORTS[sort], reverse=reverse)


Decode = Callable[[Sequence[int]], str]


def decoder(model: str) -> Decode:
    """Token ids to text, with a model's tokenizer.

    Raises:
        ConfigError: it cannot be loaded.
    """
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
    except Exception as error:  # transformers raises any kind
        raise ConfigError(f"tokenizer {model!r} cannot be loaded: {' '.join(str(error).split())}") from error
    return lambda ids: tokenizer.decode(list(ids))


def response_text(response: Response, decode: Decode) -> str:
    """What the policy generated; between the parts of several turns " ... "."""
    parts = [decode(response.token_ids[start:end].tolist()) for start, end in response.action_spans]
    return " ... ".join(parts)


def as_row(entry: Entry, *, tokens: bool = False, decode: Decode | None = None) -> dict[str, Any]:
    """All of an entry, for JSON.

    Args:
        entry: the entry.
        tokens: with token ids, their spans and the behaviour log-probs.
        decode: with the responses' text.
    """
    row = {
        "buffer": entry.buffer,
        "prompt": entry.prompt.text,
        "prompt_id": entry.prompt.id,
        "label": entry.prompt.label,
        "images": entry.prompt.images,
        "mean": float(entry.mean),
        "mean_exact": str(entry.mean),
        "step": entry.step,
        "age": entry.age,
        "syncs": entry.syncs,
        "source": entry.source,
    }
    if entry.group:
        responses = [_response_row(response, tokens, decode) for response in entry.group.responses]
        row |= {"uid": entry.group.uid, "policy_step": entry.group.policy_step, "tokens": entry.tokens}
        row["responses"] = responses
    return _plain(row)


def _response_row(response: Response, tokens: bool, decode: Decode | None) -> dict[str, Any]:
    extras = {name: response.extras[name] for name in ("score", "truncated", "info") if name in response.extras}
    row = {"reward": response.reward, "tokens": len(response.log_probs), **extras}
    if decode:
        row["text"] = response_text(response, decode)
    if tokens:
        row |= {"token_ids": response.token_ids, "action_spans": response.action_spans, "log_probs": response.log_probs}
    return row


def export(entries: Sequence[Entry], path: Path, *, tokens: bool = False, decode: Decode | None = None) -> None:
    """Write a line of JSON for each entry.

    Raises:
        OSError: the file cannot be written.
    """
    with open(path, "w", encoding="utf-8") as file:
        for entry in entries:
            file.write(json.dumps(as_row(entry, tokens=tokens, decode=decode), allow_nan=False) + "\n")


# ── For the terminal ──


def summary(stored: Stored) -> list[str]:
    """A line for the checkpoint, and one for each buffer."""
    lines = [f"{stored.folder}: {stored.steps} steps done, engines hold the weights of step {stored.engine_step}"]
    for name in BUFFERS:
        entries = [entry for entry in stored.entries if entry.buffer == name]
        line = f"{name} buffer: {len(entries)} {'prompts' if name == 'hard' else 'groups'}"
        if entries:
            ages = [entry.age for entry in entries]
            mean = float(sum(entry.mean for entry in entries) / len(entries))
            line += f", mean reward {mean:.3f}, {min(ages)} to {max(ages)} steps old (mean {sum(ages) / len(ages):.1f})"
        tokens = sum(entry.tokens or 0 for entry in entries)
        lines.append(line + (f", {tokens:,} generated tokens" if tokens else ""))
    return lines


def histogram(entries: Sequence[Entry], *, bar: str = "█") -> list[str]:
    """How many entries have which mean reward: a line each mean, or of ten equal parts where there are too many."""
    means = [entry.mean for entry in entries]
    if len(set(means)) <= MOST_MEANS:
        bins = [(f"{float(mean):.3f}", mean) for mean in sorted(set(means))]
        counts = Counter(means)
    else:
        low, width = min(means), (max(means) - min(means)) / 10
        bins = [(f"{float(low + i * width):.3f} to {float(low + (i + 1) * width):.3f}", i) for i in range(10)]
        counts = Counter(min(int((mean - low) / width), 9) for mean in means)
    most = max(counts.values(), default=1)
    margin = max((len(str(count)) for count in counts.values()), default=1)
    return [f"{label}  {counts[key]:>{margin}}  {bar * math.ceil(BAR * counts[key] / most)}" for label, key in bins]


def listing(entries: Sequence[Entry], decode: Decode | None = None, *, overflow: str = "ellipsis") -> Table:
    """A line an entry; with `decode` its responses below it."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in ("buffer", "mean", "age", "syncs", "source", "tokens", "uid"):
        table.add_column(head, justify="left" if head in ("buffer", "source") else "right", no_wrap=True)
    table.add_column("prompt", ratio=1, no_wrap=True, overflow=overflow)
    for entry in entries:
        uid = entry.group.uid if entry.group else None
        cells = (f"{float(entry.mean):.3f}", entry.age, entry.syncs, entry.source, entry.tokens, uid)
        prompt = Text(_one_line(entry.prompt.text))
        table.add_row(entry.buffer, *("-" if cell is None else str(cell) for cell in cells), prompt)
        for response in entry.group.responses if entry.group and decode else ():
            text = Text(f"{response.reward:g}: {_one_line(response_text(response, decode))}", style="dim")
            table.add_row(*[""] * 7, text)
    return table


def _one_line(text: str) -> str:
    """Text of a prompt or response without line breaks, or what a terminal would obey."""
    return "".join(char if char.isprintable() else " " for char in " ".join(text.split()))


def _plain(value: Any) -> Any:
    """As JSON can hold it: arrays as lists, no NaN or infinity."""
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value)
