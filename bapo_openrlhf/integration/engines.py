"""The rollout engine (a Ray actor around vLLM), with a look at the weights it holds."""

from __future__ import annotations

import hashlib
from typing import Any

import ray
import torch
from openrlhf.trainer.ray.vllm_engine import RolloutRayActor

from bapo_openrlhf.integration.joints import plain_class


def _checksums(worker: Any) -> dict[str, str]:
    """Runs in each vLLM worker: a digest of every weight tensor the model holds now."""
    digests = {}
    for name, weight in worker.model_runner.model.named_parameters():
        data = weight.detach().cpu().contiguous().flatten()
        # Bytes, for numpy knows no bfloat16.
        digests[name] = hashlib.blake2b(data.view(dtype=torch.uint8).numpy().tobytes()).hexdigest()
    return digests


class RolloutEngine(plain_class(RolloutRayActor)):
    """OpenRLHF's rollout engine that can tell which weights it holds."""

    async def weight_checksums(self) -> dict[str, str]:
        """Digest of each weight tensor by vLLM's name, from the first worker of this engine."""
        results = await self.llm.collective_rpc(_checksums)
        return results[0]


AdaptedRolloutActor = ray.remote(RolloutEngine)
