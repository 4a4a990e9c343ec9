"""Draws into a terminal: a curve, a label with facts, numbers and foreign text."""

import math
from collections.abc import Sequence
from textwrap import wrap

from rich.text import Text

LABEL = 11  # width of the labels at the left
BLANK = 0x2800  # the Braille character without dots
BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bit of each dot, by row and column


def curve(values: Sequence[float], low: float, high: float, columns: int, height: int) -> list[str]:
    """Draw at least one value as a line of `height` x `columns` Braille characters, which have 2 x 4 dots each."""
    wide, tall = 2 * columns, 4 * height
    points, ends = [], [*values, values[-1]]
    for x in range(wide):
        left, share = divmod(x / max(wide - 1, 1) * (len(values) - 1), 1)
        value = ends[int(left)] + (ends[int(left) + 1] - ends[int(left)]) * share
        points.append(round((high - value) / (high - low) * (tall - 1)))
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


def printable(text: str) -> str:
    """Foreign text on one line, without characters that would control the terminal."""
    return "".join(char if char.isprintable() else " " for char in " ".join(text.split()))


def size(count: float) -> str:
    """512 B, 3.0 MiB."""
    power = max(min(int(math.log2(count)) // 10, 4), 0) if count > 0 else 0
    return f"{count / 1024**power:.{1 if power else 0}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
