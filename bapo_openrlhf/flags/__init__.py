"""Flags: this project's own, what each of OpenRLHF's may be, and what flags may not be together."""
