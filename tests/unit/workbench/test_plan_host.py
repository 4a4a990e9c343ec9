"""Memory of a machine and on the disk, with the arithmetic written out."""

import pytest
from test_planning import BA_PPO, BAPO_GRPO, CONSTANTS, GRPO, ROOT, with_flags, workload_from

from bapo_openrlhf.cli import main
from bapo_openrlhf.workbench.planning.memory import host_memory
from bapo_openrlhf.workbench.planning.shapes import SHAPES

PRESET = workload_from("ba_ppo_qwen3_4b.yaml")
N = 4_022_468_096
WEIGHTS, STATES = 8 * 2 * N, 12 * N  # of 8 engines in 16 bits; master weights and Adam's two moments in fp32
EVALUATED = {"eval.dataset": "held_out.jsonl", "eval.steps": 7}  # between two syncs, which come every 5 steps


def host(flags=(), algorithm=BA_PPO, gpus=8, size="4B"):
    return host_memory(SHAPES[size], with_flags(PRESET, dict(flags)), CONSTANTS, algorithm, gpus)


def test_a_machine_by_hand():
    """Engines asleep, delayed weights, and optimizer states of actor and critic are the 0.7 that Ray leaves."""
    kept = WEIGHTS + WEIGHTS + 2 * STATES
    assert host(EVALUATED).machine == pytest.approx(kept / 0.7) == pytest.approx(322e9, abs=0.5e9)
    assert host().machine == pytest.approx((kept - WEIGHTS) / 0.7)
    assert host(EVALUATED, gpus=16).machine == pytest.approx((2 * 2 * WEIGHTS + 2 * STATES) / 2 / 0.7)


def test_ray_takes_at_most_its_limit():
    big = 14_770_033_664 * (12 + 12 + 8 * 2 + 8 * 2)
    assert big * 0.3 / 0.7 > 200e9 and host(EVALUATED, size="14B").machine == pytest.approx(big + 200e9)


@pytest.mark.parametrize(
    ("flags", "algorithm", "expected"),
    [
        ({"vllm.enable_sleep": False}, BA_PPO, (0, 0, 2 * STATES)),
        ({"ds.enable_sleep": False}, BA_PPO, (WEIGHTS, 0, 0)),
        ({"ds.enable_sleep": False, "ds.adam_offload": True}, BA_PPO, (WEIGHTS, 0, 2 * STATES)),
        ({"vllm.tensor_parallel_size": 2}, BAPO_GRPO, (WEIGHTS / 2, 0, STATES)),
        (EVALUATED, BAPO_GRPO, (WEIGHTS, WEIGHTS, STATES)),
        (EVALUATED | {"eval.steps": 10}, BAPO_GRPO, (WEIGHTS, 0, STATES)),
        ({"eval.steps": 7}, BAPO_GRPO, (WEIGHTS, 0, STATES)),  # nothing to evaluate on
        ({"adapt.reevaluate_every": 3}, BAPO_GRPO, (WEIGHTS, WEIGHTS, STATES)),
        ({"adapt.rollout_delay": 2, "run.gradient_probe": 5}, BAPO_GRPO, (WEIGHTS, WEIGHTS, STATES)),
        (EVALUATED, GRPO, (WEIGHTS, 0, STATES)),  # its engines always have today's weights
    ],
)
def test_what_is_kept(flags, algorithm, expected):
    found = host(flags, algorithm)
    assert (found.engines, found.delayed, found.optimizers) == expected


def test_a_checkpoint_by_hand():
    """16-bit weights and the optimizer's states of each trained model, however many machines write it."""
    assert host().checkpoint == host(gpus=16).checkpoint == 2 * 14 * N == pytest.approx(112.6e9, abs=0.1e9)
    assert host(algorithm=BAPO_GRPO).checkpoint == 14 * N
    assert host({"ds.lora.rank": 4, "ds.lora.target_modules": ["q_proj"]}).checkpoint == 2 * (
        2 * N + 12 * 36 * 4 * (2560 + 4096)
    )


def test_the_page_has_a_row_for_each_number_of_gpus(capsys):
    config = str(ROOT / "configs" / "ba_ppo_qwen3_4b.yaml")
    assert main.run(["plan", "--config", config, "--gpus", "8", "16"]) == 0
    lines = [line.strip("| ").split("|") for line in capsys.readouterr().out.splitlines() if "Qwen3-4B" in line]
    rows = [[cell.strip() for cell in row] for row in lines if len(row) == 8]
    assert [row[1] for row in rows] == ["8", "16"]
    assert rows[1] == ["Qwen3-4B", "16", "64.4", "0.0", "48.3", "48.3", "160.9", "112.6"]
