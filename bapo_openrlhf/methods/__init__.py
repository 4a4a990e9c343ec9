"""Methods: how a batch is made from groups. Each method is one file."""

from bapo_openrlhf.methods.bapo import BAPO
from bapo_openrlhf.methods.base import Method

__all__ = ["BAPO", "Method"]
