"""What a run proves of itself in its first steps: engine and actor are the same policy, and the first ratio is 1.

Most of what makes a run train on other numbers than its record says shows here: a second set of weights in the model's
folder, a tensor or an adapter that a sync does not bring, a layer that vLLM computes in another way, noise of a model
that is in training.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ray
from transformers import AutoConfig

from bapo_openrlhf.adapt.shift import ENOUGH, USUAL_KL
from bapo_openrlhf.training.trainer.experience import BatchExperience
from bapo_openrlhf.training.trainer.run_state import RunState
from bapo_openrlhf.training.wire.packing import FIRST_RATIO

READ = (
    "Usually they have read other weights, because {model} has a second set of them beside those that its index names, "
    "or vLLM computes this model in another way than transformers (rope scaling, attention, code of its own)"
)
SENT = (
    "Usually a part of the weights did not reach the engines: an adapter, or a tensor that vLLM names differently. It "
    "may also be that vLLM computes this model in another way than transformers"
)
AGENT = ". Or the agent does not sample with the parameters that it is given"


class Proof:
    """Ends a run that does not prove what it must, before it trains on it.

    Engine and actor are compared on responses that today's weights generated from their first token on. This is done in
    the first step of this process, so also after a resume, and in the first steps that follow a sync after an update,
    because an adapter that never arrives is 0 before. Steps are added up until there are ENOUGH tokens. Later, a gap is
    only warned of. A run ahead of training has such responses only in its first step, and if it re-evaluates.
    """

    def __init__(
        self, args: SimpleNamespace, *, state: RunState, warn: Callable[[int, str, str], None], actor: Any
    ) -> None:
        self.args, self.state, self.warn, self.actor = args, state, warn, actor
        self._began: int | None = None  # `weights_since` when this process began
        self._seen: dict[bool, tuple[int, float]] = {}  # by whether an update came before: tokens, and sum of their k3
        self._first_ratio_is_1 = False

    def check_gap(self) -> None:
        """Look at the gap of engine and actor, if it was measured in this step.

        Raises:
            RuntimeError: It is above --adapt.max_gap.
        """
        state, gap, most = self.state, self.state.gap, self.args.adapt.max_gap
        if gap.step != state.step:
            return
        self._began = state.weights_since if self._began is None else self._began
        is_after_update, tokens, total = state.weights_since > self._began, gap.tokens, gap.kl * gap.tokens
        tokens_before, kl_before = self._seen.get(is_after_update, (0, 0.0))
        if is_decisive := tokens_before < ENOUGH:
            tokens, total = self._seen[is_after_update] = tokens + tokens_before, total + kl_before
        kl = total / max(tokens, ENOUGH)
        if kl <= min(USUAL_KL, most):
            return
        finding = (
            f"engine and actor differ by a KL divergence (k3) of {total / tokens:.2g} in each of {tokens} tokens of "
            f"today's weights, and rounding explains {USUAL_KL:g}"
        )
        reason = reason_to_differ(self.args)
        if is_decisive and not reason and kl > most:
            cause = SENT if state.weights_since else READ.format(model=self.args.actor.model_name_or_path)
            cause += AGENT if self.args.train.agent_func_path else ""
            raise RuntimeError(f"{finding}; adapt.max_gap is {most:g}, so they are not the same policy. {cause}")
        self.warn(state.step + 1, "gap", finding + (f"; {reason}" if reason else ""))

    def before_update(self, experience: BatchExperience) -> None:
        """Let the actor look at the ratio of its first optimizer step, if all tokens of the batch must have 1."""
        has_dropout = self.args.adapt.keep_dropout or (self.args.ds.lora.rank and self.args.ds.lora.dropout)
        if self._first_ratio_is_1 or has_dropout:
            return
        is_exact = self.args.adapt.ratio == "decoupled" or all(origin.on_policy for origin in experience.origins)
        limit = self.state.gap.explained if is_exact else None
        ray.get(self.actor.async_run_method(method_name="expect_first_ratio", limit=limit))

    def after_update(self, status: dict[str, Any]) -> None:
        """Note whether the actor has looked. It is no metric: a resumed run looks again, and its rows would differ."""
        self._first_ratio_is_1 |= status.pop(FIRST_RATIO, None) is not None


def reason_to_differ(args: SimpleNamespace) -> str | None:
    """Why engine and actor of a run differ by more than rounding with the same weights; None if they do not."""
    if args.rollout.top_p < 1:
        return f"rollout.top_p is {args.rollout.top_p:g}, and the engines' log-probs are of the truncated distribution"
    name = args.actor.model_name_or_path
    config = AutoConfig.from_pretrained(name, trust_remote_code=True).to_dict()
    if config.get("quantization_config"):
        return f"{name} is quantized"
    settings = config | (config.get("text_config") or {})
    if any("experts" in key and type(value) is int and value > 1 for key, value in settings.items()):
        return f"{name} is a mixture of experts, and a rounding may choose another expert"
    return None
