"""A first run from nothing: `python -m bapo_openrlhf.workbench.quickstart` makes its own model and data."""
