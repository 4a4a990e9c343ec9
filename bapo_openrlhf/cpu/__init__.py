"""The real stack on a machine without a GPU, and processes that fork from a process that has imported it."""
