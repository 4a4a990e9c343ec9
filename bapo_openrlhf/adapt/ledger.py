"""The ledger: every group that was generated ends in exactly one counted state, and so does every response.

The state says what became of a group in the step that generated it, also if later steps replay it. A response has the
state of its group, or it is *dropped* because its group was trained on without it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.group import Group
from bapo_openrlhf.adapt.vocabulary import DROPPED, EARLIER, FAILED, STATES, TRAINED


def states_of(batch: Batch) -> dict[int, str]:
    """The state of each group of this step that is in the batch, by uid."""
    return {group.uid: state for state in STATES for group in getattr(batch, state)}


class Ledger:
    """Counts of generated groups and responses by state, over the whole run.

    `generated` equals the sum of the states, `failed` included, at every step, for groups and for responses. `trained`
    has the number of steps in which each group was trained on, by uid. It grows by one number for each such group.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.responses: Counter[str] = Counter()
        self.trained: Counter[int] = Counter()

    def settle(
        self, generated: Iterable[Group], batch: Batch, *, failed: Sequence[int] = ()
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Enter one step. Returns its count of groups in each state, and `generated`, and then the same for responses.

        Args:
            generated: All groups of this step, fresh and re-evaluated.
            failed: Number of responses to each prompt that gave no group: a reward or a log-prob was missing.

        Raises:
            RuntimeError: A group is in no state or in several, or this step did not generate it. The message names it.
        """
        groups = list(generated)
        counts = Counter(group.uid for group in groups)
        places = {name: [group.uid for group in getattr(batch, name)] for name in (*STATES, *EARLIER)}
        state_counts = Counter(uid for state in STATES for uid in places[state])
        replays: Counter[int] = Counter(uid for name in EARLIER for uid in places[name])
        repeats = (counts & replays) | (replays - Counter(set(replays)))  # X3: groups of earlier steps, each once
        misfits = sorted((counts - state_counts) + (state_counts - counts) + repeats)
        if misfits:
            uid = misfits[0]
            states = [name for name, uids in places.items() for listed in uids if listed == uid]
            raise RuntimeError(
                f"group {uid} was generated {counts[uid]} time(s) in this step and is in the states {states}; "
                f"every group must end in exactly one ({len(misfits)} do not)"
            )
        step = {state: len(getattr(batch, state)) for state in STATES}
        step |= {FAILED: len(failed), "generated": sum(counts.values()) + len(failed)}
        responses = _responses(groups, batch) | {FAILED: sum(failed)}
        responses["generated"] = sum(group.size for group in groups) + sum(failed)
        self.counts.update(step)
        self.responses.update(responses)
        self.check()
        self.trained.update(group.uid for _, group in batch.with_sources())
        return step, responses

    def uses(self, groups: Iterable[Group]) -> list[int]:
        """In how many steps that are entered each group was trained on."""
        return [self.trained[group.uid] for group in groups]

    def check(self) -> None:
        """Raise RuntimeError unless the counts balance."""
        for what, counts in (("groups", self.counts), ("responses", self.responses)):
            if counts["generated"] != sum(counts[state] for state in (*STATES, DROPPED, FAILED)):
                raise RuntimeError(f"the counts of generated {what} do not add up: {dict(counts)}")

    def state_dict(self) -> dict[str, Any]:
        """The counts; those of `trained` as two lists."""
        trained = [list(self.trained), list(self.trained.values())]
        return {"groups": dict(self.counts), "responses": dict(self.responses), "trained": trained}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.counts, self.responses = Counter(state["groups"]), Counter(state["responses"])
        self.trained = Counter(dict(zip(*state["trained"], strict=True)))
        self.check()


def _responses(generated: Sequence[Group], batch: Batch) -> dict[str, int]:
    """How many of the generated responses are in each state. Responses of earlier steps do not count."""
    members_by_uid = {group.uid: set(map(id, group.responses)) for group in generated}
    counts = dict.fromkeys((*STATES, DROPPED), 0)
    for state in STATES:
        for group in getattr(batch, state):
            members = members_by_uid[group.uid]
            count = len(members)
            if state in TRAINED:
                count = sum(id(response) in members for response in group.responses)
            counts[state] += count
            counts[DROPPED] += len(members) - count
    return counts
