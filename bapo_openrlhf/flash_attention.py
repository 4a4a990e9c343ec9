"""Lets OpenRLHF run without flash-attn, on the CPU and on GPUs.

OpenRLHF imports its functions, but only packed samples need them. flash-attn has no wheel for the torch of vLLM 0.29.0,
so it would have to be compiled (docs/dependencies.md).
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from bapo_openrlhf.host import load_file

IMPORTS_IT = "openrlhf.models.ring_attn_utils"


def is_missing() -> bool:
    """Whether flash-attn cannot be imported. Its module in Python may be installed without the compiled one."""
    return find_spec("flash_attn_2_cuda") is None


def _not_installed(*_args: Any, **_kwargs: Any) -> None:
    raise RuntimeError("flash-attn is not installed: leave --ds.packing_samples and --ds.ring_attn_size out")


@contextmanager
def stand_ins() -> Iterator[None]:
    """Let `from flash_attn...` succeed only inside the block, or transformers would believe that it is installed."""
    functions = {
        "flash_attn": (),
        "flash_attn.bert_padding": ("index_first_axis", "pad_input", "rearrange", "unpad_input"),
        "flash_attn.utils": (),
        "flash_attn.utils.distributed": ("all_gather",),
    }
    originals = {name: sys.modules[name] for name in functions if name in sys.modules}
    for name, attributes in functions.items():
        stand_in = ModuleType(name)
        stand_in.__path__ = []
        for attribute in attributes:
            setattr(stand_in, attribute, _not_installed)
        sys.modules[name] = stand_in
    try:
        yield
    finally:
        for name in functions:
            sys.modules.pop(name, None)
        sys.modules.update(originals)


def set_up() -> None:
    """Import the module with the stand-ins. The rest of its package is not imported, as vLLM's processes need none."""
    if IMPORTS_IT in sys.modules:
        return
    with stand_ins():
        module = load_file("models/ring_attn_utils.py", IMPORTS_IT)
    sys.modules[IMPORTS_IT] = module
