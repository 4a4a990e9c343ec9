"""What travels between the processes of a run: plain data."""
