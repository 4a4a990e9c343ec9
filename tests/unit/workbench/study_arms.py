"""What each arm of a study that comes with the project, or of the laboratory, has to be."""

from pathlib import Path

from bapo_openrlhf.cli import arguments
from bapo_openrlhf.flags.conflicts import COMBINATIONS
from bapo_openrlhf.flags.rule import Flags, check_rules
from bapo_openrlhf.flags.sizes import batch_arithmetic, epoch_steps
from bapo_openrlhf.workbench.study.definition import read_study


def require_valid_arms(path: Path, prompts: int, expected: int) -> None:
    """Each arm has valid flags on its path, and all but DAPO and larger batches take the same number of steps."""
    study, steps = read_study(path), {}
    assert read_study(path, smoke=True).arms
    for arm in study.arms:
        args = arguments.parse(study.words(arm, 1))
        check_rules(COMBINATIONS, Flags.of(args))
        assert (args.algo.advantage.estimator == "gae") is (arm.path == "critic")
        candidates = args.adapt.make_method(batch_arithmetic(args), 1).candidates if args.adapt.enabled else 1
        if not args.algo.dynamic_filtering_enable and "rollout.batch_size" not in arm.flags:
            used = min(prompts, args.data.max_samples)
            steps[arm.name] = epoch_steps(args, used, candidates) * args.train.num_episodes
    assert set(steps.values()) == {expected}, steps
