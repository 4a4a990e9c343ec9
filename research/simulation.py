"""Runs the layer with a million prompts, without a model: do buffers, thresholds and re-evaluation stay in bounds?

    python research/simulation.py            # writes research/results/simulation.{json,md,png}; about 20 minutes
    python research/simulation.py --prompts 20000 --methods bapo --results /tmp    # a short run

The real methods, filters, buffers and ledger run as under the trainer; only the responses are made up. Prompt i is
solved with probability sigmoid(skill + bonus_i - difficulty_i). Each trained group raises the skill a little and the
bonus of its own prompt more. So success probabilities rise with training, and hard prompts become solvable. Each method
runs in a process of its own, whose memory is measured. What a method keeps for each prompt grows with the data, and the
result shows it. Every step also deals its batch to many data-parallel ranks, as the trainer does, and counts what is
left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from folders import RESULTS, ROOT
from report import CORES, origin, write
from tqdm import tqdm

from bapo_openrlhf.adapt.arithmetic import BatchArithmetic, deal, micro_batch_plan
from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.group import Group, Prompt, Response, mean_reward
from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.flags.config import AdaptConfig
from bapo_openrlhf.methods import Method

METHODS = ("bapo", "mopps", "dots", "remix", "exgrpo", "repo", "arpo")
BATCH, SIZE, PROMPT_TOKENS, RESPONSE_TOKENS = 1024, 8, 16, 48  # prompts a step, G, tokens; a response has at least half
MICRO, UPDATES = 1, 8  # samples of a micro-batch; optimizer steps of a full batch
DELAY, AGAIN = 5, 5  # v, m
EXTRAS = {"info": {}, "score": None, "truncated": False, "mm_train_inputs": None}
LEARNED, GENERAL = 1.0, 2.0  # what a trained group adds to its prompt's bonus; what all of them add to the skill
EVERY = 20  # steps between two rows of the result


class World:
    """A million prompts, and a policy that solves each with a probability that rises with training."""

    def __init__(self, prompts: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.difficulty = self.rng.normal(1.0, 2.0, prompts).astype(np.float32)
        self.bonus = np.zeros(prompts, dtype=np.float32)
        self.skill, self.uid = 0.0, 0
        self.order = self.rng.permutation(prompts)
        self.at = 0

    def draw(self, count: int) -> list[Prompt]:
        """The next prompts of the data in a random order. After the last prompt it starts again."""
        places = np.take(self.order, range(self.at, self.at + count), mode="wrap")
        self.at += count
        return [Prompt(f"prompt {place}", "1") for place in places]

    def groups(self, prompts: list[Prompt], step: int, weights_version: int) -> list[Group]:
        """A group of G made-up responses to each prompt."""
        places = [int(prompt.text[7:]) for prompt in prompts]
        chance = 1 / (1 + np.exp(self.difficulty[places] - self.bonus[places] - self.skill))
        right = self.rng.random((len(prompts), SIZE)) < chance[:, None]
        tokens = self.rng.integers(0, 150_000, (len(prompts), SIZE, PROMPT_TOKENS + RESPONSE_TOKENS), dtype=np.int32)
        log_probs = self.rng.normal(-1, 1, (len(prompts), SIZE, RESPONSE_TOKENS)).astype(np.float32)
        lengths = self.rng.integers(RESPONSE_TOKENS // 2, RESPONSE_TOKENS + 1, (len(prompts), SIZE)).tolist()
        groups = []
        for row, prompt in enumerate(prompts):
            responses = []
            for n, length in enumerate(lengths[row]):
                end = PROMPT_TOKENS + length
                # copies, so that a stored response does not keep the array of the whole step alive
                response_tokens, probs = tokens[row, n, :end].copy(), log_probs[row, n, :length].copy()
                responses.append(
                    Response(response_tokens, ((PROMPT_TOKENS, end),), probs, float(right[row, n]), EXTRAS)
                )
            groups.append(Group(self.uid, prompt, tuple(responses), step, weights_version))
            self.uid += 1
        return groups

    def learn(self, groups: list[Group]) -> None:
        """Raise skill and bonuses as an update on these groups does."""
        places = [int(group.prompt.text[7:]) for group in groups]
        np.add.at(self.bonus, places, LEARNED)
        self.skill += GENERAL * len(groups) / len(self.difficulty)

    def mean_chance(self) -> float:
        """The mean success probability over all prompts."""
        return float(np.mean(1 / (1 + np.exp(self.difficulty - self.bonus - self.skill))))


def resident() -> float:
    """Memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def train_batch(ranks: int) -> int:
    """Samples of an optimizer step, a multiple of ranks x MICRO, so that a full batch has about UPDATES such steps."""
    return ranks * MICRO * max(BATCH * SIZE // (UPDATES * ranks * MICRO), 1)


def shared(batch: Batch, ranks: int) -> dict[str, int]:
    """Deals a batch to the ranks as the trainer does, plans their micro-batches, and counts what they train on.

    Returns:
        Samples trained on, fillers, optimizer steps, and groups left out. A group is left out if it has a sample that
        is not trained on exactly once, or if it was cut although the batch had room.

    Raises:
        RuntimeError: shares differ by more than a sample, a rank is out of step with the others or does not train on
            its share, or an optimizer step before the last does not have `train_batch` samples.
    """
    groups = [group for _, group in batch.with_sources()]
    lengths = [len(response.token_ids) for group in groups for response in group.responses]
    shares, size = deal(lengths, ranks), train_batch(ranks)
    sizes = np.array([len(share) for share in shares])
    # Ranks with equally many samples have the same plan.
    plans = {count: micro_batch_plan(len(lengths), count, ranks, MICRO, size) for count in set(sizes.tolist())}
    if len({tuple((part.closes, part.step_samples, part.step_parts) for part in plan) for plan in plans.values()}) > 1:
        raise RuntimeError("the ranks are out of step")
    taken = {count: np.array([part.samples for part in plan], dtype=int) for count, plan in plans.items()}
    samples = np.stack([taken[count] for count in sizes.tolist()])  # (ranks, micro-batches)
    ends = [place + 1 for place, part in enumerate(next(iter(plans.values()))) if part.closes]
    updates = [int(samples[:, start:end].sum()) for start, end in itertools.pairwise([0, *ends])]
    if (
        sizes.max() - sizes.min() > 1
        or (samples.sum(1) != sizes).any()
        or any(update != size for update in updates[:-1])
    ):
        raise RuntimeError(f"shares of {set(sizes.tolist())} samples, optimizer steps of {updates}")
    dealt = np.bincount(np.fromiter(itertools.chain(*shares), dtype=int), minlength=len(lengths))
    left_out = int((dealt.reshape(-1, SIZE) != 1).any(1).sum()) + len(batch.cut) * (len(batch) < BATCH)
    return {
        "samples": int(samples.sum()),
        "fillers": int((samples == 0).sum()),
        "updates": len(updates),
        "left_out": left_out,
    }


def simulate(name: str, prompts: int, passes: float, seed: int, ranks: int) -> dict:
    """Run one method: a row every EVERY steps, and totals of what the ranks do over all steps."""
    config = AdaptConfig(method=name, batch_size=BATCH, buffer_size=256, rollout_delay=DELAY, reevaluate_every=AGAIN)
    arithmetic = BatchArithmetic(SIZE, BATCH, BATCH, train_batch(ranks), {"actor": ranks}, MICRO)
    method: Method = config.make_method(arithmetic, seed)
    world, ledger = World(prompts, seed), Ledger()
    steps = max(int(passes * prompts / BATCH / method.candidates), 2 * AGAIN)
    rows, layer, dealing, began, before = [], 0.0, 0.0, time.perf_counter(), resident()
    totals: Counter[str] = Counter(samples=0, fillers=0, updates=0, left_out=0)
    for step in range(steps):
        drawn = world.draw(BATCH * method.candidates)
        clock = time.perf_counter()
        if method.candidates > 1:
            drawn = [drawn[place] for place in method.choose_prompts(step, drawn, BATCH)]
        hard = method.begin_step(step)
        layer += time.perf_counter() - clock
        fresh = world.groups(drawn, step, step - step % DELAY)
        again = world.groups(hard, step, step)
        clock = time.perf_counter()
        batch = method.build_batch(step, fresh, again)
        ledger.settle(fresh + again, batch)
        trained = [group for _, group in batch.with_sources()]
        layer += time.perf_counter() - clock
        clock = time.perf_counter()
        counts = shared(batch, ranks)
        dealing += time.perf_counter() - clock
        totals.update(counts)
        world.learn(trained)
        if step % EVERY == 0 or step == steps - 1 or (hard and step < 3 * AGAIN):
            metrics = method.metrics()
            mean = mean_reward(fresh)
            rows.append(
                {
                    "step": step,
                    "reward": float(mean or 0),
                    "solved": world.mean_chance(),
                    "trained": len(trained),
                    "replayed": len(batch.replayed),
                    "attempts": len(again),
                    "improved": len(batch.reevaluated),
                    "resident": resident(),
                    **counts,
                    **{key: metrics[key] for key in metrics if key.startswith(("buffer/", "threshold/", "cache/"))},
                }
            )
    return {
        "method": name,
        "prompts": prompts,
        "steps": steps,
        "ranks": ranks,
        "train_batch": train_batch(ranks),
        "totals": dict(totals),
        "milliseconds_a_step": 1000 * layer / steps,
        "dealing_milliseconds_a_step": 1000 * dealing / steps,
        "seconds": time.perf_counter() - began,
        "start_mib": before,
        "rows": rows,
    }


def apart(name: str, prompts: int, passes: float, seed: int, ranks: int) -> dict:
    """`simulate` in a process of its own."""
    words = ["--one", name, "--prompts", str(prompts), "--passes", str(passes), "--seed", str(seed)]
    words += ["--ranks", str(ranks)]
    done = subprocess.run([sys.executable, __file__, *words], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def markdown(result: Mapping[str, Any]) -> str:
    """The page of results."""
    head = [
        "method",
        "prompts",
        "steps",
        "layer, ms a step",
        "memory at a tenth, MiB",
        "at the end",
        "reward",
        "solved",
        "dealing, ms a step",
        "samples a step",
        "fillers a step",
        "groups left out",
    ]
    lines = ["# A million prompts", "", (__doc__ or "").split("\n\n")[2].rstrip(), ""]
    lines += ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for method in result["methods"]:
        rows = method["rows"]
        tenth = rows[len(rows) // 10]
        shares = [f"{method['totals'][key] / method['steps']:,.0f}" for key in ("samples", "fillers")]
        grown = [f"{row['resident'] - method['start_mib']:,.0f}" for row in (tenth, rows[-1])]
        lines.append(
            f"| `{method['method']}` | {method['prompts']:,} | {method['steps']:,} | "
            f"{method['milliseconds_a_step']:.1f} | {grown[0]} | {grown[1]} | "
            f"{rows[0]['reward']:.2f} to {rows[-1]['reward']:.2f} | "
            f"{rows[0]['solved']:.2f} to {rows[-1]['solved']:.2f} | {method['dealing_milliseconds_a_step']:.1f} | "
            f"{shares[0]} | {shares[1]} | {method['totals']['left_out']} |"
        )
    first = result["methods"][0]
    lines += [
        "",
        f"{BATCH} prompts a step, G = {SIZE}, {RESPONSE_TOKENS // 2} to {RESPONSE_TOKENS} tokens a response, v = "
        f"{DELAY}, m = {AGAIN}, the other flags at their defaults. Memory is the growth of the process since its "
        "start. It includes the arrays of the made-up world and the groups of a step. `solved` is the mean success "
        "probability over all prompts.",
        "",
        f"The last columns are about {first['ranks']:,} data-parallel ranks. Every step deals its whole batch to them, "
        f"and plans their micro-batches of {MICRO} sample and optimizer steps of {first['train_batch']:,} samples. A "
        "filler is a micro-batch without a sample: a rank takes it in the last optimizer step if other ranks have one "
        "sample more. Every step checks that the ranks' shares differ by at most one sample, that every sample is in "
        "exactly one share, that all ranks have equally many micro-batches, and that every optimizer step but the last "
        "has exactly its samples. A group is left out if a sample of it is not trained on, or if it is cut although "
        "the batch has room.",
        "",
        "![BAPO's buffers, thresholds and memory over the steps](simulation.png)",
        "",
        f"{result['machine']}; commit {result['commit']}.",
        "",
        f"`{result['command']}`",
        "",
    ]
    return "\n".join(lines)


def draw(result: dict, path: Path) -> None:
    """BAPO over the steps."""
    import pandas as pd

    from bapo_openrlhf import user_file
    from bapo_openrlhf.workbench.pages import charts
    from bapo_openrlhf.workbench.pages.colours import DASHES, PALETTE
    from bapo_openrlhf.workbench.pages.curves import Curve, Key
    from bapo_openrlhf.workbench.pages.figure import Figure, save_png

    rows = pd.DataFrame(result["rows"]).set_index("step")
    shown = (
        ("Buffers", "Entries of both buffers, and the groups that a step replays.", "entries",
         {"buffer/hard": "hard prompts", "buffer/replay": "replay groups", "replayed": "replayed in a step"}),
        ("Thresholds", "Mean reward of the fresh groups, and the thresholds that follow it.", "group mean reward",
         {"reward": "fresh", "threshold/c2": "c2", "threshold/c3": "c3"}),
        ("Memory", "What the process holds.", "MiB", {"resident": "memory of the process"}),
    )  # fmt: skip
    figures = []
    for title, says, unit, names in shown:
        keys = [Key(*each) for each in zip(names.values(), PALETTE, DASHES, strict=False)]  # two may lie on each other
        there = [(key, metric) for key, metric in zip(keys, names, strict=True) if metric in rows]
        curves = [Curve(key, rows[metric].dropna()) for key, metric in there]
        if curves:
            chart = charts.lines(curves, x="step", y=unit, x_domain=(0, float(rows.index.max())), zero=True)
            figures.append(Figure(title, says, chart, keys=keys))
    picture = user_file.load("picture", ROOT / "examples" / "quickstart" / "picture.py")
    save_png(picture.stacked(figures, f"{result['method']}, {result['steps']:,} steps"), path)


def main() -> None:
    """Parse, simulate, write."""
    parser = argparse.ArgumentParser(description="The layer with a million made-up prompts.")
    parser.add_argument("--prompts", type=int, default=1_000_000)
    parser.add_argument("--passes", type=float, default=1.0, help="through the prompts")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1024, help="data-parallel ranks that every batch is dealt to")
    parser.add_argument("--at-once", type=int, default=1, metavar="METHODS", help="a core for each")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(simulate(given.one, given.prompts, given.passes, given.seed, given.ranks)))
        return
    result = origin(shlex.join(["python", "research/simulation.py", *sys.argv[1:]]), CORES)
    with ThreadPoolExecutor(given.at_once) as pool:
        results = pool.map(
            lambda name: apart(name, given.prompts, given.passes, given.seed, given.ranks), given.methods
        )
        result["methods"] = list(tqdm(results, total=len(given.methods), unit="method"))
    write(given.results, "simulation", result, markdown(result))
    draw(result["methods"][0], given.results / "simulation.png")


if __name__ == "__main__":
    main()
