"""Reads and lists the hard and the replay buffer of a checkpoint, without changing the checkpoint.

It needs numpy and safetensors, but not torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from rich.table import Table
from rich.text import Text

from bapo_openrlhf.adapt.group import Group, Prompt, Response
from bapo_openrlhf.adapt.state import group_from_state
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.methods import BAPO
from bapo_openrlhf.record.checkpoint_store import ADAPT, CheckpointStore
from bapo_openrlhf.record.run_record import CHECKPOINTS
from bapo_openrlhf.record.state_file import load_state
from bapo_openrlhf.workbench.terminal import printable

BUFFERS = ("hard", "replay")


@dataclass(frozen=True)
class Entry:
    """One entry of a buffer.

    Attributes:
        buffer: "hard" or "replay".
        prompt: The prompt.
        mean: Exact group mean reward.
        step: Trainer step that generated the group.
        age: Trainer steps from `step` to the last step of the checkpoint, as in the metrics buffer/*_age_mean.
        group: The stored group. None in the hard buffer, which keeps only prompts.
    """

    buffer: str
    prompt: Prompt
    mean: Fraction
    step: int
    age: int
    group: Group | None = None

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
        path: ckpt.path, or the folder of a run that contains it, which means its newest whole checkpoint; or
            _adapt/TAG or a copy of it, which need not be whole.
        report: Is called with the problem of a checkpoint that is skipped.

    Raises:
        ConfigError: There is no such folder.
        CheckpointError: A folder cannot be read.
    """
    if (path / "state.json").is_file():
        return path
    store = CheckpointStore(path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path, critic=False)
    newest = store.newest_whole(report)
    if newest is None:
        raise ConfigError(
            f"{path} has no whole checkpoint with buffers ({ADAPT}/TAG); a run writes them only with batch adaptation "
            "and --ckpt.save_steps N"
        )
    return store.folder(newest)


def read_buffers(folder: Path) -> Stored:
    """Read both buffers.

    Args:
        folder: _adapt/TAG, as `find_state` returns it.

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
    last, entries = state["step"] - 1, []
    for item in method["hard"]["entries"]:
        prompt, mean, step = Prompt(**item["prompt"]), Fraction(item["mean"]), item["step"]
        entries.append(Entry("hard", prompt, mean, step, last - step))
    for group in map(group_from_state, method["replay"]["groups"]):
        entries.append(Entry("replay", group.prompt, group.mean, group.step, last - group.step, group))
    return Stored(folder, state["step"], state["engine_step"], entries)


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


def listing(entries: Sequence[Entry], decode: Decode | None = None, *, overflow: str = "ellipsis") -> Table:
    """A table with one line per entry. With `decode` its responses follow it."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in ("buffer", "mean", "age", "tokens", "uid"):
        table.add_column(head, justify="left" if head == "buffer" else "right", no_wrap=True)
    table.add_column("prompt", ratio=1, no_wrap=True, overflow=overflow)
    for entry in entries:
        group = (str(entry.tokens), str(entry.group.uid)) if entry.group else ("-", "-")
        prompt = Text(printable(entry.prompt.text))
        table.add_row(entry.buffer, f"{float(entry.mean):.3f}", str(entry.age), *group, prompt)
        for response in entry.group.responses if entry.group and decode else ():
            text = Text(f"{response.reward:g}: {printable(response_text(response, decode))}", style="dim")
            table.add_row(*[""] * 5, text)
    return table
