"""A first run from nothing: `python -m bapo_openrlhf.quickstart` makes its own model and data."""
