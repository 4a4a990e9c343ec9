"""Run: the steps of a run from its beginning to its end, with its record and its checkpoints."""
