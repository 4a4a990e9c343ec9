"""Batch adaptation (BAPO, BA-PPO) as a plug-in to OpenRLHF: replay for RL post-training of language models."""

__version__ = "0.1.0"
