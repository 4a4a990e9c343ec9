"""The reference of the gradient probe, in runs on the fake stack."""

from fractions import Fraction

from bapo_openrlhf.record.run_record import read_warnings

PROBED = {"run.gradient_probe": 2, "adapt.max_failed_share": 1, "train.num_episodes": 1}


def test_its_groups_have_the_range_of_the_run(world):
    run, ranges = world(**PROBED, **{"adapt.reward_range": (-1, 3)}), set()
    finish = run.trainer.experience_maker.finish

    def noted(passed, kept):
        ranges.update(origin.group.reward_range for origin in passed.origins)
        return finish(passed, kept)

    run.trainer.experience_maker.finish = noted
    run.trainer.fit()
    assert len(run.noted("probe")) == 1 and ranges == {(Fraction(-1), Fraction(3))}


def test_groups_whose_log_probs_are_not_finite_are_left_out(world):
    run = world(**PROBED)
    run.spoilt = {5, 6, 7}
    run.trainer.fit()
    (reference,) = run.noted("probe")
    samples = [*reference[0], *reference[1]]
    assert 0 < len(samples) < 16 * 4
    assert all(sample.action_log_probs.isfinite().all() for sample in samples)


def test_without_a_reward_a_step_is_not_probed(world):
    run = world(**PROBED)
    reward = run.reward
    run.reward = lambda *what: None if run.trainer.state.phase == "probing gradients" else reward(*what)
    run.trainer.fit()
    assert len(run.metrics()) == 4 and run.noted("probe") == []
    assert [row["kind"] for row in read_warnings(run.record) if row["kind"] == "probe"] == ["probe"]
