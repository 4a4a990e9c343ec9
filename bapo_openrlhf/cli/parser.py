"""The parser of a command's flags."""

import argparse
from typing import Any

from bapo_openrlhf.errors import refuse


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviated flags. Bad flags raise ConfigError, and do not end the process."""

    def __init__(self, prog: str, description: str, **settings: Any) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, **settings)

    error = staticmethod(refuse)  # type: ignore[assignment]
