"""The one description of a flag of this project, which the parser, the rules, the warnings and the pages read."""

from collections.abc import Iterator
from dataclasses import Field, field, fields
from typing import Any

FROM_NOW_ON = "the batch adaptation from now on"
HOW = "how the machines compute it"


def flag(
    default: Any, help: str, *, symbol: str = "", source: str = "", allowed: str | None = None, of_method: bool = False,
    needs: str = "", only: str = "", resumes: str = "", **argument: Any,
) -> Any:  # fmt: skip
    """A dataclass field that is also a flag. Its rules are made of this description.

    Args:
        source: Where the paper, or another one, has it.
        allowed: A key of `errors.ALLOWED`; None if the value is not a number, or if it is checked elsewhere.
        of_method: Whether it is an argument of methods, so that it has no effect with one that does not take it.
        needs: A key of `conflicts.NEEDS`: what must be there if the flag is not its default.
        only: FLAG or FLAG=VALUE: it has no effect if this other --adapt flag is 0, or not that value.
        resumes: A key of `resumable.MAY_CHANGE` if a resume may change it.
        argument: Further arguments of `ArgumentParser.add_argument`.
    """
    says = {"of_method": of_method, "needs": needs, "only": only, "resumes": resumes}
    return field(
        default=default,
        metadata={"help": help, "symbol": symbol, "source": source, "allowed": allowed, **says, "argument": argument},
    )


def described(configs: dict[str, type[Any]], word: str) -> Iterator[tuple[str, Any, Field[Any]]]:
    """The flags whose description has a word: the dotted name, what the description says, and the field."""
    for prefix, config in configs.items():
        for item in fields(config):
            if item.metadata[word]:
                yield f"{prefix}.{item.name}", item.metadata[word], item
