"""Log-probs and entropies of response tokens, without the logits of all positions in float32.

OpenRLHF's actor turns the logits of all positions, (B, S, V), into float32, and keeps several copies of this size until
the backward pass. The loss needs only the log-prob and the entropy of the response tokens. Here the output head takes
only the positions of these tokens, and its logits become float32 in tiles. docs/performance.md has what this saves.

For a token with logits x (after the temperature), log-sum-exp l and p = exp(x - l):

    log-prob    x[label] - l                  its gradient   onehot(label) - p
    entropy     h = l - sum(p x)              its gradient   -p (x - l + h)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from openrlhf.models import Actor
from openrlhf.models.ring_attn_utils import gather_and_pad_tensor, unpad_and_slice_tensor
from openrlhf.utils.logging_utils import init_logger

from bapo_openrlhf.training.contract import extends

logger = init_logger(__name__)

BLOCK = 2**27  # logits (N, V') that are held at a time: 256 MiB in bfloat16
TILE = {"cpu": 2**19}  # logits that are in float32 at a time: on a CPU they should fit into its cache
TILE_ON_GPU = 2**26


class _TokenLogProbs(torch.autograd.Function):
    """See `token_log_probs`.

    The vocabulary is cut into blocks of so many columns that a block's logits have at most BLOCK elements. So each row
    of the head's gradient is one product, which is rounded once. If there is only one block, its logits are kept for
    the backward pass. Otherwise they are computed again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        temperature: float,
        entropy: bool,
    ) -> torch.Tensor:
        tokens, vocabulary = len(hidden), len(weight)
        columns = min(vocabulary, max(1, BLOCK // max(tokens, 1)))
        blocks = [slice(start, start + columns) for start in range(0, vocabulary, columns)]
        total = hidden.new_full((tokens,), -torch.inf, dtype=torch.float32)  # l over the blocks so far
        mean = torch.zeros_like(total)  # sum(p x) over the blocks so far, with the p of these blocks
        chosen = torch.empty_like(total)
        logits = None
        for block in blocks:
            logits = torch.nn.functional.linear(hidden, weight[block], None if bias is None else bias[block])
            for rows in _tiles(logits):
                x = _scaled(logits[rows], temperature)
                before, found = total[rows], torch.logsumexp(x, -1)
                after = found if len(blocks) == 1 else torch.logaddexp(before, found)
                inside, places = _in_block(labels[rows], block)
                chosen[rows] = torch.where(inside, x.gather(-1, places).squeeze(-1), chosen[rows])
                if entropy:
                    shares = (x - found.unsqueeze(-1)).exp_()
                    here = shares.mul_(x).sum(-1) * (found - after).exp()
                    mean[rows] = here if len(blocks) == 1 else mean[rows] * (before - after).exp() + here
                total[rows] = after
        answer = torch.stack([chosen - total, total - mean] if entropy else [chosen - total], -1)
        ctx.save_for_backward(hidden, weight, bias, labels, total, mean)
        ctx.temperature, ctx.entropy, ctx.blocks = temperature, entropy, blocks
        ctx.logits = logits if len(blocks) == 1 and any(ctx.needs_input_grad) else None
        return answer

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, labels, total, mean = ctx.saved_tensors
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        of_hidden = torch.zeros_like(hidden, dtype=torch.float32) if for_hidden else None
        of_weight = torch.empty_like(weight) if for_weight else None
        of_bias = torch.empty_like(bias) if for_bias else None
        for block in ctx.blocks:
            logits, ctx.logits = ctx.logits, None
            if logits is None:
                logits = torch.nn.functional.linear(hidden, weight[block], None if bias is None else bias[block])
            for rows in _tiles(logits):
                x = _scaled(logits[rows], ctx.temperature)
                shares = (x - total[rows, None]).exp_()
                towards = gradient[rows, :1]
                if ctx.entropy:
                    of_x = x.sub_(mean[rows, None]).mul_(gradient[rows, 1:]).add_(towards).mul_(shares).neg_()
                else:
                    of_x = shares.mul_(-towards)
                inside, places = _in_block(labels[rows], block)
                of_x.scatter_add_(-1, places, torch.where(inside[:, None], towards, 0))
                logits[rows] = of_x.div_(ctx.temperature)  # the gradient takes the place of the logits
            if of_hidden is not None:
                of_hidden = logits @ weight[block] if len(ctx.blocks) == 1 else of_hidden + logits @ weight[block]
            if of_weight is not None:
                torch.mm(logits.T, hidden, out=of_weight[block])
            if of_bias is not None:
                of_bias[block] = logits.sum(0)
        return None if of_hidden is None else of_hidden.to(hidden.dtype), of_weight, of_bias, None, None, None


def _tiles(logits: torch.Tensor) -> Iterator[slice]:
    """The rows of each tile."""
    rows = max(1, TILE.get(logits.device.type, TILE_ON_GPU) // logits.shape[-1])
    return (slice(start, start + rows) for start in range(0, len(logits), rows))


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """A copy of the logits in float32, divided by the temperature."""
    x = logits.to(torch.float32, copy=True)
    return x if temperature == 1 else x.div_(temperature)


def _in_block(labels: torch.Tensor, block: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each label is in the block, bool of shape (n,), and its column there (otherwise 0), of shape (n, 1)."""
    inside = (labels >= block.start) & (labels < block.stop)
    return inside, torch.where(inside, labels - block.start, 0).unsqueeze(-1)


def token_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
) -> torch.Tensor:
    """Log-probs of tokens, and the entropies of their distributions.

    As in OpenRLHF, logits have the dtype of the head, and everything after them is computed in float32.

    Args:
        hidden: Inputs of the output head, (N, H).
        weight: The head's weight, (V, H).
        bias: The head's bias, (V,); None if it has none.
        labels: The tokens, (N,).
        temperature: The logits are divided by it.
        entropy: Whether entropies are wanted.

    Returns:
        float32 of shape (N, 2), log-probs and entropies in nats; (N, 1) without entropies.
    """
    return _TokenLogProbs.apply(hidden, weight, bias, labels, temperature, entropy)


class SlicedActor(Actor):
    """OpenRLHF's actor, which computes log-probs and entropies only of response tokens, in tiles.

    Other positions have 0. OpenRLHF multiplies them by 0, or masks them.

    A model is run as OpenRLHF runs it if its output head is not one matrix (tensor parallelism cuts it), or if the
    model changes the logits after the head (as Gemma 2 does).
    """

    sliced = True

    @extends(Actor)
    def forward(
        self,
        sequences: torch.Tensor,
        action_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        return_output: bool = False,
        ring_attn_group: Any = None,
        return_entropy: bool = False,
        **others: Any,
    ) -> Any:
        """Log-probs of the response tokens, float32 of shape (B, A), and the model's output if it is wanted."""
        plain = {"attention_mask": attention_mask, "ring_attn_group": ring_attn_group, **others}
        head = self.model.get_output_embeddings()
        if action_mask is None or not self.sliced or type(head) is not torch.nn.Linear:
            return super().forward(
                sequences, action_mask, return_output=return_output, return_entropy=return_entropy, **plain
            )
        batch, length = sequences.shape
        wanted = torch.zeros_like(sequences)  # position t predicts token t + 1
        wanted[:, length - 1 - action_mask.shape[1] : -1] = action_mask
        labels, unpacked = torch.roll(sequences, shifts=-1, dims=1), None
        if self.packing_samples:
            wanted, *_ = unpad_and_slice_tensor(wanted, attention_mask, ring_attn_group)
            _, _, labels, *unpacked = unpad_and_slice_tensor(sequences, attention_mask, ring_attn_group)
        places = wanted.flatten().nonzero().squeeze(-1)
        labels = labels.flatten()[places]

        def answer(hidden: torch.Tensor) -> torch.Tensor:
            rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, places)
            found = token_log_probs(
                rows, head.weight, head.bias, labels, temperature=temperature, entropy=return_entropy
            )
            nothing = found.new_zeros(hidden.shape[:-1].numel(), found.shape[-1])
            answers.append(nothing.index_copy(0, places, found).view(*hidden.shape[:-1], -1))
            return answers[-1]

        answers: list[torch.Tensor] = []
        temperature, self.temperature = self.temperature, 1.0  # OpenRLHF would divide the answer by it
        try:
            with _answering(head, answer):
                output = super().forward(sequences, return_output=True, **plain)
        finally:
            self.temperature = temperature
        found = output["logits"]
        if found.data_ptr() != answers[0].data_ptr():
            self.sliced = False
            logger.info("the model changes its logits after the output head, so they are computed for all positions")
            return self.forward(
                sequences, action_mask, return_output=return_output, return_entropy=return_entropy, **plain
            )
        parts = found.unbind(-1)
        if unpacked is not None:
            padding, indices = unpacked
            parts = [gather_and_pad_tensor(part, ring_attn_group, padding, indices, batch, length) for part in parts]
        if return_entropy:
            output.entropy = parts[1][:, :-1]
        log_probs = parts[0][:, length - 1 - action_mask.shape[1] : -1] * action_mask.float()
        return (log_probs, output) if return_output else log_probs


@contextmanager
def _answering(head: torch.nn.Linear, answer: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Within the block, the head returns what `answer` makes of its input.

    The head stays the module that is called, because ZeRO-3 gathers its weight only for the time of the call.
    """
    head.forward = answer
    try:
        yield
    finally:
        del head.forward
