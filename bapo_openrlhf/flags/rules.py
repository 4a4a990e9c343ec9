"""What flags may not be, before OpenRLHF completes them, because it would change some of them and only print it.

OpenRLHF checks few values. It finds out about most others when models are loaded, at the first step, or never.
"""

from collections.abc import Callable, Mapping
from typing import Any

from bapo_openrlhf.adapt.advantage import GROUP_ESTIMATORS
from bapo_openrlhf.flags.config import ALGORITHMS, Algorithm, described
from bapo_openrlhf.flags.ranges import MODELS, VALUES, check_ranges
from bapo_openrlhf.flags.rule import FILTERING, Flags, Rule, beside, check_rules

NO_CRITIC = "OpenRLHF has no critic for images: use --algorithm bapo_grpo, or grpo"
CORRECTION = "algo.advantage.is_correction"
LEVEL, GATING, THRESHOLD = f"{CORRECTION}_level", f"{CORRECTION}_gating", f"{CORRECTION}_threshold"
SUM = "ds.grad_accum_dtype"
FLOAT32 = ("fp32", "float32")  # its values for sums in float32
BYTES_OF_A_NAME = 255  # of a file or a folder
# Models that must have the same GPUs with a flag. OpenRLHF compares the critic with the reward model even if no reward
# model is loaded.
TOGETHER = (
    ("train.colocate_all", "actor", "ref"),
    ("train.colocate_actor_ref", "actor", "ref"),
    ("train.colocate_critic_reward", "critic", "reward"),
)


def check_values(flags: Mapping[str, Any]) -> None:
    """Refuse a value (by dotted name, as it was given) outside its range, and flags that contradict each other."""
    f = Flags(flags)
    ours = {name: allowed for name, allowed, _ in described("allowed") if f.adapted or not name.startswith("adapt.")}
    check_rules([*NEVER_RUN, *IMAGES, PACKED], f)
    check_ranges(flags, VALUES | ours)
    check_rules([*SIZES, *OPTIONS, *PLACEMENT, *ALGORITHM], f)


def _muon(model: str) -> Rule:
    return Rule(f"{model}.optim", lambda f: model in f.loaded and f[f"{model}.optim"] == "muon",
                "{it}; it must be adam, because Muon was never run with this project")  # fmt: skip


NEVER_RUN = [
    Rule("ds.ring_attn_size", lambda f: f["ds.ring_attn_size"] > 1,
         "{it}; it must be 1, because ring attention was never run with this project"),
    *map(_muon, ("actor", "critic")),
]  # fmt: skip
IMAGES = [
    Rule("data.max_images_per_prompt", lambda f: f["data.max_images_per_prompt"] > 0 and f.critic,
         "{it}, and algo.advantage.estimator gae (algorithm {f[algorithm]}) needs a critic; " + NO_CRITIC),
    Rule("data.max_images_per_prompt", lambda f: f["data.max_images_per_prompt"] > 0 and f.packing,
         "{it}, and {f.packing} packs samples; images and packed samples cannot be combined"),
]  # fmt: skip


def _data_sets(f: Flags) -> int:
    return (f["data.prompt_dataset"] or "").count(",") + 1


# OpenRLHF would only print that it takes flash_attention_2 instead.
PACKED = Rule("ds.attn_implementation", lambda f: f.packing and "flash_attention" not in f["ds.attn_implementation"],
              "{it}, and {f.packing} packs samples; packed samples need flash_attention_2")  # fmt: skip
ALGORITHM = [
    Rule("algorithm", lambda f: f["algorithm"] and f["algo.advantage.estimator"] not in _meaning(f).estimators,
         lambda f: f"algorithm {f['algorithm']} and algo.advantage.estimator {f['algo.advantage.estimator']} "
                   f"contradict each other; {f['algorithm']} takes {' or '.join(_meaning(f).estimators)}"),
    Rule("algorithm", lambda f: f["algorithm"] and f.adapted != (_meaning(f).method != "none"),
         lambda f: f"algorithm {f['algorithm']} and adapt.method {f['adapt.method']} contradict each other; "
                   f"{f['algorithm']} {'has no' if f.adapted else 'needs'} batch adaptation"),
]  # fmt: skip


def _meaning(f: Flags) -> Algorithm:
    return ALGORITHMS[f["algorithm"]]


def _one_response(f: Flags) -> bool:
    return bool(f["rollout.n_samples_per_prompt"] < 2)


GENERATE = "rollout.vllm_generate_batch_size"
SIZES = [
    beside("algo.advantage.estimator", "rollout.n_samples_per_prompt", "be at least 2", _one_response,
           lambda f: f["algo.advantage.estimator"] in GROUP_ESTIMATORS),
    beside("adapt.method", "rollout.n_samples_per_prompt", "be at least 2", _one_response),
    beside(FILTERING, "rollout.n_samples_per_prompt", "be at least 2", _one_response),
    Rule("train.batch_size", lambda f: f["train.batch_size"] > f.most_samples,
         "{it}; it must be at most {f.most_samples} = prompts of a batch x rollout.n_samples_per_prompt "
         "{f[rollout.n_samples_per_prompt]}"),
    Rule("rollout.micro_batch_size", lambda f: f.sampled // f["rollout.micro_batch_size"] < f.ranks("actor"),
         lambda f: f"{f.words('rollout.micro_batch_size')}; it must be at most {f.sampled // f.ranks('actor')}; "
                   f"each of {f.ranks('actor')} actor ranks needs one ({f.words('actor.num_gpus_per_node')})"),
    Rule("adapt.micro_batch_tokens", lambda f: 0 < (f["adapt.micro_batch_tokens"] or 0) < f["data.max_len"],
         "{it}; it must be at least data.max_len {f[data.max_len]}, the longest sample"),
    Rule(GENERATE, lambda f: (f[GENERATE] or 0) > f["rollout.batch_size"] and not f["train.async_enable"],
         "{it}; it must be at most rollout.batch_size {f[rollout.batch_size]} without train.async_enable"),
    Rule(GENERATE, lambda f: 0 < (f[GENERATE] or 0) < f["rollout.batch_size"],
         "{it}; it must be at least rollout.batch_size, {f[rollout.batch_size]}: a step would have fewer prompts than "
         "OpenRLHF counts for the learning-rate schedule"),
    Rule("rollout.max_new_tokens", lambda f: (f["rollout.max_new_tokens"] or 0) >= f["data.max_len"],
         "{it}; it must be below data.max_len {f[data.max_len]} = prompt + response"),
    Rule("reward.overlong_buffer_len", lambda f: (f["reward.overlong_buffer_len"] or 0) > f.longest_response,
         "{it}; it must be at most {f.longest_response}, the longest response"),
]  # fmt: skip


def _without_zero(f: Flags) -> bool:
    return not f["ds.zero_stage"]


def _pair(flag: str) -> Rule:
    return Rule(flag, lambda f: f[flag][0] >= f[flag][1], "{it}; it must be LOW HIGH with LOW below HIGH")


def _rewarded_at_once(flag: str, broken: Callable[[Flags], Any], why: str) -> Rule:
    return Rule(flag, lambda f: f[flag] and "reward" in f.loaded and broken(f),
                "{it}; it needs reward.remote_url or train.agent_func_path, because " + why)  # fmt: skip


OPTIONS = [
    Rule("run.name", lambda f: f["run.name"].strip() in ("", ".", "..") or "/" in f["run.name"]
         or not f["run.name"].isprintable() or len(f["run.name"].encode()) > BYTES_OF_A_NAME,
         lambda f: f"run.name is {f['run.name'][:20]!r}; it must be the name of one folder, not empty, without / and "
                   f"of at most {BYTES_OF_A_NAME} bytes"),
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
    *(beside(source, "reward.model_name_or_path", "not be set, because only one of them can give the rewards")
      for source in ("reward.remote_url", "train.agent_func_path")),
    Rule("verifier.send_responses",
         lambda f: f["verifier.send_responses"] and not "".join(f["reward.remote_url"] or "").startswith("http"),
         "{it}; it needs the address of a reward server in reward.remote_url: a function has the argument responses"),
    _rewarded_at_once(FILTERING, lambda f: True, "a reward model gives its rewards after the generation"),
    _rewarded_at_once("eval.dataset", lambda f: not f.adapted, "without batch adaptation, a reward model is not asked "
                      "in an evaluation"),
    Rule("eval.steps", lambda f: f["eval.steps"] > 0 and not f["eval.dataset"],
         "{it}; it must be -1 without eval.dataset: there is nothing to evaluate on"),
    Rule("data.prompt_probs",
         lambda f: f["data.prompt_probs"] is not None and not _are_shares(f["data.prompt_probs"], _data_sets(f)),
         lambda f: f"{f.words('data.prompt_probs')}; it must be numbers above 0 with commas, one for each of "
                   f"{_data_sets(f)} data sets in data.prompt_dataset, of sum 1"),
    beside("data.max_images_per_prompt", "ds.use_liger_kernel", "be False, because Liger has no models with vision"),
    beside("train.async_enable", "vllm.enable_sleep", "be False, because the engines never rest",
           when=lambda f: f["train.async_enable"] and f["train.colocate_all"]),
    beside("ds.enable_sleep", "ds.zero_stage", "be in [1, 3], because DeepSpeed moves only the states of a ZeRO "
           "optimizer to the host", _without_zero),
    beside("ds.adam_offload", "ds.zero_stage", "be in [1, 3], because DeepSpeed keeps only the optimizer of ZeRO on "
           "the host", _without_zero),
    beside("ds.tensor_parallel_size", "ds.zero_stage", "be below 3, because DeepSpeed cannot divide layers whose "
           "weights ZeRO has divided before", lambda f: f["ds.zero_stage"] == 3,
           when=lambda f: f["ds.tensor_parallel_size"] > 1),
    beside(SUM, "ds.zero_stage", "be in [1, 3], because without ZeRO DeepSpeed adds up gradients only in bf16",
           _without_zero, when=lambda f: f[SUM] not in (None, "bf16", "bfloat16")),
    beside(SUM, "ds.zero_stage", "be 2 or 3 without ds.adam_offload, because the optimizer that DeepSpeed takes in "
           "stage 1 ends the run at a gradient of 0", lambda f: f["ds.zero_stage"] == 1,
           when=lambda f: f[SUM] in FLOAT32 and not f["ds.adam_offload"]),
    Rule("run.stall_timeout", lambda f: f["run.stall_timeout"] and f["train.async_enable"] and not f.adapted,
         "{it}; with train.async_enable it needs batch adaptation, because OpenRLHF's own trainer does not say what it "
         "does"),
    Rule("train.partial_rollout_enable", lambda f: f["train.partial_rollout_enable"] and not f["train.async_enable"],
         "{it}; it needs train.async_enable"),
    beside("ckpt.load_enable", "run.overwrite", "be False, because one deletes an earlier run and the other continues "
           "it"),
]  # fmt: skip


def _gated(f: Flags) -> bool:
    return bool(f[GATING] != "ratio")


def _are_shares(text: str, count: int) -> bool:
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        return False
    return len(shares) == count and all(share > 0 for share in shares) and abs(sum(shares) - 1) < 1e-8


# ── How the roles of a run share its GPUs (`training/driver/build.py`). OpenRLHF asserts a part of it. ──


def _apart(f: Flags, one: str, other: str) -> bool:
    same = all(f[f"{one}.{size}"] == f[f"{other}.{size}"] for size in ("num_nodes", "num_gpus_per_node"))
    return not same and one in f.loaded and (other in f.loaded or other == "reward")


def _whole_copies(model: str) -> Rule:
    return Rule(f"{model}.num_gpus_per_node", lambda f: model in f.loaded and f.gpus(model) % f.copies,
                lambda f: f"{f.shape(model)}; its GPUs must be a multiple of ds.tensor_parallel_size "
                          f"{f.copies}")  # fmt: skip


def _beside_the_actor(model: str) -> Rule:
    def shares(f: Flags) -> bool:
        beside_critic = model in ("critic", "reward") and f.critic and f["train.colocate_critic_reward"]
        return model in f.loaded and f["train.colocate_all"] and not beside_critic

    return Rule(f"{model}.num_gpus_per_node", lambda f: shares(f) and f.gpus(model) > f.gpus("actor"),
                lambda f: f"{f.shape(model)}; with train.colocate_all it must be at most the actor's "
                          f"{f.gpus('actor')}")  # fmt: skip


def _together(flag: str, one: str, other: str) -> Rule:
    return Rule(f"{other}.num_gpus_per_node", lambda f: f[flag] and _apart(f, one, other),
                lambda f: f"{f.shape(one)}, and {f.shape(other)}; they must be the same with {flag}")  # fmt: skip


PLACEMENT = [
    Rule("vllm.num_engines", lambda f: not f["vllm.num_engines"] and f.packing,
         "{f.packing} packs samples and so needs engines; {it}"),
    *map(_whole_copies, MODELS),
    *map(_beside_the_actor, MODELS[1:]),
    *(_together(*models) for models in TOGETHER),
    Rule("vllm.num_engines",
         lambda f: f["train.colocate_all"] and not f["train.async_enable"] and f["vllm.num_engines"]
         and f.gpus("actor") != f["vllm.num_engines"] * f["vllm.tensor_parallel_size"],
         lambda f: f"{f.words('vllm.num_engines')}; with train.colocate_all, vllm.num_engines x "
                   f"vllm.tensor_parallel_size {f['vllm.tensor_parallel_size']} must be {f.gpus('actor')}: "
                   f"{f.shape('actor')}"),
]  # fmt: skip
