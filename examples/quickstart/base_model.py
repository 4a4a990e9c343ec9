"""The quickstart's base models: small Qwen3s that are made here and learn their task badly on purpose.

Nothing is downloaded. A character-level tokenizer and a model are made from a seed. There are two sizes:

- `BaseModelSettings`: 0.8M parameters, Countdown, answers of about 7 tokens. It is trained for less than a minute on
  two cores, on solutions of which a known share is wrong.
- `StepsModelSettings`: 2.1M parameters, sums, answers of 30 to 90 tokens with the steps before the result. It is
  trained for some minutes, too short for the longer sums.

Both write well-formed answers, solve most easy problems, and seldom solve hard ones. So there are all-right, all-wrong
and mixed groups, which batch adaptation needs, and reinforcement learning can still improve the model.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from bapo_openrlhf.cpu import products
from bapo_openrlhf.cpu.threads import WAIT_PASSIVELY
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.tasks import countdown, reasoning_gym

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

MANIFEST = "base_model.json"
FORMAT = 3  # Increase it if a change of this file makes a different model from the same settings.

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD, BOS, EOS = range(3)
CHARACTERS = "0123456789+-*/() :=."
# The question of a sum of reasoning-gym before its numbers, and the tags of an answer, are one token each.
WORDS = ("State the final answer to the following arithmetic problem: ", "<answer>", "</answer>")
PIECE = re.compile("|".join(map(re.escape, WORDS)) + r"|[\s\S]")
SUMS = Path(__file__).parents[2] / "configs" / "steps" / "sums.yaml"
VOCAB_MULTIPLE = 64  # The rollout engine pads the vocabulary to it. Reserved tokens fill it, so that each id decodes.
POOL = 8  # Number of batches that are drawn and sorted by length at a time.


@dataclass(frozen=True)
class ModelSettings:
    """What a base model depends on.

    Equal settings give equal models on one machine with equal versions and equal numbers of threads.

    Attributes:
        seed: Seed of the weights, the problems and their order.
        steps: Number of optimizer steps.
        batch_size: Number of solutions in a step.
        learning_rate: Peak learning rate, after a linear warm-up over 5 % of the steps and before a cosine decay to 0.
        mix: Weight of each level among the solutions.
        clean: Share of the steps that form the first phase. All its solutions are right, and reinforcement learning
            can quickly restore what the model learns in it.
        hidden_size, layers, heads, kv_heads, head_dim, intermediate_size, max_length: The architecture.
        threads: Number of torch's threads during training. None means the number that is faster in the first steps.
    """

    seed: int = 0
    steps: int = 500
    batch_size: int = 48
    learning_rate: float = 5e-3
    mix: Mapping[str, float] = field(default_factory=dict)
    clean: float = 1.0
    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 384
    max_length: int = 256
    threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "layers", "heads", "kv_heads", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        weights = self.mix.values()
        if set(self.mix) - set(self.levels) or min(weights, default=-1) < 0 or sum(weights) <= 0:
            raise ConfigError(
                f"mix is {dict(self.mix)}; it must give weights >= 0, not all 0, to any of {sorted(self.levels)}"
            )
        if not 0 <= self.clean <= 1:
            raise ConfigError(f"clean is {self.clean}; it must be within 0..1")

    @property
    def hash(self) -> str:
        """A digest of all settings and FORMAT."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class BaseModelSettings(ModelSettings):
    """The small model, which answers with an expression: Countdown, partly with wrong solutions.

    Attributes:
        wrong: Share of wrong solutions at each level in the second phase. They use the right numbers but miss the
            target.
    """

    mix: Mapping[str, float] = field(default_factory=lambda: dict(countdown.DEFAULT_MIX))
    wrong: Mapping[str, float] = field(default_factory=lambda: {"easy": 0.03, "medium": 0.4, "hard": 0.4})
    clean: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        if set(self.mix) - set(self.wrong) or not all(0 <= share <= 1 for share in self.wrong.values()):
            raise ConfigError(
                f"wrong is {dict(self.wrong)}; it must give a share of 0..1 to each level of mix, {sorted(self.mix)}"
            )

    @property
    def levels(self) -> Collection[str]:
        """Those of Countdown."""
        return countdown.LEVELS

    def draw(self, rng: random.Random, level: str, clean: bool) -> tuple[str, str] | None:
        """A problem of the train split. None means that the drawn one is of the test split."""
        puzzle = countdown.make_puzzle(rng, level)
        if puzzle.split != "train":
            return None
        err = not clean and rng.random() < self.wrong[level]
        return countdown.short_prompt(puzzle.problem), _wrong(rng, puzzle) if err else puzzle.solution


@dataclass(frozen=True)
class StepsModelSettings(ModelSettings):
    """The larger model, which writes its steps before the answer: worked sums of reasoning-gym, at last with slips.

    Attributes:
        problems: Number of different problems, of the part `warmup`. Neither training data nor benchmarks have any.
        kinds: The levels, as SUMS has them.
        miscounted: Probability of a slip in the second phase, for each step that crosses a multiple of ten.
    """

    steps: int = 600
    batch_size: int = 32
    clean: float = 0.75
    mix: Mapping[str, float] = field(
        default_factory=lambda: {
            "three_terms": 0.2,
            "four_terms": 0.2,
            "five_terms": 0.2,
            "six_terms": 0.2,
            "seven_terms": 0.2,
        }
    )
    hidden_size: int = 192
    layers: int = 5
    head_dim: int = 48
    intermediate_size: int = 512
    problems: int = 20_000
    kinds: Sequence[reasoning_gym.Kind] = field(default_factory=lambda: reasoning_gym.requested_kinds(None, SUMS))
    miscounted: float = 0.7

    @property
    def levels(self) -> Collection[str]:
        """The names in SUMS."""
        return [kind.name for kind in self.kinds]

    @cached_property
    def worked(self) -> dict[str, list[tuple[str, str]]]:
        """Pairs (prompt, solution) of each level."""
        texts = {}
        for kind in self.kinds:
            count = round(self.problems * self.mix.get(kind.name, 0) / sum(self.mix.values()))
            problems = reasoning_gym.problems(kind, "warmup", count, self.seed)
            texts[kind.name] = [(reasoning_gym.question_prompt(one), one.solution or "") for one in problems]
        return texts

    def draw(self, rng: random.Random, level: str, clean: bool) -> tuple[str, str]:
        """One of `worked`, with slips in the second phase."""
        prompt, solution = rng.choice(self.worked[level])
        return prompt, solution if clean else with_slips(solution, self.miscounted, rng)


STEP = re.compile(r"(-?\d+) ([+-]) (\d+) =")


def with_slips(solution: str, probability: float, rng: random.Random) -> str:
    """A worked sum with miscounted steps. The later steps and the answer follow from the wrong numbers.

    Only a step that crosses a multiple of ten (8 + 5, 12 - 4, 3 - 7) is miscounted, with the given probability. Its
    result is one too small then. So no two slips cancel each other, and a problem is the harder the more tens it
    crosses.
    """
    numbers, steps = [], []
    for first, sign, second in STEP.findall(solution):
        before = numbers[-1] if numbers else int(first)
        after = before + int(sign + second)
        if before // 10 != after // 10 and rng.random() < probability:
            after -= 1
        numbers.append(after)
        steps.append(f"{before} {sign} {second} = {after}")
    return f"{'. '.join(steps)}. <answer>{numbers[-1]}</answer>"


def make_tokenizer(size: int | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each of CHARACTERS and WORDS, and <pad> <bos> <eos> <unk>. It adds none to a text.

    Args:
        size: Size of the vocabulary, which reserved tokens fill. None means the least multiple of VOCAB_MULTIPLE.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*SPECIAL_TOKENS, *CHARACTERS, *WORDS]
    size = size or math.ceil(len(tokens) / VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    tokens += [f"<reserved{i}>" for i in range(size - len(tokens))]
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE.pattern), "isolated")
    core.decoder = decoders.Fuse()
    pad, bos, eos, unk = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        unk_token=unk,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=ModelSettings.max_length,
    )


def make_model(settings: ModelSettings, vocab_size: int) -> Qwen3ForCausalLM:
    """A Qwen3 with fresh weights in float32."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(settings.seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        head_dim=settings.head_dim,
        max_position_embeddings=settings.max_length,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return Qwen3ForCausalLM(config)


def solutions(settings: ModelSettings) -> Iterator[list[tuple[str, str]]]:
    """A batch of pairs (prompt, solution) for each step.

    Batches are cut from a pool that is sorted by length. That saves a quarter of the padding.
    """
    rng = random.Random(settings.seed)
    levels = [level for level, weight in settings.mix.items() if weight > 0]
    weights = [settings.mix[level] for level in levels]
    clean_steps = round(settings.clean * settings.steps)
    pool: list[list[tuple[str, str]]] = []
    for step in range(settings.steps):
        if not pool or step == clean_steps:
            pairs: list[tuple[str, str]] = []
            while len(pairs) < POOL * settings.batch_size:
                pair = settings.draw(rng, rng.choices(levels, weights)[0], step < clean_steps)
                pairs += [pair] if pair else []
            pairs.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
            pool = [pairs[i : i + settings.batch_size] for i in range(0, len(pairs), settings.batch_size)]
            rng.shuffle(pool)
        yield pool.pop()


def _wrong(rng: random.Random, puzzle: countdown.Puzzle) -> str:
    """An expression with the puzzle's numbers that misses the target."""
    while True:
        text, value = countdown.random_expression(rng, puzzle.numbers)
        if value != puzzle.target:
            return text


def _batch(pairs: Sequence[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, shape (B, T), padded on the right. Labels are -100 outside the solution and its <eos>."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids = {token: i for i, token in enumerate((*CHARACTERS, *WORDS), start=len(SPECIAL_TOKENS))}
    encoded = [[[ids[token] for token in PIECE.findall(text)] for text in pair] for pair in pairs]
    texts = [torch.tensor([*prompt, *solution, EOS]) for prompt, solution in encoded]
    tokens = pad_sequence(texts, batch_first=True, padding_value=PAD)
    labels = pad_sequence(texts, batch_first=True, padding_value=-100)
    for row, (prompt, _) in enumerate(encoded):
        labels[row, : len(prompt)] = -100
    return tokens, labels


class Threads:
    """Chooses the number of torch's threads while a model is trained.

    During the first TRIED steps, the candidates take turns. Then the one stays that took the least time for a token.
    A second thread is no help if other programs need the cores, or if the model is small.

    Args:
        fixed: The number of threads; None to choose it.
        clock: Returns seconds.
    """

    TRIED = 10

    def __init__(self, fixed: int | None, clock: Callable[[], float] = time.perf_counter) -> None:
        cores = len(os.sched_getaffinity(0))
        self.candidates = [fixed] if fixed else [count for count in (1, 2, 4) if count <= cores]
        self.seconds: dict[int, list[float]] = {count: [] for count in self.candidates}  # for a token
        self.chosen: int | None = fixed
        self._clock = clock

    @contextmanager
    def step(self, number: int, tokens: int) -> Iterator[None]:
        """One step, counted from 0, with this number of tokens."""
        import torch

        count = self.chosen or self.candidates[number % len(self.candidates)]
        torch.set_num_threads(count)
        start = self._clock()
        yield
        self.seconds[count].append((self._clock() - start) / tokens)
        if number + 1 == self.TRIED and self.chosen is None:
            # The first step of each is left out, because it also allocates memory and starts the threads.
            self.chosen = min(self.candidates, key=lambda count: statistics.median(self.seconds[count][1:]))


def train(model: Qwen3ForCausalLM, settings: ModelSettings, threads: Threads) -> list[float]:
    """Train the model on imperfect solutions. Returns the loss of each step in nats per token."""
    import torch
    from tqdm import tqdm

    def learning_rate(step: int) -> float:
        warmup = max(1, settings.steps // 20)
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, settings.steps - warmup)))

    # Muon needs a third of AdamW's steps for about the same rewards. It is for the matrices of the layers only.
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    others = [weight for weight in model.parameters() if not any(weight is matrix for matrix in matrices)]
    both = {"lr": settings.learning_rate, "weight_decay": 0.01}
    optimizers = [
        torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **both),
        torch.optim.AdamW(others, betas=(0.9, 0.98), fused=True, **both),
    ]
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate) for optimizer in optimizers]
    losses = []
    model.train()
    bar = tqdm(solutions(settings), total=settings.steps, desc="base model", unit="step")
    for number, pairs in enumerate(bar):
        tokens, labels = _batch(pairs)
        with threads.step(number, tokens.numel()):
            # No mask is needed: padding is on the right and attention is causal, so no real token sees it.
            loss = model(input_ids=tokens, labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                schedule.step()
            model.zero_grad()
            losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    return losses


def is_current(directory: str | os.PathLike, settings: ModelSettings) -> bool:
    """Whether the folder holds a complete model of these settings, with all files as they were written."""
    directory = Path(directory)
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"]
        return manifest["hash"] == settings.hash and all(_digest(directory / name) == files[name] for name in files)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def build(directory: str | os.PathLike, settings: ModelSettings | None = None) -> tuple[Path, bool]:
    """Make the base model in `directory`, or reuse it.

    The model is written to a folder next to its place and moved there when it is complete. So an interrupted build
    leaves nothing that looks like a model. A damaged model, or one with other settings, is made again.

    Returns:
        The folder, in Hugging Face's layout with bf16 weights, and whether it was made now.

    Raises:
        ConfigError: The folder holds something that this function did not write.
    """
    settings = settings or BaseModelSettings()
    directory = Path(directory)
    if is_current(directory, settings):
        return directory, False
    foreign = directory.is_file() or (directory.is_dir() and any(directory.iterdir()))
    if foreign and not (directory / MANIFEST).is_file():
        raise ConfigError(f"model directory is {directory}; it must be a new or empty folder, or hold a base model")

    for name, value in WAIT_PASSIVELY.items():
        os.environ.setdefault(name, value)

    import torch

    products.install(torch)
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=".unfinished", dir=directory.parent))
    threads, before, rng = Threads(settings.threads), torch.get_num_threads(), torch.get_rng_state()
    try:
        tokenizer = make_tokenizer()
        model = make_model(settings, len(tokenizer))
        with products.without_blocks():
            losses = train(model, settings, threads)
        model.to(torch.bfloat16).save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        files = {path.name: _digest(path) for path in sorted(unfinished.iterdir())}
        tail = losses[-max(1, len(losses) // 20) :]
        manifest = {
            "hash": settings.hash,
            "settings": asdict(settings),
            "files": files,
            "threads": threads.chosen,
            "final_loss": sum(tail) / len(tail),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
        }
        (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        unfinished.chmod(0o755)  # mkdtemp does not let other users read.
        if directory.exists():
            shutil.rmtree(directory)
        unfinished.replace(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        torch.set_num_threads(before)
        torch.set_rng_state(rng)
    return directory, True


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
