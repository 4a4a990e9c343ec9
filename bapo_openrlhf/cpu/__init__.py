"""The real stack on a machine without a GPU, and processes that start from one that has imported it."""
