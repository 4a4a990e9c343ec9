"""What is done around training runs: data prepared, runs planned, watched, reported, compared and evaluated."""
