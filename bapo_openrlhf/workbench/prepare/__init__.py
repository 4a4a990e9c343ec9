"""Turns published data into the files that training and evaluation read."""
