"""Checks whether a tag may be released: `python tools/check_tag.py v0.1.0`.

The tag, the package's version and the newest entry of CHANGELOG.md must be the same, and that entry must have a date.
Prints the text of the entry, which becomes the notes of the release.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def check(tag: str, version: str, changelog: str) -> str:
    """The text of the newest entry.

    Raises:
        ValueError: the message says what does not fit.
    """
    if tag != f"v{version}":
        raise ValueError(f"tag is {tag}; bapo_openrlhf.__version__ is {version}, so it must be v{version}")
    _, *entries = re.split(r"^## ", changelog, flags=re.M)
    if not entries:
        raise ValueError("CHANGELOG.md has no entry")
    head, _, text = entries[0].partition("\n")
    name, _, date = head.partition(", ")
    if name != version:
        raise ValueError(f"the newest entry of CHANGELOG.md is {name}; it must be {version}")
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", date):
        raise ValueError(f"the entry {name} of CHANGELOG.md has {date!r} where its date must be, as in 2026-01-31")
    return text.strip()


def main() -> int:
    """Check, and print the notes."""
    version = re.search(r'^__version__ = "(.+)"$', (ROOT / "bapo_openrlhf" / "__init__.py").read_text(), re.M)[1]
    try:
        print(check(sys.argv[1], version, (ROOT / "CHANGELOG.md").read_text()))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
