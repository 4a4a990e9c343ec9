"""What gpu_floor.py does its work with: a step's description, and a model with a bare PyTorch optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Batch = dict[str, "torch.Tensor"]
"""A micro-batch: `sequences` and `attention_mask` of shape (B, S), `action_mask` of shape (B, A)."""


@dataclass
class Step:
    """What a step does.

    Attributes:
        calls: a list of groups for each call of the engine: (token ids of the prompt, lengths of its responses).
        forward: micro-batches of the forward passes of actor, critic and reference, by model.
        train: micro-batches of training, by model. One optimizer step follows them.
        syncs: number of weight syncs.
    """

    calls: list[list[tuple[list[int], list[int]]]] = field(default_factory=list)
    forward: dict[str, list[Batch]] = field(default_factory=dict)
    train: dict[str, list[Batch]] = field(default_factory=dict)
    syncs: int = 0


def head(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *, entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs of the labels and the entropies, shape (N,), of the hidden states (N, H) under the head (V, H)."""
    import torch

    log_probs = torch.nn.functional.linear(hidden, weight).float().log_softmax(-1)
    chosen = log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return chosen, -(log_probs.exp() * log_probs).sum(-1) if entropy else None


class Trained:
    """A model with AdamW as the stack has it: bfloat16 in the passes, float32 weights and moments in the optimizer."""

    def __init__(self, folder: str, *, critic: bool, device: str = "cpu") -> None:
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)
        self.model, self.weight = model, model.lm_head.weight
        trained = list((model.model if critic else model).parameters())
        if critic:
            zeros = torch.zeros(1, model.config.hidden_size, dtype=torch.bfloat16, device=device)
            self.weight = torch.nn.Parameter(zeros)
            trained.append(self.weight)
        self.parameters = trained
        self.masters = [parameter.detach().float() for parameter in trained]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-6, weight_decay=0.0, fused=True)

    def hidden(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states before the response tokens, (N, H), and these tokens, (N,)."""
        mask, count = batch["attention_mask"], batch["action_mask"].shape[1]
        places = (mask.long().cumsum(-1) - 1).masked_fill_(mask == 0, 1)
        output = self.model.model(batch["sequences"], attention_mask=mask, position_ids=places, use_cache=False)
        chosen = batch["action_mask"].bool()
        return output.last_hidden_state[:, -count - 1 : -1][chosen], batch["sequences"][:, -count:][chosen]

    def update(self) -> None:
        """Clip the gradients, step, and round the weights."""
        import torch

        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)
