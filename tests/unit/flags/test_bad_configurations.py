"""What `check` says to a configuration that cannot work, to one that may be meant, and to one near a limit."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
from torch import zeros
from torch.nn import Parameter
from torch.optim import AdamW
from transformers.trainer import get_scheduler
from transformers.trainer_utils import SchedulerType

from bapo_openrlhf.cli import arguments, main
from bapo_openrlhf.cli.parser import parse_words
from bapo_openrlhf.errors import ALLOWED, ConfigError
from bapo_openrlhf.flags import config, rules
from bapo_openrlhf.flags.cautions import CAUTIONS
from bapo_openrlhf.flags.placement import PLACEMENT
from bapo_openrlhf.flags.ranges import VALUES, check_ranges
from bapo_openrlhf.flags.rule import Flags
from bapo_openrlhf.methods.registry import method_class

pytestmark = pytest.mark.usefixtures("without_models")

ROOT = Path(__file__).resolve().parents[3]
BASE = {
    "algorithm": "bapo_grpo",
    "actor.model_name_or_path": "model",
    "actor.num_gpus_per_node": "2",
    "critic.num_gpus_per_node": "1",
    "ref.num_gpus_per_node": "2",
    "reward.remote_url": "reward.py",
    "data.prompt_dataset": "train.jsonl",
    "data.label_key": "label",
    "data.max_len": "48",
    "rollout.max_new_tokens": "24",
    "rollout.batch_size": "32",
    "rollout.n_samples_per_prompt": "8",
    "train.batch_size": "128",
    "vllm.num_engines": "1",
}  # 256 samples a batch

AGENT = """import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    def __init__(self):
        pass

    async def step(self, states):
        return {"rewards": torch.tensor(1.0), "environment_feedback": "", "done": True, "extra_logs": {}}


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """A folder with a model of 6 heads and 64 positions, data and a reward function, in which the commands run."""
    (tmp_path / "model").mkdir()
    shape = {"model_type": "qwen2", "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64}
    (tmp_path / "model" / "config.json").write_text(json.dumps(shape))
    (tmp_path / "model" / "pytorch_model.bin").touch()
    rows = (f'{{"input": "{number}+1", "label": "{number + 1}"}}\n' for number in range(256))  # 8 steps
    (tmp_path / "train.jsonl").write_text("".join(rows))
    (tmp_path / "more.jsonl").write_text(
        "".join(f'{{"input": "{number}+2", "label": "{number + 2}"}}\n' for number in range(256))
    )
    (tmp_path / "reward.py").write_text("def reward_func(*given):\n    return {'rewards': [1.0]}\n")
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "reward.yaml").write_text("a: 1\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def argv_of(words: str) -> list[str]:
    """BASE with the words, which are `name=value` or `switch`. Several values have commas."""
    flags = dict(BASE)
    for word in words.split():
        name, is_set, value = word.partition("=")
        flags[name] = value if is_set else None
    argv = []
    for name, value in flags.items():
        if value == "" and name == "algorithm":
            continue
        many = name in ("actor.adam.betas", "critic.adam.betas", "actor.eps_clip_low_high", "reward.clip_range",
                        "algo.dynamic_filtering_range", "algo.advantage.is_correction_threshold")  # fmt: skip
        argv += [f"--{name}", *value.split(",")] if many else [f"--{name}" if value is None else f"--{name}={value}"]
    return argv


def check(capsys, words: str, *more: str) -> tuple[int, str, str]:
    """Status, output and errors of `check`."""
    status = main.run(["check", *more, *argv_of(words)])
    return status, *capsys.readouterr()


RULES = [*rules.IMAGES, rules.PACKED, *rules.ALGORITHM, *rules.SIZES, *rules.OPTIONS, *PLACEMENT, *rules.COMBINATIONS,
         *CAUTIONS]  # fmt: skip
ONE_UPDATE = "rollout.batch_size=256 train.batch_size=2048"  # of all rows of the data
REWARD_MODEL = "reward.remote_url= reward.model_name_or_path=model"
# The flags that differ from BASE; the flag, the value and what is allowed, as the message has them.
BAD = [
    # learning rates and optimizers
    ("actor.adam.lr=-1e-6", "actor.adam.lr is -1e-06; it must be in [0, 1)"),
    ("actor.adam.lr=50", "actor.adam.lr is 50.0; it must be in [0, 1)"),
    ("actor.adam.lr=1", "actor.adam.lr is 1.0; it must be in [0, 1)"),
    ("actor.adam.lr=nan", "actor.adam.lr is nan; it must be in [0, 1)"),
    ("critic.adam.lr=-3", "critic.adam.lr is -3.0; it must be in [0, 1)"),
    ("actor.muon.lr=-0.02", "actor.muon.lr is -0.02; it must be in [0, 1)"),
    ("critic.muon.momentum=1.5", "critic.muon.momentum is 1.5; it must be in [0, 1)"),
    ("actor.muon.ns_steps=0", "actor.muon.ns_steps is 0; it must be at least 1"),
    ("actor.adam.betas=2,3", "actor.adam.betas is 2.0 3.0; each must be in [0, 1)"),
    ("critic.adam.betas=0.9,1", "critic.adam.betas is 0.9 1.0; each must be in [0, 1)"),
    ("actor.adam.eps=0", "actor.adam.eps is 0.0; it must be in (0, 1]"),
    ("critic.adam.weight_decay=-0.1", "critic.adam.weight_decay is -0.1; it must be in [0, 1]"),
    ("actor.lr_scheduler=foo", "actor.lr_scheduler is foo; it must be one of linear, cosine, "),
    ("actor.lr_scheduler=greedy", "actor.lr_scheduler is greedy; it must be one of linear, cosine, "),
    ("critic.lr_scheduler=Cosine", "critic.lr_scheduler is Cosine; it must be one of linear, cosine, "),
    ("actor.lr_warmup_ratio=5", "actor.lr_warmup_ratio is 5.0; it must be in [0, 1]"),
    ("critic.lr_warmup_ratio=-0.1", "critic.lr_warmup_ratio is -0.1; it must be in [0, 1]"),
    ("actor.min_lr_ratio=2", "actor.min_lr_ratio is 2.0; it must be in [0, 1]"),
    ("actor.max_norm=-1", "actor.max_norm is -1.0; it must be at least 0"),
    ("critic.max_norm=nan", "critic.max_norm is nan; it must be at least 0"),
    # sampling and lengths
    ("rollout.temperature=0", "rollout.temperature is 0.0; it must be in [0.01, 10], because vLLM"),
    ("rollout.temperature=-1", "rollout.temperature is -1.0; it must be in [0.01, 10]"),
    ("rollout.temperature=0.009", "rollout.temperature is 0.009; it must be in [0.01, 10]"),
    ("rollout.temperature=100", "rollout.temperature is 100.0; it must be in [0.01, 10]"),
    ("rollout.top_p=0", "rollout.top_p is 0.0; it must be in (0, 1]"),
    ("rollout.top_p=7", "rollout.top_p is 7.0; it must be in (0, 1]"),
    ("rollout.max_new_tokens=0", "rollout.max_new_tokens is 0; it must be at least 1"),
    ("rollout.max_new_tokens=100", "rollout.max_new_tokens is 100; it must be below data.max_len 48"),
    ("rollout.max_new_tokens=48", "rollout.max_new_tokens is 48; it must be below data.max_len 48"),
    ("data.max_len=-5", "data.max_len is -5; it must be at least 2"),
    ("eval.temperature=-0.6", "eval.temperature is -0.6; it must be in [0, 10]"),
    ("eval.n_samples_per_prompt=0", "eval.n_samples_per_prompt is 0; it must be at least 1"),
    ("reward.overlong_buffer_len=25", "reward.overlong_buffer_len is 25.0; it must be at most 24"),
    ("reward.overlong_buffer_len=0", "reward.overlong_buffer_len is 0.0; it must be finite and above 0"),
    ("reward.overlong_penalty_factor=-1", "reward.overlong_penalty_factor is -1.0; it must be finite and at least 0"),
    ("reward.stop_properly_penalty_coef=2", "reward.stop_properly_penalty_coef is 2.0; it must be finite and at most"),
    # the loss
    ("actor.eps_clip=-0.2", "actor.eps_clip is -0.2; it must be in (0, 1]"),
    ("actor.eps_clip=5", "actor.eps_clip is 5.0; it must be in (0, 1]"),
    ("actor.eps_clip_low_high=-0.2,0.2", "actor.eps_clip_low_high is -0.2 0.2; each must be finite and above 0"),
    ("actor.eps_clip_low_high=1.5,0.2", "actor.eps_clip_low_high is 1.5 for LOW; it must be in (0, 1]"),
    ("actor.dual_clip=1", "actor.dual_clip is 1.0; it must be above 1"),
    ("actor.entropy_coef=-5", "actor.entropy_coef is -5.0; it must be in [-1, 1]"),
    ("actor.aux_loss_coef=-1", "actor.aux_loss_coef is -1.0; it must be finite and at least 0"),
    ("adapt.skip_zero_advantage actor.aux_loss_coef=0.1", "actor.aux_loss_coef is 0.1, and actor.model_name_or_path"),
    ("critic.value_clip=-0.5", "critic.value_clip is -0.5; it must be above 0"),
    ("algorithm=ba_ppo adapt.critic_baseline=group algo.advantage.gamma=0.9",
     "adapt.critic_baseline is group, and algo.advantage.gamma is 0.9; it must be 1"),
    ("algorithm=ba_ppo adapt.length_adaptive_lambd=0.05 algo.advantage.lambd=0.95",
     "adapt.length_adaptive_lambd is 0.05, and algo.advantage.lambd is 0.95; it must be 1"),
    ("algorithm=ba_ppo adapt.method=ar3po adapt.critic_baseline=group reward.overlong_buffer_len=4",
     "reward.overlong_buffer_len is 4.0; with adapt.method ar3po it must not be set"),
    *((f"adapt.{flag}={value}", f"adapt.{flag} is {value}; it needs a critic and batch adaptation")
      for flag, value in (("length_adaptive_lambd", 0.05), ("critic_groups", "generated"),
                          ("critic_baseline", "batch"))),
    ("adapt.critic_lambd=1.5", "adapt.critic_lambd is 1.5; it must be in [0, 1]"),
    ("adapt.value_pretraining=-1", "adapt.value_pretraining is -1; it must be at least 0"),
    ("critic.freezing_steps=-2", "critic.freezing_steps is -2; it must be at least -1"),
    ("algo.kl.init_coef=-0.1", "algo.kl.init_coef is -0.1; it must be finite and at least 0"),
    ("algo.kl.init_coef=inf", "algo.kl.init_coef is inf; it must be finite and at least 0"),
    ("algo.kl.target=0", "algo.kl.target is 0.0; it must be finite and above 0"),
    ("algo.kl.horizon=0", "algo.kl.horizon is 0; it must be at least 1"),
    ("algo.advantage.gamma=2", "algo.advantage.gamma is 2.0; it must be in [0, 1]"),
    ("algo.advantage.lambd=-1", "algo.advantage.lambd is -1.0; it must be in [0, 1]"),
    ("algo.advantage.is_correction_threshold=-1,2", "is_correction_threshold is -1.0 2.0; each must be at least 0"),
    ("algo.advantage.is_correction_threshold=5,2", "is_correction_threshold is 5.0 2.0; it must be HIGH, or LOW HIGH"),
    ("algo.advantage.is_correction_threshold=1,2,3", "is_correction_threshold is 1.0 2.0 3.0; it must be HIGH, or"),
    ("algo.advantage.is_correction_mode=clip algo.advantage.is_correction_level=seq",
     "algo.advantage.is_correction_mode is clip; it must be mask with is_correction_level seq"),
    ("algo.advantage.is_correction_mode=clip algo.advantage.is_correction_gating=tv",
     "algo.advantage.is_correction_mode is clip; it must be mask with is_correction_level off"),
    ("algo.advantage.is_correction_level=token algo.advantage.is_correction_gating=tv",
     "is_correction_threshold is 0.5 5.0; it must be one HIGH with algo.advantage.is_correction_gating tv"),
    ("reward.clip_range=10,-10", "reward.clip_range is 10.0 -10.0; it must be LOW HIGH with LOW below HIGH"),
    ("reward.clip_range=nan,1", "reward.clip_range is nan 1.0; each must be a number"),
    # advantages of a whole rollout, with an adapted batch
    ("algorithm= adapt.method=bapo algo.advantage.estimator=reinforce",
     "algo.advantage.estimator is reinforce; with adapt.method bapo it must be one of gae, group_norm, dr_grpo, rloo,"),
    ("algorithm= adapt.method=mopps algo.advantage.estimator=flash_reinforce",
     "algo.advantage.estimator is flash_reinforce; with adapt.method mopps it must be one of gae, group_norm, "),
    # sizes and lengths of the run
    ("train.num_episodes=0", "train.num_episodes is 0; it must be at least 1"),
    ("train.max_epochs=0", "train.max_epochs is 0; it must be at least 1"),
    ("train.batch_size=4096", "train.batch_size is 4096; it must be at most 256 = 32 prompts of a batch x"),
    ("train.batch_size=0", "train.batch_size is 0; it must be at least 1"),
    ("train.batch_size=6 train.micro_batch_size=2",
     "train.batch_size is 6; it must be a multiple of 4 = actor ranks 2 x train.micro_batch_size 2\n"),
    ("train.micro_batch_size=-1", "train.micro_batch_size is -1; it must be at least 1"),
    ("train.max_tokens_per_gpu=0", "train.max_tokens_per_gpu is 0; it must be at least 1"),
    ("train.seed=4294967296", "train.seed is 4294967296; it must be in [0, 4294967295]"),
    ("train.ema_beta=1.1", "train.ema_beta is 1.1; it must be in [0, 1]"),
    ("train.async_queue_size=0", "train.async_queue_size is 0; it must be at least 1"),
    ("rollout.batch_size=257", "it must be at most 256, the number of prompts in data.prompt_dataset train.jsonl\n"),
    ("rollout.batch_size=32 data.max_samples=31", "it must be at most 31, the number of prompts in data.prompt_dataset "
     "train.jsonl with data.max_samples 31\n"),
    ("rollout.batch_size=0", "rollout.batch_size is 0; it must be at least 1"),
    ("rollout.micro_batch_size=0", "rollout.micro_batch_size is 0; it must be at least 1"),
    (
        "rollout.micro_batch_size=200",
        "rollout.micro_batch_size is 200; it must be smaller: 256 samples make 1 of this size, and each of the 2 actor "
        "ranks needs one (actor.num_gpus_per_node is 2)",
    ),
    ("rollout.n_samples_per_prompt=0", "rollout.n_samples_per_prompt is 0; it must be at least 1"),
    ("algorithm=ba_ppo rollout.n_samples_per_prompt=1",
     "rollout.n_samples_per_prompt is 1; batch adaptation needs groups of at least 2"),
    ("algorithm=grpo rollout.n_samples_per_prompt=1",
     "rollout.n_samples_per_prompt is 1; it must be at least 2 with algo.advantage.estimator group_norm"),
    ("rollout.max_tokens_per_gpu=0", "rollout.max_tokens_per_gpu is 0; it must be at least 1"),
    ("rollout.vllm_generate_batch_size=64", "rollout.vllm_generate_batch_size is 64; it must be at most rollout.batch"),
    ("rollout.vllm_generate_batch_size=16", "rollout.vllm_generate_batch_size is 16; it must be at least roll"),
    ("rollout.vllm_generate_batch_size=0", "rollout.vllm_generate_batch_size is 0; it must be at least 1"),
    ("data.max_samples=0", "data.max_samples is 0; it must be at least 1"),
    ("data.max_images_per_prompt=-1", "data.max_images_per_prompt is -1; it must be at least 0"),
    ("data.dataloader_num_workers=-1", "data.dataloader_num_workers is -1; it must be at least 0"),
    ("logger.logging_steps=0", "logger.logging_steps is 0; it must be at least 1"),
    ("eval.steps=0", "eval.steps is 0; it must be at least 1, or -1 for never"),
    ("eval.steps=5", "eval.steps is 5; it must be -1 without eval.dataset"),
    ("ckpt.save_steps=-7", "ckpt.save_steps is -7; it must be at least 1, or -1 for never"),
    ("ckpt.save_steps=0", "ckpt.save_steps is 0; it must be at least 1, or -1 for never"),
    ("ckpt.max_num=0", "ckpt.max_num is 0; it must be at least 1"),
    ("ckpt.max_mem=100", "ckpt.max_mem is 100.0; it must be left out: OpenRLHF deletes checkpoints until the others"),
    ("ckpt.max_mem=-1", "ckpt.max_mem is -1.0; it must be above 0"),
    ("run.name=", "run.name is ''; it must be the name of one folder"),
    ("run.name=../../x", "run.name is '../../x'; it must be the name of one folder"),
    ("run.name=..", "run.name is '..'; it must be the name of one folder"),
    (f"run.name={'n' * 256}", "run.name is nnnnnnnnnnnnnnnnnnnn...; it has 256 bytes, and must have at most 255, beca"),
    (f"run.name={'ä' * 128}", "run.name is ääääääääääääääääääää...; it has 256 bytes, and must have at most 255"),
    ("run.overwrite ckpt.load_enable", "run.overwrite is True; it must be False with ckpt.load_enable, because one"),
    ("run.overwrite=true ckpt.load_enable=yes", "run.overwrite is True; it must be False with ckpt.load_enable"),
    ("run.gradient_probe=-1", "run.gradient_probe is -1; it must be at least 0"),
    ("run.answer_chars=-1", "run.answer_chars is -1; it must be at least 0"),
    ("run.grace_seconds=-1", "run.grace_seconds is -1.0; it must be finite and at least 0"),
    ("run.stall_timeout=0", "run.stall_timeout is 0.0; it must be finite and above 0"),
    ("algorithm=grpo run.stall_timeout=9 train.async_enable",
     "run.stall_timeout is 9.0; with train.async_enable it needs batch adaptation"),
    # GPUs and memory
    ("vllm.num_engines=0", "vllm.num_engines is 0; it must be at least 1"),
    ("vllm.num_engines=-2", "vllm.num_engines is -2; it must be at least 0"),
    ("vllm.tensor_parallel_size=0", "vllm.tensor_parallel_size is 0; it must be at least 1"),
    ("vllm.tensor_parallel_size=3", "vllm.tensor_parallel_size is 3; it must divide 2, the key-value heads of actor.m"),
    ("vllm.tensor_parallel_size=4", "vllm.tensor_parallel_size is 4; it must divide 6, the attention heads of actor."),
    ("vllm.gpu_memory_utilization=3", "vllm.gpu_memory_utilization is 3.0; it must be in (0, 1]"),
    ("vllm.gpu_memory_utilization=0", "vllm.gpu_memory_utilization is 0.0; it must be in (0, 1]"),
    ("vllm.sync_backend=ncll", "vllm.sync_backend is ncll; it must be one of nccl, gloo, "),
    ("actor.num_gpus_per_node=0", "actor.num_gpus_per_node is 0; it must be at least 1"),
    ("actor.num_nodes=-1", "actor.num_nodes is -1; it must be at least 1"),
    ("critic.num_gpus_per_node=0", "critic.num_gpus_per_node is 0; it must be at least 1"),
    ("reward.num_nodes=0", "reward.num_nodes is 0; it must be at least 1"),
    ("ref.num_gpus_per_node=-8", "ref.num_gpus_per_node is -8; it must be at least 1"),
    ("train.colocate_all vllm.num_engines=3", "vllm.num_engines is 3; with train.colocate_all, vllm.num_engines x"),
    ("train.colocate_all actor.num_gpus_per_node=4", "actor.num_gpus_per_node is 4, and ref.num_gpus_per_node is 2"),
    ("train.colocate_actor_ref ref.num_gpus_per_node=1",
     "ref.num_gpus_per_node is 1; they must be the same with train.colocate_actor_ref"),
    ("algorithm=ba_ppo train.colocate_all vllm.num_engines=2 critic.num_gpus_per_node=4",
     "critic.num_gpus_per_node is 4; with train.colocate_all it must be at most the actor's 2"),
    ("algorithm=ba_ppo train.colocate_critic_reward",
     "critic.num_gpus_per_node is 1, and reward.num_gpus_per_node is 8; they must be the same with train.colocate_cri"),
    ("ds.ring_attn_size=4", "actor.num_gpus_per_node is 2; its GPUs must be a multiple of 4 = ds.ring_attn_size 4"),
    ("ds.ring_attn_size=2 ref.num_gpus_per_node=1", "ref.num_gpus_per_node is 1; its GPUs must be a multiple of 2"),
    ("ds.ring_attn_size=2 ds.ring_attn_head_stride=4", "ds.ring_attn_head_stride is 4; it must divide 6"),
    ("ds.ring_attn_size=0", "ds.ring_attn_size is 0; it must be at least 1"),
    ("ds.ring_attn_head_stride=0", "ds.ring_attn_head_stride is 0; it must be at least 1"),
    ("ds.tensor_parallel_size=0", "ds.tensor_parallel_size is 0; it must be at least 1"),
    ("ds.packing_samples vllm.num_engines=0", "ds.packing_samples is True; it packs samples and so needs engines"),
    ("ds.ring_attn_size=2 vllm.num_engines=0", "ds.ring_attn_size is 2; it packs samples and so needs engines"),
    ("ds.zero_stage=4", "ds.zero_stage is 4; it must be in [0, 3]"),
    ("ds.zero_stage=0 ds.enable_sleep", "ds.zero_stage is 0; it must be in [1, 3] with ds.enable_sleep"),
    ("ds.zero_stage=0 ds.adam_offload", "ds.zero_stage is 0; it must be in [1, 3] with ds.adam_offload, because DeepS"),
    ("ds.zero_stage=0 ds.grad_accum_dtype=fp32", "ds.zero_stage is 0; it must be in [1, 3] with ds.grad_accum_dtype "),
    ("ds.zero_stage=1 ds.grad_accum_dtype=fp32 ds.enable_sleep",
     "ds.zero_stage is 1; it must be 2 or 3 with ds.grad_accum_dtype fp32 and ds.enable_sleep, because DeepSpeed tak"),
    ("actor.optim=muon ds.zero_stage=3 ds.enable_sleep",
     "actor.optim is muon; it must be adam with ds.enable_sleep and ds.zero_stage 3, because DeepSpeed then moves"),
    ("algorithm=ba_ppo critic.optim=muon ds.zero_stage=3 ds.enable_sleep",
     "critic.optim is muon; it must be adam with ds.enable_sleep and ds.zero_stage 3, because DeepSpeed then moves"),
    ("ds.zpg=0", "ds.zpg is 0; it must be at least 1"),
    ("ds.param_dtype=fp16", "ds.param_dtype is fp16; it must be bf16"),
    ("ds.grad_accum_dtype=double", "ds.grad_accum_dtype is double; it must be one of bf16, "),
    ("ds.lora.rank=-8", "ds.lora.rank is -8; it must be at least 0"),
    ("ds.lora.alpha=0", "ds.lora.alpha is 0; it must be at least 1"),
    ("ds.lora.dropout=1", "ds.lora.dropout is 1.0; it must be in [0, 1)"),
    ("ds.use_liger_kernel data.max_images_per_prompt=1", "ds.use_liger_kernel is True; it must be False with data.max"),
    ("local_rank=-2", "local_rank is -2; it must be at least -1"),
    # OpenRLHF's modes
    ("train.partial_rollout_enable", "train.partial_rollout_enable is True; it needs train.async_enable"),
    ("algorithm=grpo train.async_enable train.colocate_all vllm.enable_sleep",
     "vllm.enable_sleep is True; it must be False with train.async_enable"),
    ("algorithm=grpo algo.dynamic_filtering_enable algo.dynamic_filtering_range=1,0",
     "algo.dynamic_filtering_range is 1.0 0.0; it must be LOW HIGH with LOW below HIGH"),
    ("algorithm=ppo rollout.n_samples_per_prompt=1 algo.dynamic_filtering_enable train.batch_size=32",
     "rollout.n_samples_per_prompt is 1; it must be at least 2 with algo.dynamic_filtering_enable"),
    # files and folders
    ("actor.model_name_or_path=./none", "actor.model_name_or_path is ./none; there is no such model folder"),
    ("algorithm=ba_ppo critic.model_name_or_path=/none/model",
     "critic.model_name_or_path is /none/model; there is no such model folder"),
    ("data.prompt_dataset=none.jsonl", "data.prompt_dataset is none.jsonl; there is no such file"),
    ("data.prompt_dataset=./none", "data.prompt_dataset is ./none; there is no such file or folder"),
    ("data.prompt_dataset=model/none/x", "data.prompt_dataset is model/none/x; there is no such file or folder"),
    ("eval.dataset=none.jsonl eval.steps=1", "eval.dataset is none.jsonl; there is no such file"),
    ("data.prompt_probs=0.5,0.5", "data.prompt_probs is 0.5,0.5; it must be numbers above 0 with commas, one for each"),
    ("data.prompt_probs=0.5", "data.prompt_probs is 0.5; it must be numbers above 0 with commas"),
    ("data.prompt_probs=x", "data.prompt_probs is x; it must be numbers above 0 with commas"),
    ("reward.remote_url=reward.yaml", "reward.remote_url is reward.yaml; it must be a .py file with reward_func, or"),
    ("reward.remote_url=localhost:5000", "reward.remote_url is localhost:5000; it must be a .py file with reward_func"),
    ("reward.remote_url=a,b.py", "or addresses that begin with http:// or https://; there is a comma between two addr"),
    ("reward.remote_url=none.py", "reward.remote_url is none.py; there is no such file"),
    ("train.agent_func_path=none.py", "train.agent_func_path is none.py; it must be a .py file that is there"),
    ("train.agent_func_path=reward.yaml", "train.agent_func_path is reward.yaml; it must be a .py file that is there"),
    # where the models are
    ("algorithm=ba_ppo ds.ring_attn_size=2", "critic.num_gpus_per_node is 1; its GPUs must be a multiple of 2 = ds.ri"),
    ("ds.ring_attn_size=2 ref.num_gpus_per_node=3", "ref.num_gpus_per_node is 3; its GPUs must be a multiple of 2 = d"),
    (f"algorithm=grpo {REWARD_MODEL} ds.ring_attn_size=2 reward.num_gpus_per_node=3",
     "reward.num_gpus_per_node is 3; its GPUs must be a multiple of 2 = ds.ring_attn_size 2 x ds.tensor_parallel_size"),
    ("train.colocate_all ref.num_gpus_per_node=4", "ref.num_gpus_per_node is 4; with train.colocate_all it must be at"),
    (f"algorithm=grpo {REWARD_MODEL} train.colocate_all",
     "reward.num_gpus_per_node is 8; with train.colocate_all it must be at most the actor's 2"),
    # packed samples, micro-batches, adapters, the probe
    ("ds.attn_implementation=sdpa ds.packing_samples", "ds.attn_implementation is sdpa, and ds.packing_samples packs "),
    ("adapt.micro_batch_tokens=47", "adapt.micro_batch_tokens is 47; it must be at least data.max_len 48, the longest"),
    ("algorithm=grpo adapt.micro_batch_tokens=64", "adapt.micro_batch_tokens is 64; it needs batch adaptation, and ad"),
    ("adapt.micro_batch_tokens=64 train.dynamic_batch_enable", "adapt.micro_batch_tokens is 64, and train.dynamic_bat"),
    ("ds.lora.rank=8 train.enable_ema", "ds.lora.rank is 8; it must be 0 with train.enable_ema: "),
    ("algorithm=grpo ds.lora.rank=8", "ds.lora.rank is 8; it must be 0 without batch adaptation: "),
    ("ds.load_in_4bit", "ds.load_in_4bit is True; it must be False, because the rollout engines take no weights of 4"),
    ("ds.lora.rank=8 vllm.sync_with_ray", "ds.lora.rank is 8; it must be 0 with vllm.sync_with_ray: "),
    ("ds.lora.rank=8 data.max_images_per_prompt=1", "ds.lora.rank is 8; it must be 0 with data.max_images_per_prompt"),
    ("algorithm=grpo run.gradient_probe=4", "run.gradient_probe is 4, and adapt.method is none; it must be a method "),
    ("run.gradient_probe=4", "run.gradient_probe is 4, and actor.num_gpus_per_node is 2; it must be 1 then"),
    ("actor.num_gpus_per_node=1 run.gradient_probe=4 ds.zero_stage=3", "and ds.zero_stage is 3; it must be below 3"),
    ("actor.num_gpus_per_node=1 run.gradient_probe=4 train.async_enable", "and train.async_enable is True; it must be"),
    ("actor.num_gpus_per_node=1 run.gradient_probe=4 data.max_images_per_prompt=2",
     "run.gradient_probe is 4, and data.max_images_per_prompt is 2; it must be 0 then"),
    # with batch adaptation, or with a method
    ("ds.use_universal_ckpt ds.zero_stage=0", "ds.zero_stage is 0; with ds.use_universal_ckpt it must be in [1, 3], "),
    ("ds.use_universal_ckpt actor.optim=muon", "actor.optim is muon; with ds.use_universal_ckpt it must be adam, beca"),
    ("algorithm=ba_ppo ds.use_universal_ckpt critic.optim=muon", "critic.optim is muon; with ds.use_universal_ckpt it"),
    ("ds.use_universal_ckpt ds.tensor_parallel_size=2", "ds.tensor_parallel_size is 2; with ds.use_universal_ckpt it "),
    ("ds.use_universal_ckpt train.enable_ema", "train.enable_ema is True; with ds.use_universal_ckpt it must be False"),
    ("algo.dynamic_filtering_enable train.async_enable",
     "algo.dynamic_filtering_enable is True; it must be False with adapt.method bapo and train.async_enable, because"),
    ("algo.dynamic_filtering_enable adapt.reward_range=measured",
     "adapt.reward_range is measured; it must be LOW HIGH with algo.dynamic_filtering_enable, because"),
    ("algo.dynamic_filtering_enable adapt.method=arpo",
     "algo.dynamic_filtering_enable is True; it must be False with adapt.method arpo, because a step counts"),
    ("algo.dynamic_filtering_enable adapt.filter=none", "adapt.filter is none; it must be range with algo.dynamic_fil"),
    ("train.partial_rollout_enable train.async_enable", "train.partial_rollout_enable is True; it must be False wi"),
    ("algorithm=grpo adapt.partial_rollout_tokens=8", "adapt.partial_rollout_tokens is 8, and adapt.method is none; t"),
    ("adapt.partial_rollout_tokens=0", "adapt.partial_rollout_tokens is 0; it must be at least 1"),
    ("adapt.partial_rollout_tokens=8 reward.remote_url= train.agent_func_path=agent.py",
     "adapt.partial_rollout_tokens is 8, and train.agent_func_path is agent.py; they cannot be combined, because"),
    ("adapt.partial_rollout_tokens=8 data.max_images_per_prompt=1",
     "adapt.partial_rollout_tokens is 8, and data.max_images_per_prompt is 1; they cannot be combined, because"),
    ("adapt.partial_rollout_tokens=8 algo.dynamic_filtering_enable",
     "adapt.partial_rollout_tokens is 8, and algo.dynamic_filtering_enable is True; they cannot be combined, because"),
    ("adapt.partial_rollout_tokens=8 adapt.reward_range=measured",
     "adapt.partial_rollout_tokens is 8, and adapt.reward_range is ['measured']; they cannot be combined, because"),
    (f"{REWARD_MODEL} adapt.partial_rollout_tokens=8", "adapt.partial_rollout_tokens is 8, and adapt.reward_range is"),
    ("adapt.partial_rollout_tokens=8 run.faster=weights",
     "adapt.partial_rollout_tokens is 8, and run.faster is ['weights']; they cannot be combined, because"),
    ("adapt.partial_rollout_tokens=8 adapt.method=mopps",
     "adapt.partial_rollout_tokens is 8, and adapt.method is mopps; they cannot be combined, because"),
    ("adapt.max_staleness=1", "adapt.max_staleness is 1; it needs train.async_enable"),
    ("verifier.send_responses", "verifier.send_responses is True; it needs the address of a reward server in reward.r"),
    ("reward.model_name_or_path=model", "reward.model_name_or_path is model, and reward.remote_url is reward.py; onl"),
    ("reward.remote_url= train.agent_func_path=agent.py reward.model_name_or_path=model",
     "reward.model_name_or_path is model, and train.agent_func_path is agent.py; only one of them can give"),
    (f"{REWARD_MODEL},model", "reward.model_name_or_path is model,model; it must be one model"),
    (f"{REWARD_MODEL},model algorithm=grpo", "reward.model_name_or_path is model,model; it must be one model"),
    (f"{REWARD_MODEL} data.max_images_per_prompt=1",
     "reward.model_name_or_path is model, and data.max_images_per_prompt is 1; it must be 0 then"),
    (f"{REWARD_MODEL} adapt.method=ar3po", "reward.model_name_or_path is model; it must not be set with adapt.metho"),
    ("adapt.method=ar3po adapt.reward_range=measured", "adapt.reward_range is measured; it must be LOW HIGH with ada"),
    ("adapt.reward_range=measure", "adapt.reward_range is ['measure']; it must be two numbers LOW HIGH, LOW below"),
    ("adapt.returns=vtrace", "adapt.returns vtrace corrects a critic's values; algo.advantage.estimator group_norm ha"),
    ("adapt.ratio=decoupled actor.policy_loss_type=gspo", "actor.policy_loss_type gspo cannot be combined with adapt."),
    ("adapt.max_second_moment=0.04 adapt.ratio=decoupled", "adapt.max_second_moment is 0.04; it needs adapt.ratio beh"),
    ("adapt.reuse_gate=0.5", "train.max_epochs is 1; with adapt.reuse_gate 0.5 it must be at least 2"),
    ("adapt.reuse_gate=0.5 train.max_epochs=4 ds.lora.rank=8", "ds.lora.rank is 8; with adapt.reuse_gate 0.5 it must"),
    ("adapt.reuse_gate=0.5 train.max_epochs=4 actor.optim=muon", "actor.optim is muon; with adapt.reuse_gate 0.5"),
    ("adapt.reuse_gate=0.5 train.max_epochs=4 ds.tensor_parallel_size=2 actor.num_gpus_per_node=2",
     "ds.tensor_parallel_size is 2; with adapt.reuse_gate 0.5 it must be 1"),
    ("adapt.veto_ratio=1e-4 adapt.ratio=decoupled", "adapt.veto_ratio is 0.0001; it needs adapt.ratio behaviour and"),
    ("adapt.max_second_moment=0.04 actor.policy_loss_type=gspo", "adapt.max_second_moment is 0.04; it needs adapt.ra"),
    ("ckpt.save_steps=1 ckpt.max_num=1", "ckpt.max_num is 1; it must be at least 2: OpenRLHF deletes the oldest"),
    ("algorithm=ba_ppo critic.num_gpus_per_node=3", "train.batch_size is 128; it must be a multiple of 3 = critic ran"),
    ("adapt.method=mopps train.async_enable", "train.async_enable is True; it must be False with adapt.method mopps, "),
    ("adapt.method=ar3po reward.overlong_buffer_len=4", "reward.overlong_buffer_len is 4.0; with adapt.method ar3po i"),
    ("adapt.method=ar3po reward.stop_properly_penalty_coef=0.5",
     "reward.stop_properly_penalty_coef is 0.5; with adapt.method ar3po it must not be set, because "),
    *((f"adapt.skip_zero_advantage {more}algo.advantage.estimator={name}",
       f"algo.advantage.estimator is {name}; with adapt.skip_zero_advantage True it must be one of group_norm, dr_")
      for name, more in (("gae", "algorithm=ba_ppo "), ("reinforce_baseline", ""))),
    ("adapt.skip_zero_advantage adapt.scale_learning_rate", "adapt.scale_learning_rate is True; it must be False with "
     "adapt.skip_zero_advantage"),
    # worked solutions
    ("adapt.method=luffy", "adapt.method is luffy; it needs data.solution_key, the column of the data with worked sol"),
    ("adapt.method=relift data.solution_key=input algo.advantage.estimator=reinforce_baseline",
     "algo.advantage.estimator is reinforce_baseline; with adapt.method relift, which trains on worked solutions, it "),
    ("algorithm=ba_ppo adapt.method=luffy data.solution_key=input", "algo.advantage.estimator is gae; with adapt.meth"),
    ("adapt.method=luffy data.solution_key=input data.max_images_per_prompt=1",
     "data.max_images_per_prompt is 1; with adapt.method luffy, which trains on worked solutions, it must be 0, "),
    ("adapt.method=relift data.solution_key=input train.agent_func_path=agent.py reward.remote_url=",
     "train.agent_func_path is agent.py; with adapt.method relift, which trains on worked solutions, it must not be s"),
    ("adapt.method=bapo_demonstrations data.solution_key=input adapt.scale_learning_rate",
     "adapt.scale_learning_rate is True; with adapt.method bapo_demonstrations, which trains on worked solutions, it "),
    ("adapt.method=bapo_demonstrations data.solution_key=input adapt.reward_range=measured",
     "adapt.reward_range is measured; with adapt.method bapo_demonstrations, which trains on worked solutions, it mu"),
    ("adapt.method=bapo_demonstrations data.solution_key=input reward.overlong_buffer_len=4",
     "reward.overlong_buffer_len is 4.0; with adapt.method bapo_demonstrations it must not be set, because "),
    ("adapt.method=luffy data.solution_key=input train.async_enable", "train.async_enable is True; it must be False w"),
    ("adapt.method=prefix_sampling reward.remote_url= train.agent_func_path=agent.py",
     "train.agent_func_path is agent.py; with adapt.method prefix_sampling, which generates from prefixes of stored"),
    ("adapt.method=prefix_sampling data.max_images_per_prompt=1",
     "data.max_images_per_prompt is 1; with adapt.method prefix_sampling, which generates from prefixes of stored "),
    ("adapt.method=prefix_sampling run.faster=none", "run.faster is none; with adapt.method prefix_sampling, which ge"),
    ("adapt.options=prefix_share=1/2 run.faster=none", "run.faster is none; with adapt.method bapo, which generates f"),
    ("adapt.method=prefix_sampling reward.overlong_buffer_len=4", "reward.overlong_buffer_len is 4.0; with adapt.method"
     " prefix_sampling, which generates from prefixes of stored responses, it must not be set"),
    ("adapt.options=prefix_share=1", "ValueError: prefix_share is 1; it must be in [0, 1)"),
    ("adapt.method=luffy data.solution_key=worked", "row 1: no column 'worked' (data.solution_key); it has input"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "text"), BAD, ids=[words for words, _ in BAD])
def test_is_refused_in_one_line_that_names_flag_value_and_what_is_allowed(capsys, words, text):
    status, out, err = check(capsys, words)
    assert (status, err.count("\n")) == (2, 1) and err.startswith("error: ")
    assert text in err, err
    assert "configuration is valid" not in out


def test_there_are_at_least_a_hundred_and_none_is_twice():
    assert len({words for words, _ in BAD}) == len(BAD) >= 100


@pytest.mark.parametrize("prompts", ["-1", "0"])
def test_the_number_of_prompts_is_looked_at_even_if_the_data_is_here(capsys, prompts):
    status, _, err = check(capsys, "", f"--prompts={prompts}")
    assert (status, err) == (2, f"error: prompts is {prompts}; it must be at least 1\n")


def test_a_reward_model_that_is_not_there(capsys):
    words = "algorithm=grpo reward.remote_url= reward.model_name_or_path=./none"
    assert "reward.model_name_or_path is ./none; there is no such model folder" in check(capsys, words)[2]


@pytest.mark.parametrize("flag", ["eval.dataset", "algo.dynamic_filtering_enable"])
def test_a_reward_model_comes_too_late(capsys, flag):
    value = "train.jsonl" if flag == "eval.dataset" else "True"
    words = f"algorithm=grpo reward.remote_url= reward.model_name_or_path=model {flag}"
    words += "=train.jsonl" if flag == "eval.dataset" else ""
    assert f"{flag} is {value}; it needs reward.remote_url or train.agent_func_path" in check(capsys, words)[2]


@pytest.mark.parametrize("algorithm", ["bapo_grpo", "ba_ppo"])
def test_a_reward_model_with_batch_adaptation(capsys, algorithm):
    """Also with an evaluation. The critic begins as the reward model, as in OpenRLHF."""
    words = f"algorithm={algorithm} {REWARD_MODEL} reward.num_gpus_per_node=1 eval.dataset=more.jsonl eval.steps=4"
    status, out, err = check(capsys, words)
    assert (status, err) == (0, "") and "measured in the first step" in out
    args = arguments.parse(argv_of(words))
    assert (args.eval.dataset, args.adapt.reward_range) == ("more.jsonl", ["measured"])
    assert args.critic.model_name_or_path == (None if algorithm == "bapo_grpo" else "model")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("actor:\n  max_norm: 2\nrun: {name: a}\nactor:\n  max_norm: 1\n", "line 4: actor is there already, in line 1"),
        ("train:\n  seed: 1\n  seed: 2\n", "line 3: seed is there already, in line 2"),
        ("actor.adam.lr: 1.0e-6\nactor: {adam: {lr: 1.0e-5}}\n", "actor.adam.lr is set twice, once nested and once"),
    ],
)  # fmt: skip
def test_a_key_twice_in_one_file(capsys, folder, text, error):
    (folder / "run.yaml").write_text(text)
    status, _, err = check(capsys, "", "--config", "run.yaml")
    assert status == 2 and err.count("\n") == 1 and "config run.yaml" in err and error in err


def test_a_merged_key_may_be_overruled_in_one_file(capsys, folder):
    (folder / "run.yaml").write_text("actor: &same\n  adam: {lr: 1.0e-6}\ncritic:\n  <<: *same\n  adam: {lr: 1.0e-5}\n")
    assert check(capsys, "", "--config", "run.yaml")[0] == 0


# Flags that differ from BASE, each near a limit, and good.
GOOD = [
    "rollout.temperature=0.01", "rollout.temperature=2", "rollout.top_p=1", "rollout.max_new_tokens=47",
    "rollout.max_new_tokens=1", "data.max_len=64", "train.batch_size=256", "train.batch_size=2",
    "train.batch_size=512 adapt.batch_size=64", "adapt.reevaluate_every=5 adapt.max_reevaluated_prompts=32",
    "adapt.reevaluate_every=3",
    "adapt.method=exgrpo adapt.reevaluate_every=1",  # it has a share of its own
    "actor.adam.lr=0.01", "actor.adam.eps=1", "critic.adam.lr=1e-12", "actor.adam.betas=0,0.999", "actor.eps_clip=1",
    "actor.eps_clip_low_high=0.2,5", "actor.eps_clip=3e-4", "actor.dual_clip=3", "actor.entropy_coef=0",
    "actor.entropy_coef=1", "critic.value_clip=inf", "actor.max_norm=inf", "actor.lr_warmup_ratio=0",
    "actor.lr_warmup_ratio=1", "actor.min_lr_ratio=0", "actor.lr_scheduler=constant",
    "algo.kl.init_coef=0", "algo.advantage.gamma=0", "algo.advantage.lambd=1",
    "algo.advantage.is_correction_level=seq algo.advantage.is_correction_threshold=2",
    "algo.advantage.is_correction_level=seq algo.advantage.is_correction_gating=tv "
    "algo.advantage.is_correction_threshold=0.1",
    "reward.overlong_buffer_len=24", "reward.stop_properly_penalty_coef=-0.5", "reward.stop_properly_penalty_coef=1",
    "reward.clip_range=0,1", "critic.freezing_steps=3",  # this project clears the buffer
    "eval.dataset=more.jsonl eval.steps=1 eval.temperature=0 eval.n_samples_per_prompt=1",
    "ckpt.save_steps=1", "ckpt.save_steps=-1",
    "train.seed=0", "train.seed=4294967295", "vllm.gpu_memory_utilization=1", "vllm.tensor_parallel_size=6",
    "vllm.num_engines=1 ds.zero_stage=0", "ds.zero_stage=1 ds.enable_sleep", "run.name=a.b-c_1",
    "ds.zero_stage=0 ds.grad_accum_dtype=bf16", "ds.zero_stage=2 ds.grad_accum_dtype=fp32 ds.enable_sleep",
    "ds.zero_stage=1 ds.grad_accum_dtype=fp32 ds.enable_sleep ds.adam_offload",
    "ds.zero_stage=1 ds.grad_accum_dtype=fp32", "actor.optim=muon ds.zero_stage=2 ds.enable_sleep",
    "critic.optim=muon ds.zero_stage=3 ds.enable_sleep",  # there is no critic
    "train.colocate_all vllm.num_engines=2", "train.colocate_all vllm.tensor_parallel_size=2",
    "train.colocate_all vllm.num_engines=2 ref.num_gpus_per_node=1 adapt.kl_target=behaviour",
    "train.colocate_all vllm.num_engines=2 ref.num_gpus_per_node=1 algo.kl.init_coef=0",
    "train.colocate_critic_reward",  # there is no critic
    "algorithm=ba_ppo train.colocate_all vllm.num_engines=2", "ds.ring_attn_size=2 ds.ring_attn_head_stride=3",
    "algorithm=grpo train.async_enable rollout.vllm_generate_batch_size=64", "data.prompt_probs=1",
    "data.prompt_dataset=train.jsonl,more.jsonl data.prompt_probs=0.3,0.7",
    f"run.name={'n' * 255}", "run.overwrite", "ckpt.load_enable", "run.overwrite=false ckpt.load_enable=true",
    "algorithm=grpo algo.advantage.estimator=rloo", "algorithm= algo.advantage.estimator=reinforce",
    "adapt.filter=gaussian adapt.gaussian_mean=0.4 adapt.gaussian_std=0.3",
    "adapt.reuse_gate=0 train.max_epochs=2", "adapt.filter=uniform", "adapt.filter=top_p adapt.top_p_share=1",
    "adapt.max_shift_replayed=1",
    "adapt.max_reevaluated_prompts=8",
    "algo.kl.target=6 algo.kl.init_coef=0.01",
    "adapt.kl_target=behaviour", "adapt.rollout_delay=7 adapt.reevaluate_every=7", "adapt.rollout_delay=1",
    "adapt.ratio=decoupled adapt.rollout_delay=1", "adapt.ratio=decoupled adapt.replay_steps=0",
    "train.async_enable train.async_queue_size=6", "train.async_enable adapt.max_staleness=1",
    "train.async_enable adapt.ratio=decoupled adapt.rollout_delay=1 adapt.replay_steps=0",
    "train.batch_size=128 adapt.batch_size=16", "algorithm=ppo critic.freezing_steps=-1",
    "algorithm=ba_ppo critic.freezing_steps=6", "data.apply_chat_template",
    "adapt.method=mopps adapt.max_shift_fresh=1", "vllm.enable_sleep=false", "train.colocate_all=off",
    "train.agent_func_path=agent.py verifier.timeout=60", "eval.dataset=more.jsonl eval.steps=8", "ckpt.save_steps=8",
    "adapt.micro_batch_tokens=48", "critic.num_gpus_per_node=3",  # there is no critic
    "algorithm=ppo rollout.n_samples_per_prompt=1 train.batch_size=32", "algorithm=ba_ppo adapt.returns=vtrace",
    "actor.policy_loss_type=gspo",
]  # fmt: skip


@pytest.mark.parametrize("words", GOOD)
def test_near_a_limit_is_good_and_needs_no_warning(capsys, words):
    status, out, err = check(capsys, words)
    assert (status, err) == (0, "") and out.endswith("configuration is valid\n")


# What may be meant. None of these warns without the flags of its row.
MEANT = [
    ("reward.remote_url=http://localhost:9", "reward.remote_url is http://localhost:9; it does not answer now ("),
    ("data.prompt_dataset=org/data", "data.prompt_dataset is org/data; it is not on this machine and nothing is downl"),
    ("actor.model_name_or_path=org/model", "actor.model_name_or_path is org/model; it is not a folder of this machine"),
    ("actor.adam.lr=0", "actor.adam.lr is 0: the actor does not learn"),
    ("actor.adam.lr=0.5", "actor.adam.lr is 0.5, which is very high"),
    ("algorithm=ba_ppo critic.adam.lr=0", "critic.adam.lr is 0: the critic does not learn"),
    ("algorithm=ba_ppo critic.adam.lr=0.02", "critic.adam.lr is 0.02, which is very high"),
    ("algorithm=ba_ppo critic.max_norm=0", "critic.max_norm is 0: gradients are not clipped"),
    ("actor.max_norm=0", "actor.max_norm is 0: gradients are not clipped"),
    (r"data.input_template={}\n", r"data.input_template is {}\n: it has a backslash and an n where a new line may be "
     r"meant; write $'...\n...' in bash, and double quotes in YAML"),
    ("adapt.skip_zero_advantage algo.kl.init_coef=0.01", "algo.kl.init_coef is 0.01, and adapt.skip_zero_advantage is"),
    *((f"adapt.skip_zero_advantage algo.kl.init_coef=0 {flag}={value}", f"{flag} is {value}, and adapt.skip_zero_adv")
      for flag, value in (("actor.entropy_coef", "0.001"), ("reward.overlong_buffer_len", "4.0"),
                          ("reward.stop_properly_penalty_coef", "0.0"))),
    ("algorithm=grpo adapt.skip_zero_advantage", "adapt.skip_zero_advantage is True: no effect, because batches are "),
    ("ckpt.best_metric_key=x", "ckpt.best_metric_key is x: no effect, because eval.dataset is not set"),
    ("data.solution_key=input", "data.solution_key is input: no effect, because adapt.method bapo does not train"),
    ("algorithm=grpo data.solution_key=input", "data.solution_key is input: no effect, because adapt.method none d"),
    ("rollout.temperature=3", "rollout.temperature is 3: responses are nearly random"),
    ("actor.entropy_coef=-0.01", "actor.entropy_coef is -0.01: a negative coefficient makes the policy less random"),
    ("rollout.top_p=0.9", "rollout.top_p is 0.9: "),
    ("algorithm=grpo rollout.top_p=0.9 algo.advantage.is_correction_level=token", "pi/alpha starts between 0.9 and 1"),
    ("algorithm=ppo critic.freezing_steps=3", "critic.freezing_steps is 3: without batch adaptation, OpenRLHF keeps "),
    ("algorithm=ppo critic.freezing_steps=0", "the actor's first update is on 2 batches"),
    (
        "adapt.reevaluate_every=5 adapt.max_reevaluated_prompts=34",
        "adapt.max_reevaluated_prompts is 34 and adapt.reevaluate_every is 5: X2 may generate 21% as many responses",
    ),
    ("adapt.reevaluate_every=2", "adapt.max_reevaluated_prompts is 16 and adapt.reevaluate_every is 2: X2 may gen"),
    # what has no effect
    (
        "algorithm=grpo adapt.c1=1/8",
        "adapt.c1 is 1/8: no effect, because batches are not adapted: adapt.method is none (a",
    ),
    (
        "algorithm=ppo adapt.replay_steps=3 adapt.filter=none",
        "adapt.filter is none, adapt.replay_steps is 3: no effect",
    ),
    ("algorithm= adapt.buffer_size=3", "adapt.buffer_size is 3: no effect, because batches are not adapted: "),
    ("adapt.method=mopps adapt.c1=1/4", "adapt.c1 is 1/4: no effect, because adapt.method mopps does not read this"),
    (
        "adapt.method=exgrpo adapt.reevaluate_every=1 adapt.max_reevaluated_prompts=32",
        "adapt.max_reevaluated_prompts is 32: no effect, because adapt.method exgrpo does not read this",
    ),
    (
        "adapt.gaussian_mean=0.5",
        "adapt.gaussian_mean is 0.5: no effect, because adapt.filter is range and not gaussian",
    ),
    (
        "adapt.filter=uniform adapt.gaussian_std=0.1",
        "adapt.gaussian_std is 0.1: no effect, because adapt.filter is uni",
    ),
    ("adapt.top_p_share=0.5", "adapt.top_p_share is 0.5: no effect, because adapt.filter is range and not top_p"),
    (
        "adapt.reevaluate_every=0 adapt.max_reevaluated_prompts=9",
        "adapt.max_reevaluated_prompts is 9: no effect, because adapt.reevaluate_every is 0, so that",
    ),
    (
        "adapt.replay_steps=0 adapt.max_shift_replayed=0.1",
        "adapt.max_shift_replayed is 0.1: no effect, because adapt.replay_steps is 0, so that nothing is replayed",
    ),
    (
        "train.async_enable adapt.max_staleness=2",
        "adapt.max_staleness is 2: no effect, because generation is at most train.async_queue_size 1 steps ahead",
    ),
    (
        "train.async_enable train.async_queue_size=7",
        "generation is up to 7 steps ahead (train.async_queue_size 7, adapt.max_staleness None), and adapt",
    ),
    (
        "train.async_enable train.async_queue_size=50 adapt.max_staleness=50",
        "generation is up to 50 steps ahead (train.async_queue_size 50, adapt.max_staleness 50), and adapt",
    ),
    (
        "adapt.ratio=decoupled adapt.rollout_delay=1 adapt.replay_steps=0",
        "adapt.ratio is decoupled: no effect, because adapt.rollout_delay is 1 and adapt.replay_steps is 0",
    ),
    (
        "adapt.kl_target=behaviour algo.kl.init_coef=0",
        "adapt.kl_target is behaviour: no effect, because algo.kl.init_coe",
    ),
    (
        "adapt.partial_rollout_tokens=24",
        "adapt.partial_rollout_tokens is 24: no effect, because a response has at most rollout.max_new_tokens 24 t",
    ),
    ("algo.kl.target=6 algo.kl.init_coef=0", "algo.kl.target is 6.0: no effect, because algo.kl.init_coef is 0, and"),
    (
        "data.apply_chat_template data.input_template=Q:{}",
        "data.input_template is 'Q:{}': no effect, because data.apply",
    ),
    (
        "logger.wandb.project=openrlhf_train_ppo",
        "logger.wandb.project is openrlhf_train_ppo: no effect, because logger.",
    ),
    ("ref.offload ds.zero_stage=2", "ref.offload is True: no effect, because ds.zero_stage is 2, and DeepSpeed keeps"),
    (f"{REWARD_MODEL} reward.offload ds.zero_stage=2", "reward.offload is True: no effect, because ds.zero_stage is 2"),
    ("ds.use_universal_ckpt", "ds.use_universal_ckpt is True: no effect, because ckpt.load_enable is False, and it "),
    (
        "algorithm=ba_ppo train.colocate_all vllm.num_engines=2 critic.num_gpus_per_node=2 reward.num_gpus_per_node=2 "
        "train.colocate_critic_reward",
        "train.colocate_critic_reward is True: even with train.colocate_all, OpenRLHF then gives the critic GPUs",
    ),
    (
        "eval.dataset=more.jsonl eval.steps=1 eval.temperature=0 eval.n_samples_per_prompt=8",
        "eval.n_samples_per_prompt is 8, and eval.temperature is 0: all responses to a prompt are the same, so",
    ),
    # what is longer or larger than the run, which has 8 steps
    (
        ONE_UPDATE,
        "actor.lr_warmup_ratio is 0.03, and the actor makes one optimizer step: the first one of a warm-up has a learn",
    ),
    (
        f"algorithm=ba_ppo {ONE_UPDATE} actor.lr_warmup_ratio=0",
        "critic.lr_warmup_ratio is 0.03, and the critic makes one optimizer step: the first one of a warm-up has a lea",
    ),
    (
        "adapt.batch_size=16 train.batch_size=256",
        "train.batch_size is 256: a training batch has at most 128 samples = ",
    ),
    (
        "adapt.rollout_delay=8",
        "adapt.rollout_delay is 8, and the run has 8 trainer steps: the weights that it begins with generate all",
    ),
    (
        "adapt.reevaluate_every=8",
        "adapt.reevaluate_every is 8, and the run has 8 trainer steps: no prompt is generated ",
    ),
    (
        "algorithm=ba_ppo critic.freezing_steps=7",
        "critic.freezing_steps is 7, and the run has 8 trainer steps: the actor",
    ),
    (
        "eval.dataset=more.jsonl eval.steps=9",
        "eval.steps is 9, and the run has 8 trainer steps: eval.dataset is never evaluated",
    ),
    ("ckpt.save_steps=9", "ckpt.save_steps is 9, and the run has 8 trainer steps: no checkpoint is saved unless"),
    ("eval.dataset=more.jsonl", "eval.dataset is more.jsonl, but eval.steps is -1: it is never evaluated"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "text"), MEANT, ids=[words for words, _ in MEANT])
def test_what_may_be_meant_is_a_warning(capsys, words, text):
    status, out, err = check(capsys, words)
    assert status == 0 and out.endswith("configuration is valid\n"), err
    assert err.startswith("warning: ") and err.count("\n") == 1 and text in err


def test_the_steps_of_data_on_another_machine_count_too(capsys):
    words = "data.prompt_dataset=org/data adapt.rollout_delay=8"
    assert "adapt.rollout_delay" not in check(capsys, words)[2]
    assert "adapt.rollout_delay is 8, and the run has 8 trainer steps" in check(capsys, words, "--prompts=256")[2]
    assert "adapt.rollout_delay" not in check(capsys, words, "--prompts=257")[2]


@pytest.mark.parametrize(
    "words",
    [
        "algorithm=grpo rollout.top_p=0.9",  # plain GRPO divides by the actor's own log-probs
        "critic.adam.lr=0",  # group-relative advantages have no critic
        "adapt.method=pods adapt.partial_rollout_tokens=8",
        "train.async_enable train.async_queue_size=7 adapt.max_staleness=1",
        # the actor learns something
        f"{ONE_UPDATE} actor.lr_warmup_ratio=0",
        f"{ONE_UPDATE} actor.lr_scheduler=constant",
        "rollout.batch_size=256 train.batch_size=1024",
        f"{ONE_UPDATE} train.max_epochs=2",
        f"algorithm=ba_ppo adapt.value_pretraining=1 {ONE_UPDATE} actor.lr_warmup_ratio=0",
        *(
            f"adapt.skip_zero_advantage algo.kl.init_coef=0 actor.entropy_coef=0 algo.advantage.estimator={name}"
            for name in ("group_norm", "dr_grpo", "rloo")
        ),
        # a mixed response is not of today's policy
        "adapt.ratio=decoupled adapt.rollout_delay=1 adapt.replay_steps=0 adapt.partial_rollout_tokens=8",
    ],
)
def test_no_warning_of_what_has_an_effect_or_is_not_there(capsys, words):
    assert check(capsys, words)[2] == ""


# Rows whose messages other tests look at.
ELSEWHERE = [
    (
        f"algorithm=grpo {REWARD_MODEL} eval.dataset=more.jsonl algo.dynamic_filtering_enable",
        "test_a_reward_model_comes_too_late",
    ),
    ("algorithm=ba_ppo data.max_images_per_prompt=1", "test_preflight"),
    ("data.max_images_per_prompt=1 ds.packing_samples", "test_preflight"),
    ("algorithm=ba_ppo algo.advantage.estimator=rloo", "test_arguments"),
    ("algorithm=grpo adapt.method=bapo", "test_arguments"),
]


def flags_with(words: str) -> Flags:
    """All flags of a row, with its method and the steps of 256 prompts, without any check."""
    parser = arguments.build_parser("")
    argv = argv_of(words)
    values = vars(parse_words(parser, argv))
    flags = Flags(values)
    if values["algorithm"]:
        meaning = config.ALGORITHMS[values["algorithm"]]
        given = arguments.given_words(parser, argv)
        flags |= {"algo.advantage.estimator": given.get("algo.advantage.estimator", meaning.estimators[0])}
        flags |= {"adapt.method": given.get("adapt.method", meaning.method)}
    flags.chosen = arguments.given_words(parser, argv)
    flags.prompts = min(256, values["data.max_samples"])
    flags.steps = 256 // max(values["rollout.batch_size"], 1)
    if flags.adapted:
        flags.method = method_class(flags["adapt.method"])(capacity=8, group_size=8)
        if hasattr(flags.method, "max_reevaluated_prompts"):
            flags.method.max_reevaluated_prompts = values["adapt.max_reevaluated_prompts"] or 16
    return flags


class TestWithoutPreparedData:
    @pytest.mark.parametrize("flag", ["data.prompt_dataset", "eval.dataset"])
    def test_goes_on_with_a_warning(self, capsys, flag):
        status, out, err = check(capsys, f"{flag}=data/math/train.jsonl eval.steps=1" if flag[0] == "e" else
                                 f"{flag}=data/math/train.jsonl")  # fmt: skip
        assert status == 0 and out.endswith("configuration is valid\n")
        assert err == (
            f"warning: {flag} is data/math/train.jsonl; there is no such file yet; `bapo-openrlhf prepare math` makes "
            "it\n"
        )

    def test_training_does_not(self, capsys):
        words = [f"--{name}={value}" for name, value in BASE.items()]
        assert main.run(["train", *words, "--data.prompt_dataset=data/math/train.jsonl"]) == 2
        assert "data.prompt_dataset is data/math/train.jsonl; there is no such file yet" in capsys.readouterr().err


class TestTable:
    def test_every_rule_is_broken_by_a_row(self):
        """So no rule can be written that never speaks."""
        broken = set()
        for words, _ in [*BAD, *MEANT, *ELSEWHERE]:
            flags = flags_with(words)
            with suppress(ConfigError):
                check_ranges(flags, VALUES)
                broken |= {id(rule) for rule in RULES if rule.message(flags) is not None}
        assert [rule.flag for rule in RULES if id(rule) not in broken] == []

    def test_every_number_has_a_range(self):
        ours = {f"{prefix}.{item}" for prefix, kind in config.GROUPS.items() for item in kind.__dataclass_fields__}
        numbers = {action.dest for action in arguments.build_parser("")._actions if action.type in (int, float)}
        assert len(numbers) > 80 and numbers - ours <= VALUES.keys()

    def test_its_flags_and_words_are_there(self):
        known = {action.dest for action in arguments.build_parser("")._actions}
        assert VALUES.keys() <= known
        assert {rule.split(": ")[0] for rule in VALUES.values() if isinstance(rule, str)} <= ALLOWED.keys()

    @pytest.mark.parametrize("name", [kind.value for kind in SchedulerType])
    def test_a_schedule_is_allowed_if_openrlhf_can_use_it(self, name):
        optimizer = AdamW([Parameter(zeros(1))], lr=1e-6)
        floor = {"min_lr_rate": 0.1} if "with_min_lr" in name else {}
        try:
            # as OpenRLHF's strategy makes it, and as DeepSpeed steps it
            schedule = get_scheduler(name, optimizer, num_warmup_steps=1, num_training_steps=9,
                                     scheduler_specific_kwargs=floor)  # fmt: skip
            optimizer.step()
            schedule.step()
            usable = True
        except TypeError:
            usable = False
        assert (name in VALUES["actor.lr_scheduler"]) == usable
