"""The definitions in research/studies are valid, and their records give the tables that are kept."""

import tarfile

import pandas as pd
import pytest
import replay_map
import yaml
from folders import RESULTS, ROOT, STUDIES
from study_arms import require_valid_arms

STEPS = {  # prompts and steps of those that have other numbers than their kind
    "smollm2": (960, 60),
    "smollm2_map": (960, 60),
    "map_centre": (768, 96),
    "map_near": (768, 48),
    "map_groups": (256, 64),
    "countdown_methods": (1536, 96),
    "hard_prompts": (128, 48),
    "hard_prompts_more": (128, 48),
    "fair_shape": (256, 48),
    "fair_price": (256, 64),
    "fair_smollm2": (960, 60),
    "critic_smollm2": (960, 60),
    "reuse_prefixes": (256, 48),
    "reuse_gate": (256, 64),
    "critic_setting": (1024, 128),
    "critic_groups": (1024, 128),
}


@pytest.mark.parametrize("path", sorted(STUDIES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_arm_is_valid_and_takes_the_same_steps(path):
    require_valid_arms(path, *STEPS.get(path.stem, (512, 64)))


def test_the_studies_are_evaluated_on_levels_that_the_quickstart_makes():
    flags = yaml.safe_load((ROOT / "research" / "steps" / "map.yaml").read_text())
    levels = yaml.safe_load((ROOT / "configs" / "steps" / "sums.yaml").read_text())
    assert set(flags["eval"]["dataset"].split(",")) < {f"runs/reasoning_gym/{level}.jsonl" for level in levels}


def test_the_tables_are_those_of_the_records(tmp_path):
    """One of the studies; `python research/replay_map.py` computes all."""
    with tarfile.open(RESULTS / "map" / "map_groups.tar.xz") as records:
        records.extractall(tmp_path / "runs", filter="data")
    results = replay_map.results_of("map_groups", tmp_path)
    times = pd.read_csv(RESULTS / "map" / "unit_times.csv").query("study == @replay_map.TIMED_AS['map_groups']")
    replay_map.add_costs(results, times.set_index("arm"))
    for name, kept in (("gains", "gains.csv"), ("pairs", "pairs.csv")):
        table_of, decimals = replay_map.TABLES[name]
        table = table_of(results).round(decimals).reset_index(drop=True)
        wanted = pd.read_csv(RESULTS / "map" / kept).query("setting == 'larger groups'").drop(columns="setting")
        pd.testing.assert_frame_equal(table, wanted.reset_index(drop=True), check_dtype=False)
