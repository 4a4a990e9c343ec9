"""Products of bfloat16 matrices through float32, compared with float64 and with torch's own kernels."""

import itertools
import os
import platform
import signal
from contextlib import contextmanager

import pytest
import torch
from torch.nn import functional

from bapo_openrlhf.cpu import products
from bapo_openrlhf.errors import ConfigError


@contextmanager
def through_float32():
    """Within the block, this process multiplies through float32."""
    registered = bool(products._libraries)  # on a CPU that has no instructions, another test may have done so
    if not registered:
        products._register()
    try:
        yield
    finally:
        if not registered:
            products._libraries.pop()._destroy()


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request):
    before = torch.get_num_threads()
    torch._C.set_num_threads(request.param)
    yield request.param
    torch._C.set_num_threads(before)


def random(*shape):
    return torch.randn(*shape).bfloat16()


def assert_rounded_once(result, exact, sizes):
    """Each number is `exact`, float64, rounded to bfloat16; `sizes` is the sum of the absolute values of what it adds.

    bfloat16 has 8 significant bits, so rounding moves a number by at most 2^-9 of itself (2^-8 of the power of two
    below it). The sum itself is made in float32, which has 24.
    """
    assert result.dtype == torch.bfloat16 and result.shape == exact.shape
    assert ((result.double() - exact).abs() <= 2.0**-8 * exact.abs() / (1 + 2.0**-8) + 2.0**-20 * sizes).all()


# Calls of three matrices of bfloat16, in all forms that a model uses, and the shapes of the matrices.
CALLS = {
    "linear": (lambda a, b, c: functional.linear(a, b), [(70, 40), (24, 40), (1,)]),
    "linear with bias": (lambda a, b, c: functional.linear(a, b, c), [(3, 70, 40), (24, 40), (24,)]),
    "critic's head": (lambda a, b, c: functional.linear(a, b, c), [(3, 70, 40), (1, 40), (1,)]),
    "matmul": (lambda a, b, c: a @ b, [(70, 40), (40, 24), (1,)]),
    "transposed": (lambda a, b, c: a.T @ b, [(40, 130), (40, 24), (1,)]),
    "attention scores": (lambda a, b, c: a @ b.transpose(2, 3), [(2, 3, 70, 16), (2, 3, 70, 16), (1,)]),
    "einsum": (lambda a, b, c: torch.einsum("snk,skm->snm", a, b), [(5, 7, 16), (5, 16, 9), (1,)]),
    "addmm": (lambda a, b, c: torch.addmm(c, a, b, beta=0.5, alpha=-3), [(70, 40), (40, 24), (70, 24)]),
    "baddbmm": (lambda a, b, c: torch.baddbmm(c, a, b, beta=2, alpha=0.25), [(5, 7, 16), (5, 16, 9), (5, 7, 9)]),
}


@pytest.mark.parametrize("name", CALLS)
def test_forward_and_backward_are_exact_products_rounded_once(name, threads):
    torch.manual_seed(1)
    call, shapes = CALLS[name]
    inputs = [random(*shape).requires_grad_() for shape in shapes]
    exact_inputs = [value.detach().double().requires_grad_() for value in inputs]
    size_inputs = [value.detach().double().abs().requires_grad_() for value in inputs]
    with through_float32():
        result = call(*inputs)
        result.backward(towards := random(*result.shape))
    exact, sizes = call(*exact_inputs), call(*size_inputs)
    exact.backward(towards.double())
    sizes.backward(towards.double().abs())
    assert_rounded_once(result, exact, 4 * sizes.abs() + 10)
    for value, its_exact, its_size in zip(inputs, exact_inputs, size_inputs, strict=True):
        if value.grad is None:
            assert its_exact.grad is None
        elif value.ndim > 1:  # the gradient of a bias is a sum of rows, which torch makes in bfloat16
            # Products of a sum that torch splits (beta, alpha) are rounded before they are scaled.
            factor = 2 if name in ("addmm", "baddbmm") else 1
            error = (value.grad.double() - its_exact.grad).abs()
            assert (error <= factor * 2.0**-8 * its_exact.grad.abs() + 2.0**-20 * (4 * its_size.grad.abs() + 10)).all()


def test_output_of_a_given_tensor():
    a, b, out = random(70, 40), random(40, 24), random(70, 24)
    with through_float32():
        assert torch.mm(a, b, out=out) is out and torch.equal(out, a @ b)
        weight = torch.zeros(3, 70, 24).bfloat16()
        torch.mm(a, b, out=weight[1])  # a view, as the gradient of a block of the output head
        assert torch.equal(weight[1], out) and not weight[0].any() and not weight[2].any()


SHAPES = [(128, 384), (384, 128), (128, 64), (576, 192), (33, 47), (128, 1)]
COUNTS = [*range(1, 18), 31, 33, 48, 63, 64, 65, 100, 129, 200]


@pytest.mark.parametrize(("inner", "columns"), SHAPES)
@pytest.mark.parametrize("unrounded", [False, True], ids=["rounded", "before rounding"])
def test_a_row_does_not_depend_on_the_number_of_rows_and_its_place(inner, columns, unrounded, threads):
    torch.manual_seed(3)
    rows, weight, more = random(300, inner), random(columns, inner).T, random(columns)

    def product(rows):
        if unrounded:
            return products._in_blocks(rows.float(), weight, None)
        return torch.addmm(more, rows, weight)

    with through_float32():
        whole = product(rows)
        different = [
            (count, start)
            for count, start in itertools.product(COUNTS, (1, 77))
            if not torch.equal(product(rows[start : start + count]), whole[start : start + count])
        ]
    assert not different


def test_a_row_does_not_depend_on_the_number_of_threads():
    rows, weight = random(300, 384), random(384, 128)
    before, result = torch.get_num_threads(), []
    with through_float32():
        for count in (1, 2, 3):
            torch._C.set_num_threads(count)
            result.append(rows @ weight)
    torch._C.set_num_threads(before)
    assert torch.equal(result[0], result[1]) and torch.equal(result[0], result[2])


def test_without_blocks_and_in_a_backward_pass_of_one_thread_it_is_one_product():
    rows, weight = random(300, 384), random(384, 128)
    with through_float32(), products.without_blocks():
        assert torch.equal(rows @ weight, (rows.float() @ weight.float()).bfloat16())
    layer, before = torch.nn.Linear(384, 128, bias=False).bfloat16(), torch.get_num_threads()
    torch._C.set_num_threads(1)
    with through_float32():
        layer(rows).backward(towards := random(300, 128))
        assert torch.equal(layer.weight.grad, (towards.float().T @ rows.float()).bfloat16())
    torch._C.set_num_threads(before)


def test_only_a_part_of_a_large_matrix_is_held_in_float32(monkeypatch):
    a, b, rows, empty = random(5000, 16), random(16, 8), [], torch.empty

    def noted(*size):
        rows.append(size[0])
        return empty(*size)

    monkeypatch.setattr(torch, "empty", noted)
    with through_float32(), products.without_blocks():
        assert torch.equal(a @ b, (a.float() @ b.float()).bfloat16())
    assert 0 < max(rows) <= products.AT_ONCE


def test_a_product_does_not_come_back_to_the_kernels_that_one_thread_runs_at_a_time(monkeypatch):
    calls, make = [], products._kernel

    def noted(operator, compute):
        kernel = make(operator, compute)
        return lambda *args, **options: (calls.append(operator), kernel(*args, **options))[1]

    monkeypatch.setattr(products, "_kernel", noted)
    monkeypatch.setattr(products, "_libraries", [])
    with through_float32():
        random(300, 16) @ random(16, 8)
    assert calls == ["mm"]


def test_no_copy_of_a_weight_outlives_its_call():
    """An optimizer step, a weight sync and a restore write into the same tensor."""
    x, weight, other = random(4, 16), random(8, 16), random(8, 16)
    with through_float32():
        functional.linear(x, weight)
        weight.copy_(other)
        assert torch.equal(functional.linear(x, weight), functional.linear(x, other))


def test_vllm_s_tensors(threads):
    """vLLM computes in inference mode."""
    a, b = random(130, 16), random(16, 8)
    with through_float32():
        expected = a @ b
        with torch.inference_mode():
            assert torch.equal((a + 0) @ b, expected)


def test_threads_record_nothing_for_a_backward_pass(threads):
    a, b = random(300, 16).requires_grad_(), random(16, 8).requires_grad_()
    with through_float32(), torch.no_grad():
        assert not (a @ b).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.complex64])
def test_other_numbers_keep_torch_s_kernels(dtype):
    a, b = (10 * torch.randn(6, 5)).to(dtype), (10 * torch.randn(5, 4)).to(dtype)

    def made():
        return a @ b, torch.stack([a, a]) @ b, torch.addmm(b[0], a, b), torch.mm(a, b, out=torch.empty(0, dtype=dtype))

    expected = made()
    with through_float32():
        actual = made()
    assert all(map(torch.equal, actual, expected))


def test_errors_are_torch_s():
    a, b, wide = random(2, 3), random(4, 5), torch.zeros(3, 5)
    for one, two in [(a, b), (a, wide), (wide.T, a)]:
        with pytest.raises(RuntimeError) as direct:
            torch.mm(one, two)
        with through_float32(), pytest.raises(RuntimeError) as result:
            torch.mm(one, two)
        assert str(result.value) == str(direct.value)
    with through_float32(), pytest.raises(RuntimeError, match="dtype"):
        torch.mm(a, random(3, 5), out=torch.zeros(2, 5))


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_empty_matrices(shape):
    rows, inner, columns = shape
    with through_float32():
        assert torch.equal(random(rows, inner) @ random(inner, columns), torch.zeros(rows, columns).bfloat16())


def test_a_fork_has_threads_of_its_own():
    a, b, before = random(200, 16), random(16, 8), torch.get_num_threads()
    with through_float32():
        torch._C.set_num_threads(2)
        expected = a @ b
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # ends it if it waits for threads that it does not have
            products._pool(2)  # would be the parent's, without threads
            os._exit(int(not torch.equal(a @ b, expected)))
        torch._C.set_num_threads(before)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(("machine", "torch_says", "avx512_bf16", "amx", "way"), [
    ("x86_64", True, True, True, "direct"),
    ("x86_64", True, True, False, "direct"),
    ("x86_64", True, False, True, "direct"),
    ("x86_64", True, False, False, "float32"),  # AVX-512 without the instructions
    ("x86_64", False, False, False, "float32"),  # AVX2
    ("x86_64", False, True, True, "float32"),  # torch was told to use no more than AVX2
    ("aarch64", True, False, False, "direct"),
    ("aarch64", False, False, False, "float32"),
])  # fmt: skip
@pytest.mark.parametrize("given", [None, "auto", " Float32", "direct"])
def test_way(monkeypatch, machine, torch_says, avx512_bf16, amx, way, given):
    monkeypatch.delenv(products.SWITCH, raising=False)
    if given:
        monkeypatch.setenv(products.SWITCH, given)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: torch_says)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert products.way() == {" Float32": "float32", "direct": "direct"}.get(given, way)
    monkeypatch.setenv(products.SWITCH, "fast")
    with pytest.raises(ConfigError, match="BAPO_OPENRLHF_BF16 is 'fast'"):
        products.way()
