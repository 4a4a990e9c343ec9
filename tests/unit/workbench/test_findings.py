"""What `watch` and `report` say of groups that are far from today's policy, and that both say the same."""

import pytest

from bapo_openrlhf.workbench.findings import FARTHEST_SHIFT, STALEST_SHIFT, staleness_findings


@pytest.mark.parametrize(("source", "most"), [("replayed", FARTHEST_SHIFT), ("fresh", STALEST_SHIFT)])
def test_it_says_when_groups_are_beyond_the_limit(source, most):
    """The shift is the mean over groups, and not the mean over steps."""
    few = {"step": 1, f"groups/{source}": 1, f"shift/{source}": 1.5 * most, f"tv/{source}": 0.6}
    many = {"step": 2, f"groups/{source}": 3, f"shift/{source}": 2.5 * most / 3 + 1e-3 * most, f"tv/{source}": 0.2}
    none = {"step": 3, f"groups/{source}": 0, f"shift/{source}": 0.0, f"tv/{source}": 0.0}
    [text] = staleness_findings([few, many, none, {"step": 4}], "4 steps")
    assert text.startswith(f"{source} groups were at a mean shift of {most:.1e} and a TV distance of 0.3 in 4 steps. ")
    many[f"shift/{source}"] -= 2e-3 * most
    assert staleness_findings([few, many, none], "4 steps") == []


def test_it_says_when_groups_were_used_more_than_once():
    """The mean over groups: 2 groups with one use, and 4 with two."""
    rows = [{"groups/replayed": 2 * uses, "staleness/replayed_uses_mean": uses} for uses in (1, 2)]
    [text] = staleness_findings(rows, "2 steps")
    assert text.startswith("replayed groups had been trained on in 1.7 earlier steps on average in 2 steps. ")
    assert staleness_findings(rows[:1], "a step") == []


@pytest.mark.parametrize("value", [None, float("nan"), "far"])
def test_what_is_no_number_says_nothing(value):
    row = {"step": 1, "groups/replayed": 4, "shift/replayed": 0.5, "tv/replayed": value}
    [text] = staleness_findings([row], "a step")
    assert "at a mean shift of 5.0e-01 in a step." in text
    assert staleness_findings([row | {"shift/replayed": value}], "a step") == []
