"""The rollout engine (a Ray actor around vLLM), with a look at the weights it holds."""

from __future__ import annotations

from typing import Any

import ray
from openrlhf.trainer.ray.vllm_engine import RolloutRayActor

from bapo_openrlhf.integration.checksums import digests
from bapo_openrlhf.integration.pinned import plain_class


def _worker_digests(worker: Any) -> dict[str, str]:
    """Runs in each vLLM worker."""
    return digests(worker.model_runner.model.named_parameters())


class RolloutEngine(plain_class(RolloutRayActor)):
    """OpenRLHF's rollout engine that can tell which weights it holds."""

    async def weight_checksums(self) -> dict[str, str]:
        """Digest of each weight tensor by vLLM's name, from the first worker of this engine."""
        results = await self.llm.collective_rpc(_worker_digests)
        return results[0]


AdaptedRolloutActor = ray.remote(RolloutEngine)
