"""The ledger: every group that was generated ends in exactly one counted state.

The state says what became of a group in the step that generated it. A group may also be stored and replayed in later
steps. The buffers count what they hold and what left them.
"""

from collections import Counter
from collections.abc import Iterable

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.group import Group
from bapo_openrlhf.adapt.vocabulary import EARLIER, FAILED, STATES


def states_of(batch: Batch) -> dict[int, str]:
    """The state of each group of this step that is in the batch, by uid."""
    return {group.uid: state for state in STATES for group in getattr(batch, state)}


class Ledger:
    """Counts of generated groups by state, over the whole run.

    Invariant, at every step: `generated` equals the sum of the states, `failed` included.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def settle(self, generated: Iterable[Group], batch: Batch, *, failed: int = 0) -> dict[str, int]:
        """Enter one step, and check that each of its groups is in the batch exactly once.

        Args:
            generated: All groups of this step, fresh and re-evaluated.
            batch: The batch that was trained on.
            failed: Number of prompts that were generated for but gave no group, because a reward was missing.

        Returns:
            This step's count of each state, and `generated`.

        Raises:
            RuntimeError: A group is in no state or in several, or this step did not generate it. The message names it.
        """
        made = Counter(group.uid for group in generated)
        places = {name: [group.uid for group in getattr(batch, name)] for name in (*STATES, *EARLIER)}
        settled = Counter(uid for state in STATES for uid in places[state])
        replays: Counter[int] = Counter(uid for name in EARLIER for uid in places[name])
        twice = (made & replays) | (replays - Counter(set(replays)))  # X3: groups of earlier steps, each once
        wrong = sorted((made - settled) + (settled - made) + twice)
        if wrong:
            uid = wrong[0]
            states = [name for name, uids in places.items() for listed in uids if listed == uid]
            raise RuntimeError(
                f"group {uid} was generated {made[uid]} time(s) in this step and is in the states {states}; "
                f"every group must end in exactly one ({len(wrong)} do not)"
            )
        step = {state: len(getattr(batch, state)) for state in STATES}
        step |= {FAILED: failed, "generated": sum(made.values()) + failed}
        self.counts.update(step)
        self.check()
        return step

    def check(self) -> None:
        """Raise RuntimeError unless the counts balance."""
        if self.counts["generated"] != sum(self.counts[state] for state in (*STATES, FAILED)):
            raise RuntimeError(f"the counts of generated groups do not add up: {dict(self.counts)}")

    def state_dict(self) -> dict[str, int]:
        """The counts."""
        return dict(self.counts)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Inverse of `state_dict`."""
        self.counts = Counter(state)
        self.check()
