"""Reward: the user's reward function runs in processes that may hang or crash."""
