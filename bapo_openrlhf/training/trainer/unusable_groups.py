"""Groups that cannot be used: the run warns of them, and stops if there are too many."""

from collections.abc import Callable


class UnusableGroups:
    """Warns of groups that cannot be used, and stops a run that has so many that something must be broken."""

    def __init__(
        self, *, max_share: float, warn: Callable[[int, str, str], None], failed_calls: Callable[[], str]
    ) -> None:
        self.max_share, self.warn, self.failed_calls = max_share, warn, failed_calls

    def check(self, step: int, kind: str, unusable: int, total: int, what: str) -> None:
        """Warn of the unusable groups of a step, which counts from 1.

        Raises:
            RuntimeError: Their share is larger than --adapt.max_failed_share.
        """
        if not unusable:
            return
        counted = f"{unusable} of {total} groups {what}"
        if unusable > self.max_share * total:
            raise RuntimeError(
                f"{counted}; adapt.max_failed_share is {self.max_share}. The log of the rollout engine has each error"
                f"{self.failed_calls()}"
            )
        self.warn(step, kind, f"{counted}, and are left out{self.failed_calls()}")
