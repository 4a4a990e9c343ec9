"""The shares that a plan assumes, counted in a record by hand, and the page that quotes what came out."""

import json
import math

import plan_shares
import pytest
from folders import RESULTS, ROOT

from bapo_openrlhf.cli import arguments
from bapo_openrlhf.workbench.planning.workload import Workload

PRESET = str(ROOT / "configs" / "ba_ppo_qwen3_4b.yaml")
WORKLOAD = Workload(arguments.parse(["--config", PRESET, "--adapt.replay_steps", "1"]))


def row(step, prompt, mean, source="fresh"):
    return {"step": step, "prompt": prompt, "source": source, "mean": mean}


def test_shares_by_hand():
    """c1 is 1/8, c2 = r 3/8 + 1/8 and c3 = r 3/8 + 2/8 (Table 3). r is the mean of a step."""
    rows = [row(1, "a", 0.0), row(1, "b", 0.25), row(1, "c", 0.25), row(1, "d", 1.0)]  # r 3/8: 0.266 to 0.391
    rows += [row(2, "e", 0.375), row(2, "f", 0.375), row(2, "g", 0.0), row(2, "h", 0.125)]  # r 7/32: 0.207 to 0.332
    rows += [row(3, "i", 0.5), row(3, "j", 0.5), row(3, "k", 0.25), row(3, "l", 0.25)]  # the same as step 1
    shares = plan_shares.shares_of(rows, WORKLOAD)
    assert shares["signal_share"] == 9 / 12 and shares["hard_share"] == 3 / 12
    assert shares["replayable_share"] == 0  # of step 1 none is inside its own limits, of step 2 none either
    changed = [row(r["step"], r["prompt"], 0.3125 if r["prompt"] in "bc" else r["mean"]) for r in rows]
    # Now r of step 1 is 13/32, 0.277 to 0.402: b and c are inside, and inside step 2's; of 8 that may be replayed.
    assert plan_shares.shares_of(changed, WORKLOAD)["replayable_share"] == 2 / 8
    near = [0.25, 0.25, 0.375, 0.375, 0.125, 0.5, 0.5, 0.25, 0.25]
    kept = sum(math.exp(-((m - 0.5) ** 2) / (2 * 0.2**2)) for m in near) / 9
    assert shares["gaussian_share"] == pytest.approx(kept) and "improved_share" not in shares


@pytest.mark.parametrize(("reward", "share"), [(0.25, 1.0), (1.0, 0.0)])
def test_the_last_steps_thresholds_decide_too(reward, share):
    """A mean of 1/4 is within c2 and c3 of its own step (r = 1/4: 0.219 to 0.344), but not if r is 1 (1/2 to 5/8)."""
    rows = [row(1, str(n), 0.25) for n in range(4)] + [row(2, f"{n} again", reward) for n in range(4)]
    assert plan_shares.shares_of(rows, WORKLOAD)["replayable_share"] == share


def test_what_came_of_hard_prompts():
    rows = [row(1, "a", 0.0), row(1, "b", 0.0), row(1, "c", 0.125), row(1, "d", 0.5)]
    rows += [row(2, "a", 1.0), row(2, "b", 0.25), row(2, "c", 0.0), row(2, "d", 0.75), row(3, "c", 0.125)]
    shares = plan_shares.shares_of(rows, WORKLOAD)  # tried again: a, b, c, c
    assert (shares["leaving_share"], shares["improved_share"]) == (2 / 4, 1 / 4)
    rows += [row(4, "a", 0.25, "reevaluated"), row(4, "b", 0.0, "reevaluated")]  # real ones say more
    shares = plan_shares.shares_of(rows, WORKLOAD)
    assert (shares["leaving_share"], shares["improved_share"]) == (1 / 2, 1 / 2)


def test_lengths_by_hand():
    rows = [
        {"tokens/generated": 100, "rollouts/step": 10, "total_length": 18.0, "response_length": 10.0},
        {"tokens/generated": 200, "rollouts/step": 10, "total_length": 26.0, "response_length": 20.0},
        {"skipped_update": 1},
    ]
    shares = plan_shares.lengths_of(rows, {"rollout.max_new_tokens": 60, "data.max_len": 74})
    assert shares == {"response_share": 15 / 60, "prompt_share": 7 / 14}
    assert plan_shares.lengths_of(rows, {}) == {}


def test_the_page_quotes_the_record():
    """docs/plan.md says how far the predictions of research/results/plan.json are off."""
    result = json.loads((RESULTS / "plan.json").read_text())
    text = " ".join((ROOT / "docs" / "plan.md").read_text().split("## How good it is")[1].split())
    arms = result["arms"]
    off = {
        key: {name: round(100 * (one["predicted"][key] / one["measured"][key] - 1), 1) for name, one in arms.items()}
        for key in ("rollouts", "tokens")
    }
    assert {arm for arm, share in off["rollouts"].items() if share} == {"dapo-group"}
    low, high = min(off["tokens"].values()), max(off["tokens"].values())
    assert (
        f"exact for GRPO, PPO, BAPO-GRPO and BA-PPO, and {-off['rollouts']['dapo-group']:.0f} % too low for DAPO. "
        f"Tokens trained on are between {-low:.0f} % too low and {high:.0f} % too high."
    ) in text
    (paper, predicted) = (
        [f"{result['paper'][name][key]:.2f}" for name in ("DAPO", "BAPO-GRPO")]
        for key in ("paper_rollouts_to_grpo", "rollouts_to_grpo")
    )
    assert f"is {paper[0]} for DAPO and {paper[1]} for BAPO-GRPO, and {' and '.join(predicted)} are predicted." in text
