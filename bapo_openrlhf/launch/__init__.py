"""Before a run: its flags checked, its checkpoint chosen, and OpenRLHF's `train` started. No model loads here.

What checks something raises ConfigError. Its message names the flag, the value found and what is allowed.
"""
