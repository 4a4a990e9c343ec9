"""The workers: what they load and build, their port, generators of random numbers, and the critic's schedule."""

import socket
from types import SimpleNamespace

import pytest
import torch
from openrlhf.trainer.ray import launcher, ppo_actor, ppo_critic
from test_updates import parameter_of
from torch.distributed import TCPStore

from bapo_openrlhf.cli import arguments
from bapo_openrlhf.host import plain_class
from bapo_openrlhf.training.worker import updates, workers


@pytest.fixture(autouse=True)
def signals_reach_this_process(monkeypatch):
    """It is no worker."""
    monkeypatch.setattr(workers, "leave_to_driver", lambda: None)


FLAGS = {
    "actor.model_name_or_path": "model", "critic.model_name_or_path": "critic", "reward.remote_url": "reward.py",
    "data.prompt_dataset": "data.jsonl", "train.micro_batch_size": 3, "train.batch_size": 12,
    "rollout.temperature": 0.7, "actor.lr_scheduler": "linear", "critic.lr_scheduler": "cosine", "actor.max_norm": 0.3,
    "critic.max_norm": 0.4, "actor.lr_warmup_ratio": 0.05, "critic.lr_warmup_ratio": 0.06, "actor.min_lr_ratio": 0.2,
    "critic.min_lr_ratio": 0.3, "actor.adam.lr": 1e-5, "critic.adam.lr": 2e-5, "critic.value_clip": 0.15,
    "train.ema_beta": 0.9, "ds.attn_implementation": "sdpa", "ds.value_head_prefix": "head", "algorithm": "ppo",
    "vllm.num_engines": 1,
}  # fmt: skip


def parse(*words):
    """The arguments of a run, with flags as words, NAME or NAME=VALUE."""
    given = {name: f"--{name}={value}" for name, value in FLAGS.items()}
    return arguments.parse([*(given | {word.partition("=")[0]: f"--{word}" for word in words}).values()])


@pytest.mark.parametrize(
    "model", ["AdaptedPolicy", "AdaptedCritic", "Reference", "Reward", "PlainPolicy", "PlainCritic"]
)
def test_only_torch_can_listen_on_the_port_of_the_workers(monkeypatch, model):
    """It is chosen early by OpenRLHF's constructor on rank 0, and kept until torch listens on it."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")
    worker = plain_class(getattr(workers, f"{model}Actor"))(1, 0, "127.0.0.1", None)
    _, port = worker.get_master_addr_port()
    other = socket.socket()  # of a process that sets SO_REUSEADDR only when it listens itself
    with pytest.raises(OSError, match="Address already in use"):
        other.bind(("", port))
    store = TCPStore("127.0.0.1", port, world_size=1, is_master=True)
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_a_rank_shuffles_as_it_would_have():
    worker = object.__new__(workers.PolicyWorker)
    worker.seed_rng(5)
    saved, wanted = worker.rng_state(), torch.randperm(50).tolist()
    assert torch.equal(saved[0], torch.Generator().manual_seed(5).get_state())
    torch.manual_seed(6)
    for _ in range(2):  # the state that was saved is not used up
        worker.set_rng_state(saved)
        assert torch.randperm(50).tolist() == wanted
    assert len(saved) == 1 or torch.cuda.is_available()


@pytest.mark.parametrize("sleeps", [False, True])
def test_fine_tuning_has_its_loss_and_leaves_the_schedule(sleeps):
    events, engine = [], SimpleNamespace(lr_scheduler="schedule")
    actor = SimpleNamespace(engine=engine, cross_entropy=False)

    def fit():
        events.append((actor.cross_entropy, engine.lr_scheduler))
        return {"policy_loss": 2.0}

    worker = object.__new__(workers.PolicyWorker)
    worker.trainer, worker.fit = actor, fit
    worker.strategy = SimpleNamespace(args=SimpleNamespace(ds=SimpleNamespace(enable_sleep=sleeps)))
    worker.reload_states, worker.offload_states = (lambda name=name: events.append(name) for name in ("wake", "rest"))
    assert worker.fine_tune() == {"policy_loss": 2.0}
    assert events == (["wake"] * sleeps + [(True, None)] + ["rest"] * sleeps)
    assert (actor.cross_entropy, engine.lr_scheduler) == (False, "schedule")


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("universal", [False, True])
def test_what_deepspeed_shares_under_stage_3_is_undone(tmp_path, stage, universal):
    """Two groups, as OpenRLHF makes them; the steps after it are those of an optimizer that was never saved."""
    words = [f"ckpt.path={tmp_path}", "ckpt.load_enable", f"ds.zero_stage={stage}"]
    args = parse(*words, *["ds.use_universal_ckpt"] * universal)
    (tmp_path / "_actor").mkdir()

    def optimizer():
        decay, other = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
        adam = torch.optim.AdamW(
            [{"params": [decay], "weight_decay": 0.5}, {"params": [other], "weight_decay": 0.0}], lr=0.1
        )
        adam.wrapped = [decay, other]
        step(adam)
        return adam

    def step(adam):
        for parameter in adam.wrapped:
            parameter.grad = torch.arange(3.0)
        adam.step()

    def load_ckpt(engine, folder):
        """As DeepSpeed loads a universal checkpoint under stage 3."""
        first = next(iter(engine.basic_optimizer.state.values()))["step"]
        for group in engine.basic_optimizer.param_groups:
            group["weight_decay"] = engine.basic_optimizer.param_groups[0]["weight_decay"]
        for state in engine.basic_optimizer.state.values():
            state["step"] = first
        return folder, {"global_step": 3}

    engine, wanted = SimpleNamespace(basic_optimizer=optimizer()), optimizer()
    strategy = SimpleNamespace(args=args, print=lambda *_: None, load_ckpt=load_ckpt)
    assert workers.load_checkpoint(strategy, engine, "_actor") == {"global_step": 3}
    for adam in (engine.basic_optimizer, wanted):
        step(adam)
    equal = list(map(torch.equal, engine.basic_optimizer.wrapped, wanted.wrapped))
    assert equal == [True, True] if stage == 3 and universal else not all(equal)


def test_a_checkpoint_has_the_averaged_weights(monkeypatch, tmp_path):
    """Also parts of them (ZeRO-3). Without ZeRO-3, one rank writes them."""
    args, states = parse("train.enable_ema", "ckpt.load_enable", f"ckpt.path={tmp_path}"), []
    (tmp_path / "_actor").mkdir()
    monkeypatch.setattr(ppo_actor, "torch_dist_barrier_and_cuda_sync", lambda: None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 1)
    for average, writes in ((averaged_model([2.0, 4.0], [3.0]), True), (averaged_model([2.0, 4.0], [3.0]), False)):
        worker = object.__new__(workers.PlainPolicyWorker)
        worker.strategy = SimpleNamespace(args=args, save_ckpt=lambda *words, **_: states.append(words[-1]))
        worker.actor = SimpleNamespace(model=SimpleNamespace(save_non_zero_checkpoint=writes))
        worker.ema_model, worker.disable_ds_ckpt, worker.save_hf_ckpt = average, False, False
        worker.save_checkpoint("global_step3", {"global_step": 3})
    written, other = states
    assert other == {"global_step": 3}

    def resumed(state):
        monkeypatch.setattr(Strategy, "load_ckpt", lambda self, engine, folder: (folder, state))
        return calls_of(workers.PlainPolicyWorker, args, (9, None), monkeypatch)[1]

    loaded = resumed(written)
    parts = [[part.tolist() for part in workers.own_parts(loaded[name])] for name in ("ema_model", "actor")]
    assert parts == [[[2.0, 4.0], [3.0]], [[1.0, 1.0], [1.0]]]
    assert loaded["checkpoint_states"] == {"global_step": 3}


def averaged_model(whole, part):
    """A model of two parameters. This rank has all of the first one, and a part of the second one."""
    parameters = [parameter_of(*whole), parameter_of(part=part)]
    return SimpleNamespace(model="engine", parameters=lambda: parameters)


class Strategy:
    """Writes down what a worker asks of OpenRLHF's strategy."""

    def __init__(self, args, calls):
        self.args, self.calls = args, calls

    def __eq__(self, other):
        return self.args is other.args

    def setup_distributed(self):
        self.calls.append(("setup_distributed",))

    def get_ds_train_config(self):
        return "config for training"

    def get_ds_eval_config(self, offload):
        return f"config, offload {offload}"

    def prepare(self, model):
        self.calls.append(("prepare", getattr(model, "_offload", None), model))
        return (model[0], "optimizer", "scheduler") if isinstance(model, tuple) else model

    def load_ckpt(self, engine, folder):
        self.calls.append(("load_ckpt", engine, folder))
        return folder, {"global_step": 3}

    def print(self, *_):
        """Nothing is compared."""


class Loaded:
    """A model, equal to another one that was built from the same arguments."""

    mean = std = 0.0

    def __init__(self, calls, *args, **kwargs):
        self.calls, self.model, self.given = calls, "engine", (args, kwargs)
        self.parameters = averaged_model([1.0, 1.0], [1.0]).parameters

    def __eq__(self, other):
        return self.given == other.given

    def eval(self):
        self.calls.append(("eval",))

    def gradient_checkpointing_enable(self, **kwargs):
        self.calls.append(("gradient_checkpointing_enable", kwargs))


VARIANTS = (
    "",
    "train.enable_ema",
    "ds.lora.rank=8 ds.lora.alpha=16 ds.lora.dropout=0.1 ds.lora.target_modules=q_proj",
    "actor.gradient_checkpointing_enable",
    "actor.gradient_checkpointing_enable actor.gradient_checkpointing_reentrant",
    "ckpt.load_enable",
    "ds.enable_sleep ref.offload train.enable_ema",
    "critic.save_value_network data.disable_fast_tokenizer reward.normalize_enable",
    "ds.use_liger_kernel ds.packing_samples ds.attn_implementation=flash_attention_2",
    "actor.freeze_visual_encoder ds.experts_implementation=eager ds.load_in_4bit",
    "critic.model_name_or_path=model ckpt.save_hf ckpt.disable_ds",
)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", ["PlainPolicyWorker", "PlainCriticWorker", "ReferenceWorker"])
def test_models_and_trainers_are_built_as_openrlhf_builds_them(monkeypatch, tmp_path, kind, variant):
    """The calls of OpenRLHF's `init_model_from_pretrained` and of ours, with other objects in the place of models."""
    args = parse(*variant.split(), f"ckpt.path={tmp_path}")
    for name in ("_actor", "_critic"):
        (tmp_path / name).mkdir()
    ours = getattr(workers, kind)
    theirs = next(base for base in ours.__mro__ if base.__module__.startswith("openrlhf."))
    more = {"PlainPolicyWorker": (100, ["engine"]), "PlainCriticWorker": (100,), "ReferenceWorker": ()}[kind]
    (calls, attributes), (wanted, as_theirs) = (calls_of(module, args, more, monkeypatch) for module in (ours, theirs))
    for unread in ("max_steps", "vllm_engines"):
        as_theirs.pop(unread, None)
    assert calls == wanted and attributes == as_theirs


def calls_of(kind, args, more, monkeypatch, repairs=None):
    """What a worker calls while it loads, and the attributes that it has then. `repairs` gets names and models."""
    calls, repairs = [], [] if repairs is None else repairs
    strategy = Strategy(args, calls)

    def noted(name, kwargs_of=lambda kwargs: kwargs):
        return lambda *args, **kwargs: calls.append((name, args, kwargs_of(kwargs))) or name

    def without_unused(kwargs):
        return {name: value for name, value in kwargs.items() if name != "eps_clip"}  # OpenRLHF's trainer ignores it

    def tokenizer(pretrain, model, side, strategy, use_fast):
        calls.append(("tokenizer", pretrain, model, side, use_fast))
        return "tokenizer"

    def load(*args, **kwargs):
        calls.append(("model", args, kwargs))
        return Loaded(calls, *args, **kwargs)

    for module, model in ((ppo_actor, "Actor"), (launcher, "Actor"), (workers, "Actor"), (workers, "SlicedActor")):
        monkeypatch.setattr(module, model, load)
    for module in (ppo_critic, launcher, workers):
        monkeypatch.setattr(module, "get_llm_for_sequence_regression", load)
    for module in (ppo_actor, ppo_critic, workers):
        monkeypatch.setattr(module, "get_tokenizer", tokenizer)
    for module, trainer in ((ppo_actor, "ActorPPOTrainer"), (ppo_critic, "CriticPPOTrainer")):
        monkeypatch.setattr(module, trainer, noted("trainer", without_unused))
        monkeypatch.setattr(module, "offload_deepspeed_states", noted("offload"))
    monkeypatch.setattr(kind, "trainer_class", staticmethod(noted("trainer")), raising=False)
    for repair in ("make_savable", "restore_frequencies", "restore_normalisation"):
        monkeypatch.setattr(workers, repair, lambda model, repair=repair: repairs.append((repair, model)))
    monkeypatch.setattr(workers, "without_noise", noted("without_noise"))
    worker = object.__new__(kind)
    worker.init_model_from_pretrained(strategy, "model", *more)
    return calls, {name: value for name, value in vars(worker).items() if name != "strategy"}


@pytest.mark.parametrize("kind", ["PlainPolicyWorker", "PlainCriticWorker"])
@pytest.mark.parametrize(
    ("words", "noiseless"),
    [("algorithm=ba_ppo", True), ("algorithm=ba_ppo adapt.keep_dropout", False), ("algorithm=ppo", False)],
)
def test_only_an_adapted_run_sets_the_noise_of_its_models_to_0(monkeypatch, kind, words, noiseless):
    args = parse("rollout.n_samples_per_prompt=4", *words.split())
    more = (100, None) if kind == "PlainPolicyWorker" else (100,)
    names = [call[0] for call in calls_of(getattr(workers, kind), args, more, monkeypatch)[0]]
    assert names.count("without_noise") == noiseless
    assert not noiseless or names.index("model") < names.index("without_noise") < names.index("prepare")


@pytest.mark.parametrize(("kind", "more", "models", "done"), [
    ("PolicyWorker", (100, None), ("actor", "ema_model"), ("make_savable", "restore_frequencies")),
    ("CriticWorker", (100,), ("critic",), ("restore_normalisation", "restore_frequencies")),
    ("ReferenceWorker", (), ("model",), ("restore_frequencies",)),
    ("RewardWorker", (), ("model",), ("restore_normalisation", "restore_frequencies")),
])  # fmt: skip
def test_models_are_mended_when_they_are_loaded(monkeypatch, kind, more, models, done):
    repairs = []
    _, attributes = calls_of(getattr(workers, kind), parse("train.enable_ema"), more, monkeypatch, repairs)
    wanted = [(repair, id(attributes[name])) for name in models for repair in done]
    assert [(repair, id(model)) for repair, model in repairs] == wanted


def test_the_critics_schedule_spans_its_pretraining(monkeypatch):
    """In each of 3 steps 2 passes over 5 x 4 responses; each has 3 optimizer steps of 8, and there are 2 epochs."""
    words = "algorithm=ba_ppo adapt.value_pretraining=2 critic.freezing_steps=2 rollout.batch_size=5 "
    words += "rollout.n_samples_per_prompt=4 train.batch_size=8 train.max_epochs=2"
    args = parse(*words.split())
    calls, _ = calls_of(workers.PlainCriticWorker, args, (100,), monkeypatch)
    ((_, optimizer),) = [call[-1] for call in calls if call[0] == "prepare"]
    assert optimizer["scheduler_steps"] == 100 + 3 * 2 * 3 * 2


def test_the_critic_makes_its_epochs_for_each_of_the_actors():
    words = "algorithm=ba_ppo adapt.critic_epochs=3 train.max_epochs=2 rollout.n_samples_per_prompt=4"
    strategy = SimpleNamespace(args=parse(*words.split()))
    assert updates.WholeBatchCriticTrainer(strategy, None, None, None).max_epochs == 6


@pytest.mark.parametrize(
    ("words", "faster"),
    [("bapo_grpo", True), ("bapo_grpo run.faster=weights", False), ("ppo run.faster=log_probs", True)],
)
def test_the_class_of_the_actor_follows_the_flag(words, faster):
    args = parse("rollout.n_samples_per_prompt=4", *f"algorithm={words}".split())
    assert workers.actor_class_of(args) is (workers.SlicedActor if faster else workers.Actor)
