"""One HTML page that says what runs did, from their records."""
