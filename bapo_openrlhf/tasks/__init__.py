"""Tasks: data, prompt and reward of each in one file."""
