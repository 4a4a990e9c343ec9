"""Draws a run as a picture for the terminal: from its rows to lines of text. It reads no file and never waits."""

import math
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

from rich.text import Text

from bapo_openrlhf.adapt.vocabulary import ENDS, REASONS, SOURCES, shown_sources
from bapo_openrlhf.record.follow import RECENT, Seen
from bapo_openrlhf.record.run_record import ANSWERS, REWARD, change_in_words, end_means, phase_seconds
from bapo_openrlhf.workbench.findings import staleness_findings
from bapo_openrlhf.workbench.pages.colours import LIGHT as COLOURS
from bapo_openrlhf.workbench.pages.text import duration, many, printable, size, smooth

NAMES = {"fresh": "fresh", "reevaluated": "re-evaluated", "replayed": "replayed", "prefixed": "with a prefix"}
FILLED, EMPTY = "█", "░"  # parts of a bar
SIGNS = {"fresh": "█", "reevaluated": "▓", "replayed": "▒", "prefixed": "▚"}
LINE, FAINT, WARNING = "#D55E00", "#A6A6A6", "bold red"  # styles of the curve, of what is less important, of warnings
KINDS_IN_ROWS = ("skipped", "failed", "nonfinite")  # kinds of warnings that are left out, because the rows say more
MOST_POINTS = 512  # most points of the reward curve
LEAST_CURVE, MOST_CURVE = 3, 10  # lines of the reward curve
LEAST_BATCHES, MOST_BATCHES = 3, 8  # batches that are shown
LABEL = 11  # width of the labels at the left
BLANK = 0x2800  # the Braille character without dots
BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bit of each dot, by row and column


def picture(seen: Seen, width: int, height: int | None = None) -> Text:
    """Draw the whole picture, at least 60 columns wide. Below about 35 lines the last numbers are left out."""
    lines = _head(seen, width)
    for text in warnings(seen):
        lines += flow("!", [printable(text)], width, " ", style=WARNING, label=2)
    if seen.rows:
        lines += flow("held-out", [printable(change_in_words(seen.evaluations))], width)
        numbers = [Text(), *_numbers(seen, width)]
        lines_left = 21 if height is None else height - len(lines) - len(numbers)
        bars = min(max(lines_left // 3, LEAST_BATCHES), MOST_BATCHES)
        batches = [Text(), *_batches(seen, width, bars)]
        lines_left -= len(batches) + 4  # a blank line, the title of the curve, its axis and the steps
        lines += [Text(), *_reward(seen, width, min(max(lines_left, LEAST_CURVE), MOST_CURVE)), *batches]
        lines += numbers if height is None else numbers[: max(height - len(lines), 0)]
    for line in lines:
        line.truncate(width)
    return Text("\n", no_wrap=True, overflow="crop").join(lines)


def warnings(seen: Seen) -> list[str]:
    """What the user should look at, worst first, one line each."""
    lines = [seen.problem] if seen.problem else []
    if seen.how not in (None, "finished"):
        text = seen.summary["nothing_trained"] if seen.ended else seen.run.get("ended", {}).get("text")
        lines.append(text or "the run was killed: its process is gone without a word")
    elif len(seen.recent) == RECENT and all(row.get(REWARD) == 0 for row in seen.recent):
        lines.append(f"each reward of the last {RECENT} steps was 0: read some of the responses in {ANSWERS}")
    if seen.broken:
        lines.append(f"lines of metrics.jsonl that are left out because they are not rows: {seen.broken}")
    lines += [f"{name} is damaged, so what it says is left out" for name in sorted(seen.damaged)]
    if seen.is_silent:
        usual = f", but a step takes {duration(seen.step_seconds)}" if seen.step_seconds else ""
        what = "no new step" if seen.rows else "no step yet"
        lines.append(f"{what} for {duration(seen.age)}{usual}: the run may have stopped; see its output (train.log)")
    lines += [row["text"] for row in seen.warnings if row["kind"] not in KINDS_IN_ROWS]
    if steps := [row["step"] for row in seen.rows if row.get("skipped_update")]:
        share = f"{len(steps)} of {len(seen.rows)}"
        lines.append(f"{share} updates skipped, the last in step {steps[-1]}: the batch was empty")
    for name, why in (("failed", "no reward"), ("nonfinite", "log-probs that are not finite")):
        if count := _sum(seen.recent, f"groups/{name}"):
            recent = many(len(seen.recent), "step")
            lines.append(f"{many(count, 'group')} left out in the last {recent}: {why}")
    return lines


# ── Sections, each a list of lines ──


def _head(seen: Seen, width: int) -> list[Text]:
    seed = seen.run.get("seed")
    facts = [seen.run.get("algorithm"), None if seed is None else f"seed {seed}"]
    title = Text(printable(str(seen.run.get("name") or seen.name)), style="bold")
    title.append("".join(f" · {printable(str(fact))}" for fact in facts if fact), style="not bold")
    return [ends(title, _state(seen), width), _progress(seen, width)]


def _state(seen: Seen) -> Text:
    if seen.how is not None:
        return Text(seen.how, style="bold green" if seen.how == "finished" else WARNING)
    if seen.is_silent:
        return Text("silent", style=WARNING)
    if not seen.rows:
        return Text("starting" if seen.run else "no run here yet")
    if seen.total is not None and seen.rows[-1]["step"] >= seen.total:
        return Text("finishing")
    return Text("running", style="bold")


def _progress(seen: Seen, width: int) -> Text:
    done = seen.rows[-1]["step"] if seen.rows else 0
    total, step_seconds = seen.total, seen.step_seconds
    words = f"{done}{'' if total is None else f'/{total}'} steps"
    seconds = _sum(seen.rows, "timing/step_total")
    if seen.how is not None and seconds:
        words += f", which took {duration(seconds)}"
    elif seen.how is None and total and step_seconds and done != total:
        words += f" · {duration((total - done) * step_seconds)} left"
    if not total:
        return Text(words)
    cells = max(width - len(words) - 2, 8)
    filled = cells * min(done, total) // total
    bar = Text(FILLED * filled, style=LINE).append(EMPTY * (cells - filled), style=FAINT)
    return bar.append(f"  {words}", style="default")


def _reward(seen: Seen, width: int, height: int) -> list[Text]:
    rows = [row for row in seen.rows if row.get(REWARD) is not None]
    if not rows:
        return []
    values = [row[REWARD] for row in rows]
    first, last, window = end_means(values)
    facts = [f"now {values[-1]:.3f}"]
    if window > 1:
        facts += [f"last {window} steps {last:.3f}", f"first {window} {first:.3f}"]
    title = flow("reward", facts, width)[:1]
    smoothed = _smoothed(values)
    low, high = min(smoothed), max(smoothed)
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    decimals = min(max(2 - math.floor(math.log10(high - low)), 0), 6) if high - low < 1 else 2
    levels = 4 * height - 1  # a character has 4 rows of dots
    labels = [f"{high - (4 * row + 1.5) / levels * (high - low):.{decimals}f}" for row in range(height)]
    margin = max(map(len, labels))
    columns = max(width - margin - 3, 1)
    lines = [
        Text(f" {label:>{margin}} ┤", style=FAINT).append(dots, style=LINE)
        for label, dots in zip(labels, curve(smoothed, low, high, columns, height), strict=True)
    ]
    lines.append(Text(f" {'':>{margin}} └{'─' * columns}", style=FAINT))
    first_step = f" {'':>{margin}}  {rows[0]['step']}"
    last_step = str(rows[-1]["step"]).rjust(max(width - len(first_step) - 1, 0))
    return [*title, *lines, Text(first_step + last_step, style=FAINT)]


def _smoothed(values: Sequence[float]) -> list[float]:
    size_of_chunk = math.ceil(len(values) / MOST_POINTS)
    chunks = [values[start : start + size_of_chunk] for start in range(0, len(values), size_of_chunk)]
    return smooth([sum(chunk) / len(chunk) for chunk in chunks])


def _batches(seen: Seen, width: int, most: int) -> list[Text]:
    rows = seen.rows[-most:]
    capacity = max(max(row.get("groups/capacity") or 0, sum(_groups(row).values())) for row in rows)
    if not capacity:
        return []
    legend = Text("batches  ")
    for source in shown_sources({source: _sum(rows, f"groups/{source}") for source in SOURCES}):
        legend.append(SIGNS[source], style=COLOURS[source]).append(f" {NAMES[source]}  ")
    legend.append(EMPTY, style=FAINT).append(f" unused of {capacity:.0f}")
    counts = [_counts(row) for row in rows]
    margin = max(map(len, counts))
    cells = max(width - LABEL - margin - 2, 8)
    lines = [legend]
    for row, words in zip(rows, counts, strict=True):
        bar = Text(f"{row['step']:>{LABEL - 2}}  ")
        start = total = 0
        for source, count in _groups(row).items():
            total += count
            end = round(total / capacity * cells)
            bar.append(SIGNS[source] * (end - start), style=COLOURS[source])
            start = end
        bar.append(EMPTY * (cells - start), style=FAINT).append(f"  {words:>{margin}}")
        lines.append(bar)
    return [*lines, *_outside(rows, width)]


def _outside(rows: Sequence[Mapping[str, Any]], width: int) -> list[Text]:
    generated = _sum(rows, "groups/generated")
    if not generated:
        return []
    reasons = ", ".join(_sums_in_words(rows, "filtered", REASONS))
    ends_in_words = [
        words + (f" ({reasons})" if reasons and words.endswith(" filtered") else "")
        for words in _sums_in_words(rows, "groups", ENDS)
    ]
    return flow("generated", [f"{generated:.0f} groups in {many(len(rows), 'step')}", *ends_in_words], width)


def _sums_in_words(rows: Sequence[Mapping[str, Any]], prefix: str, names: Sequence[str]) -> list[str]:
    counts = {name: _sum(rows, f"{prefix}/{name}") for name in names}
    return [f"{count:.0f} {name.replace('_', ' ')}" for name, count in counts.items() if count]


def _numbers(seen: Seen, width: int) -> list[Text]:
    row, recent = seen.rows[-1], seen.recent
    seconds = _sum(recent, "timing/step_total")
    counts = {"responses": _sum(recent, "rollouts/step"), "tokens": _sum(recent, "tokens/generated")}
    phases = phase_seconds(recent)
    phases.pop("step_total", None)
    weights = row.get("staleness/rollout_policy")
    facts = {
        "buffers": [_buffer(row, name) for name in ("hard", "replay")],
        "thresholds": [
            *(_fact(row, f"threshold/{name}", f"{name} {{:.3f}}") for name in ("c2", "c3")),
            _fact(row, "threshold/average_reward", "average reward {:.3f}"),
        ],
        "rates": [
            *(f"{count / seconds:,.0f} {name}/s" for name, count in counts.items() if count > 0 and seconds > 0),
            _fact(row, "rollouts/total", "{:,.0f} responses so far"),
        ],
        "step": [
            None if seen.step_seconds is None else duration(seen.step_seconds),
            *(f"{name.replace('_', ' ')} {duration(total / len(recent))}" for name, total in phases.items()),
        ],
        "policy": [
            None if weights is None else f"rollout weights {many(weights, 'step')} old",
            _fact(row, "staleness/replayed_steps_mean", "replayed groups {:.1f} steps old"),
            _fact(row, "staleness/replayed_syncs_mean", "{:.1f} syncs"),
        ],
        "engine gap": [
            _fact(row, "gap/kl", "KL {:.1e} a token"),
            _fact(row, "gap/absolute", "log-probs differ by {:.1e}"),
            _fact(row, "gap/cut_share", "{:.2%} of tokens would be cut"),
            None if row.get("gap/kl") is None else f"{many(row['gap/age'], 'step')} ago",
        ],
    }
    lines = [line for label, parts in facts.items() for line in flow(label, list(filter(None, parts)), width)]
    lines += _sources(seen)
    for text in staleness_findings(recent, f"the last {many(len(recent), 'step')}"):
        lines += flow("distance", [text], width)
    return lines


def _sources(seen: Seen) -> list[Text]:
    columns = {
        "groups": ("groups/{}", "{:.0f}"),
        "shift": ("shift/{}", "{:.1e}"),
        "TV": ("tv/{}", "{:.3f}"),
        "weight": ("importance/{}_mean", "{:.3f}"),
        "clipped": ("clip/{}", "{:.1%}"),
        "step": ("step", "{:.0f}"),
    }
    table = [["source", *columns]]
    for source in SOURCES:
        row = next((row for row in reversed(seen.recent) if row.get(f"tv/{source}") is not None), None)
        if row is not None:
            cells = [_fact(row, key.format(source), form) or "-" for key, form in columns.values()]
            table.append([NAMES[source], *cells])
    lines = [Text(f"{name:<12}" + "".join(f"{cell:>8}" for cell in cells)) for name, *cells in table]
    return lines if len(lines) > 1 else []


# ── Parts ──


def _buffer(row: Mapping[str, Any], name: str) -> str | None:
    count = row.get(f"buffer/{name}")
    if count is None:
        return None
    age = _fact(row, f"buffer/{name}_age_mean", ", {:.1f} steps old") if count else None
    held = row.get(f"buffer/{name}_bytes")
    return f"{name} {count:.0f}{age or ''}{'' if held is None else f', {size(held)}'}"


def _counts(row: Mapping[str, Any]) -> str:
    counts = _groups(row)
    return "+".join(f"{counts[source]:.0f}" for source in shown_sources(counts))


def _groups(row: Mapping[str, Any]) -> dict[str, float]:
    return {source: row.get(f"groups/{source}") or 0 for source in SOURCES}


def _fact(row: Mapping[str, Any], key: str, form: str) -> str | None:
    value = row.get(key)
    return None if value is None else form.format(value)


def _sum(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    return sum(row.get(key) or 0 for row in rows)


# ── Drawing ──


def curve(values: Sequence[float], low: float, high: float, columns: int, height: int) -> list[str]:
    """Draw at least one value as a line of `height` x `columns` Braille characters, which have 2 x 4 dots each."""
    width, levels = 2 * columns, 4 * height  # in dots
    points, values = [], [*values, values[-1]]
    for x in range(width):
        place, share = divmod(x / max(width - 1, 1) * (len(values) - 2), 1)
        start, end = values[int(place) : int(place) + 2]
        points.append(round((high - (start + (end - start) * share)) / (high - low) * (levels - 1)))
    cells = [[0] * columns for _ in range(height)]
    for x, y in enumerate(points):
        before = points[x - 1] if x else y
        # A steep piece starts next to the end of the column before.
        start, end = (min(before + 1, y), y) if y > before else (y, max(before - 1, y))
        for dot in range(start, end + 1):
            cells[dot // 4][x // 2] |= BRAILLE[dot % 4][x % 2]
    # Blank cells are Braille characters too, because a font may give these characters another width.
    return ["".join(chr(BLANK + cell) for cell in row).rstrip(chr(BLANK)) for row in cells]


def flow(
    name: str, facts: Sequence[str], width: int, between: str = " · ", *, style: str = "", label: int = LABEL
) -> list[Text]:
    """A label and its facts, on as many lines as they need. A long fact is broken between words."""
    lines, current = [], ""
    for fact in facts:
        joined = f"{current}{between}{fact}" if current else fact
        if len(joined) <= width - label:
            current = joined
            continue
        lines += [current] if current else []
        *full, current = wrap(fact, max(width - label, 1), break_long_words=False, break_on_hyphens=False)
        lines += full
    lines += [current] if current else []
    return [Text(f"{'' if number else name:<{label}}{line}", style=style) for number, line in enumerate(lines)]


def ends(left: Text, right: Text, width: int) -> Text:
    """One line with a text at its left end and one at its right end."""
    left.truncate(max(width - len(right) - 1, 1))
    return left.append(" " * (width - len(left) - len(right))).append_text(right)
