"""The stages of decision_design.md: new seeds, searches that widen, rates that are passed on, and hours."""

import re
import tarfile
from collections import Counter
from dataclasses import replace

import decision_stages as stages
import pandas as pd
import pytest
import yaml
from folders import RESULTS, STUDIES
from made_runs import flag, write_run

from bapo_openrlhf.cli import arguments
from bapo_openrlhf.errors import RunError

pytestmark = pytest.mark.usefixtures("small_search")
OWN = (  # files of both studies that have stages
    "age_or_distance", "best_rates", "critic", "critic_search", "hard_prompts", "hard_prompts_more", "fair_recipe",
    "fair_shape", "fair_price", "fair_smollm2",
)  # fmt: skip
BOTH = (*stages.STAGES, *stages.FAIR)
SEARCH = stages.Stage("search", 1, "best_rates", (201, 202), {"plain": 1.0, "bapo": 1.0}, grid=(1e-4, 2e-4))
OF_AFTER = {"plain": 1.0, "two_epochs": 2.0, "without_x2": 3.0, "bapo": 4.0}
AFTER = stages.Stage("after", 1, "best_rates", (61, 62), OF_AFTER, rates_from="search", flags={"eval.steps": -1})


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(stages, "STAGES", (SEARCH, AFTER))


def run_search(root, height, stage=SEARCH):
    """Make the runs of a search until none is left; `height` takes the method and the rate. Returns the rates."""
    rates = []
    while left := [run for run in stages.planned(stage, root) if not stages.ended(run)]:
        for run in left:
            rate = float(flag(run, stages.RATE))
            top = height(stages.method_of(run.arm), rate)
            if top is None:
                run.folder.mkdir(parents=True)
                (run.folder / stages.FAILED).touch()
            else:
                write_run(run, top)
            rates.append((stages.method_of(run.arm), rate, run.seed))
    return rates


def test_seeds_are_new():
    """No earlier study, search or kept record has them."""
    used = {11, 12, 13, 42}  # the pilot, which kept no records, and the default
    for path in STUDIES.glob("*.yaml"):
        if path.stem not in OWN:
            seeds = yaml.safe_load(path.read_text()).get("seeds", [])
            used |= {seed for part in (seeds.values() if isinstance(seeds, dict) else [seeds]) for seed in part}
    used |= set(pd.read_csv(RESULTS / "map" / "first_runs.csv")["seed"])
    for records in (RESULTS / "map").glob("*.tar.xz"):
        with tarfile.open(records) as file:
            used |= {int(found[1]) for name in file.getnames() if (found := re.search(r"-s(\d+)/", name))}
    assert {1, 25, 50, 104} <= used
    of_part = Counter(seed for stage in BOTH for seed in set(stage.seeds) if not stage.beside and not stage.place)
    assert not used & set(of_part) and set(of_part.values()) == {1}
    assert min(seed for stage in stages.FAIR for seed in stage.seeds) == 401


def test_a_stage_beside_another_one_is_later_and_has_its_seeds():
    names = [stage.name for stage in stages.STAGES]
    beside = [stage for stage in stages.STAGES if stage.beside]
    assert [stage.name for stage in beside] == ["one_rate", "hard_more"]
    for stage in beside:
        other = stages.stage_of(stage.beside)
        assert names.index(other.name) < names.index(stage.name) and set(stage.seeds) <= set(other.seeds)


def test_a_stage_without_a_search_has_its_flags(tmp_path):
    """A learning rate among them is in the names of its arms."""
    runs = stages.planned(stages.stage_of("one_rate"), tmp_path)
    assert Counter((run.arm.name, flag(run, stages.RATE)) for run in runs) == {
        ("plain_0.0001-group", "0.0001"): 10, ("bapo_0.0001-group", "0.0001"): 10}  # fmt: skip
    of_study = {arm.method: arm for arm in stages.definition("best_rates").arms}
    for run in runs:
        arm = of_study[stages.method_of(run.arm)]
        assert run.arm.flags == {**arm.flags, stages.RATE: 1e-4} and run.arm.config == arm.config
    other = stages.Stage("other", 1, "best_rates", (1,), {"plain": 1.0}, flags={"eval.steps": -1})
    [run] = stages.planned(other, tmp_path)
    assert (run.arm.name, flag(run, "eval.steps"), flag(run, stages.RATE)) == ("plain-group", "-1", None)


def test_a_search_takes_each_rate_of_the_grid_with_each_seed(tmp_path):
    found = run_search(tmp_path, lambda method, rate: 0.5 + (0.1 if 1.5e-4 < rate < 3e-4 else 0))
    assert Counter(found) == Counter(
        (method, rate, seed) for method in ("plain", "bapo") for rate in (1e-4, 2e-4, 4e-4) for seed in (201, 202)
    )  # the best one was at the end of the grid, so 4e-4 came after it


@pytest.mark.parametrize(
    ("slope", "rates"), [(100, {1e-4, 2e-4, 4e-4, 8e-4}), (-100, {2.5e-5, 5e-5, 1e-4, 2e-4})], ids=["up", "down"]
)
def test_a_search_goes_on_at_the_end_at_which_the_best_rate_is(tmp_path, slope, rates):
    """At most twice."""
    searched = run_search(tmp_path, lambda method, rate: 0.5 + slope * rate)
    assert {rate for _, rate, _ in searched} == rates


@pytest.mark.parametrize(
    ("found", "rate"),
    [
        ({1e-4: 0.50, 2e-4: 0.60, 4e-4: 0.55}, 2e-4),
        ({1e-4: 0.59, 2e-4: 0.60, 4e-4: 0.20}, 1e-4),  # two seeds do not tell them apart
        ({5e-5: 0.569, 1e-4: 0.571, 2e-4: 0.60}, 1e-4),
        ({1e-4: 0.61, 2e-4: 0.60}, 1e-4),
    ],
)
def test_of_near_rates_the_smallest_is_chosen(found, rate):
    assert stages.choose(found) == rate


def test_the_arms_of_a_later_stage_have_the_rate_of_their_nearest(tmp_path, small):
    with pytest.raises(stages.NotYet, match="search"):
        stages.planned(AFTER, tmp_path)
    best = {"plain": 1e-4, "bapo": 2e-4}
    run_search(tmp_path, lambda method, rate: 0.6 if rate == best[method] else 0.3)
    assert stages.chosen_rates(SEARCH, tmp_path) == best
    with pytest.raises(KeyError):  # two epochs have a rate of their own, which this search has not
        stages.planned(AFTER, tmp_path)
    del (seconds := dict(AFTER.seconds))["two_epochs"]
    runs = stages.planned(stages.Stage(**{**vars(AFTER), "seconds": seconds}), tmp_path)
    assert {(run.arm.method, flag(run, stages.RATE)) for run in runs} == {
        ("plain", "0.0001"), ("without_x2", "0.0002"), ("bapo", "0.0002")}  # fmt: skip
    assert {flag(run, "eval.steps") for run in runs} == {"-1"} and {run.seed for run in runs} == {61, 62}


def test_a_rate_with_a_failed_run_is_out(tmp_path, small):
    run_search(tmp_path, lambda method, rate: None if rate == 2e-4 else 0.3)
    assert set(stages.chosen_rates(SEARCH, tmp_path).values()) == {2.5e-5}  # all others are equal


def test_a_search_all_of_whose_rates_have_failed_is_named(tmp_path, small):
    run_search(tmp_path, lambda method, rate: None if method == "bapo" else 0.3)
    with pytest.raises(RunError, match=r"^the search \w+: a run of each rate of bapo has failed$"):
        stages.chosen_rates(SEARCH, tmp_path)


def test_a_search_whose_runs_are_gone_has_its_kept_heights(tmp_path, small, monkeypatch):
    """No run of it is planned, and the arms of a later stage have its rates."""
    kept = tmp_path / "heights.csv"
    lines = [
        "search,plain,0.0001,0.5,a",
        "search,plain,0.0002,0.6,a",
        "search,bapo,0.0002,0.4,a",
        "other,bapo,0.1,0.9,a",
    ]
    kept.write_text("\n".join(["stage,method,rate,height,commit", *lines]))
    monkeypatch.undo()
    monkeypatch.setattr(stages, "STAGES", (SEARCH, AFTER))
    monkeypatch.setattr(stages, "HEIGHTS", kept)
    assert stages.planned(SEARCH, tmp_path) == [] and stages.seconds_left(SEARCH, tmp_path) == (0, 0)
    assert stages.chosen_rates(SEARCH, tmp_path) == {"plain": 2e-4, "bapo": 2e-4}
    later = replace(AFTER, seconds={"plain": 1.0, "bapo": 1.0})
    assert {flag(run, stages.RATE) for run in stages.planned(later, tmp_path)} == {"0.0002"}


def test_all_held_out_problems_are_asked():
    """`--data.max_samples` also cuts the evaluation, which has 400 of them."""
    for name in sorted({stage.study for stage in BOTH}):
        study = stages.definition(name)
        for arm in study.arms:
            args = arguments.parse(study.words(arm, 1), "bapo-openrlhf train")
            assert args.eval.steps > 0 and args.data.max_samples >= 400, (name, arm.name)


def test_a_search_is_judged_by_the_lower_one_of_its_seeds(tmp_path, small):
    for run in stages.planned(SEARCH, tmp_path):
        rate, seed = float(flag(run, stages.RATE)), run.seed
        write_run(run, {(1e-4, 201): 0.9, (1e-4, 202): 0.1}.get((rate, seed), 0.55))
    found = stages.heights(SEARCH, "plain", SEARCH.grid, tmp_path)
    # A straight line from 0.2064 to the top has its mean in the middle.
    assert found == pytest.approx({1e-4: (0.1 + 0.2064) / 2, 2e-4: (0.55 + 0.2064) / 2})


def test_seconds_that_are_left(tmp_path, small):
    assert stages.seconds_left(AFTER, tmp_path) == (8, 20.0)
    assert stages.seconds_left(SEARCH, tmp_path) == (8, 8.0)
    first, second, *_ = stages.planned(SEARCH, tmp_path)
    write_run(first, 0.3, update=20.0)  # 120 seconds
    assert stages.method_of(first.arm) == stages.method_of(second.arm) == "plain"
    assert stages.seconds_left(SEARCH, tmp_path) == (7, 3 * 120.0 + 4 * 1.0)


def test_every_searched_or_nearest_method_has_a_rate():
    for stage in BOTH:
        if stage.rates_from:
            searched = stages.stage_of(stage.rates_from).seconds
            nearest = stages.nearest_of(stage)
            assert {nearest.get(method, method) for method in stage.seconds} <= set(searched), stage.name
        methods = yaml.safe_load((STUDIES / f"{stage.study}.yaml").read_text())["methods"]
        assert set(stage.seconds) <= set(methods), stage.name


# ── climbs ──

STEPS_OF = (("fast", "faster"), ("passes_4",), ("partial",))
CLIMB = stages.Stage("climb", 3, "critic_search", (205,), dict.fromkeys(sum(STEPS_OF, ()), 1.0), climb=STEPS_OF,
                     rates_from="search")  # fmt: skip
CRITIC = stages.Stage("critic", 3, "critic", (81, 82), {"plain": 1.0, "without_x2": 1.0}, rates_from="search",
                      settings_from="climb")  # fmt: skip


@pytest.fixture
def climbing(monkeypatch, tmp_path):
    """Makes the runs of a climb, whose critics explain what the test says. Returns the methods that were run."""
    search = replace(SEARCH, seconds={**SEARCH.seconds, "filter_only": 1.0})
    monkeypatch.setattr(stages, "STAGES", (search, CLIMB, CRITIC))
    best = {"plain": 1e-4, "bapo": 2e-4, "filter_only": 1e-4}
    run_search(tmp_path, lambda method, rate: 0.6 if rate == best[method] else 0.3, search)

    def run(explained):
        ran = []
        while left := [run for run in stages.planned(CLIMB, tmp_path) if not stages.ended(run)]:
            for one in left:
                with pytest.raises(stages.NotYet, match="climb"):
                    stages.planned(CRITIC, tmp_path)
                value = explained[one.arm.method]
                if value is None:
                    one.folder.mkdir(parents=True)
                    (one.folder / stages.FAILED).touch()
                else:
                    write_run(one, 0.5, explained=[-5.0, -5.0, value - 0.01, value + 0.01])
                ran.append(one)
        return ran

    return run


def flags_of(run, *names):
    return [flag(run, name) for name in names]


SETTINGS = ("critic.adam.lr", "adapt.value_pretraining", "reward.remote_url")


def test_a_climb_keeps_what_has_gained_and_stops_at_enough(climbing, tmp_path):
    ran = climbing({"fast": 0.02, "faster": 0.05, "passes_4": 0.25})
    assert [run.arm.method for run in ran] == ["fast", "faster", "passes_4"]
    assert flags_of(ran[-1], *SETTINGS) == ["2.0e-3", "4", None] and flag(ran[-1], stages.RATE) == "0.0001"
    runs = stages.planned(CRITIC, tmp_path)
    assert {(run.arm.method, *flags_of(run, *SETTINGS, stages.RATE), run.seed) for run in runs} == {
        (method, "2.0e-3", "4", None, rate, seed)
        for method, rate in (("plain", "0.0001"), ("without_x2", "0.0002"))
        for seed in (81, 82)
    }
    of_plain = next(run for run in runs if run.arm.method == "plain")
    assert flag(of_plain, "adapt.filter") == "none"  # it is PPO
    assert all(flag(run, "adapt.filter") is None for run in runs if run.arm.method == "without_x2")


def test_what_loses_is_not_kept_and_what_fails_is_passed_over(climbing, tmp_path):
    ran = climbing({"fast": None, "faster": 0.1, "passes_4": 0.05, "partial": 0.3})
    assert flags_of(ran[-1], *SETTINGS) == ["2.0e-3", None, "research/partial_sums.py"]
    assert len(stages.planned(CRITIC, tmp_path)) == 4


def test_without_enough_there_are_no_runs(climbing, tmp_path):
    climbing({"fast": None, "faster": None, "passes_4": 0.1, "partial": 0.19})
    assert stages.planned(CRITIC, tmp_path) == [] and stages.seconds_left(CRITIC, tmp_path) == (0, 0)
