"""Draws the picture of docs/watch.md from a run: `python docs/watch_picture.py RUN PICTURE.svg`."""

import io
import re
import sys
from pathlib import Path

from rich.console import Console

from bapo_openrlhf.record.follow import Follower
from bapo_openrlhf.workbench.watch import picture

WIDTH, HEIGHT = 60, 60  # columns and lines, so that letters can be read where a page has 400 pixels

folder, path = sys.argv[1:]
follower = Follower(Path(folder))
follower.poll()
console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
console.print(picture(follower, WIDTH, HEIGHT))
# Without rich's fonts from the web: a picture of a page must not ask for them.
svg = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title=f"bapo-openrlhf watch {folder}"), flags=re.S)
Path(path).write_text(svg, encoding="utf-8")
