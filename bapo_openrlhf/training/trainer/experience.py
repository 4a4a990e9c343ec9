"""From samples to experience: importance ratios, the KL target and group-relative advantages.

As in OpenRLHF, log-probs come from today's actor and values from today's critic, for replayed samples as for fresh
ones. A batch passes the experience maker in two halves, because its review comes between them: `origins_of` ->
`forward` -> `ForwardPass` -> review -> `finish` -> `BatchExperience`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from openrlhf.models.utils import compute_approx_kl
from openrlhf.trainer.ppo_utils.experience import Experience

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.corrections import second_moment_mask
from bapo_openrlhf.adapt.group import REFERENCE, Group, Response
from bapo_openrlhf.adapt.monitor import SourceTokens
from bapo_openrlhf.adapt.shift import TokenSums
from bapo_openrlhf.adapt.vocabulary import SOURCES
from bapo_openrlhf.training.trainer.advantages import set_advantages
from bapo_openrlhf.training.trainer.dealing import DealtBatch, Places
from bapo_openrlhf.training.trainer.samples import sample_of


@dataclass(frozen=True)
class SampleOrigin:
    """A response that is trained on, and where it comes from. On-policy means that today's weights generated it."""

    source: str  # fresh, reevaluated or replayed
    on_policy: bool
    group: Group
    response: Response

    def sample(self) -> Experience:
        """The response as OpenRLHF's sample."""
        return sample_of(self.group.prompt, self.response)


def origins_of(batch: Batch, since: int) -> list[SampleOrigin]:
    """The responses in the order of `Batch.with_sources`. The actor has had its weights since step `since`."""
    return [
        SampleOrigin(source, group.weights_version_of(response) >= since, group, response)
        for source, group in batch.with_sources()
        for response in group.responses
    ]


@dataclass(frozen=True)
class ForwardPass:
    """What today's models say of a batch.

    Attributes:
        samples: Its samples, each with log-probs, values and KL of shape (1, A).
        log_ratios: log pi_today(y|x) - log alpha(y|x) of each sample, summed over its tokens, shape (N,).
        reference_kept: Number of generated tokens that were not sent to the reference model.
    """

    samples: list[Experience]
    origins: Sequence[SampleOrigin]
    log_ratios: np.ndarray
    sums: TokenSums
    reference_kept: int

    def at(self, places: Sequence[int]) -> tuple[list[Experience], list[SampleOrigin]]:
        """The samples at these positions, and their origins."""
        return [self.samples[place] for place in places], [self.origins[place] for place in places]


@dataclass(frozen=True)
class BatchExperience(ForwardPass):
    """The experience of the samples that stayed, with the metrics of `advantages.choose_baseline`.

    `masked` is the share of the tokens that --adapt.max_second_moment leaves out; None without this limit.
    """

    tokens: Mapping[str, SourceTokens]
    baseline: Mapping[str, float]
    masked: float | None


class ReferenceLogProbs:
    """Log-probs of a batch's responses under the reference model, in the `extras` of each response.

    OpenRLHF sends every sample of every batch to the reference model. It is the same at every step, so here a response
    is sent only once: a replayed response already has its log-probs.

    Log-probs that were kept under another name of a model are not used. A batch and the buffers share a response's
    extras. So the log-probs of a response that is in no buffer are gone when its batch is gone.
    """

    def __init__(self, name: str, responses: Sequence[Response]) -> None:
        self.name, self.responses = name, responses
        kept = [self._log_probs(response) for response in responses]
        self.missing: Places = [place for place, log_probs in enumerate(kept) if log_probs is None]
        self.kept_tokens = sum(len(log_probs) for log_probs in kept if log_probs is not None)

    def keep(self, rows: Mapping[int, torch.Tensor], samples: Sequence[Experience]) -> None:
        """Keep the reference model's answers, of shape (A,) by a sample's position, with their responses."""
        for place, row in rows.items():
            mask = samples[place].action_mask[0].bool()
            self.responses[place].extras[REFERENCE] = (self.name, row[mask].float().numpy())

    def row(self, place: int, mask: torch.Tensor) -> torch.Tensor:
        """Log-probs of the sample at this position, shape (1, A); 0 if a token was not generated, as in OpenRLHF."""
        log_probs = torch.from_numpy(self._log_probs(self.responses[place]))
        return torch.zeros(mask.shape).masked_scatter(mask.bool(), log_probs)

    def _log_probs(self, response: Response) -> Any:
        """The log-probs of a response, float32, shape (A,); None if they are not known."""
        name, log_probs = response.extras.get(REFERENCE, (None, None))
        return log_probs if name == self.name else None


class ExperienceMaker:
    """Makes experience of a batch of three sources, on any number of ranks.

    Args:
        actor, critic, reference: OpenRLHF's groups of the models' processes; None if the run has no such model.
        kl_ctl: OpenRLHF's. It has the coefficient of the KL penalty.
        reference_name: See `ReferenceLogProbs`.
    """

    def __init__(
        self, args: SimpleNamespace, actor: Any, critic: Any, reference: Any, *, kl_ctl: Any, pad: int,
        reference_name: str = "",
    ) -> None:  # fmt: skip
        self.args, self.actor, self.critic, self.reference = args, actor, critic, reference
        self.kl_ctl, self.pad, self.reference_name = kl_ctl, pad, reference_name

    @torch.no_grad()
    def forward(
        self, origins: Sequence[SampleOrigin], *, policies: bool = True, with_reference: bool = True
    ) -> ForwardPass:
        """Pass a batch through today's models.

        Without `policies` only through the critic: log ratios and KL are 0. `with_reference` says whether the reference
        model passes it beside the actor.
        """
        known = ReferenceLogProbs(self.reference_name, [origin.response for origin in origins])
        reference = self.reference if policies and with_reference else None
        samples = [origin.sample() for origin in origins]
        self._pass(samples, known, reference, policies=policies)
        log_ratios = np.zeros(len(origins))
        sums = TokenSums(*np.zeros((len(TokenSums._fields), len(origins))))
        for place, sample in enumerate(samples) if policies else ():
            ratios = token_log_ratios(sample).numpy()
            log_ratios[[place]] = ratios.sum(-1)
            for whole, part in zip(sums, TokenSums.of(ratios, sample.action_mask.numpy()), strict=True):
                whole[[place]] = part
        kept = 0 if reference is None else known.kept_tokens
        return ForwardPass(samples, origins, log_ratios, sums, kept)

    @torch.no_grad()
    def finish(self, passed: ForwardPass, kept: Sequence[int], *, monte_carlo: bool = False) -> BatchExperience:
        """The experience of samples at the positions `kept`, at least one. Monte Carlo returns have the lambda 1."""
        samples, origins = passed.at(kept)
        corrections, loss_log_ratios = self._corrections(samples, origins), []
        for sample, origin in zip(samples, origins, strict=True):
            recomputed, behaviour = sample.action_log_probs, sample.rollout_log_probs
            if self.args.adapt.kl_target == "behaviour":
                self._pull_towards_behaviour(sample)
            if self.args.adapt.ratio == "behaviour":
                sample.action_log_probs = old_log_probs(recomputed, behaviour, on_policy=origin.on_policy)
            loss_log_ratios.append(self._loss_log_ratio(recomputed, sample))
        fresh = np.array([origin.source == "fresh" for origin in origins])
        groups = [origin.group for origin in origins]
        options = {"kl_coefficient": self.kl_ctl.value, "log_ratios": corrections, "fresh": fresh}
        lambd = 1.0 if monte_carlo else self.args.adapt.critic_lambd
        baseline = set_advantages(samples, groups, self.args, critic_lambd=lambd, **options)
        log_ratios, sums = passed.log_ratios[list(kept)], passed.sums.at(list(kept))
        masked = self._mask_moved(samples, loss_log_ratios)
        tokens = {source: source_tokens(source, samples, loss_log_ratios, origins) for source in SOURCES}
        return BatchExperience(samples, origins, log_ratios, sums, passed.reference_kept, tokens, baseline, masked)

    @torch.no_grad()
    def for_critic(self, groups: Sequence[Group], since: int) -> list[Experience]:
        """Values and returns of groups that only the critic trains on, made as those of the batch are.

        Actor and reference pass them only if the returns need it: because of a KL penalty in the reward, or because
        V-trace corrects for the policy of a response. Then groups whose log-probs are not finite are left out.
        """
        origins, adapt = origins_of(Batch(fresh=list(groups)), since), self.args.adapt
        has_penalty = self.kl_ctl.value > 0 and not self.args.algo.kl.use_loss
        pulls = has_penalty and adapt.kl_target == "behaviour"
        has_kl = has_penalty and (pulls or self.reference is not None)
        corrects = adapt.returns == "vtrace" and not all(origin.on_policy for origin in origins)
        passed = self.forward(origins, policies=has_kl or corrects, with_reference=has_penalty and not pulls)
        uids = np.array([origin.group.uid for origin in origins])
        kept = np.flatnonzero(~np.isin(uids, uids[~np.isfinite(passed.log_ratios)])).tolist()
        samples, origins = passed.at(kept)
        if not samples:
            return []
        for sample in samples if pulls else ():
            self._pull_towards_behaviour(sample)
        options = {"kl_coefficient": self.kl_ctl.value, "log_ratios": self._corrections(samples, origins)}
        sample_groups = [origin.group for origin in origins]
        set_advantages(samples, sample_groups, self.args, critic_lambd=adapt.critic_lambd, **options)
        return samples

    def _corrections(self, samples: Sequence[Experience], origins: Sequence[SampleOrigin]) -> list[np.ndarray]:
        """The log ratios that V-trace corrects for, float64 of shape (1, A) for each sample; none without V-trace.

        They are 0 with today's weights, because V-trace must not correct the engine's rounding.
        """
        if self.args.adapt.returns != "vtrace":
            return []
        return [
            np.zeros(sample.action_mask.shape) if origin.on_policy else token_log_ratios(sample).numpy()
            for sample, origin in zip(samples, origins, strict=True)
        ]

    def _pass(
        self, samples: list[Experience], known: ReferenceLogProbs, reference_model: Any, *, policies: bool
    ) -> None:
        """Set log-probs, values and KL. All models are asked at once, except those that share GPUs."""
        dealt, train = DealtBatch(samples, self.args, self.pad), self.args.train
        beside_actor = train.colocate_all or train.colocate_actor_ref
        actor = dealt.ask(self.actor if policies else None, images=True, alone=beside_actor)
        critic = dealt.ask(self.critic, alone=train.colocate_all or train.colocate_critic_reward)
        reference = dealt.ask(reference_model, known.missing, images=True, alone=beside_actor)
        log_probs, values = actor(), critic()
        known.keep(reference(), samples)
        for place, sample in enumerate(samples):
            sample.action_log_probs = log_probs[place].unsqueeze(0) if log_probs else None
            sample.values = values[place].unsqueeze(0) if values else None
            if policies:
                self._set_kl(sample, None if reference_model is None else known.row(place, sample.action_mask))
            else:
                sample.kl = torch.zeros(sample.action_mask.shape)

    def _set_kl(self, sample: Experience, reference: torch.Tensor | None) -> None:
        """Set the KL of each token to the reference model, shape (1, A), or give its log-probs to the loss."""
        kl, log_probs, mask = self.args.algo.kl, sample.action_log_probs, sample.action_mask
        sample.base_action_log_probs = reference if kl.use_loss else None
        sample.kl = difference = torch.zeros_like(log_probs)
        if reference is not None and not kl.use_loss:
            sample.kl = compute_approx_kl(log_probs, reference, kl_estimator=kl.estimator)
            difference = log_probs.float() - reference.float()
        sample.info["kl"] = token_mean(sample.kl, mask)
        sample.info["logprobs_diff"] = token_mean(difference, mask)

    def _pull_towards_behaviour(self, sample: Experience) -> None:
        """Replace the KL to the reference model by D_KL(pi_theta || alpha) of Eq. 3 in a sample."""
        log_probs, behaviour, mask = sample.action_log_probs, sample.rollout_log_probs, sample.action_mask
        if self.args.algo.kl.use_loss:
            sample.base_action_log_probs = behaviour
            return
        sample.kl = compute_approx_kl(log_probs, behaviour, kl_estimator=self.args.algo.kl.estimator) * mask
        sample.info["kl"] = token_mean(sample.kl, mask)

    def _loss_log_ratio(self, recomputed: torch.Tensor, sample: Experience) -> torch.Tensor:
        """Log of the ratio that OpenRLHF's loss clips before the first update, shape (1, A)."""
        gspo = self.args.actor.policy_loss_type == "gspo"  # one ratio a response: the geometric mean over its tokens
        is_corrected = gspo and self.args.algo.advantage.is_correction_level != "off"
        denominator = sample.rollout_log_probs if is_corrected else sample.action_log_probs
        mask = sample.action_mask.bool()
        log_ratio = torch.where(mask, recomputed.float() - denominator.float(), 0.0)
        if gspo:
            log_ratio = (log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)).expand(mask.shape)
        return log_ratio

    def _mask_moved(self, samples: Sequence[Experience], log_ratios: Sequence[torch.Tensor]) -> float | None:
        """Set advantages to 0 as `second_moment_mask` says. Returns the share of these tokens; None without a limit."""
        limit = self.args.adapt.max_second_moment
        if limit is None:
            return None
        masks = [sample.action_mask.bool() for sample in samples]
        moved = torch.cat([ratio[mask] for ratio, mask in zip(log_ratios, masks, strict=True)])
        advantages = torch.cat([sample.advantages[mask] for sample, mask in zip(samples, masks, strict=True)])
        stays = torch.from_numpy(second_moment_mask(moved.double().numpy(), advantages.double().numpy(), limit))
        parts = (advantages * stays).split([int(mask.sum()) for mask in masks])
        for sample, mask, part in zip(samples, masks, parts, strict=True):
            sample.advantages = sample.advantages.masked_scatter(mask, part)
        return 1 - float(stays.double().mean())


def token_mean(numbers: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mean over the generated tokens of each response, shape (1,); 0 for a response without any."""
    return (numbers * mask).sum(-1) / mask.sum(-1).clamp(min=1)


def token_log_ratios(sample: Experience) -> torch.Tensor:
    """log pi_today - log alpha of each generated token, and 0 elsewhere; float64, shape (1, A)."""
    difference = sample.action_log_probs.double() - sample.rollout_log_probs.double()
    return torch.where(sample.action_mask.bool(), difference, 0.0)


def source_tokens(
    source: str, samples: Sequence[Experience], log_ratios: Sequence[torch.Tensor], origins: Sequence[SampleOrigin]
) -> SourceTokens:
    """What the loss takes of the tokens of one source. The log ratios, shape (1, A), are those that it clips."""
    places = [place for place, origin in enumerate(origins) if origin.source == source]

    def joined(numbers: Iterable[torch.Tensor]) -> np.ndarray:
        rows = zip(numbers, (samples[place].action_mask.bool() for place in places), strict=True)
        return torch.cat([torch.zeros(0), *(row[mask].float() for row, mask in rows)]).numpy()

    ratios = joined(log_ratios[place] for place in places)
    advantages = joined(samples[place].advantages for place in places)
    if samples[0].values is None:
        return SourceTokens(ratios, advantages)
    return SourceTokens(ratios, advantages, joined(samples[place].values - samples[place].returns for place in places))


def old_log_probs(recomputed: torch.Tensor, behaviour: torch.Tensor, *, on_policy: bool) -> torch.Tensor:
    """Log-probs in the denominator of the PPO ratio pi_theta / alpha (Eq. 3), shape (1, A): today's if on-policy."""
    return recomputed if on_policy else behaviour.to(recomputed.dtype)
