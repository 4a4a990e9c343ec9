"""Flags: this project's own, what each of OpenRLHF's may be, and what flags may not be together.

What checks a flag raises ConfigError. Its message names the flag, the value found and what is allowed.
"""
