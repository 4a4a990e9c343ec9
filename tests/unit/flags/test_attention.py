"""Attention that packages or packing rule out. test_preflight.py has its place among the checks of a run."""

from argparse import Namespace
from types import SimpleNamespace

import pytest

from bapo_openrlhf.cpu import stack as cpu
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.flags import attention
from bapo_openrlhf.flags.attention import lacking
from bapo_openrlhf.flags.rule import refuse
from bapo_openrlhf.flags.rules import PACKED
from bapo_openrlhf.launch import preflight
from bapo_openrlhf.launch.preflight import check_packages

NEITHER = "the package flash-attn or kernels, which is not installed on this machine"


def asked(implementation, packed=False, ring=1, liger=False):
    kernels = {"ring_attn_size": ring, "use_liger_kernel": liger}
    ds = SimpleNamespace(attn_implementation=implementation, packing_samples=packed, **kernels)
    return SimpleNamespace(ds=ds, logger=SimpleNamespace(wandb=SimpleNamespace(key=None)))


@pytest.fixture(autouse=True)
def install(monkeypatch):
    """A function that installs modules. At first none is there, also if this machine has them."""
    installed = set()
    monkeypatch.setattr(attention, "find_spec", lambda name: name if name in installed else None)
    return lambda *names: installed.update(names)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flex_attention"])
def test_some_attention_needs_no_package(implementation):
    assert lacking(asked(implementation)) is None


@pytest.mark.parametrize(
    ("implementation", "needs"),
    [
        ("flash_attention_2", NEITHER),
        ("flash_attention_3", NEITHER.replace("flash-attn", "flash-attn-3")),
        ("kernels-community/flash-attn2", NEITHER.replace("flash-attn or ", "")),
    ],
)
def test_flash_attention_needs_one(implementation, needs, install):
    text = lacking(asked(implementation))
    assert text.startswith(f"ds.attn_implementation is {implementation}; it needs {needs} ")
    install("kernels")
    assert lacking(asked(implementation)) is None


def test_flash_attn_without_its_compiled_module_is_not_enough(install):
    """FLASH_ATTENTION_SKIP_CUDA_BUILD installs this: `import flash_attn` then fails."""
    install("flash_attn")
    assert "needs the package flash-attn " in lacking(asked("flash_attention_2"))
    install("flash_attn_2_cuda")
    assert lacking(asked("flash_attention_2")) is None


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flash_attention_3"])
def test_packed_samples_need_flash_attn_itself(implementation, install):
    """OpenRLHF packs with functions of flash-attn, so another package with this attention does not help."""
    install("kernels", "flash_attn_interface")
    text = lacking(asked(implementation, packed=True))
    assert text.startswith("ds.packing_samples is True; it needs the package flash-attn, which is not installed")
    install("flash_attn_2_cuda")
    assert lacking(asked(implementation, packed=True)) is None


@pytest.mark.parametrize(
    ("kernels", "says", "module"),
    [
        ({"ring": 2}, "ds.ring_attn_size is 2; it needs the package ring-flash-attn, which is not", "ring_flash_attn"),
        ({"liger": True}, "ds.use_liger_kernel is True; it needs the package liger-kernel, which", "liger_kernel"),
    ],
)
def test_some_kernels_need_a_package_of_their_own(kernels, says, module, install):
    assert lacking(asked("sdpa", **kernels)).startswith(says)
    install(module)
    assert lacking(asked("sdpa", **kernels)) is None


def test_it_is_refused_only_with_a_gpu(monkeypatch):
    monkeypatch.setenv(cpu.SWITCH, "1")
    check_packages(asked("flash_attention_2"))
    monkeypatch.setenv(cpu.SWITCH, "0")
    check_packages(asked("sdpa"))
    with pytest.raises(ConfigError, match=r"needs none, without packed samples$"):
        check_packages(asked("flash_attention_2"))


@pytest.mark.parametrize("gpus", [True, False])
def test_wandb_is_needed_on_every_machine(monkeypatch, gpus):
    monkeypatch.setenv(cpu.SWITCH, str(int(not gpus)))
    args = asked("sdpa")
    args.logger.wandb.key = "k"
    for found in (None, SimpleNamespace(origin=None)):  # the second one is a folder wandb of the working folder
        monkeypatch.setattr(preflight, "find_spec", lambda name, found=found: found)
        with pytest.raises(ConfigError, match=r"^logger\.wandb\.key is set; it needs the package wandb, which is not"):
            check_packages(args)
    monkeypatch.setattr(preflight, "find_spec", lambda name: SimpleNamespace(origin="wandb/__init__.py"))
    check_packages(args)


FLAGS = {"ds.packing_samples": (False, True), "train.dynamic_batch_enable": (False, True), "ds.ring_attn_size": (1, 2)}


def flat(implementation, packing=()):
    values = {flag: pair[flag in packing] for flag, pair in FLAGS.items()}
    return Namespace(**values, **{"ds.attn_implementation": implementation})


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager", "kernels-community/flash-attn2"])
def test_packed_samples_need_flash_attention(implementation, flag):
    """OpenRLHF would take flash_attention_2 instead, and print one line about it."""
    with pytest.raises(ConfigError) as error:
        refuse([PACKED], vars(flat(implementation, [flag])))
    assert str(error.value) == (
        f"ds.attn_implementation is {implementation}, and {flag} packs samples; packed samples need flash_attention_2"
    )
    refuse([PACKED], vars(flat("flash_attention_3", [flag])))
    refuse([PACKED], vars(flat(implementation)))
