"""The composition of a run, compared with OpenRLHF's `train`: Ray and the classes of all processes write down calls."""

import sys
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import ray
import torch
from openrlhf.cli import train_ppo_ray
from openrlhf.trainer import ppo_trainer, ppo_trainer_async
from openrlhf.trainer.ray import launcher, vllm_engine

from bapo_openrlhf import host, machine
from bapo_openrlhf.cli import arguments
from bapo_openrlhf.cpu import stack as cpu
from bapo_openrlhf.training.driver import build, own_ray
from bapo_openrlhf.training.engine import engines
from bapo_openrlhf.training.trainer import dealing, plain_trainer, trainer
from bapo_openrlhf.training.worker import workers

FLAGS = {
    "algorithm": "grpo", "actor.model_name_or_path": "model", "reward.remote_url": "reward.py", "data.max_len": 77,
    "data.prompt_dataset": "data.jsonl", "actor.num_gpus_per_node": 2, "ref.num_gpus_per_node": 2, "train.seed": 9,
    "critic.num_gpus_per_node": 2, "reward.num_gpus_per_node": 2, "vllm.num_engines": 2, "rollout.temperature": 0.7,
    "rollout.max_new_tokens": 33, "rollout.top_p": 0.9, "rollout.n_samples_per_prompt": 4,
    "vllm.gpu_memory_utilization": 0.55,
}  # fmt: skip
PROCESSED = {"logprobs_mode": "processed_logprobs", "max_logprobs": 1}
PPO = "algorithm=ppo critic.model_name_or_path=critic"
TOGETHER = "train.colocate_all vllm.enable_sleep ds.enable_sleep"
VARIANTS = (
    "",
    "algo.kl.init_coef=0",
    "actor.num_nodes=3 ref.num_nodes=3",
    "train.colocate_actor_ref",
    "train.colocate_all",
    TOGETHER,
    f"{PPO} {TOGETHER}",
    PPO,
    f"{PPO} critic.save_value_network critic.num_nodes=2",
    f"{PPO} train.colocate_critic_reward",
    f"{PPO} {TOGETHER} train.colocate_critic_reward",
    f"{PPO} reward.remote_url= reward.model_name_or_path=rewards",
    f"{PPO} reward.remote_url= reward.model_name_or_path=rewards train.colocate_critic_reward train.colocate_actor_ref",
    "train.async_enable",
    "train.async_enable train.colocate_all",
    "vllm.tensor_parallel_size=2 vllm.num_engines=3",
    f"vllm.tensor_parallel_size=2 vllm.num_engines=1 {TOGETHER}",
    "ds.tensor_parallel_size=2",
    "vllm.enable_sleep vllm.enforce_eager vllm.enable_prefix_caching train.full_determinism_enable",
    "data.max_images_per_prompt=3",
    "algo.advantage.is_correction_level=token",
    "train.agent_func_path=agent.py",
)


class Calls:
    """What a run asks for, in order. A reference of Ray is the call that it stands for."""

    def __init__(self):
        self.events = []

    def __call__(self, *event):
        self.events.append(event)
        return event

    def requested(self):
        return [event for event in self.events if event[0] not in ("call", "wait")]

    def called(self):
        asked = [event for event in self.events if event[0] == "call" and event[2] != "__ray_call__"]  # where they are
        return Counter(map(repr, asked))


class Named:
    """What a run gets from Ray. Both sides get equal ones, under equal names."""

    def __init__(self, calls, name):
        self._calls, self._name = calls, name

    def __repr__(self):
        return self._name

    def __eq__(self, other):
        return repr(self) == repr(other)


class Process(Named):
    """An actor of Ray, of any class."""

    def __getattr__(self, method):
        return SimpleNamespace(remote=lambda *args, **kwargs: self._calls("call", self._name, method, args, kwargs))


class Kind:
    """A class of actors."""

    def __init__(self, calls, name, **options):
        self.calls, self.name, self.given = calls, name, options

    def options(self, **options):
        if options == {"max_concurrency": 2}:  # this project's trainer answers while it trains
            return self
        where = options["scheduling_strategy"]
        return Kind(self.calls, self.name, **options | {"scheduling_strategy": vars(where)})

    def remote(self, *args, **kwargs):
        number = sum(event[0] == self.name for event in self.calls.events)
        for name in ("faster", "moe_backend"):  # which OpenRLHF's engine is not given
            kwargs.pop(name, None)
        self.calls(self.name, args, kwargs, self.given)
        return Process(self.calls, f"{self.name} {number}")


class Workers(Named):
    """The processes of a model."""

    _actor_handlers = ()

    def __init__(self, calls, name, *sizes, **where):
        super().__init__(calls, name)
        calls(name, sizes, where)

    def __getattr__(self, method):
        return lambda *args, **kwargs: [self._calls("call", self._name, method, args, kwargs)]


class Place(Named):
    """GPUs that are reserved together."""

    def __init__(self, calls, bundles, strategy):
        super().__init__(calls, repr(calls("reserved", bundles, strategy)))

    def ready(self):
        return "ready"


@pytest.fixture
def calls(monkeypatch):
    """The calls that are noted from now on, on a machine with GPUs. Both sides get the same classes."""
    monkeypatch.setenv(cpu.SWITCH, "0")
    calls = Calls()
    strategy = SimpleNamespace(print=lambda *_: None)

    def workers_of(nodes, gpus, kind, **where):
        return Workers(calls, kind, nodes, gpus, **where)

    def indices(place, number, size):
        return [number * size, number * size + 1]

    processor = SimpleNamespace(from_pretrained=lambda *args, **kwargs: SimpleNamespace(image_token_id=5))

    def classes_of(args):
        kind = Kind(calls, "asynchronous" if args.train.async_enable else "trainer")
        return build.Classes("policy", "critic", kind, workers_of)

    for module, name, value in (
        (ray, "get", lambda refs: (calls("wait", refs), [None] * len(refs) if isinstance(refs, list) else 50)[1]),
        (ray, "wait", lambda refs, **_: (refs, [])),
        (ray, "is_initialized", lambda: True),
        *((module, "placement_group", partial(Place, calls)) for module in (train_ppo_ray, vllm_engine, build)),
        (train_ppo_ray, "get_strategy", lambda args: strategy),
        (build, "strategy_of", lambda args: strategy),
        (train_ppo_ray, "RayActorGroup", workers_of),
        *((train_ppo_ray, f"{name.title()}ModelActor", name) for name in ("policy", "critic", "reference", "reward")),
        (vllm_engine, "RolloutRayActor", Kind(calls, "engine")),
        (ppo_trainer, "PPOTrainer", Kind(calls, "trainer")),
        (ppo_trainer_async, "PPOTrainerAsync", Kind(calls, "asynchronous")),
        *((module, "get_bundle_indices", indices) for module in (vllm_engine, build)),
        (sys.modules["transformers"], "AutoProcessor", processor),  # importing the stack may load it anew
        (build, "AutoProcessor", processor),
        (build, "classes_of", classes_of),
        (workers, "ReferenceActor", "reference"),
        (workers, "RewardActor", "reward"),
        (engines, "RolloutActor", Kind(calls, "engine")),
    ):
        monkeypatch.setattr(module, name, value)
    return calls


def arguments_of(variant):
    words = {name: f"{name}={value}" for name, value in FLAGS.items()}
    return arguments.parse([f"--{word}" for word in (words | {w.split("=")[0]: w for w in variant.split()}).values()])


def train(args):
    """Our `train`, with signals that never come and whose handlers are not set."""
    build.train(args, SimpleNamespace(first=None, listen=lambda: None))


def of_run(calls, train, variant):
    """What a run asks for, once it is over."""
    calls.events = []
    train(arguments_of(variant))
    return calls.requested(), calls.called()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_plain_run_asks_for_what_openrlhf_asks_for(calls, variant):
    processes, called = of_run(calls, train_ppo_ray.train, variant)
    ours, of_ours = of_run(calls, train, variant)
    assert ours == processes
    if "train.colocate_all" in variant and "sleep" not in variant and "async" not in variant:
        of_ours = Counter({call: n for call, n in of_ours.items() if "get_num_unfinished" not in call})
    assert of_ours == called


@pytest.mark.parametrize(("size", "workers"), [(1, "uni"), (2, "mp")])
def test_an_engine_without_a_gpu_has_no_workers_of_ray(monkeypatch, size, workers):
    """And one sequence at a time, if the run is to be repeatable."""
    monkeypatch.setenv(cpu.SWITCH, "1")
    args = arguments_of(f"vllm.tensor_parallel_size={size} train.full_determinism_enable")
    settings = build.settings_of_engines(args)
    assert (settings["distributed_executor_backend"], settings["max_num_seqs"]) == (workers, 1)
    args.train.full_determinism_enable = False
    assert not {"max_num_seqs", "moe_backend"} & build.settings_of_engines(args).keys()


def test_an_engine_keeps_the_weights_of_experts_in_the_order_of_a_sync(monkeypatch):
    """On GPUs, where vLLM has kernels for which it reorders them once they are loaded."""
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    monkeypatch.setenv(cpu.SWITCH, "0")
    backend = unquantized.map_unquantized_backend(build.settings_of_engines(arguments_of(""))["moe_backend"])
    gate_up, down = torch.arange(24.0).view(2, 4, 3), torch.arange(12.0).view(2, 3, 2)
    config = SimpleNamespace(is_act_and_mul=True)

    def kept(backend):
        new = unquantized.convert_to_unquantized_kernel_format(backend, config, gate_up.clone(), down.clone())
        return torch.equal(new[0], gate_up) and torch.equal(new[1], down)

    assert kept(backend) and not kept(unquantized.UnquantizedMoeBackend.FLASHINFER_CUTLASS)


def test_the_key_of_a_service_is_not_printed(calls, monkeypatch):
    """What a run prints may be kept in train.log."""
    printed, args = [], arguments_of(VARIANTS[0])
    args.logger.wandb.key = "secret"
    monkeypatch.setattr(build, "strategy_of", lambda args: SimpleNamespace(print=printed.append))
    train(args)
    assert printed[0]["logger.wandb.key"] == "***" and printed[0]["train.seed"] == 9
    assert args.logger.wandb.key == "secret"


def place(calls, *event):
    """The place of an event in the order of all."""
    return next(n for n, other in enumerate(calls.events) if other[: len(event)] == event)


def waited_before(calls, model, process, method):
    """Whether a call is answered before a model begins to load."""
    loads = place(calls, "call", model, "async_init_model_from_pretrained")
    waits = [event[1] for event in calls.events[:loads] if event[0] == "wait" and isinstance(event[1], list)]
    return any(ref[:3] == ("call", process, method) for refs in waits for ref in refs)


@pytest.mark.parametrize(
    ("variant", "method"), [(TOGETHER, "sleep"), ("train.colocate_all", "get_num_unfinished_requests")]
)
def test_models_on_the_gpus_of_engines_wait_for_their_cache(calls, variant, method):
    of_run(calls, train, variant)
    for model in ("policy", "reference"):
        assert all(waited_before(calls, model, f"engine {n}", method) for n in (0, 1))


def test_all_processes_are_there_before_anyone_waits_for_an_engine(calls):
    of_run(calls, train, f"{PPO} {TOGETHER}")
    asleep = place(calls, "call", "engine 0", "sleep")
    assert all(place(calls, name) < asleep for name in ("engine", "policy", "reference", "critic", "trainer"))


@pytest.mark.parametrize(("words", "waits"), [
    ("", False),
    ("train.colocate_actor_ref", False),
    ("train.colocate_all", True),
    ("train.colocate_critic_reward reward.remote_url= reward.model_name_or_path=rewards", True),
])  # fmt: skip
def test_a_critic_waits_for_the_models_that_share_its_gpus(calls, words, waits):
    of_run(calls, train, f"{PPO} {words}")
    assert waited_before(calls, "critic", "policy", "async_init_model_from_pretrained") is waits
    assert not waited_before(calls, "critic", "trainer 0", "fit")


@pytest.mark.parametrize(("variant", "wanted"), [
    ("", True),
    ("algo.kl.init_coef=0", False),
    ("adapt.kl_target=behaviour", False),
    ("algorithm=grpo adapt.kl_target=behaviour", True),  # batch adaptation is off, and with it its flags
])  # fmt: skip
def test_a_kl_penalty_to_the_behaviour_policy_has_no_reference_model(calls, variant, wanted):
    processes, _ = of_run(calls, train, f"algorithm=bapo_grpo {variant}")
    (asked,) = [event for event in processes if event[0] == "trainer"]
    assert any(event[0] == "reference" for event in processes) is wanted
    assert str(asked[1][5]) == ("reference" if wanted else "None")


@pytest.mark.parametrize("initialized", [False, True])
@pytest.mark.parametrize("more", [{}, {"worker_process_setup_hook": "with stand-ins"}])
def test_ray_starts_as_openrlhf_starts_it(calls, monkeypatch, initialized, more):
    """Without flash-attn, workers on GPUs need more."""
    started = []
    monkeypatch.setattr(ray, "is_initialized", lambda: initialized)
    monkeypatch.setattr(ray, "init", lambda **given: started.append(given))
    monkeypatch.setattr(own_ray, "_ask_for_token", lambda: None)
    monkeypatch.setattr(machine, "of_workers", lambda: more)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    of_run(calls, train_ppo_ray.train, "")
    theirs, started[:] = list(started), []
    of_run(calls, train, "")
    wanted = [{"address": "local", "runtime_env": given["runtime_env"] | more} for given in theirs]
    assert started == wanted and len(started) == (not initialized)


@pytest.mark.parametrize("ahead", [False, True])
def test_classes_of_a_run(ahead):
    more = " train.async_enable" * ahead
    adapted = (workers.AdaptedPolicyActor, workers.AdaptedCriticActor, trainer.AdaptedPPOTrainerActor)
    assert build.classes_of(arguments_of(f"algorithm=bapo_grpo{more}")) == (*adapted, dealing.DealtActorGroup)
    plain = ppo_trainer_async.PPOTrainerAsync if ahead else plain_trainer.RecordedPPOTrainerActor
    models = (workers.PlainPolicyActor, workers.PlainCriticActor, plain)
    assert build.classes_of(arguments_of(more)) == (*models, launcher.RayActorGroup)


@pytest.mark.parametrize(
    ("variant", "log_probs", "faster"),
    [("", {}, False), ("run.faster=requests", {}, True), ("algorithm=bapo_grpo", PROCESSED, True)],
)
def test_engines_return_log_probs_of_the_sampling_distribution_and_may_be_faster(variant, log_probs, faster):
    settings = build.settings_of_engines(arguments_of(variant))
    assert {name: settings[name] for name in PROCESSED if name in settings} == log_probs
    assert settings["faster"] is faster


def test_another_version_of_openrlhf(calls, monkeypatch):
    monkeypatch.setattr(host.importlib.metadata, "version", lambda name: "0.11.3")
    with pytest.raises(RuntimeError, match=r"openrlhf 0\.11\.3"):
        train(arguments_of(""))
    assert not calls.events
