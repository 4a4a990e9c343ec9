"""The rollout engines: an actor of Ray around vLLM, vLLM's workers, and the processes of the user's reward function."""
