"""From published data to the files that training and evaluation read."""
