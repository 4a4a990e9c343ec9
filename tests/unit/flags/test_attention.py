"""Attention that packages rule out. test_preflight.py has its place among the checks of a run."""

from types import SimpleNamespace

import pytest

from bapo_openrlhf.cpu import stack as cpu
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.launch import environment, preflight
from bapo_openrlhf.launch.environment import missing_attention
from bapo_openrlhf.launch.preflight import check_packages


def arguments_of(implementation, packed=False, liger=False):
    ds = SimpleNamespace(attn_implementation=implementation, packing_samples=packed, use_liger_kernel=liger)
    return SimpleNamespace(ds=ds, logger=SimpleNamespace(wandb=SimpleNamespace(key=None)))


@pytest.fixture(autouse=True)
def install(monkeypatch):
    """A function that installs modules. At first none is there, also if this machine has them."""
    installed = set()
    monkeypatch.setattr(environment, "find_spec", lambda name: name if name in installed else None)
    return lambda *names: installed.update(names)


FLASH = "ds.attn_implementation is flash_attention_2"
PACKS = "ds.packing_samples is True"


@pytest.mark.parametrize(("words", "flag", "without", "needs"), [
    ({"implementation": "flash_attention_2"}, FLASH, [], "flash-attn"),
    ({"implementation": "flash_attention_2"}, FLASH, [], "kernels"),
    # FLASH_ATTENTION_SKIP_CUDA_BUILD installs flash-attn without its compiled module: the import then fails
    ({"implementation": "flash_attention_2"}, FLASH, ["flash_attn"], "flash-attn"),
    ({"implementation": "flash_attention_3"}, "ds.attn_implementation is flash_attention_3", [], "flash-attn-3"),
    ({"implementation": "org/attn"}, "ds.attn_implementation is org/attn", ["flash_attn_2_cuda"], "kernels"),
    # OpenRLHF packs with functions of flash-attn, so another package with this attention does not help
    ({"implementation": "flash_attention_2", "packed": True}, PACKS, ["kernels"], "flash-attn"),
    ({"implementation": "sdpa", "liger": True}, "ds.use_liger_kernel is True", ["kernels"], "liger-kernel"),
])  # fmt: skip
def test_what_needs_a_package(install, words, flag, without, needs):
    modules = {"flash-attn": "flash_attn_2_cuda", "flash-attn-3": "flash_attn_interface", "kernels": "kernels"}
    install(*without)
    text = missing_attention(arguments_of(**words))
    assert text.startswith(f"{flag}; ") and needs in text
    install(modules.get(needs, "liger_kernel"))
    assert missing_attention(arguments_of(**words)) is None


def test_wandb_is_needed_also_without_a_gpu(monkeypatch):
    monkeypatch.setenv(cpu.SWITCH, "1")
    args = arguments_of("sdpa")
    args.logger.wandb.key = "k"
    for found in (None, SimpleNamespace(origin=None)):  # the second one is a folder wandb of the working folder
        monkeypatch.setattr(preflight, "find_spec", lambda name, found=found: found)
        with pytest.raises(ConfigError, match=r"^logger\.wandb\.key is set; "):
            check_packages(args)
    monkeypatch.setattr(preflight, "find_spec", lambda name: SimpleNamespace(origin="wandb/__init__.py"))
    check_packages(args)
