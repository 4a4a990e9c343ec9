"""What is wrong with rows: the first row of each kind, and how many there are."""

from bapo_openrlhf.errors import ConfigError


def quoted(value: object, most: int = 80) -> str:
    """A value in an error message, shortened."""
    text = repr(value)
    return text if len(text) <= most else text[: most - 4] + " ..."


class Findings:
    """Collects what is wrong with rows."""

    def __init__(self) -> None:
        self._errors: dict[str, tuple[str, int]] = {}
        self._counted: dict[str, tuple[str, str, int]] = {}
        self.warnings: list[str] = []

    def error(self, kind: str, text: str) -> None:
        """A row that a run cannot use. Of each kind, the first text is kept, and the others are counted."""
        first, count = self._errors.get(kind, (text, 0))
        self._errors[kind] = (first, count + 1)

    def warn(self, text: str) -> None:
        """What is seldom meant."""
        self.warnings.append(text)

    def count(self, kind: str, text: str, advice: str = "") -> None:
        """A row with what is seldom meant. Of each kind, the first text is kept, and the others are counted."""
        text, advice, count = self._counted.get(kind, (text, advice, 0))
        self._counted[kind] = (text, advice, count + 1)

    def warn_of_counted(self, rows: int) -> None:
        """Warn of each kind that was counted in so many rows."""
        for text, advice, count in self._counted.values():
            self.warn(f"{text}; so it is with {count} of {rows} rows" + (f". {advice}" if advice else ""))

    def refuse_if_all(self, kind: str, rows: int) -> None:
        """Make an error of a kind that was counted in all of so many rows."""
        text, _, count = self._counted.get(kind, ("", "", 0))
        if count and count == rows:
            self.error(kind, f"{text}; so it is with all {count} rows")

    def check(self) -> None:
        """Raise ConfigError if there are errors. Its message has a line for each kind."""
        if self._errors:
            lines = [text + (f" ({count} rows are so)" if count > 1 else "") for text, count in self._errors.values()]
            raise ConfigError("\nerror: ".join(lines))
