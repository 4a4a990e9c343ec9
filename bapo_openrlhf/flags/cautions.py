"""What may be meant, but is seldom what a user wants: each is a warning, and the run goes on."""

import math
from collections.abc import Callable
from typing import Any

from bapo_openrlhf.flags.config import GROUPS, described
from bapo_openrlhf.flags.conflicts import PENALTIES
from bapo_openrlhf.flags.rule import Flags, Rule
from bapo_openrlhf.methods import registry

FEW_STEPS = 2  # a run of fewer trainer steps is a trial: nobody expects it to sync or to re-evaluate
HIGH_RATE = 0.01
METHOD, OPTIONS = "adapt.method", "adapt.options"
# Responses of X2 for each response of the rollouts. In the study (docs/results.md) 0.25 cost 2.6 points, and 1 cost 7.
MOST_X2 = 0.2
FAR = 2  # times the replay window that generation may be ahead without a warning


def _learning(model: str) -> list[Rule]:
    rate, norm, warm_up = f"{model}.adam.lr", f"{model}.max_norm", f"{model}.lr_warmup_ratio"
    return [
        Rule(rate, lambda f: model in f.loaded and f[rate] == 0, f"{rate} is 0: the {model} does not learn"),
        Rule(rate, lambda f: model in f.loaded and f[rate] > HIGH_RATE,
             lambda f: f"{rate} is {f[rate]:g}, which is very high; 1e-6 is usual, and a tiny model may take 1e-3"),
        Rule(warm_up, lambda f: model in f.loaded and f[warm_up] > 0 and _one_update(f, model),
             f"{{it}}, and the {model} makes one optimizer step: the first one of a warm-up has a learning rate of 0, "
             "so that nothing is learned; with 0 there is no warm-up"),
        Rule(norm, lambda f: model in f.loaded and f[norm] == 0 and 0 < f[rate] <= HIGH_RATE,
             f"{norm} is 0: gradients are not clipped"),
    ]  # fmt: skip


def _one_update(f: Flags, model: str) -> bool:
    """Whether a model makes a single optimizer step, and has a schedule that may begin with a warm-up."""
    whole = f.steps == f["train.max_epochs"] == 1 and f.batch_samples <= f["train.batch_size"]
    pretrained = model == "critic" and f["adapt.value_pretraining"] > 0
    return whole and not pretrained and f[f"{model}.lr_scheduler"] != "constant"


SAMPLING = [
    Rule("rollout.top_p",
         lambda f: f["rollout.top_p"] < 1 and (f.adapted or f["algo.advantage.is_correction_level"] != "off"),
         "rollout.top_p is {f[rollout.top_p]:g}: the engines' log-probs (alpha) are of the truncated distribution, but "
         "the actor's (pi) are of the whole vocabulary. So pi/alpha starts between {f[rollout.top_p]:g} and 1 without "
         "any staleness; only 1 avoids it"),
    Rule("rollout.temperature", lambda f: f["rollout.temperature"] > 2,
         "rollout.temperature is {f[rollout.temperature]:g}: responses are nearly random; 1 is usual"),
    Rule("eval.n_samples_per_prompt",
         lambda f: f["eval.dataset"] and f["eval.temperature"] == 0 and f["eval.n_samples_per_prompt"] > 1,
         "{it}, and eval.temperature is 0: all responses to a prompt are the same, so that one is enough"),
    Rule("actor.entropy_coef", lambda f: (f["actor.entropy_coef"] or 0) < 0,
         "actor.entropy_coef is {f[actor.entropy_coef]:g}: a negative coefficient makes the policy less random"),
    Rule("critic.freezing_steps", lambda f: f["critic.freezing_steps"] >= 0 and not f.adapted,
         lambda f: f"{f.words('critic.freezing_steps')}: without batch adaptation, OpenRLHF keeps the batches of the "
                   f"frozen steps, so the actor's first update is on {f['critic.freezing_steps'] + 2} batches"),
    Rule("eval.dataset", lambda f: f["eval.dataset"] and f["eval.steps"] == -1,
         "{it}, but eval.steps is -1: it is never evaluated"),
]  # fmt: skip
X2 = [
    Rule("adapt.max_reevaluated_prompts", lambda f: _share_of_x2(f) > MOST_X2,
         lambda f: f"adapt.max_reevaluated_prompts is {_most_x2(f)} and {f.words('adapt.reevaluate_every')}: X2 may "
                   f"generate {_share_of_x2(f):.0%} as many responses as the rollouts, which is more than "
                   f"{MOST_X2:.0%}. In our study 25% cost 2.6 points of accuracy for the same number of responses"),
]  # fmt: skip


def _most_x2(f: Flags) -> int:
    return int(getattr(f.method, "max_reevaluated_prompts", 0))


def _share_of_x2(f: Flags) -> float:
    fresh = f["adapt.reevaluate_every"] * f["rollout.batch_size"]
    return _most_x2(f) / fresh if fresh else 0.0


def _takes(f: Flags, name: str) -> bool:
    """Whether a method reads an --adapt flag. A method that is not made yet may read any."""
    return f.method is None or registry.takes(type(f.method), name)


def _unused(f: Flags) -> list[str]:
    if f.adapted:
        of_methods = [name for name, *_ in described("of_method") if name in f.chosen]
        return [name for name in of_methods if not _takes(f, name.removeprefix("adapt."))]
    named = [f"adapt.{name}" for name in GROUPS["adapt"].__dataclass_fields__]
    return [name for name in named if name in f.chosen and name != METHOD and (name != OPTIONS or f[OPTIONS])]


def _unused_text(f: Flags) -> str:
    flags = ", ".join(map(f.words, _unused(f)))
    if f.adapted:
        return f"{flags}: no effect, because adapt.method {f[METHOD]} does not read this"
    algorithm = f" (algorithm {f['algorithm']})" if f["algorithm"] else ""
    return f"{flags}: no effect, because batches are not adapted: adapt.method is none{algorithm}"


def _counts_only(flag: str, only: str) -> Rule:
    name, _, value = only.partition("=")
    other = f"adapt.{name}"
    return Rule(flag, lambda f: f.adapted and flag in f.chosen and _takes(f, name)
                and (f[other] != value if value else f[other] == 0),
                "{it}: no effect, because adapt." + name + " is {f[" + other + "]}"
                + (f" and not {value}" if value else ""))  # fmt: skip


def _weakened(flag: str) -> Rule:
    return Rule(flag, lambda f: f.adapted and f["adapt.skip_zero_advantage"]
                and (f[flag] is not None if flag in PENALTIES else f[flag]),
                "{it}, and adapt.skip_zero_advantage is True: this term is lost for the skipped responses, so that a "
                "step is not the one that trains on them")  # fmt: skip


def _idle(flag: str, why: str, broken: Callable[[Flags], Any]) -> Rule:
    return Rule(flag, broken, "{it}: no effect, because " + why)


def _offload(model: str) -> Rule:
    flag = f"{model}.offload"
    return _idle(flag, "ds.zero_stage is {f[ds.zero_stage]}, and DeepSpeed keeps a model that is not trained on the "
                 "host only in stage 3",
                 lambda f: f[flag] and model in f.loaded and f["ds.zero_stage"] < 3)  # fmt: skip


NO_EFFECT = [
    Rule("adapt", _unused, _unused_text),
    *(_counts_only(name, only) for name, only, _ in described("only")),
    *map(_offload, ("ref", "reward")),
    Rule("adapt.reevaluate_every",
         lambda f: f.method is not None and f.method.prefixed and f["adapt.reevaluate_every"] == 0,
         "{it}: no prompt is asked again, and only then does adapt.method {f[adapt.method]} give it a prefix"),
    _idle("adapt.max_staleness", "generation is at most train.async_queue_size {f[train.async_queue_size]} steps ahead",
          lambda f: f.adapted and f["train.async_enable"]
          and (f["adapt.max_staleness"] or 0) > f["train.async_queue_size"]),
    _idle("adapt.partial_rollout_tokens", "a response has at most rollout.max_new_tokens {f[rollout.max_new_tokens]} "
          "tokens",
          lambda f: f.adapted
          and (f["adapt.partial_rollout_tokens"] or 0) >= (f["rollout.max_new_tokens"] or math.inf)),
    _idle("adapt.kl_target", "algo.kl.init_coef is 0",
          lambda f: f.adapted and f["adapt.kl_target"] == "behaviour" and f["algo.kl.init_coef"] == 0),
    _idle("algo.kl.target", "algo.kl.init_coef is 0, and the coefficient only ever grows or shrinks by a factor",
          lambda f: f["algo.kl.target"] is not None and f["algo.kl.init_coef"] == 0),
    _idle("data.input_template", "data.apply_chat_template is True, and a prompt has one template",
          lambda f: f["data.input_template"] and f["data.apply_chat_template"]),
    Rule("data.input_template",
         lambda f: "\\n" in (f["data.input_template"] or "") and not f["data.apply_chat_template"],
         "{it}: it has a backslash and an n where a new line may be meant; write $'...\\n...' in bash, and double "
         "quotes in YAML"),
    _idle("ckpt.best_metric_key", "eval.dataset is not set, and the best checkpoint is that of an evaluation",
          lambda f: f["ckpt.best_metric_key"] not in (None, "", "none") and not f["eval.dataset"]),
    _idle("data.solution_key", "adapt.method {f[adapt.method]} does not train on worked solutions",
          lambda f: f["data.solution_key"]
          and not (f.adapted and (f.method is None or f.method.demonstrates or f.method.prefixed))),
    _idle("ds.use_universal_ckpt", "ckpt.load_enable is False, and it is about the checkpoint that is loaded",
          lambda f: f["ds.use_universal_ckpt"] and not f["ckpt.load_enable"]),
    _idle("logger.wandb.project", "logger.wandb.key is not set, and OpenRLHF logs to wandb only with it",
          lambda f: "logger.wandb.project" in f.chosen and not f["logger.wandb.key"]),
]  # fmt: skip


def _of_all_steps(flag: str, says: str, broken: Callable[[Flags], Any]) -> Rule:
    return Rule(flag, lambda f: f.steps is not None and f.steps >= FEW_STEPS and broken(f),
                "{it}, and the run has {f.steps} trainer steps: " + says)  # fmt: skip


OFTEN = [
    Rule("train.colocate_critic_reward",
         lambda f: f["train.colocate_critic_reward"] and f["train.colocate_all"] and f.critic,
         "{it}: even with train.colocate_all, OpenRLHF then gives the critic GPUs of its own"),
    Rule("train.batch_size",
         lambda f: f.adapted and f["train.batch_size"] > f.batch_samples,
         lambda f: f"{f.words('train.batch_size')}: a training batch has at most "
                   f"{f.batch_samples} samples = adapt.batch_size {f.capacity} x "
                   f"rollout.n_samples_per_prompt {f['rollout.n_samples_per_prompt']}, so that no optimizer step is "
                   "full"),
    Rule("adapt.max_staleness",
         lambda f: f.adapted and _takes(f, "replay_steps") and f["adapt.replay_steps"] > 0
         and f.ahead > FAR * f["adapt.replay_steps"],
         lambda f: f"generation is up to {f.ahead} steps ahead (train.async_queue_size {f['train.async_queue_size']}, "
                   f"adapt.max_staleness {f['adapt.max_staleness']}), and adapt.replay_steps is "
                   f"{f['adapt.replay_steps']}: fresh groups are far older than those that are too old to replay"),
    _of_all_steps("adapt.rollout_delay", "the weights that it begins with generate all fresh groups",
                  lambda f: f.adapted and f["adapt.rollout_delay"] >= f.steps),
    _of_all_steps("adapt.reevaluate_every", "no prompt is generated again",
                  lambda f: f.adapted and f["adapt.reevaluate_every"] >= f.steps and _takes(f, "reevaluate_every")),
    _of_all_steps("eval.steps", "eval.dataset is never evaluated",
                  lambda f: f["eval.dataset"] and f["eval.steps"] > f.steps),
    _of_all_steps("ckpt.save_steps", "no checkpoint is saved unless a signal stops the run",
                  lambda f: f["ckpt.save_steps"] > f.steps),
    _of_all_steps("critic.freezing_steps", "the actor does not learn in any of them",
                  lambda f: f["critic.freezing_steps"] >= 0 and f["critic.freezing_steps"] + 1 >= f.steps),
]  # fmt: skip
COEFFICIENTS = ("algo.kl.init_coef", "actor.entropy_coef", "actor.aux_loss_coef")
WEAKENED = [*map(_weakened, (*COEFFICIENTS, *PENALTIES))]
CAUTIONS = [*_learning("actor"), *_learning("critic"), *SAMPLING, *X2, *NO_EFFECT, *OFTEN, *WEAKENED]
