"""The catalogue: every metric that a run can write, OpenRLHF's own included. docs/metrics.md is made of it.

Names are KIND/WHAT in lower case: what comes before the slash says what is spoken of. SOURCE stands for one of fresh,
reevaluated and replayed. A name ends in _mean or _max where it is one of several numbers about the same thing, in
_total where it counts this run so far, in _share where it is a part of 1, in _bytes or _seconds for its unit. Names
without a slash are those of OpenRLHF's training, `skipped_update`, and what a reward function returns as "extra_logs".
"""

from __future__ import annotations

from dataclasses import dataclass

from bapo_openrlhf.adapt.vocabulary import SOURCES

ADAPTED = ("ba_ppo", "bapo_grpo")
CRITIC = ("ba_ppo", "ppo")
ALL = ("ba_ppo", "bapo_grpo", "ppo", "grpo")


@dataclass(frozen=True)
class Metric:
    """One metric, or one for each source.

    Attributes:
        name: as in metrics.jsonl; may have SOURCE in it.
        unit: "" for a number without one.
        meaning: what it says.
        source: equation or place in the paper; "" for none.
        algorithms: those whose runs have it.
        when: which steps or settings it takes; "" for every step.
        optional: whether `when` is a setting or an incident, so that a run may end without it.
    """

    name: str
    unit: str
    meaning: str
    source: str = ""
    algorithms: tuple[str, ...] = ADAPTED
    when: str = ""
    optional: bool = False

    def names(self, algorithm: str) -> list[str]:
        """As they are in a run of this algorithm; without batch adaptation all groups are fresh."""
        if algorithm not in self.algorithms:
            return []
        sources = SOURCES if algorithm in ADAPTED else SOURCES[:1]
        return [self.name.replace("SOURCE", source) for source in sources] if "SOURCE" in self.name else [self.name]


TRAINED = "steps that trained on the source"

CATALOGUE: dict[str, tuple[Metric, ...]] = {
    "Reward": (
        Metric(
            "reward/fresh_mean",
            "reward",
            "mean over all fresh responses, before the filter: how good the rollout policy is",
            "r of Eq. 8",
            ALL,
        ),
    ),
    "What was generated": (
        Metric("rollouts/step", "responses", "generated in this step, re-evaluation included", "", ALL),
        Metric("rollouts/total", "responses", "this run so far", "Table 1", ALL),
        Metric("groups/generated", "groups", "generated in this step, re-evaluation included", "", ALL),
        Metric(
            "prompts/passed_over",
            "prompts",
            "drawn from the data and not generated for, by a method that chooses prompts",
        ),
        Metric(
            "rollouts/left_over",
            "responses",
            "of the batch, not trained on: where the data ends, OpenRLHF drops what fills no micro-batch",
            "",
            ("ppo", "grpo"),
        ),
        Metric("tokens/generated", "tokens", "generated in this step, re-evaluation included", "", ALL),
        Metric("tokens/generated_total", "tokens", "this run so far", "", ALL),
        Metric("length/SOURCE", "tokens", "mean length of a response that is trained on", "", ALL, TRAINED),
    ),
    "The batch": (
        Metric("groups/capacity", "groups", "most that a batch holds: B", "B, Eq. 7", ALL),
        Metric("groups/capacity_used", "0 to 1", "share of it that was trained on", "Fig. 8", ALL),
        Metric("groups/fresh", "groups", "fresh ones that were trained on", "X1, Eq. 5", ALL),
        Metric("groups/reevaluated", "groups", "hard prompts generated again, trained on", "X2, Eq. 5, 6", ALL),
        Metric("groups/replayed", "groups", "groups of earlier steps, trained on", "X3, Eq. 5, 7", ALL),
        Metric(
            "groups/filtered",
            "groups",
            "fresh ones that the filter dropped, without batch adaptation OpenRLHF's dynamic filtering",
            "Def. 3.1",
            ALL,
        ),
        Metric(
            "filtered/none_right",
            "groups",
            "of these, without signal: rewards all equal, and below 1",
            "Def. 3.1",
            ALL,
        ),
        Metric(
            "filtered/all_right",
            "groups",
            "of these, without signal: rewards all equal, and at least 1",
            "Def. 3.1",
            ALL,
        ),
        Metric(
            "filtered/by_draw",
            "groups",
            "of these, with a signal: dropped by the filter's draw, or by `--algo.dynamic_filtering_range`",
            "A.3",
            ALL,
        ),
        Metric("groups/cut", "groups", "selected, but the batch was full (groups/capacity)", "Prop. A.3"),
        Metric(
            "groups/too_far",
            "groups",
            "selected, but their policy is further from today's than allowed",
            "Eq. 9, 10",
        ),
        Metric(
            "groups/nonfinite",
            "groups",
            "selected, but with log-probs under today's policy that are no finite numbers",
        ),
        Metric(
            "groups/failed",
            "groups",
            "generated, but without a reward for one of the responses, or with log-probs that are no finite numbers",
        ),
        Metric("groups/unused", "groups", "drawn for replay and left out: too far, or not finite"),
        Metric(
            "tokens/trained", "tokens", "generated tokens of the batch, once, whatever train.max_epochs is", "", ALL
        ),
        Metric("tokens/trained_total", "tokens", "this run so far", "", ALL),
        Metric(
            "tokens/reference_kept",
            "tokens",
            "generated tokens of the batch that the reference model was not asked for again",
            "",
            ADAPTED,
            "steps with an update",
        ),
        Metric(
            "skipped_update",
            "",
            "1: nothing was left to train on; the step has no metrics of the training",
            "",
            ALL,
            "steps without an update",
            True,
        ),
    ),
    "Re-evaluation": (
        Metric("groups/reevaluation_attempts", "groups", "hard prompts generated again", "Alg. 1, line 14"),
        Metric("groups/unimproved", "groups", "of these, still too hard: mean at most c1", "Eq. 6"),
        Metric("groups/solved", "groups", "of these, above c1 with nothing left to learn: all rewards equal", "Eq. 6"),
        Metric(
            "reevaluation/improved_share",
            "0 to 1",
            "groups/reevaluated over groups/reevaluation_attempts",
            "Eq. 6",
            ADAPTED,
            "steps that re-evaluate",
        ),
        Metric(
            "reevaluation/added_seconds",
            "seconds",
            "what re-evaluation adds to the step: timing/reevaluation, or, where hard prompts were generated together "
            "with the fresh ones, the wait after those were done",
        ),
    ),
    "Buffers and thresholds": (
        Metric("buffer/hard", "prompts", "stored after this step", "B_bad"),
        Metric(
            "buffer/hard_age_mean",
            "trainer steps",
            "mean time since a stored prompt's last group",
            "B_bad",
            ADAPTED,
            "steps after which something is stored",
        ),
        Metric("buffer/replay", "groups", "stored after this step", "B_high"),
        Metric(
            "buffer/replay_age_mean",
            "trainer steps",
            "mean time since a stored group was generated",
            "B_high",
            ADAPTED,
            "steps after which something is stored",
        ),
        Metric("buffer/replay_added", "groups", "entered the replay buffer so far"),
        Metric("buffer/replay_evicted", "groups", "left it so far because it was full"),
        Metric("buffer/replay_expired", "groups", "left it so far because they were too old"),
        Metric(
            "buffer/replay_bytes",
            "bytes",
            "tokens and log-probs in the replay buffer, also those under the reference model, once computed",
            "Eq. 4",
        ),
        Metric("threshold/average_reward", "reward", "average reward r that moves c2 and c3", "Eq. 8"),
        Metric("threshold/c2", "reward", "least group mean reward that is replayed", "Eq. 5, 8"),
        Metric("threshold/c3", "reward", "greatest group mean reward that is replayed", "Eq. 5, 8"),
    ),
    "Staleness": (
        Metric(
            "staleness/rollout_policy", "trainer steps", "age of the weights that generated the fresh groups", "t mod v"
        ),
        Metric(
            "staleness/replayed_steps_mean",
            "trainer steps",
            "mean age of the groups in X3",
            "",
            ADAPTED,
            "steps that replay",
        ),
        Metric("staleness/replayed_steps_max", "trainer steps", "greatest age", "", ADAPTED, "steps that replay"),
        Metric(
            "staleness/replayed_syncs_mean",
            "syncs",
            "the same in syncs of the rollout engines since the groups' weights",
            "",
            ADAPTED,
            "steps that replay",
        ),
        Metric("staleness/replayed_syncs_max", "syncs", "greatest age", "", ADAPTED, "steps that replay"),
        Metric(
            "tv/SOURCE",
            "0 to 1",
            "sampled total variation distance of today's policy to the one that generated the source: mean of "
            "max(0, 1 - pi(y|x) / alpha(y|x))",
            "Eq. 9, 10",
            ADAPTED,
            TRAINED,
        ),
        Metric(
            "importance/SOURCE_mean",
            "ratio",
            "mean of pi(y|x) / alpha(y|x) over whole responses, each capped at e^20",
            "rho of Eq. 3",
            ADAPTED,
            TRAINED,
        ),
        Metric("importance/SOURCE_max", "ratio", "their maximum", "rho of Eq. 3", ADAPTED, TRAINED),
        Metric(
            "importance/SOURCE_effective_share",
            "0 to 1",
            "effective sample size of these weights, as a share of the responses: (sum w)^2 / (N sum w^2)",
            "",
            ADAPTED,
            TRAINED,
        ),
    ),
    "The loss's tokens, before the first update": (
        Metric(
            "clip/SOURCE",
            "0 to 1",
            "share of tokens whose ratio is clipped, so that they have no gradient: A > 0 and rho > 1 + eps_high, or "
            "A < 0 and rho < 1 - eps_low; with --actor.dual_clip c also A < 0 and rho > c",
            "Eq. 1, 3",
            ADAPTED,
            TRAINED,
        ),
        Metric(
            "advantage/SOURCE_abs",
            "",
            "mean of |A| over tokens, as the loss takes it",
            "Eq. 2, A.9",
            ADAPTED,
            TRAINED,
        ),
        Metric(
            "value/SOURCE_error",
            "reward",
            "root mean square over tokens of value minus return",
            "A.9",
            ("ba_ppo",),
            TRAINED,
        ),
        Metric("value/SOURCE_bias", "reward", "mean over tokens of value minus return", "A.9", ("ba_ppo",), TRAINED),
    ),
    "Theorem 3.2": (
        Metric("theory/k1", "", "constant of X1", "Eq. 11", ADAPTED, "steps with an update"),
        Metric("theory/k2", "", "constant of X2", "Eq. 12", ADAPTED, "steps with an update"),
        Metric("theory/k3", "", "constant of X3", "Eq. 13", ADAPTED, "steps with an update"),
        Metric(
            "theory/bound_SOURCE",
            "",
            "the source's term of the lower bound, at the policy that the step starts from: surrogate - 2 (K + 1) TV",
            "Theorem 3.2; Eq. 22, 23",
            ADAPTED,
            TRAINED,
        ),
        Metric(
            "theory/bound",
            "",
            "the sources' terms, each weighted by its share of the groups, added up",
            "Theorem 3.2",
            ADAPTED,
            "steps with an update",
        ),
    ),
    "Time": (
        Metric("timing/generation", "seconds", "generating the fresh groups, with hard prompts that go along", "", ALL),
        Metric(
            "timing/reevaluation",
            "seconds",
            "generating hard prompts again on their own, with the weight syncs that this takes",
            "",
            ADAPTED,
            "steps that re-evaluate while the engines hold older weights",
            True,
        ),
        Metric("timing/adapt", "seconds", "making the batch"),
        Metric("timing/make_experience", "seconds", "log-probs, values, advantages", "", ALL, "steps with an update"),
        Metric("timing/ppo_train", "seconds", "the optimizer steps", "", ALL, "steps with an update"),
        Metric("timing/broadcast", "seconds", "syncing weights to the engines", "", ALL, "steps with an update"),
        Metric("timing/step_total", "seconds", "sum of all timing/*", "", ALL),
    ),
    "Of single methods": tuple(
        Metric(name, unit, meaning, "", ADAPTED, f"`--adapt.method {methods}`", True)
        for name, unit, meaning, methods in (
            ("prompts/known", "prompts", "that there was a group of", "mopps, dots"),
            ("prompts/predicted", "0 to 1", "mean predicted success of the prompts generated for", "mopps, dots"),
            ("prompts/unseen_share", "0 to 1", "share of them that had no group before", "mopps, dots"),
            ("prompts/prediction_error", "0 to 1", "mean |predicted - observed| of the others", "mopps, dots"),
            ("cache/prompts", "prompts", "with stored responses", "repo, arpo"),
            ("cache/responses", "responses", "stored", "repo, arpo"),
            ("cache/bytes", "bytes", "tokens and sampled log-probs of the stored responses", "repo, arpo"),
            ("cache/added", "responses", "entered so far", "repo, arpo"),
            ("cache/evicted", "responses", "left so far, for newer ones of their prompt", "repo, arpo"),
            ("cache/drawn", "groups", "drawn by the strategy in this step", "repo"),
            ("cache/without_signal", "groups", "of these, left out because their rewards are equal", "repo"),
            ("cache/no_room", "groups", "of these, left out because the batch was full", "repo"),
            ("mix/replayed_share", "0 to 1", "share of the batch that is replayed", "remix"),
            ("exchange/failed", "groups", "fresh ones of which all responses failed", "arpo"),
            ("exchange/groups", "groups", "of these, with a stored success in the place of a response", "arpo"),
            (
                "exchange/age_mean",
                "steps",
                "mean, between the weights that generated the stored responses and today's; missing without any",
                "arpo, exgrpo",
            ),
            ("experience/started", "", "1: experience is stored and used, 0: not yet", "exgrpo"),
            ("experience/pass_rate", "0 to 1", "share of the fresh responses that are right", "exgrpo"),
            ("experience/prompts", "prompts", "with a stored success", "exgrpo"),
            ("experience/bytes", "bytes", "tokens and sampled log-probs of the stored successes", "exgrpo"),
            ("experience/retired", "prompts", "that were solved by all responses, so far", "exgrpo"),
            ("traces/prompts", "prompts", "of the data that have a trace", "luffy, relift"),
            ("traces/mixed", "groups", "fresh groups that a trace was put into", "luffy"),
            ("traces/trained_share", "0 to 1", "share of the trained responses that are traces", "luffy"),
            ("finetune/unsolved", "prompts", "fresh ones of which no response had a reward above 0", "relift"),
            ("finetune/waiting", "prompts", "with a trace, waiting for fine-tuning after this step", "relift"),
            ("finetune/demonstrations", "responses", "fine-tuned on, in a step that fine-tunes", "relift"),
            ("finetune/loss", "nats", "mean of -log pi over their tokens, before that", "relift"),
        )
    ),
}

# Of the batch that was trained on: the filter and the replay move them. Missing where there was no update.
OPENRLHF: tuple[Metric, ...] = (
    Metric("policy_loss", "", "the actor's loss, without KL and entropy terms", "Eq. 1, 3", ALL),
    Metric(
        "entropy_loss",
        "nats",
        "mean entropy of the actor's next-token distribution",
        "",
        ALL,
        "`--actor.entropy_coef` is set",
        True,
    ),
    Metric("actor_grad_norm", "", "gradient norm of the actor, last optimizer step, before clipping", "", ALL),
    Metric("actor_lr", "", "learning rate of the actor after the step", "", ALL),
    Metric("ppo_clip_ratio", "0 to 1", "share of clipped tokens, over all of the step's updates", "Eq. 1", ALL),
    Metric("ppo_kl", "nats", "mean of log pi_old - log pi over tokens, over all of the step's updates", "", ALL),
    Metric("kl", "nats", "mean KL penalty to the reference, or to the behaviour policy", "Eq. 1, 3", ALL),
    Metric("logprobs_diff", "nats", "mean of log pi - log pi_reference over tokens", "", ALL),
    Metric(
        "vllm_kl",
        "nats",
        "mean of log alpha - log pi_old over tokens",
        "",
        ALL,
        "`--adapt.ratio decoupled` or `--algo.advantage.is_correction_level`",
        True,
    ),
    Metric(
        "is_filter_ratio",
        "0 to 1",
        "share of tokens (or responses) whose weight prox / alpha was truncated or masked",
        "",
        ALL,
        "`--adapt.ratio decoupled` or `--algo.advantage.is_correction_level`",
        True,
    ),
    Metric("critic_loss", "reward^2", "half the mean squared error of the values", "A.9", CRITIC),
    Metric("values", "reward", "mean value over tokens", "A.9", CRITIC),
    Metric("critic_grad_norm", "", "gradient norm of the critic, mean over micro-batches", "", CRITIC),
    Metric("critic_lr", "", "learning rate of the critic, mean over micro-batches", "", CRITIC),
    Metric("reward", "reward", "mean reward, length penalties included", "", ALL),
    Metric("score", "reward", 'mean of the reward function\'s "scores"', "", ALL, "rewards not from a model", True),
    Metric("return", "reward", "mean of the responses' shaped rewards", "", ALL),
    Metric("group_reward_std", "reward", "mean standard deviation of a group's rewards", "", ALL),
    Metric("response_length", "tokens", "mean length, from the first generated token to the last", "", ALL),
    Metric("total_length", "tokens", "mean length with the prompt", "", ALL),
    Metric("truncated", "0 to 1", "share of responses that ended at `--rollout.max_new_tokens`", "", ALL),
    Metric("response_clip_ratio", "0 to 1", "share of samples that fill `--data.max_len`", "", ALL),
    Metric("rollout/num_samples", "responses", "in the batch", "", ALL),
    Metric("rollout/reward_mean", "reward", "mean reward", "", ALL),
    Metric("rollout/reward_std", "reward", "standard deviation of the rewards", "", ALL),
    Metric("rollout/response_length_mean", "tokens", "as response_length", "", ALL),
    Metric("rollout/truncated_rate", "0 to 1", "as truncated", "", ALL),
    Metric(
        "dynamic_filtering_pass_rate",
        "percent",
        "responses kept for each prompt drawn, times 100",
        "",
        ("ppo", "grpo"),
        "`--algo.dynamic_filtering_enable`",
        True,
    ),
)


def all_metrics() -> list[Metric]:
    """The whole catalogue, in order."""
    return [*(metric for section in CATALOGUE.values() for metric in section), *OPENRLHF]


def names(algorithm: str, *, optional: bool) -> set[str]:
    """Names in the rows of a run of this algorithm.

    Args:
        optional: with those that depend on a setting or an incident, or without.
    """
    wanted = [metric for metric in all_metrics() if optional or not metric.optional]
    return {name for metric in wanted for name in metric.names(algorithm)}
