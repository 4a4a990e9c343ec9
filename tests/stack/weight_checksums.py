"""An actor worker and a rollout engine that tell the digests of their weights, tensor by tensor.

The module must be on PYTHONPATH, so that Ray's workers can import it.
"""

from collections.abc import Mapping

import ray
import torch
from weight_digests import digests, of_vllm_worker

from bapo_openrlhf.training.engine import engines
from bapo_openrlhf.training.worker import workers

# vLLM stacks these projections in one tensor, in the output dimension.
STACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def stacked(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of a Hugging Face model under vLLM's names, with the projections stacked as in vLLM."""
    result: dict[str, torch.Tensor] = {}
    parts = {part: (whole, members) for whole, members in STACKED.items() for part in members}
    for name, weight in weights.items():
        key = next((part for part in parts if f".{part}." in name), None)
        if key is None:
            result[name] = weight
            continue
        whole, members = parts[key]
        if key == members[0]:
            result[name.replace(key, whole)] = torch.cat([weights[name.replace(key, part)] for part in members])
    return result


class ChecksumEngine(engines.RolloutEngine):
    async def weight_checksums(self) -> dict[str, str]:
        """The digest of each weight tensor by vLLM's name, from the first worker of this engine."""
        return (await self.llm.collective_rpc(of_vllm_worker))[0]


class ChecksumWorker(workers.PolicyWorker):
    def weight_checksums(self) -> dict[str, str]:
        """The digest of each weight tensor by vLLM's name. It needs whole tensors, which no rank has under ZeRO-3."""
        return digests(stacked(dict(self.actor.model.module.named_parameters())).items())


ChecksumEngineActor = ray.remote(ChecksumEngine)
ChecksumPolicyActor = ray.remote(num_gpus=1)(ChecksumWorker)
