"""Reads, selects, lists and exports the hard and the replay buffer of a checkpoint, without changing the checkpoint.

It needs numpy and safetensors, but not torch.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from bapo_openrlhf.adapt.group import Group, Prompt, Response
from bapo_openrlhf.adapt.staleness import sync_age
from bapo_openrlhf.adapt.state import group_from_state
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.methods import BAPO
from bapo_openrlhf.record.checkpoint_store import ACTOR, ADAPT, CRITIC, TAG, CheckpointStore
from bapo_openrlhf.record.run_record import read_run
from bapo_openrlhf.record.state_file import CheckpointError, load_state
from bapo_openrlhf.workbench.terminal import printable

BUFFERS = ("hard", "replay")
MOST_MEANS = 12  # most means that get a line each in the histogram
BAR = 30  # width of the longest bar


@dataclass(frozen=True)
class Entry:
    """One entry of a buffer.

    Attributes:
        buffer: "hard" or "replay".
        prompt: The prompt.
        mean: Exact group mean reward.
        step: Trainer step that generated the group.
        age: Trainer steps from `step` to the last step of the checkpoint, as in the metrics buffer/*_age_mean.
        syncs: Syncs of the rollout engines from the weights that generated the group to that last step. None if
            unknown.
        group: The stored group. None in the hard buffer, which keeps only prompts.
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
        """Source of the group. Only fresh groups are stored for replay. The hard buffer does not keep it."""
        return "fresh" if self.group else None

    @property
    def tokens(self) -> int | None:
        """Number of generated tokens of all responses."""
        return sum(len(response.log_probs) for response in self.group.responses) if self.group else None


@dataclass(frozen=True)
class Stored:
    """Both buffers of a checkpoint.

    Attributes:
        folder: Path of _adapt/TAG.
        steps: Number of finished trainer steps. The last one was step `steps` - 1.
        engine_step: Number of updates in the weights that the rollout engines hold.
        entries: The hard buffer, then the replay buffer, each with the oldest entry first.
    """

    folder: Path
    steps: int
    engine_step: int
    entries: list[Entry]


def find_state(path: Path, report: Callable[[str], None]) -> Path:
    """Find the folder with the state of the batch adaptation.

    Args:
        path: ckpt.path, which means its newest whole checkpoint; _adapt, _actor or _critic in it; one of their folders
            TAG; a copy of _adapt/TAG; or the folder of a run that contains its checkpoints.
        report: Is called with the problem of a checkpoint that is read nevertheless or skipped.

    Raises:
        ConfigError: There is no such folder.
        CheckpointError: A folder cannot be read.
    """
    top = Path(os.path.abspath(path))
    if not top.is_dir():
        state = "is not a folder" if top.exists() else "does not exist"
        raise ConfigError(f"checkpoint {str(path)!r} {state}{_why_none(top)}")
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
        raise ConfigError(f"checkpoints in {top} were written without batch adaptation, so they have no buffers")
    if not tags:
        raise ConfigError(f"{top} has no checkpoint with a state of batch adaptation ({ADAPT}/TAG){_why_none(top)}")
    if tag is not None:
        if tag not in tags:
            raise ConfigError(f"checkpoint {tag} in {top} has no state of batch adaptation; {', '.join(tags)} have one")
        try:
            store.check(tag)
        except CheckpointError as error:
            report(f"checkpoint {tag} is not whole, so a run would skip it: {error}")
        return store.folder(tag)
    newest = store.newest_whole(report)
    if newest is None:
        raise ConfigError(
            f"no checkpoint in {top} is whole: {', '.join(tags)}; name one of them to read it nevertheless"
        )
    return store.folder(newest)


def _why_none(path: Path) -> str:
    """Why a folder has no checkpoints, from the record of the run that it belongs to."""
    config = (read_run(path) or read_run(path.parent)).get("config", {})
    hint = "; a run writes checkpoints only with --ckpt.save_steps N"
    if "ckpt.save_steps" in config:
        hint += f", and this one had ckpt.save_steps {config['ckpt.save_steps']} and ckpt.path {config['ckpt.path']}"
    return hint


def read_buffers(folder: Path, delay: int | None = None) -> Stored:
    """Read both buffers.

    Args:
        folder: _adapt/TAG, as `find_state` returns it.
        delay: v, from which the ages in syncs follow. None: run.json next to the checkpoints says it.

    Raises:
        ConfigError: The state belongs to another method.
        CheckpointError: A file is missing or damaged.
    """
    state = load_state(folder, tensors=False)
    method = state.get("method")
    found = (method.get("method"), method.get("version")) if isinstance(method, dict) else (None, None)
    if found != ("bapo", BAPO.VERSION):
        raise ConfigError(
            f"checkpoint {folder} has the state of method {found[0]!r}, version {found[1]!r}; only 'bapo', "
            f"version {BAPO.VERSION}, can be listed"
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
    """v, from the run.json in ckpt.path or next to it."""
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
    """Select the entries that meet all given conditions, and sort them.

    Args:
        entries: Entries of a checkpoint.
        buffer: "hard" or "replay".
        mean: Lowest and highest group mean reward, both included.
        age: Lowest and highest age in trainer steps, both included.
        contains: Text in the prompt. Case does not matter.
        sort: A key of SORTS. Equal entries keep their order.
        reverse: Whether the highest comes first.
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
    """A function that turns token ids into text with the tokenizer of a model.

    Raises:
        ConfigError: The tokenizer cannot be loaded.
    """
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
    except Exception as error:  # transformers raises many types
        raise ConfigError(f"tokenizer {model!r} cannot be loaded: {' '.join(str(error).split())}") from error
    return lambda ids: tokenizer.decode(list(ids))


def response_text(response: Response, decode: Decode) -> str:
    """Text that the policy generated. " ... " separates several turns."""
    parts = [decode(response.token_ids[start:end].tolist()) for start, end in response.action_spans]
    return " ... ".join(parts)


def as_row(entry: Entry, *, tokens: bool = False, decode: Decode | None = None) -> dict[str, Any]:
    """Everything about an entry, for JSON.

    Args:
        entry: The entry.
        tokens: Whether to include token ids, their spans and the behaviour log-probs.
        decode: Includes the text of the responses.
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
    """Write one line of JSON per entry.

    Raises:
        OSError: The file cannot be written.
    """
    with open(path, "w", encoding="utf-8") as file:
        for entry in entries:
            file.write(json.dumps(as_row(entry, tokens=tokens, decode=decode), allow_nan=False) + "\n")


# ── For the terminal ──


def summary(stored: Stored) -> list[str]:
    """One line about the checkpoint and one about each buffer."""
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
    """Number of entries per mean reward, one line each. Many different means are grouped into ten equal parts."""
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
    """A table with one line per entry. With `decode` its responses follow it."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in ("buffer", "mean", "age", "syncs", "source", "tokens", "uid"):
        table.add_column(head, justify="left" if head in ("buffer", "source") else "right", no_wrap=True)
    table.add_column("prompt", ratio=1, no_wrap=True, overflow=overflow)
    for entry in entries:
        uid = entry.group.uid if entry.group else None
        cells = (f"{float(entry.mean):.3f}", entry.age, entry.syncs, entry.source, entry.tokens, uid)
        prompt = Text(printable(entry.prompt.text))
        table.add_row(entry.buffer, *("-" if cell is None else str(cell) for cell in cells), prompt)
        for response in entry.group.responses if entry.group and decode else ():
            text = Text(f"{response.reward:g}: {printable(response_text(response, decode))}", style="dim")
            table.add_row(*[""] * 7, text)
    return table


def _plain(value: Any) -> Any:
    """Convert into what JSON can hold: arrays become lists, NaN and infinity become None, other objects text."""

    def converted(item: Any) -> Any:
        return item.tolist() if isinstance(item, (np.ndarray, np.generic)) else str(item)

    return json.loads(json.dumps(value, default=converted), parse_constant=lambda name: None)
