"""Groups whose responses know where they come from."""

from collections.abc import Callable

import pytest

from bapo_openrlhf.adapt.group import Group


@pytest.fixture(scope="session")
def make(make_group) -> Callable[..., Group]:
    """`make([0, 1], "a", step=1)`: a group of prompt a with these rewards; its responses know its uid."""

    def build(rewards, prompt, **where):
        group = make_group([float(r) for r in rewards], prompt=prompt, **where)
        for response in group.responses:
            response.extras["uid"] = group.uid
        return group

    return build
