"""Names that a run itself uses. This file imports nothing, because a reward process reads it."""

FIRST_RATIO = "first_ratio"  # what the actor returns, and from which the trainer knows that it has looked
# What a run itself knows of a response or logs under a name without a slash. `extra_logs` would replace it.
OWN = frozenset((
    "actor_grad_norm", "actor_lr", "critic_grad_norm", "critic_loss", "critic_lr", "dynamic_filtering_pass_rate",
    "entropy_loss", "generated_samples", "group_reward_std", "is_filter_ratio", "kl", "logprobs_diff", "policy_loss",
    "ppo_clip_ratio", "ppo_kl", "response_clip_ratio", "response_length", "return", "reward", "score",
    "skipped_update", "step", "stopped", "total_length", "truncated", "values", "version_max",
    "version_min", "vllm_kl", FIRST_RATIO,
))  # fmt: skip
