"""What a run leaves on disk: its record (metrics, groups, answers) and its checkpoints."""
