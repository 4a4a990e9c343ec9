"""Log-probs and entropies of response tokens, without the logits of all positions in float32.

OpenRLHF's actor turns the logits of all positions, (B, S, V), into float32, and keeps several copies of this size. Here
the output head takes only the positions of response tokens, and logits become float32 in tiles (docs/performance.md).

For a token with logits x (after the temperature), log-sum-exp l and p = exp(x - l):

    log-prob    x[label] - l                  its gradient   onehot(label) - p
    entropy     h = l - sum(p x)              its gradient   -p (x - l + h)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from openrlhf.models import Actor
from openrlhf.models.ring_attn_utils import gather_and_pad_tensor, unpad_and_slice_tensor
from openrlhf.utils.logging_utils import init_logger

from bapo_openrlhf.host import extends

logger = init_logger(__name__)

BLOCK = 2**27  # logits (N, V') that are held at a time: 256 MiB in bfloat16
TILE = {"cpu": 2**19}  # logits that are in float32 at a time: on a CPU they should fit into its cache
TILE_ON_GPU = 2**26


class _TokenLogProbs(torch.autograd.Function):
    """The logits of a single block are kept for the backward pass. Those of several are computed again."""

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
        # Blocks have whole columns, so that each row of the head's gradient is one product, which is rounded once.
        columns = min(vocabulary, max(1, BLOCK // max(tokens, 1)))
        blocks = [slice(start, start + columns) for start in range(0, vocabulary, columns)]
        total = hidden.new_full((tokens,), -torch.inf, dtype=torch.float32)  # l over the blocks so far
        mean = torch.zeros_like(total)  # sum(p x) over the blocks so far, with the p of these blocks
        label_logits = torch.empty_like(total)
        logits = None
        for block in blocks:
            logits = torch.nn.functional.linear(hidden, weight[block], None if bias is None else bias[block])
            for rows in _tiles(logits):
                x = _scaled(logits[rows], temperature)
                l_old, l_block = total[rows], torch.logsumexp(x, -1)
                l_new = l_block if len(blocks) == 1 else torch.logaddexp(l_old, l_block)
                in_block, places = _in_block(labels[rows], block)
                label_logits[rows] = torch.where(in_block, x.gather(-1, places).squeeze(-1), label_logits[rows])
                if entropy:
                    p = (x - l_block.unsqueeze(-1)).exp_()
                    block_mean = p.mul_(x).sum(-1) * (l_block - l_new).exp()
                    mean[rows] = block_mean if len(blocks) == 1 else mean[rows] * (l_old - l_new).exp() + block_mean
                total[rows] = l_new
        answer = torch.stack([label_logits - total, total - mean] if entropy else [label_logits - total], -1)
        ctx.save_for_backward(hidden, weight, bias, labels, total, mean)
        ctx.temperature, ctx.entropy, ctx.blocks = temperature, entropy, blocks
        ctx.logits = logits if len(blocks) == 1 and any(ctx.needs_input_grad) else None
        return answer

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, labels, total, mean = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None
        d_weight = torch.empty_like(weight) if needs_weight else None
        d_bias = torch.empty_like(bias) if needs_bias else None
        for block in ctx.blocks:
            logits, ctx.logits = ctx.logits, None
            if logits is None:
                logits = torch.nn.functional.linear(hidden, weight[block], None if bias is None else bias[block])
            for rows in _tiles(logits):
                x = _scaled(logits[rows], ctx.temperature)
                p = (x - total[rows, None]).exp_()
                d_label = gradient[rows, :1]
                if ctx.entropy:
                    d_x = x.sub_(mean[rows, None]).mul_(gradient[rows, 1:]).add_(d_label).mul_(p).neg_()
                else:
                    d_x = p.mul_(-d_label)
                in_block, places = _in_block(labels[rows], block)
                d_x.scatter_add_(-1, places, torch.where(in_block[:, None], d_label, 0))
                logits[rows] = d_x.div_(ctx.temperature)  # the gradient takes the place of the logits
            if d_hidden is not None:
                d_hidden = logits @ weight[block] if len(ctx.blocks) == 1 else d_hidden + logits @ weight[block]
            if d_weight is not None:
                torch.mm(logits.T, hidden, out=d_weight[block])
            if d_bias is not None:
                d_bias[block] = logits.sum(0)
        return None if d_hidden is None else d_hidden.to(hidden.dtype), d_weight, d_bias, None, None, None


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
    in_block = (labels >= block.start) & (labels < block.stop)
    return in_block, torch.where(in_block, labels - block.start, 0).unsqueeze(-1)


def token_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
) -> torch.Tensor:
    """Log-probs of tokens, and entropies in nats: float32 of shape (N, 2), or (N, 1) without entropies.

    As in OpenRLHF, logits have the dtype of the head, and everything after them is computed in float32. The inputs of
    the head have the shape (N, H), its weight (V, H), its bias (V,), and the tokens (N,).
    """
    return _TokenLogProbs.apply(hidden, weight, bias, labels, temperature, entropy)


@dataclass
class TokenRequest:
    """Tokens whose log-probs an output head is asked for, and what it answered (`TokenHead.forward`).

    `places` are positions in the flattened input of the head, (N,), and `labels` the tokens that these predict, (N,).
    """

    places: torch.Tensor
    labels: torch.Tensor
    temperature: float
    entropy: bool
    answer: torch.Tensor | None = None


class TokenHead(torch.nn.Linear):
    """An output head with the weight of another one. It can be asked for log-probs in the place of its logits."""

    request: TokenRequest | None = None  # None while it gives logits

    @classmethod
    def of(cls, head: torch.nn.Linear) -> Self:
        """A head with the parameters of `head`: the same objects, so that embeddings stay tied."""
        token_head = cls(head.in_features, head.out_features, bias=head.bias is not None, device="meta")
        token_head.weight, token_head.bias = head.weight, head.bias
        return token_head.train(head.training)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits; or log-probs and entropies at the places that it is asked for, and 0 at the others.

        The answer has the leading dimensions of `hidden`, and 2 columns, or 1 without entropies.
        """
        request = self.request
        if request is None:
            return super().forward(hidden)
        rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, request.places)
        log_probs = token_log_probs(
            rows, self.weight, self.bias, request.labels, temperature=request.temperature, entropy=request.entropy
        )
        zeros = log_probs.new_zeros(hidden.shape[:-1].numel(), log_probs.shape[-1])
        request.answer = zeros.index_copy(0, request.places, log_probs).view(*hidden.shape[:-1], -1)
        return request.answer


class SlicedActor(Actor):
    """OpenRLHF's actor, which computes log-probs and entropies only of response tokens. Other positions have 0.

    A model is run as OpenRLHF runs it if its output head is not one matrix, because tensor parallelism cuts one that is
    not that of the embeddings, or if the model changes the logits after the head (as Gemma 2 does).
    """

    sliced = True

    @extends(Actor)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, and put a `TokenHead` into it, before DeepSpeed wraps it."""
        super().__init__(*args, **kwargs)
        head = self.model.get_output_embeddings()
        if type(head) is torch.nn.Linear:
            self.model.set_output_embeddings(TokenHead.of(head))

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
        """Log-probs of response tokens, float32 (B, A), and the output if wanted. Its `entropy` is (B, S - 1)."""
        inputs = {"attention_mask": attention_mask, "ring_attn_group": ring_attn_group, **others}
        wanted = {"return_output": return_output, "return_entropy": return_entropy}
        head = self.model.get_output_embeddings()
        if action_mask is None or not self.sliced or type(head) is not TokenHead:
            return super().forward(sequences, action_mask, **inputs, **wanted)
        batch, length = sequences.shape
        mask = torch.zeros_like(sequences)  # position t predicts token t + 1
        mask[:, length - 1 - action_mask.shape[1] : -1] = action_mask
        labels = torch.roll(sequences, shifts=-1, dims=1)
        if self.packing_samples:
            mask, *_ = unpad_and_slice_tensor(mask, attention_mask, ring_attn_group)
            _, _, labels, padding, indices = unpad_and_slice_tensor(sequences, attention_mask, ring_attn_group)
        places = mask.flatten().nonzero().squeeze(-1)
        head.request = request = TokenRequest(places, labels.flatten()[places], self.temperature, return_entropy)
        self.temperature = 1.0  # the head divides by it, and OpenRLHF must not do it again
        try:
            output = super().forward(sequences, return_output=True, **inputs)
        finally:
            head.request, self.temperature = None, request.temperature
        answer = output["logits"]  # under ZeRO-3, a hook of DeepSpeed's makes another object of the same memory
        if answer.shape != request.answer.shape or answer.data_ptr() != request.answer.data_ptr():
            self.sliced = False
            logger.info("the model changes its logits after the output head, so they are computed for all positions")
            return self.forward(sequences, action_mask, **inputs, **wanted)
        parts = answer.unbind(-1)
        if self.packing_samples:
            parts = [gather_and_pad_tensor(part, ring_attn_group, padding, indices, batch, length) for part in parts]
        if return_entropy:
            output.entropy = parts[1][:, :-1]
        log_probs = parts[0][:, length - 1 - action_mask.shape[1] : -1] * action_mask.float()
        return (log_probs, output) if return_output else log_probs
