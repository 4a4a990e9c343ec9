"""What `check` says to a configuration that cannot work, to one that may be meant, and to one near a limit.

A row has flags that differ from BASE: `name=value` or `switch`, with commas between several values. The message must
name those after the last | and those after >.
"""

import json
import re
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
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.flags import config, rules
from bapo_openrlhf.flags.cautions import CAUTIONS
from bapo_openrlhf.flags.conflicts import COMBINATIONS
from bapo_openrlhf.flags.ranges import VALUES, check_ranges
from bapo_openrlhf.flags.rule import Flags
from bapo_openrlhf.methods.registry import METHODS, method_class, takes

pytestmark = pytest.mark.usefixtures("without_models")

BASE = {
    "algorithm": "bapo_grpo", "actor.model_name_or_path": "model", "actor.num_gpus_per_node": "2",
    "critic.num_gpus_per_node": "1", "ref.num_gpus_per_node": "2", "reward.remote_url": "reward.py",
    "data.prompt_dataset": "train.jsonl", "data.label_key": "label", "data.max_len": "48",
    "rollout.max_new_tokens": "24", "rollout.batch_size": "32", "rollout.n_samples_per_prompt": "8",
    "train.batch_size": "128", "vllm.num_engines": "1",  # 256 samples a batch
}  # fmt: skip

AGENT = """import torch
from openrlhf.utils import agent
class Instance(agent.AgentInstanceBase):
    def __init__(self): ...
    async def step(self, states):
        return {"rewards": torch.tensor(1.0), "environment_feedback": "", "done": True, "extra_logs": {}}
class AgentExecutor(agent.MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Instance)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """A folder with a model of 6 heads and 64 positions, data and a reward function, in which the commands run."""
    (tmp_path / "model").mkdir()
    shape = {"model_type": "qwen2", "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64}
    (tmp_path / "model" / "config.json").write_text(json.dumps(shape))
    (tmp_path / "model" / "pytorch_model.bin").touch()
    for name, more in (("train.jsonl", 1), ("more.jsonl", 2)):
        rows = (f'{{"input": "{number}+{more}", "label": "{number + more}"}}\n' for number in range(256))  # 8 steps
        (tmp_path / name).write_text("".join(rows))
    (tmp_path / "reward.py").write_text("def reward_func(*given):\n    return {'rewards': [1.0]}\n")
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "reward.yaml").write_text("a: 1\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


SHORT = {
    "@model": "reward.remote_url= reward.model_name_or_path=model",
    "@once": "rollout.batch_size=256 train.batch_size=2048",  # one optimizer step on all rows of the data
    "@seq": "algo.advantage.is_correction_level=seq",
    "@beside": "vllm.num_engines=2 critic.num_gpus_per_node=4 reward.num_gpus_per_node=4",
    "@n": f"run.name={'n' * 256}",
    "@ä": f"run.name={'ä' * 128}",
}
SEVERAL = ("actor.adam.betas", "critic.adam.betas", "actor.eps_clip_low_high", "reward.clip_range",
           "algo.dynamic_filtering_range", "algo.advantage.is_correction_threshold")  # fmt: skip


def words_of(row: str) -> list[str]:
    """The words of a row without marks."""
    for short, words in SHORT.items():
        row = row.replace(short, words)
    return row.partition(">")[0].replace("|", " ").split()


def argv_of(row: str) -> list[str]:
    flags = dict(BASE)
    for word in words_of(row):
        name, is_set, value = word.partition("=")
        flags[name] = value if is_set else None
    argv = []
    for name, value in flags.items():
        if name in SEVERAL:
            argv += [f"--{name}", *value.split(",")]
        elif (name, value) != ("algorithm", ""):
            argv += [f"--{name}" if value is None else f"--{name}={value}"]
    return argv


def flags_in_message(row: str) -> set[str]:
    """The flags that the message must name."""
    before, _, more = row.partition(">")
    return {word.partition("=")[0] for word in words_of(before.rpartition("|")[2])} | {*more.split()}


def names(line: str, row: str) -> bool:
    """Whether a line names the flags that it must name."""
    return all(re.search(rf"(?<![\w.]){re.escape(flag)}(?![.]?\w)", line) for flag in flags_in_message(row))


def check(capsys, row: str, *more: str) -> tuple[int, str, str]:
    """Status, output and errors of `check`."""
    return main.run(["check", *more, *argv_of(row)]), *capsys.readouterr()


def rows_of(text: str) -> list[str]:
    return [row.strip() for row in text.strip().splitlines()]


def rows_in(text: str) -> list[str]:
    """The rows of a text that has many in a line, with ; between them."""
    return [row.strip() for row in " ".join(text.split()).split(";")]


BEFORE = [*rules.NEVER_RUN, *rules.IMAGES, rules.PACKED, *rules.SIZES, *rules.OPTIONS, *rules.PLACEMENT,
          *rules.ALGORITHM]  # fmt: skip
RULES = [*BEFORE, *COMBINATIONS, *CAUTIONS]
# Values that are refused with the other flags of BASE, by their flag: of each range one flag, and all other rules.
VALUES_REFUSED = rows_in("""
    actor.adam.lr -3 1 nan ; actor.adam.betas 2,3 ; critic.adam.eps 0 ; actor.lr_scheduler greedy ;
    critic.lr_scheduler Cosine ; actor.lr_warmup_ratio 5 ; rollout.temperature 0.009 100 ; rollout.top_p 0 7 ;
    rollout.max_new_tokens 0 48 ; data.max_len 1 ; eval.temperature -0.6 ; reward.overlong_buffer_len 25 0 ;
    reward.stop_properly_penalty_coef 2 ; actor.eps_clip_low_high -0.2,0.2 1.5,0.2 ; actor.dual_clip 1 ;
    actor.entropy_coef -5 ; critic.value_clip -0.5 ; adapt.length_adaptive_lambd 0.05 ;
    adapt.critic_groups generated ; adapt.critic_baseline batch ; critic.freezing_steps -2 ;
    algo.kl.init_coef -0.1 inf ; algo.advantage.gamma 2 ; algo.advantage.is_correction_threshold -1,2 5,2 1,2,3 ;
    reward.clip_range 10,-10 nan,1 ; train.batch_size 4096 0 ; train.seed 4294967296 ; rollout.batch_size 257 ;
    rollout.micro_batch_size 0 200 ; rollout.vllm_generate_batch_size 64 16 ; eval.steps 0 5 ; ckpt.max_num 0 ;
    ckpt.max_mem 100 -1 ; run.name ../../x .. ; run.gradient_probe -1 4 ; run.answer_chars -1 ; run.grace_seconds -1 ;
    run.stall_timeout 0 ; vllm.num_engines 0 -2 ; vllm.tensor_parallel_size 3 4 ; vllm.sync_backend ncll ;
    ds.zero_stage 4 ; ds.param_dtype fp16 ; ds.grad_accum_dtype double ; ds.lora.dropout 1 ; local_rank -2 ;
    actor.model_name_or_path ./none ; data.prompt_dataset none.jsonl ./none model/none/x ;
    data.prompt_probs 0.5,0.5 0.5 x ; reward.remote_url reward.yaml localhost:5000 a,b.py none.py reward.py,b.py ;
    train.agent_func_path none.py reward.yaml ; adapt.micro_batch_tokens 47 ; adapt.partial_rollout_tokens 0 ;
    adapt.max_staleness 1 ; reward.model_name_or_path model ; adapt.reward_range measure ; adapt.returns vtrace ;
    adapt.method luffy
""")
TOGETHER = rows_of("""
    adapt.skip_zero_advantage | actor.aux_loss_coef=0.1
    algorithm=ba_ppo | adapt.critic_baseline=group algo.advantage.gamma=0.9
    algorithm=ba_ppo | adapt.length_adaptive_lambd=0.05 algo.advantage.lambd=0.95
    algorithm=ba_ppo adapt.critic_baseline=group | adapt.method=ar3po reward.overlong_buffer_len=4
    algo.advantage.is_correction_level=seq | algo.advantage.is_correction_mode=clip
    algo.advantage.is_correction_gating=tv | algo.advantage.is_correction_mode=clip
    algo.advantage.is_correction_level=token | algo.advantage.is_correction_gating=tv
    algorithm= | adapt.method=bapo algo.advantage.estimator=reinforce
    train.batch_size=6 train.micro_batch_size=2
    rollout.batch_size=32 data.max_samples=31
    data.prompt_dataset=train.jsonl,more.jsonl | data.prompt_probs=0.3333333,0.6666666
    algorithm=ba_ppo | rollout.n_samples_per_prompt=1
    algorithm=grpo | rollout.n_samples_per_prompt=1
    run.overwrite ckpt.load_enable
    algorithm=grpo | run.stall_timeout=9 train.async_enable
    train.colocate_all vllm.num_engines=3
    train.colocate_actor_ref ref.num_gpus_per_node=1
    algorithm=ba_ppo vllm.num_engines=2 | train.colocate_all critic.num_gpus_per_node=4
    algorithm=ba_ppo | train.colocate_critic_reward
    train.colocate_all vllm.num_engines=2 @model train.colocate_critic_reward | reward.num_gpus_per_node=4
    ds.packing_samples vllm.num_engines=0
    ds.zero_stage=0 ds.enable_sleep
    ds.zero_stage=0 ds.adam_offload
    ds.zero_stage=0 ds.grad_accum_dtype=fp32
    ds.zero_stage=1 ds.grad_accum_dtype=fp32
    ds.use_liger_kernel data.max_images_per_prompt=1
    train.partial_rollout_enable
    algorithm=grpo train.colocate_all | train.async_enable vllm.enable_sleep
    algorithm=grpo algo.dynamic_filtering_enable | algo.dynamic_filtering_range=1,0
    algorithm=ppo train.batch_size=32 | rollout.n_samples_per_prompt=1 algo.dynamic_filtering_enable
    algorithm=ba_ppo | critic.model_name_or_path=/none/model
    eval.steps=1 | eval.dataset=none.jsonl
    train.colocate_all ref.num_gpus_per_node=4
    algorithm=grpo @model | train.colocate_all
    ds.attn_implementation=eager train.dynamic_batch_enable
    ds.attn_implementation=kernels-community/flash-attn2 ds.packing_samples
    algorithm=grpo | adapt.micro_batch_tokens=64
    adapt.micro_batch_tokens=64 train.dynamic_batch_enable
    ds.lora.rank=8 train.enable_ema
    algorithm=grpo | ds.lora.rank=8
    ds.load_in_4bit
    ds.lora.rank=8 vllm.sync_with_ray
    ds.lora.rank=8 ds.tensor_parallel_size=2
    ds.lora.rank=8 data.max_images_per_prompt=1
    algorithm=grpo | run.gradient_probe=4
    actor.num_gpus_per_node=1 | run.gradient_probe=4 ds.zero_stage=3
    actor.num_gpus_per_node=1 | run.gradient_probe=4 train.async_enable
    actor.num_gpus_per_node=1 | run.gradient_probe=4 data.max_images_per_prompt=2
    ds.use_universal_ckpt ds.zero_stage=0
    ds.use_universal_ckpt ds.tensor_parallel_size=2
    ds.use_universal_ckpt train.enable_ema
    algo.dynamic_filtering_enable train.async_enable
    algo.dynamic_filtering_enable adapt.reward_range=measured
    algo.dynamic_filtering_enable adapt.method=arpo
    algo.dynamic_filtering_enable adapt.filter=none
    train.async_enable | train.partial_rollout_enable
    algorithm=grpo | adapt.partial_rollout_tokens=8
    reward.remote_url= | adapt.partial_rollout_tokens=8 train.agent_func_path=agent.py
    adapt.partial_rollout_tokens=8 data.max_images_per_prompt=1
    adapt.partial_rollout_tokens=8 algo.dynamic_filtering_enable
    adapt.partial_rollout_tokens=8 adapt.reward_range=measured
    @model | adapt.partial_rollout_tokens=8
    adapt.partial_rollout_tokens=8 run.faster=weights
    adapt.partial_rollout_tokens=8 adapt.method=mopps
    verifier.send_responses
    reward.remote_url= | train.agent_func_path=agent.py reward.model_name_or_path=model
    reward.remote_url= | reward.model_name_or_path=model,model
    reward.remote_url= | reward.model_name_or_path=model data.max_images_per_prompt=1
    reward.remote_url= | reward.model_name_or_path=model adapt.method=ar3po
    adapt.method=ar3po adapt.reward_range=measured
    adapt.ratio=decoupled actor.policy_loss_type=gspo
    adapt.max_second_moment=0.04 adapt.ratio=decoupled
    adapt.reuse_gate=0.5
    train.max_epochs=4 | adapt.reuse_gate=0.5 ds.lora.rank=8
    train.max_epochs=4 actor.num_gpus_per_node=2 | adapt.reuse_gate=0.5 ds.tensor_parallel_size=2
    adapt.veto_ratio=1e-4 adapt.ratio=decoupled
    adapt.max_second_moment=0.04 actor.policy_loss_type=gspo
    ckpt.save_steps=1 | ckpt.max_num=1
    algorithm=ba_ppo critic.num_gpus_per_node=3 | > train.batch_size
    adapt.method=mopps train.async_enable
    adapt.method=ar3po reward.overlong_buffer_len=4
    adapt.method=ar3po reward.stop_properly_penalty_coef=0.5
    adapt.skip_zero_advantage algo.advantage.estimator=reinforce_baseline
    adapt.skip_zero_advantage adapt.scale_learning_rate
    adapt.skip_zero_advantage adapt.method=pods
    data.solution_key=input | adapt.method=relift algo.advantage.estimator=reinforce_baseline
    data.solution_key=input | adapt.method=luffy data.max_images_per_prompt=1
    data.solution_key=input reward.remote_url= | adapt.method=relift train.agent_func_path=agent.py
    data.solution_key=input | adapt.method=bapo_demonstrations adapt.scale_learning_rate
    data.solution_key=input | adapt.method=bapo_demonstrations adapt.reward_range=measured
    data.solution_key=input | adapt.method=bapo_demonstrations reward.overlong_buffer_len=4
    reward.remote_url= | adapt.method=prefix_sampling train.agent_func_path=agent.py
    adapt.method=prefix_sampling data.max_images_per_prompt=1
    adapt.method=prefix_sampling run.faster=none
    adapt.options=prefix_share=1/2 | run.faster=none
    adapt.method=prefix_sampling reward.overlong_buffer_len=4
    adapt.options=prefix_share=1 | > adapt.method
    adapt.method=luffy | data.solution_key=worked
    algorithm=ba_ppo ds.zero_stage=2 | data.max_images_per_prompt=1 > algo.advantage.estimator
    data.max_images_per_prompt=1 ds.packing_samples
    algorithm=ba_ppo algo.advantage.estimator=rloo
    algorithm=grpo adapt.method=bapo
    algorithm=grpo @model | eval.dataset=more.jsonl
    algorithm=grpo @model | algo.dynamic_filtering_enable
    algorithm=grpo reward.remote_url= | reward.model_name_or_path=./none
    ds.ring_attn_size=2
    actor.optim=muon
    algorithm=ba_ppo | critic.optim=muon
    ds.tensor_parallel_size=4 | actor.num_gpus_per_node=2
    ds.tensor_parallel_size=2 ds.zero_stage=3
    ref.num_gpus_per_node=3 | ds.tensor_parallel_size=2
    algorithm=grpo @model | ds.tensor_parallel_size=2 reward.num_gpus_per_node=3
    algorithm=ba_ppo | ds.tensor_parallel_size=2 critic.num_gpus_per_node=1
    train.async_enable | rollout.vllm_generate_batch_size=64 adapt.method=bapo
    adapt.method=ar3po train.async_enable
    algorithm=ppo | adapt.critic_lambd=0.5
    adapt.value_pretraining=2
    adapt.critic_epochs=2
""")
BAD = [f"{flag}={value}" for flag, *values in map(str.split, VALUES_REFUSED) for value in values]
BAD += ["run.name=", "@n", "@ä", *TOGETHER]


@pytest.mark.parametrize("row", BAD)
def test_is_refused_in_one_line_that_names_the_flags(capsys, row):
    status, out, err = check(capsys, row)
    assert (status, err.count("\n")) == (2, 1) and err.startswith("error: ")
    assert names(err, row), err
    assert "configuration is valid" not in out


def test_the_number_of_prompts_is_looked_at_even_if_the_data_is_here(capsys):
    status, _, err = check(capsys, "", "--prompts=0")
    assert status == 2 and err.startswith("error: prompts is 0; ")


@pytest.mark.parametrize("algorithm", ["bapo_grpo", "ba_ppo"])
def test_a_reward_model_with_batch_adaptation(capsys, algorithm):
    """Also with an evaluation. The critic begins as the reward model, as in OpenRLHF."""
    row = f"algorithm={algorithm} @model reward.num_gpus_per_node=1 eval.dataset=more.jsonl eval.steps=4"
    status, out, err = check(capsys, row)
    assert (status, err) == (0, "") and "measured in the first step" in out
    args = arguments.parse(argv_of(row))
    assert (args.eval.dataset, args.adapt.reward_range) == ("more.jsonl", ["measured"])
    assert args.critic.model_name_or_path == (None if algorithm == "bapo_grpo" else "model")


def test_a_key_twice_in_one_file(capsys, folder):
    """As a group and in a name with dots. A merged key may be overruled. Equal keys are in test_user_file.py."""
    (folder / "run.yaml").write_text("actor.adam.lr: 1.0e-6\nactor: {adam: {lr: 1.0e-5}}\n")
    status, _, err = check(capsys, "", "--config", "run.yaml")
    assert status == 2 and err.count("\n") == 1 and "config run.yaml" in err and "actor.adam.lr is " in err

    (folder / "run.yaml").write_text("actor: &same\n  adam: {lr: 1.0e-6}\ncritic:\n  <<: *same\n  adam: {lr: 1.0e-5}\n")
    assert check(capsys, "", "--config", "run.yaml")[0] == 0


# Each is near a limit and good, or looks like a row of MEANT and needs no warning.
GOOD = rows_in("""
    rollout.temperature=0.01 ; rollout.temperature=2 ; rollout.max_new_tokens=47 ; rollout.max_new_tokens=1 ;
    data.max_len=64 ; train.batch_size=256 ; train.batch_size=2 ; train.batch_size=512 adapt.batch_size=64 ;
    adapt.reevaluate_every=5 adapt.max_reevaluated_prompts=32 ; adapt.reevaluate_every=3 ;
    adapt.method=exgrpo adapt.reevaluate_every=1 ; actor.adam.lr=0.01 ; actor.eps_clip_low_high=0.2,5 ;
    critic.value_clip=inf ; actor.max_norm=inf ; actor.lr_scheduler=constant ; algo.kl.init_coef=0 ;
    algo.advantage.is_correction_level=seq algo.advantage.is_correction_threshold=2 ;
    reward.overlong_buffer_len=24 ; reward.stop_properly_penalty_coef=-0.5 ; critic.freezing_steps=3 ;
    eval.dataset=more.jsonl eval.steps=1 eval.temperature=0 eval.n_samples_per_prompt=1 ; ckpt.save_steps=1 ;
    ckpt.save_steps=-1 ; vllm.tensor_parallel_size=6 ; vllm.num_engines=1 ds.zero_stage=0 ; run.name=a.b-c_1 ;
    ds.zero_stage=1 ds.enable_sleep ; ds.zero_stage=0 ds.grad_accum_dtype=bf16 ;
    ds.zero_stage=2 ds.grad_accum_dtype=fp32 ds.enable_sleep ;
    ds.zero_stage=1 ds.grad_accum_dtype=fp32 ds.enable_sleep ds.adam_offload ;
    critic.optim=muon ds.zero_stage=3 ds.enable_sleep ;
    train.colocate_all vllm.num_engines=2 ; train.colocate_all vllm.tensor_parallel_size=2 ;
    train.colocate_all vllm.num_engines=2 ref.num_gpus_per_node=1 adapt.kl_target=behaviour ;
    train.colocate_all vllm.num_engines=2 ref.num_gpus_per_node=1 algo.kl.init_coef=0 ;
    train.colocate_critic_reward ; algorithm=ba_ppo train.colocate_all vllm.num_engines=2 ;
    algorithm=grpo train.async_enable rollout.vllm_generate_batch_size=64 ; data.prompt_probs=1 ;
    algorithm=grpo train.async_enable train.partial_rollout_enable ;
    algorithm=grpo train.async_enable algo.dynamic_filtering_enable ;
    data.prompt_dataset=train.jsonl,more.jsonl data.prompt_probs=0.3,0.7 ;
    data.prompt_dataset=train.jsonl,more.jsonl data.prompt_probs=0.333333333,0.666666666 ;
    run.overwrite ; ckpt.load_enable ;
    run.overwrite=false ckpt.load_enable=true ; algorithm=grpo algo.advantage.estimator=rloo ;
    algorithm= algo.advantage.estimator=reinforce ;
    adapt.filter=gaussian adapt.gaussian_mean=0.4 adapt.gaussian_std=0.3 ; adapt.reuse_gate=0 train.max_epochs=2 ;
    adapt.filter=uniform ; adapt.filter=top_p adapt.top_p_share=1 ; adapt.max_shift_replayed=1 ;
    adapt.max_reevaluated_prompts=8 ; algo.kl.target=6 algo.kl.init_coef=0.01 ; adapt.kl_target=behaviour ;
    adapt.rollout_delay=7 adapt.reevaluate_every=7 ; adapt.rollout_delay=1 ;
    adapt.ratio=decoupled adapt.rollout_delay=1 adapt.replay_steps=0 ;
    train.async_enable train.async_queue_size=6 ; train.async_enable adapt.max_staleness=1 ;
    train.batch_size=128 adapt.batch_size=16 ; algorithm=ppo critic.freezing_steps=-1 ;
    algorithm=ba_ppo critic.freezing_steps=6 ; data.apply_chat_template ;
    adapt.method=mopps adapt.max_shift_fresh=1 ; vllm.enable_sleep=false ; train.colocate_all=off ;
    train.agent_func_path=agent.py verifier.timeout=60 ; eval.dataset=more.jsonl eval.steps=8 ; ckpt.save_steps=8 ;
    adapt.micro_batch_tokens=48 ; critic.num_gpus_per_node=3 ;
    algorithm=ppo rollout.n_samples_per_prompt=1 train.batch_size=32 ; algorithm=ba_ppo adapt.returns=vtrace ;
    actor.policy_loss_type=gspo ;
    @seq algo.advantage.is_correction_gating=tv algo.advantage.is_correction_threshold=0.1 ;
    algorithm=ba_ppo adapt.method=ar3po reward.overlong_buffer_len=4 ;
    adapt.method=pods reward.overlong_buffer_len=4 ; train.async_enable adapt.max_staleness=0 ;
    algorithm=ba_ppo adapt.critic_lambd=0 ; algorithm=ba_ppo adapt.value_pretraining=2 ;
    algorithm=ba_ppo adapt.critic_groups=generated ; algorithm=ba_ppo adapt.critic_baseline=batch ;
    algorithm=ba_ppo adapt.length_adaptive_lambd=0.05 ;
    algorithm=ba_ppo run.gradient_probe=4 actor.num_gpus_per_node=1 critic.num_gpus_per_node=2 ;
    algorithm=grpo rollout.top_p=0.9 ; critic.adam.lr=0 ; ds.packing_samples ds.attn_implementation=flash_attention_3 ;
    adapt.method=pods adapt.partial_rollout_tokens=8 ;
    train.async_enable train.async_queue_size=7 adapt.max_staleness=1 ; @once actor.lr_warmup_ratio=0 ;
    @once actor.lr_scheduler=constant ; rollout.batch_size=256 train.batch_size=1024 ; @once train.max_epochs=2 ;
    algorithm=ba_ppo adapt.value_pretraining=1 @once actor.lr_warmup_ratio=0 ;
    adapt.skip_zero_advantage algo.kl.init_coef=0 actor.entropy_coef=0 algo.advantage.estimator=group_norm ;
    adapt.skip_zero_advantage algo.kl.init_coef=0 actor.entropy_coef=0 algo.advantage.estimator=dr_grpo ;
    adapt.skip_zero_advantage algo.kl.init_coef=0 actor.entropy_coef=0 algo.advantage.estimator=rloo
""")


@pytest.mark.parametrize("row", GOOD)
def test_near_a_limit_is_good_and_needs_no_warning(capsys, row):
    status, out, err = check(capsys, row)
    assert (status, err) == (0, "") and out.endswith("configuration is valid\n")


# What may be meant. None of these warns without the flags of its row.
MEANT = rows_of(r"""
    reward.remote_url=http://localhost:9
    data.prompt_dataset=org/data
    actor.model_name_or_path=org/model
    actor.adam.lr=0
    actor.adam.lr=0.5
    algorithm=ba_ppo | critic.adam.lr=0
    algorithm=ba_ppo | critic.adam.lr=0.02
    algorithm=ba_ppo | critic.max_norm=0
    actor.max_norm=0
    data.input_template={}\n
    adapt.skip_zero_advantage algo.kl.init_coef=0.01
    algo.kl.init_coef=0 | adapt.skip_zero_advantage actor.entropy_coef=0.001
    algo.kl.init_coef=0 | adapt.skip_zero_advantage reward.overlong_buffer_len=4.0
    algo.kl.init_coef=0 | adapt.skip_zero_advantage reward.stop_properly_penalty_coef=0.0
    ckpt.best_metric_key=x
    data.solution_key=input
    algorithm=grpo | data.solution_key=input
    rollout.temperature=3
    actor.entropy_coef=-0.01
    rollout.top_p=0.9
    algorithm=grpo algo.advantage.is_correction_level=token | rollout.top_p=0.9
    algorithm=ppo | critic.freezing_steps=0
    adapt.reevaluate_every=5 adapt.max_reevaluated_prompts=34
    adapt.reevaluate_every=2
    algorithm=ppo adapt.replay_steps=3 adapt.filter=none
    algorithm= | adapt.buffer_size=3
    adapt.method=mopps adapt.c1=1/4
    adapt.reevaluate_every=1 | adapt.method=exgrpo adapt.max_reevaluated_prompts=32
    adapt.gaussian_mean=0.5
    adapt.filter=uniform adapt.gaussian_std=0.1
    adapt.top_p_share=0.5
    adapt.reevaluate_every=0 adapt.max_reevaluated_prompts=9
    adapt.replay_steps=0 adapt.max_shift_replayed=0.1
    train.async_enable | adapt.max_staleness=2
    train.async_enable | train.async_queue_size=7
    adapt.kl_target=behaviour algo.kl.init_coef=0
    adapt.partial_rollout_tokens=24
    algo.kl.target=6 algo.kl.init_coef=0
    data.apply_chat_template data.input_template=Q:{}
    logger.wandb.project=openrlhf_train_ppo
    ref.offload ds.zero_stage=2
    @model | reward.offload ds.zero_stage=2
    ds.use_universal_ckpt
    algorithm=ba_ppo @beside | train.colocate_all train.colocate_critic_reward
    algorithm=ba_ppo @model @beside | train.colocate_all train.colocate_critic_reward
    eval.dataset=more.jsonl eval.steps=1 | eval.temperature=0 eval.n_samples_per_prompt=8
    @once | > actor.lr_warmup_ratio
    algorithm=ba_ppo @once actor.lr_warmup_ratio=0 | > critic.lr_warmup_ratio
    adapt.batch_size=16 train.batch_size=256
    adapt.rollout_delay=8
    adapt.reevaluate_every=8
    adapt.method=prefix_sampling adapt.reevaluate_every=0
    algorithm=ba_ppo | critic.freezing_steps=7
    eval.dataset=more.jsonl eval.steps=9
    ckpt.save_steps=9
    eval.dataset=more.jsonl
""")


@pytest.mark.parametrize("row", MEANT)
def test_what_may_be_meant_is_a_warning(capsys, row):
    status, out, err = check(capsys, row)
    assert status == 0 and out.endswith("configuration is valid\n"), err
    assert err.startswith("warning: ") and err.count("\n") == 1 and names(err, row), err


def test_the_steps_of_data_on_another_machine_count_too(capsys):
    row = "data.prompt_dataset=org/data adapt.rollout_delay=8"
    for prompts, warned in (([], False), (["--prompts=256"], True), (["--prompts=257"], False)):
        assert ("adapt.rollout_delay is 8" in check(capsys, row, *prompts)[2]) == warned


def flags_with(row: str) -> Flags:
    """All flags of a row, with its method and the steps of 256 prompts, without any check."""
    parser = arguments.build_parser("")
    argv = argv_of(row)
    values = vars(parse_words(parser, argv))
    flags = Flags(values)
    if values["algorithm"]:
        meaning = config.ALGORITHMS[values["algorithm"]]
        given = arguments.flags_on(parser, argv)
        flags |= {"algo.advantage.estimator": given.get("algo.advantage.estimator", meaning.estimators[0])}
        flags |= {"adapt.method": given.get("adapt.method", meaning.method)}
    flags.chosen = arguments.flags_on(parser, argv)
    flags.prompts = min(256, values["data.max_samples"])
    flags.steps = 256 // max(values["rollout.batch_size"], 1)
    if flags.adapted:
        flags.method = method_class(flags["adapt.method"])(capacity=8, group_size=8)
        if hasattr(flags.method, "max_reevaluated_prompts"):
            flags.method.max_reevaluated_prompts = values["adapt.max_reevaluated_prompts"] or 16
    return flags


class TestWithoutPreparedData:
    @pytest.mark.parametrize("row", ["data.prompt_dataset=data/math/train.jsonl",
                                     "eval.steps=1 | eval.dataset=data/math/train.jsonl"])  # fmt: skip
    def test_goes_on_with_a_warning(self, capsys, row):
        status, out, err = check(capsys, row)
        assert status == 0 and out.endswith("configuration is valid\n")
        assert err.startswith("warning: ") and names(err, row) and "`bapo-openrlhf prepare math`" in err

    def test_training_does_not(self, capsys):
        words = [f"--{name}={value}" for name, value in BASE.items()]
        assert main.run(["train", *words, "--data.prompt_dataset=data/math/train.jsonl"]) == 2
        assert capsys.readouterr().err.startswith("error: data.prompt_dataset is data/math/train.jsonl; ")


class TestTable:
    def test_every_rule_is_broken_by_a_row(self):
        """So no rule can be written that never speaks."""
        broken = set()
        for row in [*BAD, *MEANT]:
            flags = flags_with(row)
            with suppress(ConfigError):
                check_ranges(flags, VALUES)
                broken |= {id(rule) for rule in RULES if rule.message(flags) is not None}
        assert [rule.flag for rule in RULES if id(rule) not in broken] == []

    def test_a_flag_that_methods_take_says_so(self):
        """Batch adaptation itself reads eps too."""
        flags = config.AdaptConfig.__dataclass_fields__
        taken = {name for name in flags for method in METHODS if takes(method_class(method), name)} - {"eps"}
        assert taken == {name for name, item in flags.items() if item.metadata["of_method"]}

    def test_every_number_has_a_range(self):
        ours = {f"{prefix}.{item}" for prefix, kind in config.GROUPS.items() for item in kind.__dataclass_fields__}
        numbers = {action.dest for action in arguments.build_parser("")._actions if action.type in (int, float)}
        assert len(numbers) > 80 and numbers - ours <= VALUES.keys()

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
