"""A first run without downloads: `python -m bapo_openrlhf.workbench.quickstart` makes its own model and data."""
