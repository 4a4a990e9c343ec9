"""Methods: how a batch is made of groups. One file a method."""

from bapo_openrlhf.methods.bapo import BAPO, BAPOConfig
from bapo_openrlhf.methods.base import Method

__all__ = ["BAPO", "BAPOConfig", "Method"]
