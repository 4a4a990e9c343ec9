"""What one run leaves behind: its metrics, its summary and its picture."""
