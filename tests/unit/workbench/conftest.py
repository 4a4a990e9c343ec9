"""The tests of the workbench import what they share from files of this folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
