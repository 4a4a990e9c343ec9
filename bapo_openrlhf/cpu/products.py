"""Products of bfloat16 matrices on a CPU that has no instructions for bfloat16.

CPUs with AMX and the newer ones with AVX-512 have them, AVX2 does not. Without them, torch's own product takes four to
ten times as long as that of the same numbers in float32. So this file replaces torch's kernels in every process of a
run: it multiplies in float32 and rounds the result to bfloat16. Every product of two bfloat16 numbers is exact in
float32, and torch's own kernel adds in float32 too, so only the order of the additions differs.

A row of a product depends only on that row and on the other matrix, so that what the engine samples for a request does
not depend on its batch. MKL does not promise this: it chooses a kernel by the number of rows, and splits them among its
threads. So rows are multiplied in blocks of ROWS, each by one thread, and the last block is filled up with zeros. A
backward pass with one thread has no blocks, because a gradient is a sum over all rows.
"""

import os
import platform
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

from bapo_openrlhf.cpu.patching import PATCHES
from bapo_openrlhf.errors import ConfigError

SWITCH = "BAPO_OPENRLHF_BF16"  # "direct", "float32", or "auto": what is faster on this CPU
ROWS = 64  # of a block
AT_ONCE = 16 * ROWS  # rows that are held in float32 at a time without blocks
NO_BACKWARD = -1  # what torch says outside of a backward pass
_with_blocks = ContextVar("with_blocks", default=True)
_libraries: list[Any] = []  # torch forgets a kernel when its library object is gone


def requested_way() -> str:
    """The way that the environment asks for: "direct", "float32" or "auto". Another value is a ConfigError."""
    switch = os.environ.get(SWITCH, "").strip().lower() or "auto"
    if switch not in ("auto", "direct", "float32"):
        raise ConfigError(f"{SWITCH} is {switch!r}; allowed: direct, float32, auto (what is faster on this CPU)")
    return switch


def way() -> str:
    """How this process multiplies bfloat16 matrices: "direct" (with torch's own kernels) or "float32"."""
    import torch

    if (switch := requested_way()) != "auto":
        return switch
    # torch asks the first before it hands a product to oneDNN. It also says yes on x86 with an AVX-512 that has none.
    supported = torch.ops.mkldnn._is_mkldnn_bf16_supported() and (
        platform.machine() not in ("x86_64", "AMD64")
        or torch.cpu._is_avx512_bf16_supported()
        or torch.cpu._is_amx_tile_supported()
    )
    return "direct" if supported else "float32"


def install(_torch: Any) -> None:
    """Replace torch's kernels in this process if `way` is "float32"."""
    if way() == "float32" and not _libraries:
        _register()


PATCHES.setdefault("torch", []).append(install)


@contextmanager
def without_blocks() -> Iterator[None]:
    """Within the block, a row of a product may depend on the number of rows. This is faster for small matrices."""
    token = _with_blocks.set(False)
    try:
        yield
    finally:
        _with_blocks.reset(token)


def _register() -> None:
    import warnings

    import torch

    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for name, compute in {"mm": _mm, "addmm": _addmm, "bmm": _bmm, "baddbmm": _baddbmm}.items():
            for operator in (name, f"{name}.out"):
                library.impl(operator, _kernel(operator, compute), "CPU", with_keyset=True, allow_override=True)


def _kernel(operator: str, compute: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    original = torch.library.get_kernel(f"aten::{operator}", "CPU").call_boxed
    bfloat16 = torch.bfloat16

    def kernel(keys: Any, first: Any, *operands: Any, out: Any = None, **scales: Any) -> Any:
        output = {} if out is None else {"out": out}
        if any(tensor.dtype is not bfloat16 for tensor in (first, *operands, *output.values())):
            return original(keys, first, *operands, **scales, **output)
        result = compute(first, *operands, **scales)
        if out is None:
            return result
        out.resize_(result.shape)
        return out.copy_(result)

    return kernel


def _mm(a: Any, b: Any) -> Any:
    """The product of (n, k) and (k, m): bfloat16 of shape (n, m)."""
    return _in_blocks(a, b, None)


def _addmm(c: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    """`beta` c + `alpha` a b, rounded once. c can be broadcast to (n, m)."""
    return _in_blocks(a, b, c.expand(len(a), b.shape[1]), beta, alpha)


def _bmm(a: Any, b: Any) -> Any:
    """The products of (s, n, k) and (s, k, m): bfloat16 of shape (s, n, m)."""
    return (a.float() @ b.float()).bfloat16()


def _baddbmm(c: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    """`beta` c + `alpha` a b, rounded once. c can be broadcast to (s, n, m)."""
    return c.float().baddbmm(a.float(), b.float(), beta=beta, alpha=alpha).bfloat16()


def _in_blocks(a: Any, b: Any, c: Any, beta: float = 0, alpha: float = 1) -> Any:
    """`beta` c + `alpha` a b in the dtype of a, with a c of shape (n, m) or None. It is computed in float32."""
    import torch

    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        torch.mm(a.float(), b.float())  # raises torch's own error
    rows, right, threads = len(a), b.float(), torch.get_num_threads()
    is_backward = torch._C._current_graph_task_id() != NO_BACKWARD
    in_blocks = _with_blocks.get() and not (is_backward and threads == 1)
    step = ROWS if in_blocks else AT_ONCE
    result = a.new_empty(rows, b.shape[1])

    def fill(start: int) -> None:
        block = slice(start, min(start + step, rows))
        count = block.stop - start
        size = ROWS if in_blocks else count
        # Contiguous, because MKL's choice may also depend on the layout.
        left, product = torch.empty(size, a.shape[1]), torch.empty(size, b.shape[1])
        left[:count] = a[block]
        left[count:] = 0
        product.addmm_(left, right, beta=0)  # no kernel of this file, because only one thread at a time runs those
        product = product[:count]
        if alpha != 1:
            product *= alpha
        if c is not None and beta != 0:
            product.add_(c[block], alpha=beta)
        result[block] = product

    blocks = range(0, rows, step)
    if in_blocks and threads > 1:
        list(_pool(threads).map(torch.inference_mode(result.is_inference())(torch.no_grad()(fill)), blocks))
    else:
        for start in blocks:
            fill(start)
    return result


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads that compute with one thread each, so that MKL does not split a block."""
    import torch

    # Not `torch.set_num_threads`, which vLLM replaces by a function that does nothing.
    return ThreadPoolExecutor(threads, "products", initializer=torch._C.set_num_threads, initargs=(1,))


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of the threads
