"""Agents of two turns on the real stack, whose groups are trained on fresh, re-evaluated and replayed.

The agent writes down what vLLM was asked and gave (agent.py). From that, and from transformers' model with the weights
of the step, come the masks, log-probs, ratios, rewards, advantages and gradients that the run is compared with.
"""

import json
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import plain_update
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bapo_openrlhf.adapt.group import Prompt
from bapo_openrlhf.record import run_record as record

pytestmark = pytest.mark.stack

HERE = Path(__file__).parent
SIZE, STOPS, STEPS = 4, 3, 6  # G; the run stops after three steps, and has 6 if it is resumed
HANGS = "3+3="
RATES = {"stopped": 1e-2, "resumed": 3e-3}  # weights must move in three steps, and stay small in six, as rounding grows
OBJECTIVE = plain_update.Objective(low=0.2, high=0.3, kl=0.1)
ERROR = 0.05  # of a log-prob: vLLM and transformers round differently to bf16
NORM_ERROR = 0.02


class Episode(NamedTuple):
    """A response as the agent saw it. Masks and log-probs are by token, without the shift of OpenRLHF's."""

    prompt: str
    generation: int  # how often the prompt was generated before
    tokens: tuple[int, ...]  # prompt, turn, feedback, turn, feedback
    mask: np.ndarray  # 1 for tokens that vLLM sampled
    log_probs: np.ndarray  # of vLLM; 0 for other tokens
    reward: float  # sum over both turns


def episode(line, encode):
    tokens, mask, log_probs = encode(line["prompt"]), [], []
    for turn, feedback in zip(line["turns"], line["feedback"], strict=True):
        assert turn["asked"] == tokens  # vLLM continued what was said so far
        mask += [0] * (len(tokens) - len(mask)) + [1] * len(turn["given"])
        log_probs += [0.0] * (len(tokens) - len(log_probs)) + turn["log_probs"]
        tokens = tokens + turn["given"] + encode(feedback)
    rest = [0] * (len(tokens) - len(mask))
    mask, log_probs = np.array(mask + rest), np.array(log_probs + rest, dtype=np.float32)
    return Episode(line["prompt"], line["generation"], tuple(tokens), mask, log_probs, line["reward"])


class Runs(NamedTuple):
    """A run that stopped, and in `make test-all` also one that was resumed."""

    stopped: object  # result of the first part, with steps 0 to 2
    result: object  # of the last part
    total: int  # steps of all parts
    folder: Path  # what the probes wrote; first/ and second/ are the parts
    lines: list  # what the agent wrote
    episodes: dict  # whole ones by their tokens
    steps: dict  # at which each prompt was generated, in order
    stop: int  # the token that ends a turn

    def part(self, step):
        return self.folder / ("first" if step < STOPS else "second")

    def rows(self):
        """(step, data, index, source, episode) of each response of each batch."""
        for step in range(self.total):
            data = np.load(self.part(step) / f"experience{step}.npz")
            for index, source in enumerate(data["source"]):
                real = data[f"{index}/attention_mask"].astype(bool)
                yield step, data, index, source, self.episodes[tuple(data[f"{index}/sequences"][real].tolist())]

    def generated_at(self, episode):
        return self.steps[episode.prompt][episode.generation]


@pytest.fixture(scope="module", params=["stopped", pytest.param("resumed", marks=pytest.mark.slow)])
def runs(train, workspace, request):
    run_name = f"agents_{request.param}"
    folder = workspace / f"probe_{run_name}"
    (folder / "first").mkdir(parents=True)
    (folder / "second").mkdir()

    def part(name, fails, **more):
        environment = {
            "PROBE_FOLDER": folder / name, "AGENT_FOLDER": folder, "AGENT_HANGS": HANGS, "AGENT_FAILS": fails,
        }  # fmt: skip
        flags = {  # with a warm-up, the first update would change nothing
            "algorithm": "bapo_grpo", "reward__remote_url": None, "train__agent_func_path": HERE / "agent.py",
            "verifier__timeout": 5, "adapt__reward_range": (0, 2), "adapt__rollout_delay": 1,
            "adapt__reevaluate_every": 2, "adapt__c3": "7/8", "data__max_len": 64, "data__max_samples": 24,
            "train__num_episodes": 2, "actor__adam__lr": RATES[request.param], "actor__lr_warmup_ratio": 0.0,
            "actor__eps_clip_low_high": (OBJECTIVE.low, OBJECTIVE.high), "algo__kl__init_coef": OBJECTIVE.kl,
            "ckpt__save_steps": 1, "environment": {key: str(value) for key, value in environment.items()},
        }  # fmt: skip
        return train(run_name, str(HERE / "probe.py"), "agents", **flags, **more)

    stopped = result = part("first", folder / "first" / f"actor{STOPS - 1}", status=1)
    if request.param == "resumed":
        result = part("second", folder / "never", ckpt__load_enable=True)
    total = len(result.metrics)
    assert total == (STOPS if result is stopped else STEPS), result.output[-6000:]
    tokenizer = AutoTokenizer.from_pretrained(workspace / "model")
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    lines = [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]
    episodes = {one.tokens: one for one in (episode(line, encode) for line in lines)}
    assert len(episodes) == len(lines)  # otherwise tokens would not tell which one a sample is
    data = [json.loads(line) for line in (workspace / "data.jsonl").read_text().splitlines()]
    texts = {Prompt(row["input"], row["label"]).id: row["input"] for row in data}
    steps = {}
    for row in record.read_groups(result.folder):
        steps.setdefault(texts[row["prompt"]], []).append(row["step"] - 1)
    return Runs(stopped, result, total, folder, lines, episodes, steps, *encode("7"))


def test_masks_cover_the_tokens_of_the_model_and_not_those_of_the_environment(runs):
    """In both turns and for all sources; also of groups that were stored before the run was stopped.

    A re-evaluation has new responses, and a replay has the old ones.
    """
    result = dict.fromkeys(("fresh", "reevaluated", "replayed"), 0)
    for step, data, index, source, one in runs.rows():
        mask = data[f"{index}/action_mask"]
        assert np.array_equal(mask[: len(one.mask) - 1], one.mask[1:]) and not mask[len(one.mask) - 1 :].any()
        edges = np.flatnonzero(np.diff(one.mask))
        assert len(edges) == 4 and one.mask[0] == one.mask[-1] == 0  # two turns, each with feedback after it
        assert (runs.generated_at(one) < step) is (source == "replayed")
        assert source != "reevaluated" or one.generation > 0
        result[source] += 1
        if source == "replayed" and step >= STOPS > runs.generated_at(one):
            result["resumed"] = result.get("resumed", 0) + 1
    assert min(result.values()) >= SIZE and ("resumed" in result) is (runs.total > STOPS), result


def test_the_agent_can_end_turns_early(runs):
    """By a text that it gave as `stop`, which is then the last token. OpenRLHF's min_tokens of 1 spares the first."""
    turns = [turn["given"] for line in runs.lines for turn in line["turns"]]
    assert any(runs.stop in turn[1:] for turn in turns) and not any(runs.stop in turn[1:-1] for turn in turns)


def log_probs_of(model, one):
    tokens = torch.tensor([one.tokens])
    with torch.no_grad():
        result = model(tokens).logits.float().log_softmax(-1)
    return result[0, :-1].gather(-1, tokens[0, 1:, None])[:, 0].numpy()[one.mask[1:] == 1]


def test_log_probs_and_ratios_are_those_of_the_tokens_of_the_model(runs):
    """What is kept is that of vLLM to the last bit, and that of transformers with the weights that generated.

    The ratio is the sum of log pi - log alpha over both turns, with pi of transformers with the weights of the step.
    """
    actors = [
        AutoModelForCausalLM.from_pretrained(runs.part(step) / f"actor{step}", dtype=torch.bfloat16)
        for step in range(runs.total)
    ]
    moved = []
    for step, data, index, source, one in runs.rows():
        kept, length = data[f"{index}/rollout_log_probs"], len(one.mask) - 1
        assert np.array_equal(kept[:length], one.log_probs[1:]) and not kept[length:].any()
        of_model = one.log_probs[one.mask == 1]
        assert of_model == pytest.approx(log_probs_of(actors[runs.generated_at(one)], one), abs=ERROR)
        if source == "replayed":
            old = data[f"{index}/action_log_probs"][:length][one.mask[1:] == 1]
            assert np.array_equal(old, of_model)  # the denominator in the loss
            today = log_probs_of(actors[step], one)
            assert data["log_ratios"][index] == pytest.approx((today - of_model).sum(), abs=2 * ERROR)
            moved.append(np.abs(of_model - today).max())
    assert max(moved) > 5 * ERROR  # under other weights they are others


def updates(runs):
    for part in ("first", "second"):
        for number in range(len(list((runs.folder / part).glob("actor-0-*.pt")))):
            yield torch.load(runs.folder / part / f"actor-0-{number}.pt")


def episodes_of(runs, batch):
    """The episodes of a micro-batch's samples, and their masks as its action mask is."""
    lengths, width = batch["attention_mask"].sum(-1).tolist(), batch["action_mask"].shape[1]
    rows = zip(batch["sequences"].tolist(), lengths, strict=True)
    episodes = [runs.episodes[tuple(tokens[:length])] for tokens, length in rows]
    masks = [torch.tensor([*one.mask[1:], *[0] * (width + 1 - len(one.mask))]) for one in episodes]
    return episodes, torch.stack(masks)


def test_rewards_are_sums_over_turns_and_give_the_advantages(runs):
    groups = {}
    for one in runs.episodes.values():
        groups.setdefault((one.prompt, one.generation), []).append(one.reward)
    for row in record.read_groups(runs.result.folder):
        (actual,) = [
            rewards
            for (prompt, generation), rewards in groups.items()
            if Prompt(prompt, _label(prompt)).id == row["prompt"]
            and runs.steps[prompt].index(row["step"] - 1) == generation
        ]
        assert len(actual) == SIZE
        assert row["mean"] == (None if row["state"] == "failed" else sum(actual) / SIZE / 2)  # rewards go from 0 to 2
    for update in updates(runs):
        for batch in update["micro_batches"]:
            members, masks = episodes_of(runs, batch)
            for one, row, mask in zip(members, batch["advantages"], masks, strict=True):
                rewards = np.array(groups[one.prompt, one.generation])
                wanted = (one.reward - rewards.mean()) / np.sqrt(rewards.var() + 1e-6)
                assert row[mask == 1].tolist() == pytest.approx([wanted] * int(mask.sum()), abs=1e-4)


def _label(prompt):
    return str((8, 4, 4, 2, 2, 0)[int(prompt.split("+")[0]) % 6])


def test_gradients_take_nothing_from_the_tokens_of_the_environment(runs, workspace):
    """The norm is that of plain PyTorch's gradient with the agent's masks, and not with the feedback in them."""
    settings = {"dtype": torch.bfloat16, "attn_implementation": "eager"}
    net = AutoModelForCausalLM.from_pretrained(workspace / "model", **settings)  # its weights are replaced

    def norm(batch):
        net.zero_grad()
        plain_update.actor_loss(net, batch, OBJECTIVE)[0].backward()
        return float(torch.stack([weight.grad.float().norm() for weight in net.parameters()]).norm())

    checked = 0
    for update in updates(runs):
        before, window = update["before"], []
        for micro_batch in update["micro_batches"]:
            window.append(micro_batch)
            if not micro_batch["stepped"]:
                continue
            with torch.no_grad():
                for name, weight in net.named_parameters():
                    weight.copy_(before[name])
            batch = plain_update.joined(window)
            _, batch["action_mask"] = episodes_of(runs, batch)
            assert micro_batch["norm"] == pytest.approx(norm(batch), rel=NORM_ERROR)
            hull = batch["action_mask"].cumsum(-1).clamp(max=1)
            batch["action_mask"] = hull * batch["action_mask"].flip(-1).cumsum(-1).clamp(max=1).flip(-1)
            assert micro_batch["norm"] != pytest.approx(norm(batch), rel=5 * NORM_ERROR)
            before, window = micro_batch["after"], []
            checked += 1
    assert checked >= runs.total


def test_an_agent_that_hangs_costs_its_group_alone(runs):
    """Once, in the first part. What its group generated is counted, and all other groups can be used."""
    (failed,) = [row for row in record.read_groups(runs.result.folder) if row["state"] == "failed"]
    assert failed["prompt"] == Prompt(HANGS, _label(HANGS)).id
    assert failed["tokens"] == sum(
        one.mask.sum() for one in runs.episodes.values() if (one.prompt, one.generation) == (HANGS, 0)
    )
    assert f"the agent took more than 5 s between two generations for prompt {HANGS!r}" in runs.stopped.output
    assert sum(row["groups/failed"] for row in runs.result.metrics) == 1


def test_agents_that_all_fail_stop_the_run(runs):
    error = next(line for line in runs.stopped.output.splitlines() if line.startswith("error: "))
    assert f"step {STOPS + 1}, generating: RuntimeError: 8 of 8 groups gave no reward" in error
    assert "1 x timeout, 32 x raised. The commonest cause, 32 of 33: the agent raised LookupError: the env" in error
    assert re.search(r"the environment is gone \(.*/agent\.py:\d+\)$", error)
    assert "LookupError: the environment is gone" in runs.stopped.output
