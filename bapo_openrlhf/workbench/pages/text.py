"""Numbers and text for people."""

import math
import numbers
import re
from collections.abc import Sequence
from typing import Any

WIDTH = 140  # Columns if the output is not a terminal. The paper's widest table needs them.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def is_number(value: Any) -> bool:
    """Whether a value of a record is a finite number."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def number(value: Any) -> str:
    """A number with four significant digits at most, or all before the point. Text stays; anything else is "–"."""
    if isinstance(value, str):
        return value
    if not is_number(value):
        return "–"
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def duration(seconds: float) -> str:
    """1.57 s, 42 s, 3 min 28 s, 2 h 5 min, 1 d 3 h."""
    whole = round(seconds)
    for unit, name, smaller, rest in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit:
            many, few = divmod(round(whole / smaller), unit // smaller)
            return f"{many} {name}" + (f" {few} {rest}" if few else "")
    return f"{seconds:.3g} s" if seconds < 10 else f"{whole} s"


def size(count: float) -> str:
    """512 B, 3.0 MiB."""
    power = max(min(int(math.log2(count)) // 10, 4), 0) if count > 0 else 0
    return f"{count / 1024**power:.{1 if power else 0}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def many(count: float, noun: str) -> str:
    """1 step, 2 steps."""
    return f"{count:.0f} {noun}{'' if count == 1 else 's'}"


def smoothing_width(count: int) -> int:
    """How many points the moving average of `count` points takes: a tenth of them, at least 3, an odd number."""
    return max(3, count // 10) | 1


def smooth(values: Sequence[float]) -> list[float]:
    """Centred moving average over `smoothing_width` values; at the ends over those that exist. As long as `values`."""
    half = smoothing_width(len(values)) // 2
    windows = [values[max(0, place - half) : place + half + 1] for place in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def clean(text: str) -> str:
    """`text` with a replacement for each character that an HTML file may not hold. Tabs and line ends stay."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def printable(text: str) -> str:
    """Foreign text on one line, without characters that would control the terminal."""
    return "".join(char if char.isprintable() else " " for char in " ".join(text.split()))
