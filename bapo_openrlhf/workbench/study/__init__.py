"""Studies: a grid of methods, advantage paths and seeds on one task, run on the real stack and compared."""
