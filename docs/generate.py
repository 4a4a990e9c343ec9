"""Writes docs/api.md, docs/config.md, docs/metrics.md, and the generated parts of two more pages, from the code.

With --check it exits 1 if one of them is out of date.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from dataclasses import fields
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from types import FunctionType
from typing import Any

from bapo_openrlhf import methods
from bapo_openrlhf.adapt.advantage import ESTIMATORS
from bapo_openrlhf.adapt.batch import Batch, fill, fitting
from bapo_openrlhf.adapt.buffers import CountedStore, HardBuffer, HardPrompt, ReplayBuffer
from bapo_openrlhf.adapt.filters import has_signal
from bapo_openrlhf.adapt.group import Group, Prompt, Response, group_from_state, group_state, prompt_state
from bapo_openrlhf.adapt.metric import ADAPTED, ALL, CRITIC, Metric, declare
from bapo_openrlhf.adapt.schedule import due
from bapo_openrlhf.adapt.thresholds import Interval
from bapo_openrlhf.flags import config, files
from bapo_openrlhf.launch.method_trial import try_method
from bapo_openrlhf.methods import BAPO, Method, registry
from bapo_openrlhf.methods.base import FilteredMethod, option
from bapo_openrlhf.record import metrics

FOLDER = Path(__file__).parent
HEAD = """# Configuration reference

These flags come in addition to those of OpenRLHF 0.11.2, which keep their meaning. `bapo-openrlhf train --help` lists
them, and `--help-all` also lists OpenRLHF's. `bapo-openrlhf check` with the same flags says what a run would do,
without models or GPU. [Start from these settings](own_data.md#start-from-these-settings) names the flags to set first,
and the reason for each value.

## YAML and command line

Flags can be in a YAML file (`--config FILE`), on the command line, or in both. A later line of this list overrides an
earlier one:

1. The defaults below, and OpenRLHF's.
2. What `--algorithm` stands for: an advantage estimator and a method.
3. The YAML file.
4. The command line.

Several files come one after the other. The file of a task names a model or data, and may name an algorithm and a
method. `--algorithm` on the command line, or in a later file, also overrides the estimator and the method that such a
file chose for another algorithm. Any other contradiction between the algorithm and its parts is an error. So is a file
for a method that the run would not use: two of them with different methods, or one with `grpo` or `ppo`. Only
`--adapt.method` on the command line overrides it.

If an algorithm is named and the critic's GPUs are not, the critic takes as many GPUs as the actor. A flag that has no
effect in this run is a warning, unless a file has it for another algorithm or method.

In the file, names are nested at the dots or written with dots: `adapt: {c1: 1/8}` is `adapt.c1: 1/8`. Lists are several
values (`c2: [1/8, 4/8]`), switches take `true` or `false`, and `null` keeps the default. A section may be empty. A name
that is no flag is an error. On the command line a switch needs no value, and may have one: `--train.colocate_all
false`. A relative path starts from the working directory, also if a file in another folder has it.

## `--algorithm`

| value | advantage estimators (the first is the default) | batches | what it is |
| --- | --- | --- | --- |
"""
ESTIMATORS_HEAD = """
With batch adaptation, this is what the estimators (`--algo.advantage.estimator`) do. b are the rewards that those of a
group are compared with: usually all of the group. A whitened advantage is moved to mean 0 and variance 1 over all
generated tokens of the batch. OpenRLHF's `reinforce` and `flash_reinforce` are refused, because they compare a response
with no other of its group.
"""
OPENRLHF = """
## OpenRLHF's flags that batch adaptation reads

| flag | what it means here |
| --- | --- |
| `--rollout.n_samples_per_prompt` | G, the group size; at least 2 |
| `--rollout.batch_size` | prompts of a rollout batch, and B unless `--adapt.batch_size` says otherwise |
| `--rollout.temperature`, `--rollout.top_p` | the behaviour policy: both are applied before log-probs are stored |
| `--train.batch_size` | samples of an optimizer step, a multiple of ranks x micro-batch; the last step takes the rest |
| `--train.micro_batch_size`, `--actor.num_gpus_per_node`, ... | ranks and micro-batches: see `--train.batch_size` |
| `--reward.remote_url` | a `.py` file with `reward_func`, or an endpoint, [or nothing](rewards.md) |
| `--algo.kl.init_coef`, `--algo.kl.use_loss` | beta, and whether the loss or the reward has the KL penalty |
| `--algo.advantage.is_correction_level` | the engine-to-actor correction, or the weight of `--adapt.ratio decoupled` |
| `--train.seed` | seed of the order of the prompts and of every random choice of batch adaptation, too |
| `--train.full_determinism_enable` | each response has a seed: runs are [equal](decisions.md#weights-and-requests) |
| `--eval.steps` | evaluation uses today's weights, with any v |
| `--ckpt.save_steps` | checkpoints contain the buffers, and between two syncs the rollout weights |
| `--ckpt.output_dir` | the trained model's folder; the default is here `DIR/NAME/model` |
| `--ckpt.path` | the checkpoints' folder; the default is here `DIR/NAME/checkpoints` |
| `--ckpt.load_enable` | resumes from the newest complete checkpoint in `--ckpt.path`: [Reliability](reliability.md) |
| `--ds.use_universal_ckpt` | resumes [on another number of ranks](reliability.md#on-another-number-of-ranks) |

## OpenRLHF's flags to know

| flag | why |
| --- | --- |
| `--algo.advantage.lambd`, `--algo.advantage.gamma` | GAE of `ba_ppo` and `ppo`; both 1 by default |
| `--critic.model_name_or_path`, `--critic.adam.lr` | the critic; by default the run's reward model, or the actor's |
| `--actor.eps_clip` | epsilon of the PPO clip; the paper does not give it, OpenRLHF's default is 0.2 |
| `--actor.loss_agg_mode` | `token-mean` (default) gives all tokens the same weight; Eq. 1 is `seq-mean-token-mean` |
| `--train.max_epochs` | passes over each training batch |
| `--vllm.enforce_eager`, `--vllm.sync_backend gloo`, `--ds.attn_implementation eager` | needed without a GPU |

Batch adaptation refuses `--train.partial_rollout_enable`. [Design decisions](decisions.md#refused-for-now) says why.
"""

API_HEAD = """
# API

[Add a method](add_a_method.md) shows how the parts go together, and [Concepts](concepts.md#words) defines the words.

All of it is pure: it needs numpy, and neither torch, Ray nor OpenRLHF. T is the number of tokens of a prompt and a
response, and A is the number of generated ones.
"""
API = (
    *(Method, FilteredMethod, option, BAPO, Prompt, Response, Group, Batch, fill, fitting, has_signal),
    *(CountedStore, HardBuffer, HardPrompt, ReplayBuffer, due, Interval, prompt_state, group_state, group_from_state),
    *(Metric, declare, try_method),
)

METRICS_HEAD = """
# Metrics reference

Every trainer step writes its metrics to `metrics.jsonl`. OpenRLHF's own loggers also write them to wandb and
TensorBoard (`--logger.wandb.key`, `--logger.tensorboard_dir`), under the run's name, with `train/` before each metric.
Only the loggers have
the metrics of OpenRLHF's evaluations (`eval/...`).

## Names

Names are `kind/what`, in lower case. `SOURCE` stands for `fresh`, `reevaluated` or `replayed` (X1, X2, X3), or
`prefixed`. A name ends in `_mean` or `_max` if it is one of several numbers about the same thing, in `_total` if it
counts the run so far, in `_share` if it is a part of 1, and in `_bytes` or `_seconds` for its unit. Names without a
slash are those of OpenRLHF's training, `skipped_update`, and what a reward function returns as `extra_logs`, under its
own names. Your own method may report more.

`step` is OpenRLHF's count and starts at 1: the row with `step` k is that of t = k - 1. A value that is not a number is
null. A metric that does not apply to a step is not in its row.

## What a run leaves

The files of a run are in `DIR/NAME` (`--run.dir`, `--run.name`), also for plain `ppo` and `grpo`.
`bapo_openrlhf.record.run_record` reads all of them, even while the run continues.

- `run.json` is written at the start. It has `name`, `algorithm`, `seed`, `started`, `total_steps` (null if not known),
  `command`, `commit`, `cpu` (its kind), `versions`, and `config`: every flag by its dotted name. On a CPU,
  `bf16_products` says how bfloat16 matrices are [multiplied](faq.md#cpus-with-and-without-bfloat16), by the first step
  that does it so. A resume writes `run.json` again, with the old `started`, the times of all resumes in `resumed`, and
  what they changed in `changed`. `inputs` has digests of the data, the models and the code that flags name.
- `metrics.jsonl` has a line for each trainer step: the metrics of this page.
- `groups.jsonl` has a line for each generated group: `step`; `uid`, its number; `prompt`, an id that is the same in
  every run; `source`, which is `fresh`, `reevaluated` or `prefixed`; `state`, what became of it; `mean`, its mean
  reward, mapped from `--adapt.reward_range` to [0, 1] (null if it failed, or if a reward model judges without batch
  adaptation); `responses`, G; `tokens`, the sum over its responses; and, if it has a prefix, `prefix_tokens`, which
  are not among them.
- `answers.jsonl` has sampled answers: `step`, `prompt`, `kind`, `text` of the prompt, `label`, `response`, `reward`. A
  prompt has at most one answer of kind `failed`, from its first group with mean reward 0. After that it has at most one
  of kind `solved`, the best response of its first group above 0. The middle of a response longer than
  `--run.answer_chars` is left out. With 0 there is no such file.
- `warnings.jsonl` has the first warning of each kind, and of each place at which a run stalls: `step`; `kind`;
  `text`. The terminal and `watch` show them.
- `probes.jsonl` has a line for each group of a batch, every K steps with `--run.gradient_probe K`: `step`; `uid`;
  `source`; `age` in trainer steps; `tv`, its TV distance to today's policy; `shift` of [today's
  policy](concepts.md#staleness) on it; `mean`, its mean reward; `cosine`, between its policy gradient and that of 512
  groups that today's policy generates (null if one of them is 0); `norm` of its gradient. The loss is OpenRLHF's,
  without KL and entropy. The run is the same with the probe as without it, if `--train.full_determinism_enable` is set.
  Otherwise vLLM's random numbers go on from other places.
- `evaluations.jsonl` has a line for each evaluation during training (`--eval.dataset`, `--eval.steps`): `step`, and
  OpenRLHF's numbers. `eval_SET_pass1` is the mean reward of the answers to SET's prompts. There are also
  `eval_SET_passN` and lengths.
- `summary.json` is written at the end. It has what the run did, from its metrics.

The `state` of a group is the name of its count `groups/STATE` below: `fresh`, `reevaluated` or `prefixed` (trained on),
`filtered`, `unimproved`, `solved`, `unsteered`, `demonstration`, `cut`, `too_far`, `nonfinite` or `failed`. A resumed
run drops the lines of the steps that it does again.
"""
METRICS_FOOT = """
## What a reward function reports

What a reward function returns as `extra_logs` has its own name, and is averaged over the responses of the batch that
have it (without batch adaptation, all must): `boxed` (mathematics, geometry and GSM8K: share of answers in a box),
`answered` (reasoning-gym: within tags) and `well_formed` (Countdown: by the rules). A name of the run itself is
refused.

## How to read them

**The batch is not the policy.** OpenRLHF's `reward`, `rollout/reward_mean` and `response_length` describe the batch
that was trained on, which the filter and the replay change. `reward/fresh_mean` says how good the policy is.

**Before the first update.** `tv/*`, `importance/*`, `theory/*`, `clip/*`, `advantage/*` and `value/*` use the policy
and the critic that the step starts from. So `tv/fresh` right after a sync only shows the difference between engine and
actor, and so does `tv/reevaluated` without `--train.async_enable`.

**`clip/SOURCE`** treats all tokens of the step as if they were in its first optimizer step. If a step has several, the
policy moves between them, which `ppo_clip_ratio` includes. rho is pi_today / pi_old with the loss's own old log-probs.
It is 1 if today's weights generated the sample, and always with `--adapt.ratio decoupled`. With
`--actor.policy_loss_type gspo` each token has the ratio of its response. Weights or masks of
`--algo.advantage.is_correction_level` do not count as clips. `ppo_clip_ratio` does not count dual clip.

**`advantage/SOURCE_abs` and `value/SOURCE_*`.** Advantages are as the loss takes them, so on the critic path after
OpenRLHF's whitening. Returns are before it: with lambda = gamma = 1 they are the reward, minus the KL penalty if that
is in the reward.

**`filtered/none_right` and `filtered/all_right`** are exact for rewards of 0 and 1. If equal rewards have another
value, at least 1 counts as right.

**`theory/*`**: rewards must be 0 or 1. The groups of X1 and X3 were chosen by the rewards of the same responses that TV
and surrogate are averaged over, which biases both a little. K1 bounds groups that passed the range filter, and those
with a prefix. K2 bounds X2 as long as c1 is at most 1/G. With the filters `uniform` and `none`, or a larger c1, the
numbers are only the paper's formula. With c1 = 0, as in the mini-test, K2 is 999 (at the default eps) and its bound
says nothing.

**Plain `ppo` and `grpo`**: `groups/generated` is the sum of `groups/fresh` and `groups/filtered`. The latter are
dropped by `--algo.dynamic_filtering_enable`. If a whole batch was dropped, its groups count in the next step.
"""


def cell(value: str) -> str:
    """A table cell. Bars are escaped, because they would end it."""
    return value.replace("|", "\\|")


def values(argument: dict[str, Any]) -> str:
    """The choices of a flag, or its kind of number. "" if only its help says what it takes."""
    if "choices" in argument:
        return ", ".join(f"`{choice}`" for choice in argument["choices"])
    return "switch" if "action" in argument else {int: "integer", float: "number"}.get(argument.get("type"), "")


def made_of(source: str) -> str:
    """The end of a page."""
    return f"\nThis page is generated by `python docs/generate.py`. Edit {source} instead.\n"


def config_page() -> str:
    """docs/config.md."""
    lines = [HEAD.rstrip()]
    for name, algorithm in config.ALGORITHMS.items():
        estimators = ", ".join(f"`{estimator}`" for estimator in algorithm.estimators)
        lines.append(f"| `{name}` | {estimators} | {algorithm.method} | {algorithm.help} |")
    rows = [("estimator", "a reward r becomes", "then", "whitened"), ("---",) * 4]
    for name, estimator in ESTIMATORS.items():
        then = "GAE or V-trace with the critic's values" if estimator.critic else "sums of what follows, gamma 1"
        rows.append((f"`{name}`", estimator.formula, then, "yes" if estimator.whitened else "no"))
    lines += [ESTIMATORS_HEAD, table(rows).rstrip()]
    for prefix, kind in config.GROUPS.items():
        summary = " ".join((kind.__doc__ or "").split())
        lines += [
            "",
            f"## `--{prefix}.*`",
            "",
            summary,
            "",
            "| flag | values | default | symbol | source | meaning |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for item in fields(kind):
            meta = item.metadata
            default = "" if item.default is None else f"`{item.default}`"
            cells = (f"`--{prefix}.{item.name}`", values(meta["argument"]), default, meta["symbol"], meta["source"])
            lines.append(f"| {' | '.join(cell(text) for text in (*cells, meta['help']))} |")
    return "\n".join(lines) + "\n" + OPENRLHF + made_of("the flags in `bapo_openrlhf/flags/config.py`")


def metrics_page() -> str:
    """docs/metrics.md."""
    lines = [METRICS_HEAD.strip()]
    sections = metrics.CATALOGUE | {"OpenRLHF's own, of the batch that was trained on": metrics.OPENRLHF}
    for title, section in sections.items():
        lines += ["", f"## {title}", "", "| name | unit | meaning | paper | when |", "| --- | --- | --- | --- | --- |"]
        for metric in section:
            cells = (f"`{metric.name}`", metric.unit, metric.sentence, metric.paper, when(metric))
            lines.append(f"| {' | '.join(map(cell, cells))} |")
    source = "`bapo_openrlhf/record/metrics.yaml`, or `METRICS` of a method or buffer,"
    return "\n".join(lines) + "\n" + METRICS_FOOT + made_of(source) + "A test compares it with what runs write.\n"


def when(metric: Metric) -> str:
    """The runs and steps that have a metric. "" if all have it."""
    only = {ALL: "", ADAPTED: "batch adaptation", CRITIC: "critic"}.get(metric.algorithms)
    if only is None:
        only = ", ".join(f"`{name}`" for name in metric.algorithms)
    return "; ".join(part for part in (only, metric.when) if part)


def with_parts(text: str, parts: dict[str, str]) -> str:
    """A page that is written by hand, with these parts between two comments each."""
    for part, content in parts.items():
        begin = text.index("-->\n", text.index(f"<!-- generated: {part} ")) + len("-->\n")
        text = f"{text[:begin]}\n{content}\n{text[text.index('<!-- end -->', begin) :]}"
    return text


def methods_page() -> str:
    """docs/methods.md."""
    text = (FOLDER / "methods.md").read_text(encoding="utf-8")
    return with_parts(text, {"table": methods_table(), "methods": methods_sections(), "files": methods_files()})


ROOMS = ("driver", "trainer", "engine", "worker", "wire")


def architecture_page() -> str:
    """docs/architecture.md."""
    text = (FOLDER / "architecture.md").read_text(encoding="utf-8")
    return with_parts(text, {room: room_table(room, text) for room in ROOMS})


def room_table(room: str, page: str) -> str:
    """The files of a room of training/ with the first sentences of their docstrings.

    They stay in the order of the page, which follows a step. New files come last.
    """
    folder = FOLDER.parent / "bapo_openrlhf" / "training" / room
    rows = [("file", "what it is"), ("---",) * 2]
    links = {
        f"[`training/{room}/{path.name}`](../bapo_openrlhf/training/{room}/{path.name})": path
        for path in sorted(folder.glob("*.py"))
        if path.stem != "__init__"
    }
    for link in sorted(links, key=lambda link: page.find(link) if link in page else len(page)):
        text = " ".join(ast.get_docstring(ast.parse(links[link].read_text(encoding="utf-8"))).split("\n\n")[0].split())
        rows.append((link, re.split(r"(?<!Eq\.)(?<!Sec\.)(?<=\.)\s", text)[0].removesuffix(".")))
    return table(rows)


def methods_table() -> str:
    """What each method does, when to use it, and where it comes from."""
    rows = [("name", "what it does", "when to use it", "source"), ("---",) * 4]
    rows += [(f"`{name}`", *cells) for name, cells in registry.overview().items()]
    return table(rows)


def table(rows: list[tuple[str, ...]]) -> str:
    """The lines of a table."""
    return "".join(f"| {' | '.join(map(cell, row))} |\n" for row in rows)


def methods_sections() -> str:
    """A section for each method, from the docstrings of its file and its class."""
    return "\n".join(section(name, registry.method_class(name)) for name in registry.METHODS)


def section(name: str, kind: type[Method]) -> str:
    """What a method does, its deviations, its options, and the --adapt flags that it reads."""
    title = inspect.getdoc(sys.modules[kind.__module__]) or ""
    story = re.split(r"\n\n(?:Args|Raises):\n", inspect.getdoc(kind) or "")[0]
    parts = [f"### `{name}`", title, story]
    flags = {item.name for item in fields(config.AdaptConfig)}
    parameters = inspect.signature(kind).parameters
    given = flags | {"capacity", "group_size", "seed", "signal_between"}
    options = {n: p.default for n, p in parameters.items() if n not in given}
    if options:
        meaning = arguments(kind)
        items = (wrapped(f"- `{option}` {shown(default)}: {meaning[option]}") for option, default in options.items())
        parts += ["Options (`--adapt.options`) and their defaults:", "\n".join(items)]
    read = ", ".join(f"`--adapt.{n}`" for n in parameters if n in flags and not n.startswith(("gaussian", "top_p")))
    parts.append(wrapped(f"[Flags](config.md) that it reads: {read}."))
    if kind.candidates > 1 or not kind.asynchronous:
        parts.append("It is refused with `--train.async_enable`, because what it generates depends on earlier rewards.")
    return "\n\n".join(parts) + "\n"


def wrapped(text: str) -> str:
    """A paragraph, or an item of a list, in lines of at most 120 characters."""
    return textwrap.fill(text, 120, subsequent_indent="  " * text.startswith("- "), break_on_hyphens=False)


def arguments(kind: type[Method]) -> dict[str, str]:
    """What the docstrings of a class and its bases say of each parameter."""
    meaning: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        _, _, rest = (inspect.cleandoc(each.__doc__ or "")).partition("\n\nArgs:\n")
        for entry in re.split(r"\n(?=    \w)", rest.split("\n\n")[0]):
            names, _, text = entry.partition(":")
            meaning |= {name.strip(): " ".join(text.split()) for name in names.split(",")}
    return meaning


def shown(default: Any) -> str:
    """The default of an option, as `--adapt.options` takes it."""
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)


def methods_files() -> str:
    """The flags of each file in configs/methods, and its comment."""
    rows = [("file", "flags", "what it is"), ("---",) * 3]
    for path in sorted((FOLDER.parent / "configs" / "methods").glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        comment = " ".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("# "))
        flags = " ".join(f"--{flag} {value_of(value)}" for flag, value in files.settings_of(str(path)))
        rows.append((f"`{path.name}`", f"`{flags}`", comment))
    return table(rows)


def value_of(value: Any) -> str:
    """A value of a YAML file, as a command line has it."""
    if isinstance(value, list):
        return " ".join(map(value_of, value))
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def api_page() -> str:
    """docs/api.md."""
    parts = [API_HEAD.strip()]
    for item in API:
        module = methods.__name__ if item.__name__ in methods.__all__ else item.__module__
        parts += [f"## {item.__name__}", f"`from {module} import {item.__name__}`", described(item.__name__, item)]
        for name, member in vars(item).items() if inspect.isclass(item) else ():
            if isinstance(member, (FunctionType, property, cached_property)) and member.__doc__ and name[0] != "_":
                parts += [f"### {item.__name__}.{name}", described(name, member)]
    return "\n\n".join(parts) + "\n" + made_of("the docstrings of the code")


def described(name: str, item: Any) -> str:
    """A signature, if the item takes or gives something, and its docstring with lists in the place of its sections."""
    text = re.split(r"\n\n(Args|Attributes|Raises):\n", inspect.getdoc(item) or "")
    code = signature(name, item)
    parts = [f"```python\n{code}\n```"] * bool(code) + [text[0]]
    for title, entries in zip(text[1::2], text[2::2], strict=True):
        rows = (entry.strip().partition(": ") for entry in re.split(r"\n(?=    \w)", entries))
        items = [f"- `{names.replace(', ', '`, `')}`: {' '.join(meaning.split())}" for names, _, meaning in rows]
        parts += [f"{title}:", "\n".join(map(wrapped, items))]
    return "\n\n".join(parts)


def signature(name: str, item: Any) -> str:
    """A class, function or property with its parameters and what it returns. "" for a class without parameters."""
    getter = item.fget if isinstance(item, property) else item.func if isinstance(item, cached_property) else None
    found = inspect.signature(getter or item)
    result = "" if inspect.isclass(item) else local(inspect.formatannotation(found.return_annotation))
    if getter:
        return f"{name}: {result}"
    given = [each for each in found.parameters.values() if each.name != "self"]
    first = next((each for each in given if each.kind is each.KEYWORD_ONLY), None)
    words = [word for each in given for word in (*["*"] * (each is first), parameter(each))]
    arrow = f" -> {result}" if result else ""
    line = f"{name}({', '.join(words)}){arrow}"
    if len(line) > 110:
        line = "\n    ".join([f"{name}(", *(f"{word}," for word in words)]) + f"\n){arrow}"
    return line if words or arrow else ""


def parameter(each: inspect.Parameter) -> str:
    """A parameter with its type and its default. The default is "..." if it is made by a function, or is one."""
    plain = (bool, int, float, str, tuple, Fraction, type(None), type(each.empty))
    known = isinstance(each.default, plain)
    return local(str(each if known else each.replace(default=each.empty))) + " = ..." * (not known)


def local(text: str) -> str:
    """Types without the modules that they are in."""
    return re.sub(r"\b(?:[a-z_]\w*\.)+", "", text)


def with_code(page: str) -> str:
    """The page with each flag as code, so that no line ends within one. Help texts and docstrings have plain flags."""
    return re.sub(
        r"(```.*?```|`[^`]*`)|(?<![\w-])(--[a-z][\w.]*\w)", lambda found: found[1] or f"`{found[2]}`", page, flags=re.S
    )


PAGES = {
    "api.md": api_page, "architecture.md": architecture_page, "config.md": config_page, "metrics.md": metrics_page,
    "methods.md": methods_page,
}  # fmt: skip


def main() -> int:
    """Write the pages, or compare them."""
    for name, page in PAGES.items():
        path, text = FOLDER / name, with_code(page())
        if "--check" not in sys.argv[1:]:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            print(f"docs/{name} is out of date: run docs/generate.py", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
