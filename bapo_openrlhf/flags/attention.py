"""Find attention that the installed packages cannot compute, before a model loads.

Without flash-attn, sdpa, eager and flex_attention work, but samples cannot be packed.
"""

import argparse
from collections.abc import Mapping
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from bapo_openrlhf.errors import ConfigError

PACKS = "ds.packing_samples", "train.dynamic_batch_enable", "ds.ring_attn_size"  # the last two switch the first on
_FLASH = {"flash_attn_2_cuda": "flash-attn"}  # module: package. The compiled module may be missing from the package.
_HUB = {"kernels": "kernels"}  # transformers gets the attention from the model hub with it
_NEEDS = {"flash_attention_2": _FLASH | _HUB, "flash_attention_3": {"flash_attn_interface": "flash-attn-3"} | _HUB}


def packing_flag(flags: Mapping[str, Any]) -> str | None:
    """The flag that makes OpenRLHF pack samples."""
    return next((flag for flag in PACKS if flags.get(flag, 0) > (flag == "ds.ring_attn_size")), None)


def check_flags(flat: argparse.Namespace) -> None:
    """Refuse packed samples with other attention: OpenRLHF would only print that it takes flash_attention_2 instead.

    Raises:
        ConfigError: The message names both flags.
    """
    flag, asked = packing_flag(vars(flat)), vars(flat)["ds.attn_implementation"]
    if flag and "flash_attention" not in asked:
        raise ConfigError(
            f"ds.attn_implementation is {asked}, and {flag} packs samples; packed samples need flash_attention_2"
        )


def lacking(args: SimpleNamespace) -> str | None:
    """A sentence on what the attention needs that is not installed; None if nothing is missing."""
    asked = args.ds.attn_implementation
    needs = _FLASH if args.ds.packing_samples else _HUB if "/" in asked else _NEEDS.get(asked, {})
    if not needs or any(map(find_spec, needs)):
        return None
    flag, value = ("ds.packing_samples", True) if args.ds.packing_samples else ("ds.attn_implementation", asked)
    return (
        f"{flag} is {value}; it needs the package {' or '.join(needs.values())}, which is not installed on this "
        "machine (docs/dependencies.md). ds.attn_implementation sdpa needs none, without packed samples"
    )
