"""Faster: what takes less time than OpenRLHF's way, with the same results (`--run.faster`)."""
