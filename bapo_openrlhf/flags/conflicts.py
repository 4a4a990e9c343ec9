"""What flags may not be together in a run: with a method, with batch adaptation, or with each other."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from bapo_openrlhf.adapt.advantage import ESTIMATORS
from bapo_openrlhf.flags.config import MEASURED, described
from bapo_openrlhf.flags.rule import FILTERING, Flags, Rule, beside
from bapo_openrlhf.methods.luffy import LUFFY
from bapo_openrlhf.methods.pods import PODS

METHOD, ESTIMATOR, REWARD_MODEL = "adapt.method", "algo.advantage.estimator", "reward.model_name_or_path"
IMAGES, AGENT, OVERLONG = "data.max_images_per_prompt", "train.agent_func_path", "reward.overlong_buffer_len"
PENALTIES = (OVERLONG, "reward.stop_properly_penalty_coef")
UNWHITENED = [name for name, estimator in ESTIMATORS.items() if not estimator.whitened]


# ── What a flag needs, by a word of its description: whether it is there, and what the message says of it ──

NEEDS: dict[str, tuple[Callable[[Flags], Any], str]] = {
    "batch adaptation": (lambda f: f.adapted, "it needs batch adaptation, and adapt.method is none"),
    "a critic": (lambda f: f.adapted and f.critic,
                 "it needs a critic and batch adaptation (--algorithm ba_ppo), and algo.advantage.estimator is "
                 "{f[algo.advantage.estimator]} with adapt.method {f[adapt.method]}"),
    "asynchrony": (lambda f: not f.adapted or f["train.async_enable"], "it needs train.async_enable"),
    "a ratio of tokens": (
        lambda f: not f.adapted or (f["adapt.ratio"], f["actor.policy_loss_type"]) == ("behaviour", "ppo"),
        "it needs adapt.ratio behaviour and actor.policy_loss_type ppo, because it is about the ratio pi/alpha of each "
        "token"),
}  # fmt: skip


def _needed(flag: str, need: str, default: Any) -> Rule:
    is_met, says = NEEDS[need]
    return Rule(flag, lambda f: f[flag] != default and not is_met(f), "{it}; " + says)


# ── What a rule asks ──


def _measured(f: Flags) -> bool:
    return bool(f["adapt.reward_range"] == [MEASURED])


def _one_by_one(f: Flags) -> bool:
    """Whether requests are those of OpenRLHF, which have no place for tokens of a response."""
    return not {"requests", "all"} & set(f["run.faster"] or ())


def _waits(f: Flags) -> bool:
    """Whether what a method generates depends on results of steps that are not over in asynchronous mode."""
    return f.method is not None and (f.method.candidates > 1 or not f.method.asynchronous)


def _stages(f: Flags) -> bool:
    return f.method is not None and f.method.first_responses is not None


def _relates(f: Flags) -> bool:
    """Whether advantages are relative to rewards of responses that are not trained on."""
    relates = f.method is not None and (f.method.related_to_generated or f.method.demonstrates)
    return relates and (not f.critic or f["adapt.critic_baseline"] == "group")


def _no_penalty(flag: str) -> Rule:
    return beside(METHOD, flag, "not be set, because advantages are relative to rewards of responses that are not "
                  "trained on, and their penalties are not known", lambda f: f[flag] is not None, _relates)  # fmt: skip


def _whole_micro_batches(model: str) -> Rule:
    def step(f: Flags) -> int:
        return f.ranks(model) * int(f["train.micro_batch_size"])

    return Rule("train.batch_size", lambda f: model in f.loaded and f["train.batch_size"] % step(f),
                lambda f: f"{f.words('train.batch_size')}; it must be a multiple of {step(f)} = {model} ranks "
                          f"{f.ranks(model)} x train.micro_batch_size {f['train.micro_batch_size']}")  # fmt: skip


# ── The rules, in the order in which they are looked at ──

_adapter = partial(beside, "ds.lora.rank")
_probe = partial(beside, "run.gradient_probe")  # needs gradients whole in one process, and no generation ahead
_in_parts = partial(beside, "adapt.partial_rollout_tokens")
_adapts = partial(beside, METHOD)
_filtering = partial(beside, FILTERING, when=lambda f: f.adapted and f[FILTERING])
WITH_FLAGS = [
    Rule("ds.load_in_4bit", lambda f: f["ds.load_in_4bit"],
         "{it}; it must be False, because the rollout engines take no weights of 4 bits from the actor"),
    _adapter("train.enable_ema", "be False, because OpenRLHF's averaged model has no adapter"),
    _adapter(METHOD, "not be none, because OpenRLHF's rollout engines cannot load an adapter", lambda f: not f.adapted),
    _adapter("vllm.sync_with_ray", "be False, because OpenRLHF then expects one dtype for all weights"),
    _adapter("ds.tensor_parallel_size", "be 1, because DeepSpeed divides layers without their adapters",
             lambda f: f["ds.tensor_parallel_size"] > 1),
    _adapter(IMAGES, "be 0, because for such models OpenRLHF sends only the adapter"),
    Rule("adapt.micro_batch_tokens",
         lambda f: f["adapt.micro_batch_tokens"] is not None and f["train.dynamic_batch_enable"],
         "{it}, and train.dynamic_batch_enable is True; only one of them can make the micro-batches"),
    *(_needed(name, need, item.default) for name, need, item in described("needs")),
    beside("adapt.length_adaptive_lambd", "algo.advantage.lambd",
           "be 1, because only one of them can be the lambda of advantages", lambda f: f["algo.advantage.lambd"] != 1),
    beside("adapt.critic_baseline", "algo.advantage.gamma",
           "be 1, because a mean of rewards is no baseline of discounted returns",
           lambda f: f["algo.advantage.gamma"] != 1, when=lambda f: f["adapt.critic_baseline"] != "critic"),
    _probe("actor.num_gpus_per_node", "be 1", lambda f: f.gpus("actor") != 1),
    _probe("ds.zero_stage", "be below 3", lambda f: f["ds.zero_stage"] > 2),
    _probe("train.async_enable", "be False"),
    _probe(IMAGES, "be 0"),
    _in_parts(AGENT, "not be set, because what an agent did so far is in no checkpoint"),
    _in_parts(IMAGES, "be 0, because vLLM would take an image token of the response for an image"),
    _in_parts(FILTERING, "be False, because a step draws prompts until enough groups have a signal, and an unfinished "
                         "group has no reward"),
    _in_parts("adapt.reward_range", "be LOW HIGH, because the first complete groups, of which it would be measured, "
                                    "have the shortest responses", _measured),
    _in_parts("run.faster", "have requests, because OpenRLHF's have no place for the tokens that are there already",
              _one_by_one),
    _in_parts(METHOD, "be another, because what it generates depends on results that would not be there yet",
              lambda f: _waits(f) or _stages(f)),
    _adapts("train.partial_rollout_enable",
            "be False, because the moment of a sync decides which weights generate which tokens, and it follows the "
            "clock, so a resumed run would not repeat it; adapt.partial_rollout_tokens stops a response after a number "
            "of tokens instead"),
    _filtering("train.async_enable", "be False with batch adaptation, because a rollout is asked for before its step, "
                                     "and only the step knows how many groups its buffer can replay"),
    _filtering("adapt.filter", "be range, because the flag draws prompts until enough groups pass it",
               lambda f: f["adapt.filter"] != "range"),
    _filtering("adapt.reward_range", "be LOW HIGH, because the first step compares rewards with "
                                     "algo.dynamic_filtering_range before their range is measured", _measured),
    _adapts("rollout.vllm_generate_batch_size", "be at most rollout.batch_size, {f[rollout.batch_size]}: what is left "
            "over would be in no checkpoint",
            lambda f: (f["rollout.vllm_generate_batch_size"] or 0) > f["rollout.batch_size"]),
    Rule(REWARD_MODEL, lambda f: "," in (f[REWARD_MODEL] or ""), "{it}; it must be one model"),
    beside(REWARD_MODEL, IMAGES, "be 0, because a reward model gets no images"),
    _adapts(ESTIMATOR, "be one of " + ", ".join(ESTIMATORS) + ", because it compares the responses of a whole rollout, "
            "and an adapted batch is not one", lambda f: f[ESTIMATOR] not in ESTIMATORS),
    Rule("adapt.returns", lambda f: f.adapted and f["adapt.returns"] == "vtrace" and not f.critic,
         "{it}, which corrects a critic's values; algo.advantage.estimator {f[algo.advantage.estimator]} has none, it "
         "must be gae"),
    beside("adapt.ratio", "actor.policy_loss_type", "not be gspo, because OpenRLHF's loss of sequences has one ratio, "
           "to the behaviour policy, and no weight to truncate", lambda f: f["actor.policy_loss_type"] == "gspo",
           when=lambda f: f.adapted and f["adapt.ratio"] == "decoupled"),
    _adapts("ckpt.max_mem", "be left out: OpenRLHF deletes checkpoints until the others are smaller, also the last "
            "one, before it writes a new one. ckpt.max_num limits their number",
            lambda f: f["ckpt.max_mem"] < math.inf and not f["ckpt.disable_ds"]),
    _adapts("ckpt.max_num", "be at least 2: OpenRLHF deletes the oldest checkpoint before it writes a new one",
            lambda f: f["ckpt.save_steps"] > 0 and not f["ckpt.disable_ds"] and f["ckpt.max_num"] < 2),
]  # fmt: skip

_reuses = partial(beside, "adapt.reuse_gate", when=lambda f: f.adapted and f["adapt.reuse_gate"] is not None)
UPDATES = [
    _reuses("train.max_epochs", "be at least 2, because the first use never ends early",
            lambda f: f["train.max_epochs"] < 2),
    _reuses("ds.lora.rank", "be 0, because an adapter leaves the output head as it is"),
    _reuses("ds.tensor_parallel_size", "be 1, because the gradient of a divided output head is not added up",
            lambda f: f["ds.tensor_parallel_size"] > 1),
]  # fmt: skip

_universal = partial(beside, "ds.use_universal_ckpt", when=lambda f: f.adapted and f["ds.use_universal_ckpt"])
UNIVERSAL = [
    _universal("ds.zero_stage", "be in [1, 3], because DeepSpeed converts only what ZeRO divides",
               lambda f: not f["ds.zero_stage"]),
    _universal("ds.tensor_parallel_size", "be 1, because it is not tested how DeepSpeed joins divided weights",
               lambda f: f["ds.tensor_parallel_size"] > 1),
    _universal("train.enable_ema", "be False, because DeepSpeed does not convert the averaged weights"),
]  # fmt: skip
RANKS = [
    Rule("vllm.num_engines", lambda f: (f["vllm.num_engines"] or 0) < 1, "{it}; it must be at least 1"),
    *map(_whole_micro_batches, ("actor", "critic")),
]

_solutions = partial(beside, METHOD, when=lambda f: f.method and f.method.demonstrates)
_prefixes = partial(beside, METHOD, when=lambda f: f.method and f.method.prefixed)
_staged = partial(beside, METHOD, when=_stages)
OF_METHODS = [
    _solutions("data.solution_key", "be the column of the data with worked solutions",
               lambda f: not f["data.solution_key"]),
    _solutions(ESTIMATOR, "compare the responses of one group, because a worked solution has no values of a critic and "
               "is not among the whitened advantages", lambda f: ESTIMATORS[f[ESTIMATOR]].whitened),
    _solutions(IMAGES, "be 0, because a worked solution is only text"),
    _solutions(AGENT, "not be set, because a worked solution has one turn"),
    _solutions("adapt.scale_learning_rate", "be False, because a worked solution has no weight pi/alpha"),
    _solutions("adapt.reward_range", "be LOW HIGH, because a worked solution has the greatest reward", _measured),
    _prefixes(AGENT, "not be set, because an agent begins with its prompt, and not with a prefix"),
    _prefixes(IMAGES, "be 0, because vLLM would take an image token of a prefix for an image"),
    _prefixes("run.faster", "have requests, because OpenRLHF's have no place for a prefix", _one_by_one),
    _prefixes(OVERLONG, "not be set, because a prefix does not count as length, so that a response that is cut would "
              "pass for a short one", lambda f: f[OVERLONG] is not None),
    beside(METHOD, "train.async_enable", "be False, because what it generates depends on results that would not be "
           "there yet", when=_waits),
    *map(_no_penalty, PENALTIES),
    _staged(REWARD_MODEL, "not be set, because the method needs rewards while it generates"),
    _staged("adapt.reward_range", "be LOW HIGH, because the method needs the range while it generates", _measured),
    beside(METHOD, FILTERING, "be False, because a step counts the groups with a signal before the method adds rewards "
           "to them", when=lambda f: f.method and f.method.adds_rewards),
]  # fmt: skip

_skipping = partial(beside, "adapt.skip_zero_advantage")
SKIPPING = [
    _skipping(ESTIMATOR, "be one of " + ", ".join(UNWHITENED) + ", because only with them the advantages of equal "
              "rewards are 0", lambda f: f[ESTIMATOR] not in UNWHITENED),
    _skipping("adapt.scale_learning_rate", "be False, because the factor needs the weight pi/alpha of each response"),
    _skipping(METHOD, "be another, because a step divides by the responses that a skipped group has, and this method "
              "trains on fewer of them, or on a worked solution too",
              lambda f: isinstance(f.method, (LUFFY, PODS))),
]  # fmt: skip
OF_DATA = [
    Rule("rollout.batch_size", lambda f: f.prompts is not None and f.prompts < f["rollout.batch_size"],
         "{it}; it must be at most {f.prompts}, the number of prompts in data.prompt_dataset {f[data.prompt_dataset]} "
         "(data.max_samples {f[data.max_samples]})"),
]  # fmt: skip
COMBINATIONS = [*WITH_FLAGS, *UPDATES, *UNIVERSAL, *RANKS, *OF_METHODS, *SKIPPING, *OF_DATA]
