"""From samples to experience: importance ratios, the KL target and group-relative advantages.

OpenRLHF's experience maker computes log-probs with today's actor and values with today's critic, for replayed samples
as for fresh ones. This module decides three more things: the policy in the denominator of the PPO ratio, the policy
that the KL penalty pulls to, and how group-relative advantages are normalised (Eq. 2).

A batch passes the experience maker in two halves, because the review of the batch comes between them:
`origins_of` -> `forward` -> `ForwardPass` -> review -> `finish` -> `BatchExperience`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from openrlhf.models.utils import compute_approx_kl
from openrlhf.trainer.ppo_utils.experience import Experience

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.corrections import second_moment_mask
from bapo_openrlhf.adapt.first_update import SourceTokens
from bapo_openrlhf.adapt.group import Group, Response
from bapo_openrlhf.adapt.shift import TokenSums
from bapo_openrlhf.adapt.staleness import nonfinite
from bapo_openrlhf.adapt.vocabulary import SOURCES
from bapo_openrlhf.training.trainer.advantages import set_advantages
from bapo_openrlhf.training.trainer.dealing import DealtBatch, forward_parts
from bapo_openrlhf.training.trainer.reference import ReferenceLogProbs
from bapo_openrlhf.training.trainer.samples import sample_of


@dataclass(frozen=True)
class SampleOrigin:
    """A response that is trained on, and where it comes from.

    Attributes:
        source: One of fresh, reevaluated and replayed.
        on_policy: Whether today's weights generated it.
        group: The group that it belongs to.
        response: The response.
    """

    source: str
    on_policy: bool
    group: Group
    response: Response

    def sample(self) -> Experience:
        """The response as OpenRLHF's sample."""
        return sample_of(self.group.prompt, self.response)


def origins_of(batch: Batch, since: int) -> list[SampleOrigin]:
    """The responses of a batch that is trained on with the weights that the actor has had since trainer step `since`.

    They are in the order of `Batch.with_sources`.
    """
    return [
        SampleOrigin(source, group.weights_version_of(response) >= since, group, response)
        for source, group in batch.with_sources()
        for response in group.responses
    ]


@dataclass(frozen=True)
class ForwardPass:
    """What today's models say of a batch.

    Attributes:
        experiences: OpenRLHF's forward-pass batches with log-probs, values and KL. Their `index` has the positions of
            their samples.
        origins: Where each sample comes from.
        log_ratios: log pi_today(y|x) - log alpha(y|x) of each sample, summed over its tokens, shape (N,).
        sums: Other sums over the tokens of each sample.
        reference_kept: Number of generated tokens that were not sent to the reference model.
    """

    experiences: list[Experience]
    origins: Sequence[SampleOrigin]
    log_ratios: np.ndarray
    sums: TokenSums
    reference_kept: int


@dataclass(frozen=True)
class BatchExperience(ForwardPass):
    """What comes out of the experience maker: the experience of the samples that stayed, and numbers about it.

    Attributes:
        tokens: What the loss takes of each source's tokens.
        baseline: Metrics of the choice of the baseline (`advantages.choose_baseline`); none without a critic.
        masked: Share of the tokens that --adapt.max_second_moment leaves out; None without this limit.
    """

    tokens: Mapping[str, SourceTokens]
    baseline: Mapping[str, float]
    masked: float | None


class ExperienceMaker:
    """Makes experience of a batch of three sources, on any number of ranks.

    The ranks of every model pass shares that differ by at most one sample (`dealing`), and each response passes the
    reference model only once (`reference_name`).

    Args:
        args: OpenRLHF's (nested) arguments.
        actor, critic, reference: OpenRLHF's groups of the models' processes; None if the run has no such model.
        kl_ctl: OpenRLHF's. It has the coefficient of the KL penalty.
        pad: Token id of the padding.
        reference_name: Name of the reference model, see `ReferenceLogProbs`.
    """

    def __init__(
        self, args: SimpleNamespace, actor: Any, critic: Any, reference: Any, *, kl_ctl: Any, pad: int,
        reference_name: str = "",
    ) -> None:  # fmt: skip
        self.args, self.actor, self.critic, self.reference = args, actor, critic, reference
        self.kl_ctl, self.pad, self.reference_name = kl_ctl, pad, reference_name

    @torch.no_grad()
    def forward(self, origins: Sequence[SampleOrigin], *, policies: bool = True) -> ForwardPass:
        """Pass a batch through today's models. An empty one passes none.

        Args:
            origins: The responses of the batch.
            policies: Whether actor and reference pass it, too. If not, all log ratios and all KL are 0.
        """
        if not origins:
            return ForwardPass([], [], np.zeros(0), TokenSums(*np.zeros((len(TokenSums._fields), 0))), 0)
        known = ReferenceLogProbs(self.reference_name, [origin.response for origin in origins])
        experiences = self._pass(self._deal([origin.sample() for origin in origins]), known, policies=policies)
        log_ratios = np.zeros(len(origins))
        sums = TokenSums(*np.zeros((len(TokenSums._fields), len(origins))))
        for experience in experiences if policies else ():
            ratios = token_log_ratios(experience).numpy()
            log_ratios[experience.index] = ratios.sum(-1)
            for whole, part in zip(sums, TokenSums.of(ratios, experience.action_mask.bool().numpy()), strict=True):
                whole[experience.index] = part
        kept = known.kept_tokens if policies and self.reference is not None else 0
        return ForwardPass(experiences, origins, log_ratios, sums, kept)

    @torch.no_grad()
    def finish(self, passed: ForwardPass, kept: Sequence[int], *, monte_carlo: bool = False) -> BatchExperience:
        """Make the experience of the samples that stay: old log-probs, KL target and advantages.

        Args:
            passed: What today's models say of the batch.
            kept: Positions of the samples that stay, in order; at least one.
            monte_carlo: Whether the returns are Monte Carlo returns. If so, --adapt.critic_lambd is not used.
        """
        origins, experiences = self._kept(passed, kept)
        corrections, loss_log_ratios = self._corrections(experiences, origins), []
        for experience in experiences:
            log_probs = experience.action_log_probs
            self._set_policies(experience, [origins[place].on_policy for place in experience.index])
            loss_log_ratios.append(self._loss_log_ratio(log_probs, experience))
        fresh = np.array([origin.source == "fresh" for origin in origins])
        baseline = self._set_advantages(experiences, origins, corrections, fresh, monte_carlo=monte_carlo)
        log_ratios, sums = passed.log_ratios[list(kept)], passed.sums.at(list(kept))
        masked = self._mask_moved(experiences, loss_log_ratios)
        tokens = {source: source_tokens(source, experiences, loss_log_ratios, origins) for source in SOURCES}
        kept_tokens = passed.reference_kept
        return BatchExperience(experiences, origins, log_ratios, sums, kept_tokens, tokens, baseline, masked)

    @torch.no_grad()
    def for_critic(self, groups: Sequence[Group], since: int) -> list[Experience]:
        """Values and returns of groups that only the critic trains on, made as those of the batch are.

        Actor and reference pass them only if the returns need it: because of a KL penalty in the reward, or because
        V-trace corrects for the policy of a response. Then groups whose log-probs are not finite are left out.

        Args:
            groups: The groups.
            since: First trainer step with today's weights.
        """
        origins, adapt = origins_of(Batch(fresh=list(groups)), since), self.args.adapt
        penalised = self.kl_ctl.value > 0 and not self.args.algo.kl.use_loss
        has_kl = penalised and (adapt.kl_target == "behaviour" or self.reference is not None)
        corrects = adapt.returns == "vtrace" and not all(origin.on_policy for origin in origins)
        passed = self.forward(origins, policies=has_kl or corrects)
        sizes = [group.size for group in groups]
        kept = np.flatnonzero(np.repeat(~nonfinite(passed.log_ratios, sizes), sizes)).tolist()
        if not kept:
            return []
        origins, experiences = self._kept(passed, kept)
        if has_kl or corrects:
            corrections = self._corrections(experiences, origins)
        else:
            corrections = [np.zeros(experience.action_mask.shape) for experience in experiences]
        if has_kl and adapt.kl_target == "behaviour":
            for experience in experiences:
                self._pull_towards_behaviour(experience)
        self._set_advantages(experiences, origins, corrections)
        return experiences

    def make_experience_batch(self, experience: list[Experience]) -> list[Experience]:
        """OpenRLHF's training step calls this. It gets the experience that `finish` has made, and passes it on."""
        return experience

    def _kept(self, passed: ForwardPass, kept: Sequence[int]) -> tuple[list[SampleOrigin], list[Experience]]:
        """The origins and the experience of the samples at these positions, dealt again if they are not all."""
        origins, experiences = [passed.origins[place] for place in kept], passed.experiences
        if len(kept) < len(passed.origins):
            rows = {place: (e, row) for e in experiences for row, place in enumerate(e.index)}
            experiences = list(self._deal([row_of(*rows[place]) for place in kept]).batches)
        return origins, experiences

    def _corrections(self, experiences: Sequence[Experience], origins: Sequence[SampleOrigin]) -> list[np.ndarray]:
        """The log ratios that V-trace corrects for, of each experience; none without V-trace."""
        if self.args.adapt.returns != "vtrace":
            return []
        return [off_policy_log_ratios(e, [origins[place].on_policy for place in e.index]) for e in experiences]

    def _set_advantages(
        self,
        experiences: Sequence[Experience],
        origins: Sequence[SampleOrigin],
        corrections: Sequence[np.ndarray],
        fresh: np.ndarray | None = None,
        *,
        monte_carlo: bool = False,
    ) -> dict[str, float]:
        return set_advantages(
            experiences,
            [origin.group for origin in origins],
            self.args,
            kl_coefficient=self.kl_ctl.value,
            critic_lambd=1.0 if monte_carlo else self.args.adapt.critic_lambd,
            log_ratios=corrections,
            fresh=fresh,
        )

    def _deal(self, samples: list[Experience]) -> DealtBatch:
        cut = partial(forward_parts, self.args)
        return DealtBatch(samples, self.actor, cut, self.pad)

    def _pass(self, dealt: DealtBatch, known: ReferenceLogProbs, *, policies: bool = True) -> list[Experience]:
        """Pass a batch through today's models. Returns its forward-pass batches with log-probs, values and KL.

        All models are asked before the first answer is awaited. But models that share GPUs (`--train.colocate_*`) are
        asked one after the other, and each empties its cache.

        Args:
            dealt: The samples. Only those that `known` lacks go to the reference model.
            known: The log-probs under the reference model. It gets those that were unknown.
            policies: See `forward`.
        """
        train, reference_model = self.args.train, self.reference if policies else None
        beside_actor = train.colocate_all or train.colocate_actor_ref
        actor = dealt.ask(self.actor if policies else None, images=True, alone=beside_actor)
        critic = dealt.ask(self.critic, alone=train.colocate_all or train.colocate_critic_reward)
        reference = dealt.ask(reference_model, known.missing, images=True, alone=beside_actor)
        log_probs, values = dealt.in_batches(actor()), dealt.in_batches(critic())
        known.keep(reference(), dealt.samples)
        for batch, action_log_probs, value in zip(dealt.batches, log_probs, values, strict=True):
            batch.action_log_probs, batch.values = action_log_probs, value
            if policies:
                self._set_kl(batch, None if reference_model is None else known.of(batch))
            else:
                batch.kl = torch.zeros(batch.action_mask.shape)
        return dealt.batches

    def _set_kl(self, batch: Experience, reference: torch.Tensor | None) -> None:
        """Set the KL of each token to the reference model, shape (B, A), or give its log-probs to the loss.

        Without a reference model, and if the KL is a term of the loss (`--algo.kl.use_loss`), it is 0 here.

        Args:
            batch: Forward-pass batch. Its `action_log_probs` are today's.
            reference: Log-probs under the reference model, shape (B, A); None if there is none.
        """
        kl, log_probs, mask = self.args.algo.kl, batch.action_log_probs, batch.action_mask
        batch.base_action_log_probs = reference if kl.use_loss else None
        batch.kl = moved = torch.zeros_like(log_probs)
        if reference is not None and not kl.use_loss:
            batch.kl = compute_approx_kl(log_probs, reference, kl_estimator=kl.estimator)
            moved = log_probs.float() - reference.float()
        batch.info["kl"] = token_mean(batch.kl, mask)
        batch.info["logprobs_diff"] = token_mean(moved, mask)

    def _set_policies(self, experience: Experience, on_policy: Sequence[bool]) -> None:
        """Set the old log-probs and the KL target of an experience as configured.

        Args:
            experience: Forward-pass batch. Its `action_log_probs` are today's.
            on_policy: Whether today's weights generated each of its samples.
        """
        if self.args.adapt.kl_target == "behaviour":
            self._pull_towards_behaviour(experience)
        if self.args.adapt.ratio == "behaviour":
            recomputed, behaviour = experience.action_log_probs, experience.rollout_log_probs
            experience.action_log_probs = old_log_probs(recomputed, behaviour, torch.tensor(on_policy))

    def _pull_towards_behaviour(self, experience: Experience) -> None:
        """Replace the KL to the reference model by D_KL(pi_theta || alpha) of Eq. 3 in a forward-pass batch."""
        log_probs, behaviour, mask = experience.action_log_probs, experience.rollout_log_probs, experience.action_mask
        if self.args.algo.kl.use_loss:
            experience.base_action_log_probs = behaviour
            return
        experience.kl = compute_approx_kl(log_probs, behaviour, kl_estimator=self.args.algo.kl.estimator) * mask
        experience.info["kl"] = token_mean(experience.kl, mask)

    def _loss_log_ratio(self, recomputed: torch.Tensor, experience: Experience) -> torch.Tensor:
        """Log of the ratio that OpenRLHF's loss clips before the first update, shape (B, A).

        Args:
            recomputed: Log-probs under today's policy, shape (B, A).
            experience: Forward-pass batch with its old log-probs.
        """
        gspo = self.args.actor.policy_loss_type == "gspo"  # one ratio a response: the geometric mean over its tokens
        corrected = gspo and self.args.algo.advantage.is_correction_level != "off"
        old = experience.rollout_log_probs if corrected else experience.action_log_probs
        mask = experience.action_mask.bool()
        log_ratio = torch.where(mask, recomputed.float() - old.float(), 0.0)
        if gspo:
            log_ratio = (log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)).expand(mask.shape)
        return log_ratio

    def _mask_moved(self, experiences: Sequence[Experience], log_ratios: Sequence[torch.Tensor]) -> float | None:
        """Set advantages to 0 as `second_moment_mask` says. Returns the share of these tokens; None without a limit."""
        limit = self.args.adapt.max_second_moment
        if limit is None:
            return None
        masks = [experience.action_mask.bool() for experience in experiences]
        moved = torch.cat([ratio[mask] for ratio, mask in zip(log_ratios, masks, strict=True)])
        advantages = torch.cat([e.advantages[mask] for e, mask in zip(experiences, masks, strict=True)])
        stays = torch.from_numpy(second_moment_mask(moved.double().numpy(), advantages.double().numpy(), limit))
        parts = (advantages * stays).split([int(mask.sum()) for mask in masks])
        for experience, mask, part in zip(experiences, masks, parts, strict=True):
            experience.advantages = experience.advantages.masked_scatter(mask, part)
        return 1 - float(stays.double().mean())


def token_mean(numbers: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mean over the generated tokens of each response, shape (B,); 0 for a response without any."""
    return (numbers * mask).sum(-1) / mask.sum(-1).clamp(min=1)


def token_log_ratios(experience: Experience) -> torch.Tensor:
    """log pi_today - log alpha of each generated token, and 0 elsewhere; float64, shape (B, A)."""
    difference = experience.action_log_probs.double() - experience.rollout_log_probs.double()
    return torch.where(experience.action_mask.bool(), difference, 0.0)


def off_policy_log_ratios(experience: Experience, on_policy: Sequence[bool]) -> np.ndarray:
    """The same for V-trace, shape (B, A): 0 for a sample that today's weights generated.

    The log ratio of such a sample is only the rounding of the engine. V-trace must not correct for it.

    Args:
        experience: Forward-pass batch. Its `action_log_probs` are today's.
        on_policy: Whether today's weights generated each of its samples.
    """
    ratios: np.ndarray = token_log_ratios(experience).masked_fill(torch.tensor(on_policy).unsqueeze(-1), 0.0).numpy()
    return ratios


def source_tokens(
    source: str,
    experiences: Sequence[Experience],
    log_ratios: Sequence[torch.Tensor],
    origins: Sequence[SampleOrigin],
) -> SourceTokens:
    """What the loss takes of the tokens of one source.

    Args:
        source: One of fresh, reevaluated and replayed.
        experiences: The experience of the batch.
        log_ratios: Log of the ratio that the loss clips, shape (B, A), of each experience.
        origins: Where each sample comes from.
    """
    parts: list[tuple[torch.Tensor, ...]] = []
    for experience, log_ratio in zip(experiences, log_ratios, strict=True):
        rows = torch.tensor([origins[place].source == source for place in experience.index])
        if parts and not rows.any():
            continue
        chosen = experience.action_mask.bool() & rows.unsqueeze(-1)
        numbers = [log_ratio, experience.advantages]
        if experience.values is not None:
            numbers.append(experience.values - experience.returns)
        parts.append(tuple(number[chosen].float() for number in numbers))
    return SourceTokens(*(torch.cat(number).numpy() for number in zip(*parts, strict=True)))


def row_of(experience: Experience, row: int) -> Experience:
    """One sample of an experience, as an experience of its own."""
    size = len(experience.index)

    def pick(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: pick(item) for key, item in value.items()}
        return value[row : row + 1] if isinstance(value, (list, torch.Tensor)) and len(value) == size else value

    return Experience(**{field.name: pick(getattr(experience, field.name)) for field in fields(Experience)})


def old_log_probs(recomputed: torch.Tensor, behaviour: torch.Tensor, on_policy: torch.Tensor) -> torch.Tensor:
    """Log-probs in the denominator of the PPO ratio, shape (B, A) (Eq. 3: rho = pi_theta / alpha).

    If today's policy generated a sample, the actor's own log-probs are those of the behaviour policy. Otherwise the
    stored log-probs are used.

    Args:
        recomputed: Log-probs under today's policy, shape (B, A).
        behaviour: Stored log-probs, shape (B, A).
        on_policy: Whether today's policy generated each sample, bool, shape (B,).
    """
    return torch.where(on_policy.unsqueeze(-1), recomputed, behaviour.to(recomputed.dtype))
