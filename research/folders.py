"""Where records, studies and pictures are. After its import, the scripts of benchmarks/ can be imported as well."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STUDIES = ROOT / "research" / "studies"  # their definitions; that of the example, countdown, is in configs/studies
RESULTS = ROOT / "research" / "results"
IMAGES = ROOT / "research" / "images"  # of the pages in research/
DOCS_IMAGES = ROOT / "docs" / "images"  # of docs/results.md, study_results.md and the README

sys.path.append(str(ROOT / "research" / "benchmarks"))
