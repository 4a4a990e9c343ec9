"""The catalogue: every metric that a run can write, OpenRLHF's own included. docs/metrics.md is made from it.

A method declares its own metrics (`METRICS` of its class and of its buffers). All others are declared here.

Names are KIND/WHAT in lower case: the part before the slash says what is measured. SOURCE stands for fresh, reevaluated
or replayed. A name ends in _mean or _max if it is one of several numbers about the same thing, in _total if it counts
the run so far, in _share if it is a part of 1, and in _bytes or _seconds for its unit. Names without a slash are those
of OpenRLHF's training, `skipped_update`, and what a reward function returns as "extra_logs".
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from bapo_openrlhf.adapt.metric import ALL, ATTEMPTS, CAPACITY, CRITIC, Metric, declare
from bapo_openrlhf.methods import BAPO, registry

TRAINED = "steps that trained on the source"
UPDATE = "steps with an update"

# Tables of metrics by the runs and steps that have them; `declare` without more is for every step of batch adaptation.
every = partial(declare, algorithms=ALL)
every_update = partial(every, when=UPDATE)
every_trained = partial(every, when=TRAINED)
plain = partial(declare, algorithms=("ppo", "grpo"))
critic = partial(declare, algorithms=CRITIC)
critic_trained = partial(declare, algorithms=("ba_ppo",), when=TRAINED)
trained = partial(declare, when=TRAINED)
updated = partial(declare, when=UPDATE)
replaying = partial(declare, when="steps that replay")
reevaluating = partial(declare, when="steps that re-evaluate")
# Those of a setting or an incident.
between_syncs = partial(declare, when="steps that re-evaluate while the engines hold older weights", optional=True)
without_update = partial(every, when="steps without an update", optional=True)
with_entropy = partial(every, when="`--actor.entropy_coef` is set", optional=True)
with_scores = partial(every, when="rewards not from a model", optional=True)
with_dynamic_filter = partial(plain, when="`--algo.dynamic_filtering_enable`", optional=True)
with_engine_ratio = partial(
    every, when="`--adapt.ratio decoupled` or `--algo.advantage.is_correction_level`", optional=True
)


def _of_single_methods() -> tuple[Metric, ...]:
    """Metrics of the built-in methods that BAPO does not have, each with the methods that report it."""
    methods: dict[Metric, list[str]] = {}
    for name in registry.METHODS:
        for metric in registry.method_class(name).METRICS:
            methods.setdefault(metric, []).append(name)
    return tuple(
        replace(metric, when=f"`--adapt.method {', '.join(names)}`", optional=True)
        for metric, names in methods.items()
        if metric not in BAPO.METRICS
    )


CATALOGUE: dict[str, tuple[Metric, ...]] = {
    "Reward": every("""
        reward/fresh_mean | reward | Reward | r of Eq. 8 | Mean over all fresh responses, before the filter: how \
            good the rollout policy is.
    """),
    "What was generated": (
        *every("""
            rollouts/step | responses | Responses | | Responses generated in this step, re-evaluation included.
            rollouts/total | responses | Responses generated | Table 1 | Responses generated so far in this run, \
                re-evaluation included.
            groups/generated | groups | Groups | | Groups generated in this step, re-evaluation included.
            tokens/generated | tokens | Tokens | | Tokens generated in this step, re-evaluation included.
            tokens/generated_total | tokens | Tokens generated | | Tokens generated so far in this run, \
                re-evaluation included.
        """),
        *every_trained("""
            length/SOURCE | tokens | Response length by source | | Mean length of a response that is trained on.
        """),
        *declare("""
            prompts/passed_over | prompts | Prompts passed over | | Prompts drawn from the data and not generated \
                for, by a method that chooses prompts.
        """),
        *plain("""
            rollouts/left_over | responses | Responses left over | | Responses of the batch that are not trained \
                on, because OpenRLHF drops what fills no micro-batch at the end of the data.
        """),
    ),
    "The batch": (
        replace(CAPACITY, algorithms=ALL),
        *every("""
            groups/capacity_used | 0 to 1 | Capacity used | Fig. 8 | Share of a batch's capacity that was filled. \
                Below 1, a step trains on less.
            groups/fresh | groups | Fresh groups | X1, Eq. 5 | Fresh groups that were trained on.
            groups/reevaluated | groups | Re-evaluated groups | X2, Eq. 5, 6 | Hard prompts that were generated \
                again and trained on.
            groups/replayed | groups | Replayed groups | X3, Eq. 5, 7 | Groups of earlier steps that were trained on.
            groups/filtered | groups | Filtered groups | Def. 3.1 | Fresh groups that the filter dropped. Without \
                batch adaptation it is OpenRLHF's dynamic filtering.
            filtered/none_right | groups | Filtered: none right | Def. 3.1 | Filtered groups without signal whose \
                rewards are all equal and below 1.
            filtered/all_right | groups | Filtered: all right | Def. 3.1 | Filtered groups without signal whose \
                rewards are all equal and at least 1.
            filtered/by_draw | groups | Filtered: by draw | A.3 | Filtered groups with a signal, dropped by the \
                filter's draw or by `--algo.dynamic_filtering_range`.
            tokens/trained | tokens | Tokens in the batch | | Generated tokens of the batch. Each counts once, \
                whatever train.max_epochs is.
            tokens/trained_total | tokens | Tokens trained on | | Sum of tokens/trained so far in this run.
        """),
        *declare("""
            groups/cut | groups | Cut groups | Prop. A.3 | Selected, but the batch was full (groups/capacity).
            groups/too_far | groups | Groups too far | Eq. 9, 10 | Selected, but their policy is further from \
                today's than allowed.
            groups/nonfinite | groups | Groups not finite | | Selected, but their log-probs under today's policy \
                are not all finite numbers.
            groups/failed | groups | Failed groups | | Generated, but a response has no reward, or the log-probs \
                are not all finite numbers.
            groups/unused | groups | Unused groups | | Drawn for replay and left out: too far, or not finite.
        """),
        *updated("""
            tokens/reference_kept | tokens | Reference log-probs kept | | Generated tokens of the batch that the \
                reference model did not have to compute again.
        """),
        *without_update("""
            skipped_update | | Skipped update | | 1 if nothing was left to train on. The step then has no \
                metrics of the training.
        """),
    ),
    "Re-evaluation": (
        ATTEMPTS,
        *declare("""
            groups/unimproved | groups | Still too hard | Eq. 6 | Attempts with a mean of at most c1.
            groups/solved | groups | Solved | Eq. 6 | Attempts above c1 that have nothing left to learn from: all \
                rewards are equal.
            reevaluation/added_seconds | seconds | Time of re-evaluation | | What re-evaluation adds to the step: \
                timing/reevaluation, or the wait after the fresh groups were done if hard prompts were generated \
                together with them.
        """),
        *reevaluating("""
            reevaluation/improved_share | 0 to 1 | Re-evaluated and improved | Eq. 6 | Share of the hard \
                prompts generated again whose new group was trained on.
        """),
    ),
    "Buffers and thresholds": tuple(metric for metric in BAPO.METRICS if metric not in (CAPACITY, ATTEMPTS)),
    "Staleness": (
        *declare("""
            staleness/rollout_policy | trainer steps | Age of the rollout weights | t mod v | How many trainer \
                steps old the weights were that generated the fresh groups.
        """),
        *replaying("""
            staleness/replayed_steps_mean | trainer steps | Age of the replayed groups | | Mean age of the groups in X3.
            staleness/replayed_steps_max | trainer steps | Age of the oldest replayed group | | Age of the \
                oldest group in X3.
            staleness/replayed_syncs_mean | syncs | Syncs since the replayed groups | | Mean number of syncs \
                of the rollout engines since the groups' weights.
            staleness/replayed_syncs_max | syncs | Syncs since the oldest of them | | The same for the oldest group.
        """),
        *trained("""
            tv/SOURCE | 0 to 1 | Distance to today's policy | Eq. 9, 10 | Sampled total variation distance between \
                today's policy and the one that generated the source: mean of max(0, 1 - pi(y|x) / alpha(y|x)).
            importance/SOURCE_mean | ratio | Importance weight | rho of Eq. 3 | Mean of pi(y|x) / alpha(y|x) over \
                whole responses, each capped at e^20.
            importance/SOURCE_max | ratio | Largest weight | rho of Eq. 3 | Maximum of these weights.
            importance/SOURCE_effective_share | 0 to 1 | Effective sample size | | Effective sample size of the \
                importance weights as a share of the responses, (sum w)^2 / (N sum w^2). 1 means that today's policy \
                generated them.
        """),
    ),
    "The loss's tokens, before the first update": (
        *trained("""
            clip/SOURCE | 0 to 1 | Clipped tokens | Eq. 1, 3 | Share of tokens that have no gradient because their \
                ratio is clipped: A > 0 and rho > 1 + eps_high, or A < 0 and rho < 1 - eps_low. With --actor.dual_clip \
                c also A < 0 and rho > c.
            advantage/SOURCE_abs | | Advantages | Eq. 2, A.9 | Mean of |A| over tokens, as the loss takes it.
        """),
        *critic_trained("""
            value/SOURCE_error | reward | Error of the critic | A.9 | Root mean square of value minus return \
                over tokens.
            value/SOURCE_bias | reward | Bias of the critic | A.9 | Mean of value minus return over tokens. \
                Above 0, the critic expects too much.
        """),
    ),
    "Theorem 3.2": (
        *updated("""
            theory/k1 | | K1 | Eq. 11 | Constant of X1.
            theory/k2 | | K2 | Eq. 12 | Constant of X2.
            theory/k3 | | K3 | Eq. 13 | Constant of X3.
            theory/bound | | The bound | Theorem 3.2 | Sum of the sources' terms, each weighted by its share of \
                the groups. Below 0 it promises nothing.
        """),
        *trained("""
            theory/bound_SOURCE | | Terms of the bound | Theorem 3.2; Eq. 22, 23 | The source's term of the lower \
                bound at the policy that the step starts from, surrogate - 2 (K + 1) TV. Below 0 it promises nothing.
        """),
    ),
    "Time": (
        *every("""
            timing/generation | seconds | Generation | | Generating the fresh groups, and the hard prompts that \
                are generated together with them.
            timing/step_total | seconds | Step | | Sum of all timing/*.
        """),
        *between_syncs("""
            timing/reevaluation | seconds | Re-evaluation | | Generating hard prompts again on their own, with \
                the weight syncs that this takes.
        """),
        *declare("""
            timing/adapt | seconds | Making the batch | | Making the batch.
        """),
        *every_update("""
            timing/make_experience | seconds | Experience | | Log-probs, values and advantages.
            timing/ppo_train | seconds | Training | | The optimizer steps.
            timing/broadcast | seconds | Weight sync | | Syncing weights to the engines.
        """),
    ),
    "Of single methods": _of_single_methods(),
}

# These describe the batch that was trained on, which depends on the filter and the replay. A step without an update
# does not have them.
OPENRLHF: tuple[Metric, ...] = (
    *every("""
        policy_loss | | Policy loss | Eq. 1, 3 | Loss of the actor without KL and entropy terms.
        actor_grad_norm | | Gradient norm | | Norm of the actor's gradient in the last optimizer step, before clipping.
        actor_lr | | Learning rate | | Learning rate of the actor after the step.
        ppo_clip_ratio | 0 to 1 | Clipped tokens | Eq. 1 | Share of clipped tokens over all updates.
        ppo_kl | nats | KL of the step | | Mean of log pi_old - log pi over tokens, over all updates of the step.
        kl | nats | KL divergence | Eq. 1, 3 | Mean KL penalty to the reference, or to the behaviour policy.
        logprobs_diff | nats | Log-prob difference | | Mean of log pi - log pi_reference over tokens.
        reward | reward | Reward of the batch | | Mean reward, length penalties included.
        return | reward | Return | | Mean of the responses' shaped rewards.
        group_reward_std | reward | Spread in a group | | Mean standard deviation of a group's rewards.
        response_length | tokens | Response length | | Mean length, from the first to the last generated token.
        total_length | tokens | Total length | | Mean length with the prompt.
        truncated | 0 to 1 | Truncated | | Share of responses that ended at `--rollout.max_new_tokens`.
        response_clip_ratio | 0 to 1 | Full samples | | Share of samples that fill `--data.max_len`.
        rollout/num_samples | responses | Samples | | Responses in the batch.
        rollout/reward_mean | reward | Reward of the batch | | Mean reward.
        rollout/reward_std | reward | Spread of the rewards | | Standard deviation of the rewards.
        rollout/response_length_mean | tokens | Response length | | The same as response_length.
        rollout/truncated_rate | 0 to 1 | Truncated | | The same as truncated.
    """),
    *with_entropy("""
        entropy_loss | nats | Entropy | | Mean entropy of the actor's next-token distribution.
    """),
    *with_engine_ratio("""
        vllm_kl | nats | KL to the engine | | Mean of log alpha - log pi_old over tokens.
        is_filter_ratio | 0 to 1 | Corrected weights | | Share of tokens (or responses) whose weight prox / \
            alpha was truncated or masked.
    """),
    *with_scores("""
        score | reward | Score | | Mean of the reward function's "scores".
    """),
    *critic("""
        critic_loss | reward^2 | Critic loss | A.9 | Half the mean squared error of the values.
        values | reward | Values | A.9 | Mean value over tokens.
        critic_grad_norm | | Gradient norm of the critic | | Gradient norm of the critic, mean over micro-batches.
        critic_lr | | Learning rate of the critic | | Learning rate of the critic, mean over micro-batches.
    """),
    *with_dynamic_filter("""
        dynamic_filtering_pass_rate | percent | Pass rate | | Responses kept for each prompt drawn, times 100.
    """),
)


def all_metrics() -> list[Metric]:
    """The whole catalogue, in order."""
    return [*(metric for section in CATALOGUE.values() for metric in section), *OPENRLHF]


def names(algorithm: str, *, optional: bool) -> set[str]:
    """Names in the rows of a run of this algorithm.

    Args:
        optional: Whether to include those that depend on a setting or an incident.
    """
    wanted = [metric for metric in all_metrics() if optional or not metric.optional]
    return {name for metric in wanted for name in metric.names(algorithm)}
