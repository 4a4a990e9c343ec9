"""What flags may not be together.

OpenRLHF checks few values. It finds out about most others when models are loaded, at the first step, or never. A rule
of `BEFORE` is looked at before OpenRLHF completes the flags, because it would change some of them and only print it.
"""

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from bapo_openrlhf.adapt.advantage import ESTIMATORS, GROUP_ESTIMATORS
from bapo_openrlhf.flags.config import ALGORITHMS, MEASURED
from bapo_openrlhf.flags.critic import CRITIC
from bapo_openrlhf.flags.placement import PLACEMENT
from bapo_openrlhf.flags.prefixes import PREFIXES
from bapo_openrlhf.flags.ranges import VALUES, check_ranges
from bapo_openrlhf.flags.rule import Flags, Rule, refuse
from bapo_openrlhf.flags.skipping import SKIPPING
from bapo_openrlhf.flags.updates import UPDATES
from bapo_openrlhf.methods import Method

FILTERING = "algo.dynamic_filtering_enable"
NO_CRITIC = "OpenRLHF has no critic for images: use --algorithm bapo_grpo, or grpo"
CORRECTION = "algo.advantage.is_correction"
LEVEL, GATING, THRESHOLD = f"{CORRECTION}_level", f"{CORRECTION}_gating", f"{CORRECTION}_threshold"
SUM = "ds.grad_accum_dtype"
BYTES_OF_A_NAME = 255  # of a file or a folder


def check_values(flags: Mapping[str, Any]) -> None:
    """Refuse a value outside its range, and flags that contradict each other.

    Args:
        flags: Values by dotted name, as they were given, before OpenRLHF completes them.

    Raises:
        ConfigError: The message names the flag, its value and what is allowed.
    """
    refuse([*IMAGES, PACKED], flags)
    check_ranges(flags, VALUES)
    refuse([*SIZES, *OPTIONS, *PLACEMENT], flags)


def check_algorithm(args: SimpleNamespace) -> None:
    """Refuse flags that contradict the algorithm."""
    refuse(ALGORITHM, Flags.of(args))


def check_combinations(args: SimpleNamespace, **facts: Any) -> None:
    """Refuse flags that cannot be combined.

    Args:
        args: Arguments, as OpenRLHF has completed them.
        facts: What is known of the run, as attributes of `Flags`.

    Raises:
        ConfigError: The message names the flags and says why they exclude each other.
    """
    refuse(COMBINATIONS, Flags.of(args, **facts))


IMAGES = [
    Rule("data.max_images_per_prompt", lambda f: f["data.max_images_per_prompt"] > 0 and f.critic,
         lambda f: f"{f.words('data.max_images_per_prompt')}, and algo.advantage.estimator gae"
                   f"{' (algorithm ' + f['algorithm'] + ')' if f['algorithm'] else ''} needs a critic; {NO_CRITIC}"),
    Rule("data.max_images_per_prompt", lambda f: f["data.max_images_per_prompt"] > 0 and f.packing,
         "{it}, and {f.packing} packs samples; images and packed samples cannot be combined"),
]  # fmt: skip


def shares(flag: str, data: str) -> Rule:
    """The rule of how often each data set is drawn from, of which there is one more than commas in the flag `data`."""
    return Rule(flag, lambda f: f[flag] is not None and not _are_shares(f[flag], (f[data] or "").count(",") + 1),
                lambda f: f"{f.words(flag)}; it must be numbers above 0 with commas, one for each of "
                          f"{(f[data] or '').count(',') + 1} data sets in {data}, of sum 1")  # fmt: skip


# OpenRLHF would only print that it takes flash_attention_2 instead.
PACKED = Rule(
    "ds.attn_implementation", lambda f: f.packing and "flash_attention" not in f["ds.attn_implementation"],
    "{it}, and {f.packing} packs samples; packed samples need flash_attention_2",
)  # fmt: skip

ALGORITHM = [
    Rule("algorithm", lambda f: f["algorithm"] and f["algo.advantage.estimator"] not in _meaning(f).estimators,
         lambda f: f"algorithm {f['algorithm']} and algo.advantage.estimator {f['algo.advantage.estimator']} "
                   f"contradict each other; {f['algorithm']} takes {' or '.join(_meaning(f).estimators)}"),
    Rule("algorithm", lambda f: f["algorithm"] and f.adapted != (_meaning(f).method != "none"),
         lambda f: f"algorithm {f['algorithm']} and adapt.method {f['adapt.method']} contradict each other; "
                   f"{f['algorithm']} {'has no' if f.adapted else 'needs'} batch adaptation"),
]  # fmt: skip


def _meaning(f: Flags) -> Any:
    return ALGORITHMS[f["algorithm"]]


SIZES = [
    Rule("rollout.n_samples_per_prompt",
         lambda f: f["rollout.n_samples_per_prompt"] < 2 and f["algo.advantage.estimator"] in GROUP_ESTIMATORS,
         "{it}; it must be at least 2 with algo.advantage.estimator {f[algo.advantage.estimator]}"),
    Rule("rollout.n_samples_per_prompt", lambda f: f.adapted and f["rollout.n_samples_per_prompt"] < 2,
         "{it}; batch adaptation needs groups of at least 2"),
    Rule("rollout.n_samples_per_prompt", lambda f: f["rollout.n_samples_per_prompt"] < 2 and f[FILTERING],
         "{it}; it must be at least 2 with algo.dynamic_filtering_enable"),
    Rule("train.batch_size", lambda f: f["train.batch_size"] > _most_groups(f) * f["rollout.n_samples_per_prompt"],
         lambda f: f"{f.words('train.batch_size')}; it must be at most "
                   f"{_most_groups(f) * f['rollout.n_samples_per_prompt']} = {_most_groups(f)} prompts of a batch x "
                   f"{f.words('rollout.n_samples_per_prompt').replace(' is ', ' ')}"),
    Rule("rollout.micro_batch_size", lambda f: f.sampled // f["rollout.micro_batch_size"] < f.ranks("actor"),
         lambda f: f"{f.words('rollout.micro_batch_size')}; it must be smaller: {f.sampled} samples make "
                   f"{f.sampled // f['rollout.micro_batch_size']} of this size, and each of the {f.ranks('actor')} "
                   f"actor ranks needs one ({f.words('actor.num_gpus_per_node')})"),
    Rule("adapt.micro_batch_tokens", lambda f: 0 < (f["adapt.micro_batch_tokens"] or 0) < f["data.max_len"],
         "{it}; it must be at least data.max_len {f[data.max_len]}, the longest sample"),
    Rule("rollout.vllm_generate_batch_size",
         lambda f: (f["rollout.vllm_generate_batch_size"] or 0) > f["rollout.batch_size"]
         and not f["train.async_enable"],
         "{it}; it must be at most rollout.batch_size {f[rollout.batch_size]} without train.async_enable"),
    Rule("rollout.vllm_generate_batch_size",
         lambda f: 0 < (f["rollout.vllm_generate_batch_size"] or 0) < f["rollout.batch_size"],
         "{it}; it must be at least rollout.batch_size, {f[rollout.batch_size]}: a step would have fewer prompts than "
         "OpenRLHF counts for the learning-rate schedule"),
    Rule("rollout.max_new_tokens", lambda f: (f["rollout.max_new_tokens"] or 0) >= f["data.max_len"],
         "{it}; it must be below data.max_len {f[data.max_len]} = prompt + response"),
    Rule("reward.overlong_buffer_len", lambda f: (f["reward.overlong_buffer_len"] or 0) > f.longest_response,
         "{it}; it must be at most {f.longest_response}, the longest response"),
]  # fmt: skip


def _most_groups(f: Flags) -> int:
    return max(int(f["rollout.batch_size"]), f.capacity)


def _pair(flag: str) -> Rule:
    return Rule(flag, lambda f: f[flag][0] >= f[flag][1], "{it}; it must be LOW HIGH with LOW below HIGH")


def _rewarded_at_once(flag: str, broken: Callable[[Flags], Any], why: str) -> Rule:
    return Rule(flag, lambda f: f[flag] and "reward" in f.loaded and broken(f),
                "{it}; it needs reward.remote_url or train.agent_func_path, because " + why)  # fmt: skip


def _only_source(flag: str) -> Rule:
    return Rule("reward.model_name_or_path", lambda f: f["reward.model_name_or_path"] and f[flag],
                "{it}, and " + flag + " is {f[" + flag + "]}; only one of them can give the rewards")  # fmt: skip


def _awake_muon(model: str) -> Rule:
    return Rule(f"{model}.optim", lambda f: model in f.loaded and f[f"{model}.optim"] == "muon"
                and f["ds.enable_sleep"] and f["ds.zero_stage"] == 3 and not f["ds.adam_offload"],
                "{it}; it must be adam with ds.enable_sleep and ds.zero_stage 3, because DeepSpeed then moves only "
                "Adam's states to the host")  # fmt: skip


OPTIONS = [
    Rule("run.name", lambda f: f["run.name"].strip() in ("", ".", "..") or "/" in f["run.name"]
         or not f["run.name"].isprintable(),
         lambda f: f"run.name is {f['run.name']!r}; it must be the name of one folder, not empty and without /"),
    Rule("run.name", lambda f: len(f["run.name"].encode()) > BYTES_OF_A_NAME,
         lambda f: f"run.name is {f['run.name'][:20]}...; it has {len(f['run.name'].encode())} bytes, and must have at "
                   f"most {BYTES_OF_A_NAME}, because it is the name of a folder"),
    Rule(THRESHOLD, lambda f: len(f[THRESHOLD]) > 2 or f[THRESHOLD][0] > f[THRESHOLD][-1],
         "{it}; it must be HIGH, or LOW HIGH with LOW not above HIGH"),
    Rule(f"{CORRECTION}_mode", lambda f: f[f"{CORRECTION}_mode"] == "clip" and (f[LEVEL] == "seq" or _gated(f)),
         "{it}; it must be mask with is_correction_level {f[algo.advantage.is_correction_level]} and "
         "is_correction_gating {f[algo.advantage.is_correction_gating]}: only the ratio of a token can be clipped"),
    Rule(THRESHOLD, lambda f: f[LEVEL] != "off" and _gated(f) and len(f[THRESHOLD]) == 2 and f[THRESHOLD][0] > 0,
         "{it}; it must be one HIGH with algo.advantage.is_correction_gating {f[algo.advantage.is_correction_gating]}"),
    *map(_pair, ("reward.clip_range", "algo.dynamic_filtering_range")),
    Rule("actor.eps_clip_low_high", lambda f: (f["actor.eps_clip_low_high"] or [0])[0] > 1,
         "actor.eps_clip_low_high is {f[actor.eps_clip_low_high][0]} for LOW; it must be in (0, 1], because the ratio "
         "is above 0"),
    *map(_only_source, ("reward.remote_url", "train.agent_func_path")),
    Rule("verifier.send_responses",
         lambda f: f["verifier.send_responses"] and not "".join(f["reward.remote_url"] or "").startswith("http"),
         "{it}; it needs the address of a reward server in reward.remote_url: a function has the argument responses"),
    _rewarded_at_once(FILTERING, lambda f: True, "a reward model gives its rewards after the generation"),
    _rewarded_at_once("eval.dataset", lambda f: not f.adapted, "without batch adaptation, a reward model is not asked "
                      "in an evaluation"),
    Rule("eval.steps", lambda f: f["eval.steps"] > 0 and not f["eval.dataset"],
         "{it}; it must be -1 without eval.dataset: there is nothing to evaluate on"),
    shares("data.prompt_probs", "data.prompt_dataset"),
    Rule("ds.use_liger_kernel", lambda f: f["ds.use_liger_kernel"] and f["data.max_images_per_prompt"] > 0,
         "{it}; it must be False with data.max_images_per_prompt {f[data.max_images_per_prompt]}, because Liger has no "
         "models with vision"),
    Rule("vllm.enable_sleep",
         lambda f: f["vllm.enable_sleep"] and f["train.async_enable"] and f["train.colocate_all"],
         "{it}; it must be False with train.async_enable, because the engines never rest"),
    Rule("ds.zero_stage", lambda f: f["ds.enable_sleep"] and not f["ds.zero_stage"],
         "{it}; it must be in [1, 3] with ds.enable_sleep, because DeepSpeed moves only the states of a ZeRO optimizer "
         "to the host"),
    Rule("ds.zero_stage", lambda f: f["ds.adam_offload"] and not f["ds.zero_stage"],
         "{it}; it must be in [1, 3] with ds.adam_offload, because DeepSpeed keeps only the optimizer of ZeRO on the "
         "host"),
    Rule("ds.zero_stage", lambda f: not f["ds.zero_stage"] and f[SUM] not in (None, "bf16", "bfloat16"),
         "{it}; it must be in [1, 3] with ds.grad_accum_dtype {f[ds.grad_accum_dtype]}, because without ZeRO DeepSpeed "
         "adds up gradients only in bf16"),
    Rule("ds.zero_stage", lambda f: f["ds.zero_stage"] == 1 and f[SUM] in ("fp32", "float32")
         and f["ds.enable_sleep"] and not f["ds.adam_offload"],
         "{it}; it must be 2 or 3 with ds.grad_accum_dtype {f[ds.grad_accum_dtype]} and ds.enable_sleep, because "
         "DeepSpeed takes another optimizer in stage 1, whose states it cannot move to the host"),
    *map(_awake_muon, ("actor", "critic")),
    Rule("run.stall_timeout", lambda f: f["run.stall_timeout"] and f["train.async_enable"] and not f.adapted,
         "{it}; with train.async_enable it needs batch adaptation, because OpenRLHF's own trainer does not say what it "
         "does"),
    Rule("train.partial_rollout_enable", lambda f: f["train.partial_rollout_enable"] and not f["train.async_enable"],
         "{it}; it needs train.async_enable"),
    Rule("run.overwrite", lambda f: f["run.overwrite"] and f["ckpt.load_enable"],
         "{it}; it must be False with ckpt.load_enable, because one deletes an earlier run and the other continues it"),
]  # fmt: skip


def _gated(f: Flags) -> bool:
    return bool(f[GATING] != "ratio")


def _are_shares(text: str, count: int) -> bool:
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        return False
    return len(shares) == count and all(share > 0 for share in shares) and abs(sum(shares) - 1) < 1e-6


def _no_adapter(broken: Callable[[Flags], Any], why: str) -> Rule:
    return Rule("ds.lora.rank", lambda f: f["ds.lora.rank"] and broken(f), "{it}; it must be 0 " + why)


# LoRA and small weights, if the engines could not get the actor's weights.
ADAPTERS = [
    Rule("ds.load_in_4bit", lambda f: f["ds.load_in_4bit"],
         "{it}; it must be False, because the rollout engines take no weights of 4 bits from the actor"),
    _no_adapter(lambda f: f["train.enable_ema"], "with train.enable_ema: OpenRLHF's averaged model has no adapter"),
    _no_adapter(lambda f: not f.adapted,
                "without batch adaptation: OpenRLHF's rollout engines cannot load an adapter"),
    _no_adapter(lambda f: f["vllm.sync_with_ray"],
                "with vllm.sync_with_ray: OpenRLHF then expects one dtype for all weights"),
    _no_adapter(lambda f: f["data.max_images_per_prompt"],
                "with data.max_images_per_prompt: for such models OpenRLHF sends only the adapter"),
]  # fmt: skip


def _no_probe(name: str, broken: Callable[[Flags], Any], allowed: str) -> Rule:
    return Rule("run.gradient_probe", lambda f: f["run.gradient_probe"] and broken(f),
                "{it}, and " + name + " is {f[" + name + "]}; it must be " + allowed + " then")  # fmt: skip


# A probe of gradients needs them whole in one process, and no generation ahead of training.
PROBE = [
    _no_probe("adapt.method", lambda f: not f.adapted, "a method of batch adaptation"),
    _no_probe("actor.num_gpus_per_node", lambda f: f.gpus("actor") != 1, "1"),
    _no_probe("ds.zero_stage", lambda f: f["ds.zero_stage"] > 2, "below 3"),
    _no_probe("train.async_enable", lambda f: f["train.async_enable"], "False"),
    _no_probe("data.max_images_per_prompt", lambda f: f["data.max_images_per_prompt"], "0"),
]
WITH_ADAPTATION = [
    Rule("train.partial_rollout_enable", lambda f: f.adapted and f["train.partial_rollout_enable"],
         "{it}; it must be False with adapt.method {f[adapt.method]}, because the moment of a sync decides which "
         "weights generate which tokens, and it follows the clock, so a resumed run would not repeat it; "
         "adapt.partial_rollout_tokens stops a response after a number of tokens instead"),
    Rule(FILTERING, lambda f: f.adapted and f[FILTERING] and f["train.async_enable"],
         "{it}; it must be False with adapt.method {f[adapt.method]} and train.async_enable, because a rollout is "
         "asked for before its step, and only the step knows how many groups its buffer can replay"),
    Rule("adapt.filter", lambda f: f.adapted and f[FILTERING] and f["adapt.filter"] != "range",
         "{it}; it must be range with algo.dynamic_filtering_enable, which draws prompts until enough groups pass it"),
    Rule("adapt.reward_range", lambda f: f.adapted and f[FILTERING] and f["adapt.reward_range"] == [MEASURED],
         "{it}; it must be LOW HIGH with algo.dynamic_filtering_enable, because the first step compares rewards with "
         "algo.dynamic_filtering_range before their range is measured"),
    Rule("rollout.vllm_generate_batch_size",
         lambda f: f.adapted and (f["rollout.vllm_generate_batch_size"] or 0) > f["rollout.batch_size"],
         "{it}; with adapt.method {f[adapt.method]} it must be at most rollout.batch_size, {f[rollout.batch_size]}: "
         "what is left over would be in no checkpoint"),
    Rule("adapt.max_staleness",
         lambda f: f.adapted and f["adapt.max_staleness"] is not None and not f["train.async_enable"],
         "{it}; it needs train.async_enable"),
    Rule("reward.model_name_or_path", lambda f: "," in (f["reward.model_name_or_path"] or ""),
         "{it}; it must be one model"),
    Rule("reward.model_name_or_path",
         lambda f: f["reward.model_name_or_path"] and f["data.max_images_per_prompt"],
         "{it}, and data.max_images_per_prompt is {f[data.max_images_per_prompt]}; it must be 0 then, because a reward "
         "model gets no images"),
    Rule("algo.advantage.estimator", lambda f: f.adapted and f["algo.advantage.estimator"] not in ESTIMATORS,
         "{it}; with adapt.method {f[adapt.method]} it must be one of " + ", ".join(ESTIMATORS) + ", because it "
         "compares the responses of a whole rollout, and an adapted batch is not one"),
    Rule("adapt.returns", lambda f: f.adapted and f["adapt.returns"] == "vtrace" and not f.critic,
         "adapt.returns vtrace corrects a critic's values; algo.advantage.estimator {f[algo.advantage.estimator]} has "
         "none, it must be gae"),
    Rule("actor.policy_loss_type",
         lambda f: f.adapted and f["adapt.ratio"] == "decoupled" and f["actor.policy_loss_type"] == "gspo",
         "actor.policy_loss_type gspo cannot be combined with adapt.ratio decoupled: OpenRLHF's sequence-level loss "
         "has one ratio, to the behaviour policy, and no weight to truncate"),
    Rule("ckpt.max_mem",
         lambda f: f.adapted and f["ckpt.max_mem"] < math.inf and not f["ckpt.disable_ds"],
         "{it}; it must be left out: OpenRLHF deletes checkpoints until the others are smaller, also the last one, "
         "before it writes a new one. ckpt.max_num limits their number"),
    Rule("ckpt.max_num", lambda f: f.adapted and f["ckpt.save_steps"] > 0 and not f["ckpt.disable_ds"]
         and f["ckpt.max_num"] < 2,
         "{it}; it must be at least 2: OpenRLHF deletes the oldest checkpoint before it writes a new one"),
]  # fmt: skip


def _no_partial(name: str, broken: Callable[[Flags], Any], why: str) -> Rule:
    return Rule("adapt.partial_rollout_tokens", lambda f: f["adapt.partial_rollout_tokens"] is not None and broken(f),
                "{it}, and " + name + " is {f[" + name + "]}; they cannot be combined, because " + why)  # fmt: skip


# What partial rollouts cannot be combined with.
PARTIAL = [
    _no_partial("adapt.method", lambda f: not f.adapted, "only batch adaptation knows groups of several policies"),
    _no_partial("train.agent_func_path", lambda f: f["train.agent_func_path"],
                "what an agent did so far is in no checkpoint"),
    _no_partial("data.max_images_per_prompt", lambda f: f["data.max_images_per_prompt"],
                "vLLM would take an image token among those that a response has already for an image"),
    _no_partial(FILTERING, lambda f: f[FILTERING],
                "a step draws prompts until enough groups have a signal, and an unfinished group has no reward"),
    _no_partial("adapt.reward_range", lambda f: f["adapt.reward_range"] == [MEASURED],
                "the first complete groups, of which it would be measured, have the shortest responses"),
    _no_partial("run.faster", lambda f: not {"requests", "all"} & set(f["run.faster"] or ()),
                "OpenRLHF's requests have no place for the tokens that a response has already"),
    _no_partial("adapt.method", lambda f: f.method and (
                f.method.candidates > 1 or not f.method.asynchronous or _stages(f)),
                "what it generates depends on results that would not be there yet"),
]  # fmt: skip


def _not_universal(flag: str, broken: Callable[[Flags], Any], allowed: str) -> Rule:
    return Rule(flag, lambda f: f.adapted and f["ds.use_universal_ckpt"] and broken(f),
                "{it}; with ds.use_universal_ckpt it must be " + allowed)  # fmt: skip


def _muon(model: str) -> Rule:
    return _not_universal(f"{model}.optim", lambda f: model in f.loaded and f[f"{model}.optim"] == "muon",
                          "adam, because DeepSpeed converts only Adam's state")  # fmt: skip


# What DeepSpeed's universal checkpoints cannot have.
UNIVERSAL = [
    _not_universal("ds.zero_stage", lambda f: not f["ds.zero_stage"],
                   "in [1, 3], because DeepSpeed converts only what ZeRO divides"),
    *map(_muon, ("actor", "critic")),
    _not_universal("ds.tensor_parallel_size", lambda f: f["ds.tensor_parallel_size"] > 1,
                   "1, because it is not tested how DeepSpeed joins the parts of divided weights"),
    _not_universal("train.enable_ema", lambda f: f["train.enable_ema"],
                   "False, because DeepSpeed does not convert the averaged weights"),
]  # fmt: skip


# Flags that need batch adaptation, or of which only one can count.
NEEDED = [
    Rule("adapt.micro_batch_tokens", lambda f: f["adapt.micro_batch_tokens"] is not None and not f.adapted,
         "{it}; it needs batch adaptation, and adapt.method is none"),
    Rule("adapt.micro_batch_tokens",
         lambda f: f["adapt.micro_batch_tokens"] is not None and f["train.dynamic_batch_enable"],
         "{it}, and train.dynamic_batch_enable is True; only one of them can make the micro-batches"),
]  # fmt: skip


def _whole_micro_batches(model: str) -> Rule:
    def step(f: Flags) -> int:
        return f.ranks(model) * int(f["train.micro_batch_size"])

    return Rule("train.batch_size", lambda f: model in f.loaded and f["train.batch_size"] % step(f),
                lambda f: f"{f.words('train.batch_size')}; it must be a multiple of {step(f)} = {model} ranks "
                          f"{f.ranks(model)} x train.micro_batch_size {f['train.micro_batch_size']}")  # fmt: skip


RANKS = [
    Rule("vllm.num_engines", lambda f: (f["vllm.num_engines"] or 0) < 1, "{it}; it must be at least 1"),
    *map(_whole_micro_batches, ("actor", "critic")),
]


def _no_penalty(flag: str) -> Rule:
    return Rule(flag, lambda f: f[flag] is not None and f.method and _relates(f.method)
                and (not f.critic or f["adapt.critic_baseline"] == "group"),
                "{it}; with adapt.method {f[adapt.method]} it must not be set, because advantages are relative to "
                "rewards of responses that are not trained on, and their penalties are not known")  # fmt: skip


def _relates(method: Method) -> bool:
    return method.related_to_generated or method.demonstrates


def _no_demonstrations(flag: str, broken: Callable[[Flags], Any], allowed: str) -> Rule:
    return Rule(flag, lambda f: f.method and f.method.demonstrates and broken(f),
                "{it}; with adapt.method {f[adapt.method]}, which trains on worked solutions, it must "
                + allowed)  # fmt: skip


# What a worked solution lacks: responses beside which it could stand.
DEMONSTRATIONS = [
    Rule("adapt.method", lambda f: f.method and f.method.demonstrates and not f["data.solution_key"],
         "{it}; it needs data.solution_key, the column of the data with worked solutions"),
    _no_demonstrations("algo.advantage.estimator", lambda f: ESTIMATORS[f["algo.advantage.estimator"]].whitened,
                       "compare the responses of one group, because a worked solution has no values of a critic and "
                       "is not among the whitened advantages"),
    _no_demonstrations("data.max_images_per_prompt", lambda f: f["data.max_images_per_prompt"],
                       "be 0, because a worked solution is only text"),
    _no_demonstrations("train.agent_func_path", lambda f: f["train.agent_func_path"],
                       "not be set, because a worked solution has one turn"),
    _no_demonstrations("adapt.scale_learning_rate", lambda f: f["adapt.scale_learning_rate"],
                       "be False, because a worked solution has no weight pi/alpha"),
    _no_demonstrations("adapt.reward_range", lambda f: f["adapt.reward_range"] == [MEASURED],
                       "be LOW HIGH, because a worked solution has the greatest reward"),
]  # fmt: skip
# What a method cannot be combined with.
OF_METHODS = [
    Rule("train.async_enable",
         lambda f: f["train.async_enable"] and f.method and (f.method.candidates > 1 or not f.method.asynchronous),
         "{it}; it must be False with adapt.method {f[adapt.method]}, because what it generates depends on results "
         "that would not be there yet"),
    *map(_no_penalty, ("reward.overlong_buffer_len", "reward.stop_properly_penalty_coef")),
    Rule("reward.model_name_or_path", lambda f: f["reward.model_name_or_path"] and _stages(f),
         "{it}; it must not be set with adapt.method {f[adapt.method]}, because the method needs rewards while it "
         "generates"),
    Rule("adapt.reward_range", lambda f: f["adapt.reward_range"] == [MEASURED] and _stages(f),
         "{it}; it must be LOW HIGH with adapt.method {f[adapt.method]}, because the method needs the range while it "
         "generates"),
    Rule(FILTERING, lambda f: f[FILTERING] and f.method and f.method.adds_rewards,
         "{it}; it must be False with adapt.method {f[adapt.method]}, because a step counts the groups with a signal "
         "before the method adds rewards to them"),
]  # fmt: skip


def _stages(f: Flags) -> bool:
    return f.method is not None and f.method.first_responses is not None


OF_DATA = [
    Rule("rollout.batch_size", lambda f: f.prompts is not None and f.prompts < f["rollout.batch_size"],
         lambda f: f"{f.words('rollout.batch_size')}; it must be at most {f.prompts}, the number of prompts in "
                   f"data.prompt_dataset {f['data.prompt_dataset']}"
                   f"{' with ' + f.words('data.max_samples').replace(' is ', ' ') if _cut(f) else ''}"),
]  # fmt: skip


def _cut(f: Flags) -> bool:
    return bool(f.prompts == f["data.max_samples"])


COMBINATIONS = [
    *ADAPTERS, *NEEDED, *CRITIC, *PROBE, *PARTIAL, *WITH_ADAPTATION, *UPDATES, *UNIVERSAL, *RANKS, *DEMONSTRATIONS,
    *PREFIXES, *OF_METHODS, *SKIPPING, *OF_DATA,
]  # fmt: skip
