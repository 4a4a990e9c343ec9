"""Find attention that the installed packages cannot compute, and other kernels that are not installed.

Without flash-attn, sdpa, eager and flex_attention work, but samples cannot be packed.
"""

from importlib.util import find_spec
from types import SimpleNamespace

_FLASH = {"flash_attn_2_cuda": "flash-attn"}  # module: package. The compiled module may be missing from the package.
_HUB = {"kernels": "kernels"}  # transformers gets the attention from the model hub with it
_NEEDS = {"flash_attention_2": _FLASH | _HUB, "flash_attention_3": {"flash_attn_interface": "flash-attn-3"} | _HUB}


def missing_attention(args: SimpleNamespace) -> str | None:
    """A sentence on what the attention or a kernel needs that is not installed; None if nothing is missing."""
    if args.ds.use_liger_kernel and find_spec("liger_kernel") is None:
        return "ds.use_liger_kernel is True; it needs the package liger-kernel, which is not installed on this machine"
    asked = args.ds.attn_implementation
    needs = _FLASH if args.ds.packing_samples else _HUB if "/" in asked else _NEEDS.get(asked, {})
    if not needs or any(map(find_spec, needs)):
        return None
    flag, value = ("ds.packing_samples", True) if args.ds.packing_samples else ("ds.attn_implementation", asked)
    return (
        f"{flag} is {value}; it needs the package {' or '.join(needs.values())}, which is not installed on this "
        "machine (docs/dependencies.md). ds.attn_implementation sdpa needs none, without packed samples"
    )
