"""Two short runs of a configuration with a small model, and what they show."""
