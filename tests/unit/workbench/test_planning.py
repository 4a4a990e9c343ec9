"""Each equation of a plan agrees with something independent: published numbers, other code, or a simulation."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from bapo_openrlhf.adapt.group import REFERENCE, Group, Prompt, Response
from bapo_openrlhf.cli import arguments, main
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.flags.config import flags_of
from bapo_openrlhf.flags.sizes import batch_arithmetic
from bapo_openrlhf.workbench.planning import memory
from bapo_openrlhf.workbench.planning.constants import GIB, Constants
from bapo_openrlhf.workbench.planning.groups import average_groups, groups_of_step, happenings, hard_prompts
from bapo_openrlhf.workbench.planning.output import Plan
from bapo_openrlhf.workbench.planning.shapes import SHAPES, shape_of_folder
from bapo_openrlhf.workbench.planning.workload import ALGORITHMS, Workload

ROOT = Path(__file__).parents[3]
GRPO, PPO, DAPO, BAPO_GRPO, BA_PPO = ALGORITHMS
CONSTANTS = Constants()


def workload_from(name, *flags):
    return Workload(arguments.parse(["--config", str(ROOT / "configs" / name), *flags]))


def with_flags(workload, flags):
    """The workload with other values of some flags, which must be there, by their dotted names."""
    assert flags.keys() <= flags_of(workload.args).keys()
    return workload.with_flags(flags)


# 8 colocated GPUs, ZeRO-3, 256 x 8 responses of 4096, prompts of 2048
WORKLOAD = with_flags(
    workload_from("ba_ppo_qwen3_4b.yaml"),
    {"ds.zero_stage": 3, "actor.gradient_checkpointing_enable": True, "vllm.gpu_memory_utilization": 0.6},
)
APART = workload_from("countdown/train.yaml")  # a GPU each for actor, critic, reference and engine
BESIDE = {"train.colocate_actor_ref": True}
WITHOUT_REFERENCE = {"algo.kl.init_coef": 0.0}


def on_gpu(size, workload, algorithm=BA_PPO, gpus=8):
    """Memory on the fullest of so many GPUs."""
    return memory.gpu_memory(SHAPES[size], workload, CONSTANTS, algorithm, gpus)


def test_published_parameter_counts():
    """The numbers of weights in the models' safetensors indexes, with a tied matrix, which a file has twice, once."""
    assert {size: shape.parameters for size, shape in SHAPES.items()} == {
        "0.6B": 596_049_920, "1.5B": 1_543_714_304, "1.7B": 1_720_574_976, "4B": 4_022_468_096, "7B": 7_615_616_512,
        "8B": 8_190_735_360, "14B": 14_770_033_664, "32B": 32_763_876_352, "70B": 70_553_706_496,
    }  # fmt: skip


SIZES = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8,
         "vocab_size": 100}  # fmt: skip


@pytest.mark.parametrize(("kind", "tied"), [("Qwen2", True), ("Qwen3", False), ("Llama", False)])
def test_parameters_of_a_real_model(tmp_path, kind, tied):
    config = getattr(transformers, f"{kind}Config")(num_hidden_layers=3, tie_word_embeddings=tied, **SIZES)
    config.save_pretrained(tmp_path)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    assert shape_of_folder("actor.model_name_or_path", tmp_path).parameters == model.num_parameters()


@pytest.mark.parametrize(
    "kind", ["gemma", "gemma2", "gemma3_text", "cohere", "cohere2", "smollm3", "qwen3", "llama", "mistral"]
)
def test_embeddings_are_tied_as_the_class_has_it_if_the_file_does_not_say_it(tmp_path, kind):
    config = SIZES | {"num_hidden_layers": 2, "model_type": kind}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert (
        shape_of_folder("actor.model_name_or_path", tmp_path).tied
        == transformers.CONFIG_MAPPING[kind]().tie_word_embeddings
    )
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": kind == "llama"}))
    assert shape_of_folder("actor.model_name_or_path", tmp_path).tied == (kind == "llama")


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_parameters_of_an_adapter(tmp_path, targets):
    config = transformers.Qwen3Config(num_hidden_layers=3, **SIZES)
    config.save_pretrained(tmp_path)
    adapter = peft.LoraConfig(r=5, target_modules=targets, task_type="CAUSAL_LM")
    model = peft.get_peft_model(transformers.Qwen3ForCausalLM(config), adapter)
    shape = shape_of_folder("actor.model_name_or_path", tmp_path)
    assert shape.adapter_parameters(5, targets) == model.get_nb_trainable_parameters()[0]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{", "its config.json is not valid JSON"), ("[]", r"its config.json must be an object"),
        ("{}", "num_attention_heads None"), ('{"num_attention_heads": 0}', "num_attention_heads 0"),
        ('{"num_experts": 8}', "a mixture of experts"),
    ],
)  # fmt: skip
def test_a_folder_that_is_no_dense_model(tmp_path, config, says):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=rf"actor\.model_name_or_path.*{tmp_path}.*{says}"):
        shape_of_folder("actor.model_name_or_path", tmp_path)


@given(st.integers(1, 9), st.integers(0, 13), st.integers(1, 300))
def test_syncs_and_reevaluations(delay, every, steps):
    engine, sent, again, apart = 0, 0, 0, 0
    for step in range(steps):
        if every and step and step % every == 0:
            again += 1
            if engine != step:
                apart, sent = apart + 1, sent + 1
            engine = step - step % delay  # put back from the host
        if (step + 1) % delay == 0:
            engine, sent = step + 1, sent + 1
    assert happenings(delay, every, steps) == (sent - apart, again, apart)


@pytest.mark.parametrize(("delay", "every"), [(1, 0), (5, 5), (2, 4), (8, 4), (3, 4), (5, 1)])
def test_average_groups_are_those_of_many_steps(delay, every):
    workload = with_flags(WORKLOAD, {"adapt.rollout_delay": delay, "adapt.reevaluate_every": every})
    many, total = 840, Counter()  # a multiple of all periods; the first is left out, because t = 0 re-evaluates nothing
    for step in range(many, 2 * many):
        again = bool(every) and step % every == 0
        groups = groups_of_step(BA_PPO, workload, CONSTANTS, reevaluates=again)
        assert groups.again == (again and hard_prompts(workload, CONSTANTS))
        total.update(vars(groups))
    result = vars(average_groups(BA_PPO, workload, CONSTANTS))
    assert result == pytest.approx({source: total[source] / many for source in result})


def test_engines_have_gpus_of_their_own_if_generation_is_ahead():
    """OpenRLHF then shares GPUs only among the models that DeepSpeed trains."""
    together, ahead = WORKLOAD, with_flags(WORKLOAD, {"train.async_enable": True, "train.async_queue_size": 1})
    assert (together.gpus, ahead.gpus) == (8, 16)
    assert [ahead.gpus_of(role, BA_PPO, 16) for role in ("actor", "critic", "engines")] == [8, 8, 8]
    assert [together.gpus_of(role, BA_PPO, 16) for role in ("actor", "critic", "engines")] == [16, 16, 16]
    sizes = [on_gpu("4B", workload, gpus=16) for workload in (together, ahead)]
    assert sizes[0].generation > sizes[1].generation == 0.6 * 80 * GIB
    kept = [on_gpu("4B", with_flags(one, {"vllm.enable_sleep": False}), gpus=16) for one in (together, ahead)]
    assert kept[0].training > kept[1].training == sizes[1].training
    assert on_gpu("4B", ahead, gpus=1).word == "GPUs"


# ── Groups ──


def test_dapo_draws_until_its_batch_is_full():
    """The equation agrees with a simulation: each of n places is filled again until its group has a signal."""
    rng, share, places = np.random.default_rng(0), 0.3, 64
    draws = rng.geometric(share, size=(20_000, places))
    workload, constants = with_flags(WORKLOAD, {"rollout.batch_size": places}), replace(CONSTANTS, signal_share=share)
    result = groups_of_step(DAPO, workload, constants, reevaluates=False)
    assert result.fresh == pytest.approx(draws.sum(axis=1).mean(), rel=0.01) and result.trained == places


@pytest.mark.parametrize(("share", "rounds"), [(0.9, 1), (0.5, 2), (0.25, 4), (0.1, 4), (0, 4)])
def test_a_step_draws_prompts_until_its_batch_and_its_buffer_are_enough(share, rounds):
    flags = {"rollout.batch_size": 20, "adapt.batch_size": 23, "adapt.replay_steps": 1}
    constants = replace(CONSTANTS, signal_share=share, replayable_share=0.25)  # 18 are wanted
    for dynamic, times in ((True, rounds), (False, 1)):
        workload = with_flags(WORKLOAD, flags | {"algo.dynamic_filtering_enable": dynamic})
        found = groups_of_step(BAPO_GRPO, workload, constants, reevaluates=False)
        assert found.fresh == 20 * times and found.x1 == pytest.approx(min(20 * times * share, 23))
        assert found.x3 == pytest.approx(min(5, 23 - found.x1))


@pytest.mark.parametrize(
    ("flags", "leaving"),
    [({}, 0.3), ({"adapt.max_reevaluated_prompts": 6}, 0.3), ({"adapt.buffer_size": 5}, 0.3),
     ({"adapt.reevaluate_every": 1}, 0.9)],
)  # fmt: skip
def test_hard_prompts_of_a_reevaluation(flags, leaving):
    """The equation agrees with a simulated queue: prompts come in each step, are tried every m steps, and leave."""
    rng = np.random.default_rng(1)
    base = {"rollout.batch_size": 32, "adapt.reevaluate_every": 4, "adapt.max_reevaluated_prompts": 40}
    workload = with_flags(WORKLOAD, base | {"adapt.buffer_size": 60} | flags)
    adapt = workload.args.adapt
    constants, waiting, tried = replace(CONSTANTS, hard_share=0.05, leaving_share=leaving), 0, []
    for step in range(1, 40_000):
        if step % adapt.reevaluate_every == 0:
            now = min(waiting, adapt.max_reevaluated_prompts)
            tried.append(now)
            waiting -= rng.binomial(now, leaving)
        waiting = min(waiting + rng.binomial(32, 0.05), adapt.buffer_size)
    # The buffer fills with what no re-evaluation solves; the mean of a minimum is a little below the minimum of means.
    assert np.mean(tried[100:]) == pytest.approx(hard_prompts(workload, constants), rel=0.05)


def test_hard_prompts_that_never_leave_or_never_come():
    assert hard_prompts(WORKLOAD, replace(CONSTANTS, leaving_share=0.0)) == 64
    assert hard_prompts(WORKLOAD, replace(CONSTANTS, leaving_share=0.0, hard_share=0.0)) == 0
    assert hard_prompts(with_flags(WORKLOAD, {"adapt.reevaluate_every": 0}), CONSTANTS) == 0


SMALL = with_flags(WORKLOAD, {
    "rollout.n_samples_per_prompt": 4, "rollout.batch_size": 24, "adapt.batch_size": 20, "adapt.buffer_size": 16,
    "adapt.replay_steps": 3, "adapt.rollout_delay": 2, "adapt.reevaluate_every": 4, "adapt.max_reevaluated_prompts": 8,
    "adapt.c1": "0", "adapt.c2": ["1/4"], "adapt.c3": ["1/2"],
})  # fmt: skip


def played(workload, make_group):
    """Runs the real method on prompts of fixed difficulty. Returns the counts of each step, and all means by source."""
    rng = np.random.default_rng(2)
    method = workload.args.adapt.make_method(batch_arithmetic(workload.args), 1)
    means, counts = {"fresh": [], "reevaluated": []}, []

    def generate(prompts, step, source):
        rewards = [(rng.random(4) < float(prompt.label)).astype(float) for prompt in prompts]
        means[source] += [row.mean() for row in rewards]
        return [make_group(row, prompt=prompt, step=step) for row, prompt in zip(rewards, prompts, strict=True)]

    for step in range(400):
        again = method.begin_step(step)
        fresh = [Prompt(f"{step} {n}", f"{rng.beta(0.3, 0.9):.4f}") for n in range(workload.args.rollout.batch_size)]
        batch = method.build_batch(step, generate(fresh, step, "fresh"), generate(again, step, "reevaluated"))
        counts.append((len(again), len(batch.fresh), len(batch.reevaluated), len(batch.replayed)))
    return np.array(counts), means


def shares(means):
    """What the plan assumes, counted. The thresholds are fixed: c1 = 0, c2 = 1/4, c3 = 1/2."""
    fresh, again = np.array(means["fresh"]), np.array(means["reevaluated"])
    conditions = {
        "signal_share": (fresh > 0) & (fresh < 1), "hard_share": fresh == 0,
        "replayable_share": (fresh >= 1 / 4) & (fresh <= 1 / 2),
        "leaving_share": again > 0, "improved_share": (again > 0) & (again < 1),
    }  # fmt: skip
    return {name: float(condition.mean()) for name, condition in conditions.items()}


@pytest.mark.parametrize(
    "flags",
    [{}, *(pytest.param(one, marks=pytest.mark.slow) for one in ({"adapt.batch_size": 12}, {"adapt.replay_steps": 1}))],
)
def test_groups_of_the_real_method(make_group, flags):
    workload = with_flags(SMALL, flags)
    counts, means = played(workload, make_group)
    result = average_groups(BAPO_GRPO, workload, replace(CONSTANTS, **shares(means)))
    again, x1, x2, x3 = counts[20:].mean(axis=0)
    assert result.again == pytest.approx(again, rel=0.02)
    # A batch that is sometimes full has a little less than a full one's mean.
    assert [result.x1, result.x2, result.x3] == pytest.approx([x1, x2, x3], rel=0.12, abs=0.35)
    assert result.trained == pytest.approx(x1 + x2 + x3, rel=0.06)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.integers(1, 300), st.booleans())
def test_a_batch_has_all_that_is_eligible_up_to_its_capacity(signal, improved, replayable, capacity, reevaluates):
    constants = replace(CONSTANTS, signal_share=signal, improved_share=improved, replayable_share=replayable)
    workload = with_flags(WORKLOAD, {"adapt.batch_size": capacity})
    result = groups_of_step(BA_PPO, workload, constants, reevaluates=reevaluates)
    assert min(vars(result).values()) >= 0
    prompts, adapt = WORKLOAD.args.rollout.batch_size, WORKLOAD.args.adapt
    replays = min(replayable * prompts * adapt.replay_steps, adapt.buffer_size)
    assert result.trained == pytest.approx(min(capacity, signal * prompts + improved * result.again + replays))


@pytest.mark.parametrize(
    ("name", "kept", "with_advantage"),
    [("range", 0.4, 0.4), ("gaussian", 0.1, 0.1), ("uniform", 0.6, 0.24), ("top_p", 0.36, 0.36), ("none", 1.0, 0.4)],
)
def test_filters(name, kept, with_advantage):
    """Groups that are skipped have no price. With the filter none they have places, so that nothing is replayed."""
    constants = replace(CONSTANTS, signal_share=0.4, gaussian_share=0.25)
    for skips, share in ((False, kept), (True, with_advantage)):
        flags = {"adapt.filter": name, "adapt.batch_size": 256, "adapt.skip_zero_advantage": skips}
        groups = groups_of_step(BAPO_GRPO, with_flags(WORKLOAD, flags), constants, reevaluates=False)
        assert groups.x1 == pytest.approx(256 * share) and (groups.x3 == 0) == (name == "none")


def test_roles_with_gpus_of_their_own():
    """Four roles share 16 GPUs, four each, and three five each. A reference may be beside the actor."""
    assert [APART.gpus_of(role, BA_PPO, 16) for role in ("actor", "critic", "reference", "engines")] == [4] * 4
    assert [APART.gpus_of(role, GRPO, 16) for role in ("actor", "reference", "engines")] == [5] * 3
    assert [APART.has_reference(one) for one in ALGORITHMS] == [one is not DAPO for one in ALGORITHMS]
    assert not with_flags(APART, WITHOUT_REFERENCE).has_reference(GRPO)
    flags = {**BESIDE, "vllm.num_engines": 4, "actor.num_gpus_per_node": 2, "critic.num_gpus_per_node": 2}
    workload = with_flags(APART, flags)
    assert workload.gpus_of("reference", BA_PPO, 16) == workload.gpus_of("actor", BA_PPO, 16) == 4
    assert [workload.ranks(model, BA_PPO, 16) for model in ("actor", "critic", "reference")] == [4, 4, 4]


def test_an_optimizer_step_is_for_the_ranks_of_all_trained_models():
    flags = {**BESIDE, "vllm.num_engines": 4, "critic.num_gpus_per_node": 3, "train.micro_batch_size": 1}
    workload = with_flags(APART, flags)
    assert [workload.ranks(model, BA_PPO, 64) for model in ("actor", "critic")] == [8, 24]
    for batch, algorithm, word in ((23, BA_PPO, "batch"), (23, BAPO_GRPO, "fits"), (24, BA_PPO, "fits")):
        assert on_gpu("0.6B", with_flags(workload, {"train.batch_size": batch}), algorithm, 64).word == word


# ── Memory ──

# Bytes that a layer keeps of a token: two norms, queries and attention's result, keys and values, the MLP's 4 arrays.
LAYER = {
    "1.5B": 2 * (8 * 1536 + 4) + 2 * 2 * 1536 + 2 * 2 * 256 + 4 * 12 + 4 * 2 * 8960,
    "7B": 2 * (8 * 3584 + 4) + 2 * 2 * 3584 + 2 * 2 * 512 + 4 * 28 + 4 * 2 * 18944,
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["Qwen3", "Qwen2", "Llama"])
def test_activations_of_a_real_layer(tmp_path, kind, padded):
    """What torch keeps for the backward pass of a model of transformers: with a layer more, so much more."""
    samples, tokens = 2, 40
    batch = {"input_ids": torch.ones(samples, tokens, dtype=torch.long)}
    batch["attention_mask"] = batch["input_ids"].clone()
    batch["attention_mask"][0, -3:] = 0 if padded else 1

    def kept(layers, again):
        config = getattr(transformers, f"{kind}Config")(num_hidden_layers=layers, attn_implementation="sdpa", **SIZES)
        config.save_pretrained(tmp_path)
        model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16).model.train()
        if again:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        weights, result = {weight.untyped_storage().data_ptr() for weight in model.parameters()}, {}

        def keep(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                result[storage.data_ptr()] = storage  # kept alive, so that no other tensor gets its address
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(**batch, use_cache=False)
        return sum(storage.nbytes() for storage in result.values())

    layer, inputs = (kept(3, again) - kept(2, again) for again in (False, True))
    shape = shape_of_folder("actor.model_name_or_path", tmp_path)
    assert layer == samples * tokens * shape.activation_bytes(tokens if padded else 0)
    flags = {"train.micro_batch_size": samples, "ds.attn_implementation": "sdpa" if padded else "flash_attention_2",
             "data.max_len": tokens, "rollout.max_new_tokens": 10}  # fmt: skip

    def planned(layers, again):
        workload = with_flags(WORKLOAD, flags | {"actor.gradient_checkpointing_enable": again})
        return memory.activation_bytes(replace(shape, layers=layers), workload, CONSTANTS, logits=False)

    assert layer == planned(3, False) - planned(2, False) and inputs == planned(3, True) - planned(2, True)
    assert planned(2, True) == 2 * inputs + layer  # while one layer is computed again


@pytest.mark.parametrize(("flags", "tokens"), [
    ({"train.micro_batch_size": 2}, 6144),
    ({}, 0),  # a sample at a time is not padded
    ({"adapt.micro_batch_tokens": 6144}, 0),
    ({"adapt.micro_batch_tokens": 6145}, 6144),
    ({"train.micro_batch_size": 2, "ds.packing_samples": True}, 0),
    ({"train.micro_batch_size": 2, "ds.attn_implementation": "flash_attention_2"}, 0),
])  # fmt: skip
def test_which_samples_have_a_mask(flags, tokens):
    assert with_flags(WORKLOAD, flags).masked_tokens == tokens


def test_micro_batches_by_tokens_are_planned_as_so_many_samples():
    by_tokens = with_flags(WORKLOAD, {"adapt.micro_batch_tokens": 4 * 6144})
    by_number = with_flags(WORKLOAD, {"train.micro_batch_size": 4, "rollout.micro_batch_size": 4})
    assert on_gpu("7B", by_tokens) == on_gpu("7B", by_number) != on_gpu("7B", WORKLOAD)


def test_zero_as_its_paper_has_it():
    """arXiv 1910.02054, Fig. 1: 7.5B parameters, 64 ranks."""
    sizes = [memory.model_state_bytes(7_500_000_000, stage, 64) / 1e9 for stage in range(4)]
    assert sizes == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)
    assert memory.model_state_bytes(1000, 0, 4, optimizer_on_host=True) == 4000


@pytest.mark.parametrize(("dtype", "more"), [("fp32", 2), ("float32", 2), ("bf16", 0), ("fp16", 0)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_memory_of_gradients_that_are_added_up_in_another_type(stage, dtype, more):
    plain = with_flags(WORKLOAD, {"ds.zero_stage": stage})
    added = with_flags(plain, {"ds.grad_accum_dtype": dtype})
    shared = 1 if stage == 1 else 8
    more *= SHAPES["4B"].parameters / shared
    assert on_gpu("4B", added).training - on_gpu("4B", plain).training == pytest.approx(more)


def test_memory_by_hand():
    """BA-PPO with Qwen2.5-7B and ZeRO-3 on 8 GPUs of 80 GiB. Engines and models sleep."""
    n, tokens = 7_615_616_512, 6144
    state, weights = 16 * n / 8, 2 * n / 8
    logits = 2 * 2**27 + 8 * 2**26  # a block in bf16, a tile in two fp32 arrays
    trained = tokens * (2 * 3584 * 28 + LAYER["7B"]) + logits  # inputs of the layers, one layer
    result = on_gpu("7B", WORKLOAD)
    assert result.word == "fits"
    assert result.generation == pytest.approx(0.6 * 80 * GIB + 3 * weights)
    assert result.training == pytest.approx(state + trained + 2 * weights)  # the critic's and the reference's are there
    assert result.experience == pytest.approx(logits + 3 * weights)
    result = on_gpu("7B", with_flags(WORKLOAD, {"vllm.enable_sleep": False, "ds.enable_sleep": False}))
    assert result.generation == pytest.approx(0.6 * 80 * GIB + 2 * state + weights)
    assert result.training == pytest.approx(2 * state + trained + weights + 0.6 * 80 * GIB)
    assert result.word == "together"


def test_memory_of_roles_apart():
    """Each role has one GPU, so ZeRO-2 shares nothing: 16 bytes per parameter, and activations of all layers."""
    shape, tokens = SHAPES["1.5B"], 16 * 48
    logits = 16 * 24 * 151936  # less than a tile
    trained = 16 * shape.parameters + tokens * LAYER["1.5B"] * 28 + 10 * logits
    result = on_gpu("1.5B", APART, gpus=4)
    assert result.training == pytest.approx(trained) and result.generation == 0.5 * 80 * GIB
    result = on_gpu("1.5B", with_flags(APART, BESIDE), gpus=4)
    assert result.training == pytest.approx(trained + 2 * shape.parameters)


@pytest.mark.parametrize(
    ("size", "copies", "parameters"),
    [("7B", 2, 4_080_409_088), ("7B", 4, 2_312_805_376), ("7B", 8, 1_531_780_096), ("4B", 8, 843_316_736),
     ("70B", 8, 9_739_706_368)],
)  # fmt: skip
def test_parameters_under_tensor_parallelism(size, copies, parameters):
    """The most of any GPU by `get_shard_size_list` of DeepSpeed 0.19.6 and transformers' plan for the model.

    7B has 4 key heads, so 4 of 8 GPUs have the attention. The head of 4B is the matrix of its embeddings.
    """
    assert SHAPES[size].parameters_on(copies) == parameters and SHAPES[size].parameters_on(1) == SHAPES[size].parameters


def test_memory_under_tensor_parallelism():
    """All 8 GPUs hold one rank, so each has 16 bytes for each parameter on it; sleeping models have 2."""
    cut = with_flags(WORKLOAD, {"ds.tensor_parallel_size": 8, "train.enable_ema": True, "ds.zero_stage": 2})
    on_one = SHAPES["4B"].parameters_on(8)
    activations = memory.activation_bytes(SHAPES["4B"], cut, CONSTANTS, logits=True)
    result = on_gpu("4B", cut)
    assert result.training == pytest.approx((16 + 2 * 3) * on_one + activations)  # critic, reference and average
    assert result.generation == pytest.approx(0.6 * 80 * GIB + 4 * 2 * on_one)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_memory_of_adapters(stage):
    """All weights are there in 2 bytes, and only the adapters have 2 for a gradient and 12 for the optimizer."""
    shape, rank = SHAPES["1.5B"], 16
    sides = [(1536, 1536), (1536, 256), (1536, 256), (1536, 1536), (1536, 8960), (1536, 8960), (8960, 1536)]
    n, a = shape.parameters, 28 * rank * sum(width + height for width, height in sides)
    full = with_flags(WORKLOAD, {"ds.zero_stage": stage})
    before, after = (on_gpu("1.5B", one) for one in (full, with_flags(full, {"ds.lora.rank": rank})))
    idle = 2 * a / (8 if stage == 3 else 1)  # the sleeping critic's
    saved = {1: 2 * (n - a) - 2 * a + 12 * (n - a) / 8, 2: -2 * a + 14 * (n - a) / 8, 3: -2 * a / 8 + 14 * (n - a) / 8}
    assert before.training - after.training == pytest.approx(saved[stage] - idle)
    assert after.generation - before.generation == pytest.approx(2 * idle)


def test_memory_of_a_reward_model():
    """Its weights, 2 bytes a parameter: beside all models, beside the critic, or on GPUs of its own."""
    shape, kept = SHAPES["1.5B"], {"reward.remote_url": None, "reward.num_gpus_per_node": 1}
    with_it = with_flags(WORKLOAD, kept)
    assert with_it.gpus == WORKLOAD.gpus
    result, before = on_gpu("1.5B", with_it), on_gpu("1.5B", WORKLOAD)
    for phase in memory.PHASES:
        assert getattr(result, phase) == pytest.approx(getattr(before, phase) + 2 * shape.parameters / 8)
    assert on_gpu("1.5B", with_flags(with_it, {"reward.offload": True})) == before
    result = on_gpu("1.5B", with_flags(WORKLOAD, {"ref.offload": True}))
    assert before.generation - result.generation == pytest.approx(2 * shape.parameters / 8)
    lower = with_flags(with_it, {"ds.zero_stage": 2})  # such models are on the host only in stage 3
    assert all(
        on_gpu("1.5B", lower) == on_gpu("1.5B", with_flags(lower, {f"{one}.offload": True}))
        for one in ("ref", "reward")
    )

    apart = with_flags(APART, kept)
    assert apart.gpus == APART.gpus + 1 and on_gpu("1.5B", apart, gpus=5) == on_gpu("1.5B", APART, gpus=4)
    beside = with_flags(apart, {"train.colocate_critic_reward": True})
    assert beside.gpus == APART.gpus and with_flags(beside, {"algo.advantage.estimator": "rloo"}).gpus == apart.gpus - 1
    critic = 16 * shape.parameters + 16 * 48 * LAYER["1.5B"] * 28
    assert on_gpu("1.5B", beside, gpus=4).training == pytest.approx(critic + 2 * shape.parameters)


def test_a_critic_beside_the_reward_model_has_gpus_of_its_own():
    """Also if all other models share theirs, as OpenRLHF places them; so each of the two blocks is half of 16."""
    with_it = with_flags(WORKLOAD, {"train.colocate_critic_reward": True})
    assert (with_it.gpus, with_flags(with_it, {"algo.advantage.estimator": "rloo"}).gpus) == (16, 8)
    assert [with_it.ranks(model, BA_PPO, 16) for model in ("actor", "critic", "reference")] == [8, 8, 8]
    assert on_gpu("1.5B", with_it, gpus=16) == on_gpu("1.5B", WORKLOAD, BAPO_GRPO)  # as if there were no critic


@pytest.mark.parametrize("stage", [2, 3])
def test_memory_of_averaged_weights(stage):
    """They are a model of their own, whole on each GPU of the actor; stage 3 divides them, and has them on the host."""
    shape = SHAPES["1.5B"]
    for workload, gpus in ((WORKLOAD, 8), (APART, 4)):
        plain = with_flags(workload, {"ds.zero_stage": stage, "algo.advantage.estimator": "rloo"})
        averaged = with_flags(plain, {"train.enable_ema": True})
        with_it, before = (on_gpu("1.5B", one, BAPO_GRPO, gpus) for one in (averaged, plain))
        assert with_it.training - before.training == pytest.approx(2 * shape.parameters * (stage == 2))
        together = workload is WORKLOAD
        assert with_it.generation - before.generation == pytest.approx(2 * shape.parameters * (stage == 2) * together)


def test_engines():
    """48 GiB without a reserve of 3 hold weights and cache. 70B needs 131.4 GiB, so an engine has 4 GPUs."""
    assert memory.tensor_parallel(SHAPES["7B"], WORKLOAD, CONSTANTS) == 1
    assert memory.tensor_parallel(SHAPES["70B"], WORKLOAD, CONSTANTS) == 4
    narrow = with_flags(WORKLOAD, {"vllm.gpu_memory_utilization": 0.28})
    assert memory.tensor_parallel(SHAPES["70B"], narrow, CONSTANTS) == 8
    free = 4 * (0.6 * 80 - 3) * GIB - 2 * 70_553_706_496
    assert memory.cache_tokens(SHAPES["70B"], WORKLOAD, CONSTANTS, 4) == pytest.approx(free / (320 * 1024))


@pytest.mark.parametrize(("word", "size", "gpus", "flags"), [
    ("engine", "70B", 32, {"vllm.gpu_memory_utilization": 0.2}),
    ("GPUs", "70B", 2, {}),
    ("GPUs", "1.5B", 3, {"train.colocate_all": False}),
    ("GPUs", "0.6B", 1, {"ds.tensor_parallel_size": 2}),  # a rank takes two
    ("training", "70B", 8, {}),
    ("fits", "7B", 64, {"adapt.batch_size": 7, "train.micro_batch_size": 1}),  # 56 samples on 64 ranks
    ("batch", "7B", 64, {"train.batch_size": 64, "train.micro_batch_size": 2}),
])  # fmt: skip
def test_the_word_for_what_does_not_fit(word, size, gpus, flags):
    assert on_gpu(size, with_flags(WORKLOAD, flags), gpus=gpus).word == word


@given(st.sampled_from(sorted(SHAPES)), st.sampled_from(ALGORITHMS), st.integers(3, 9), st.integers(0, 3))
def test_memory_never_grows_with_ranks(size, algorithm, power, stage):
    workload = with_flags(WORKLOAD, {"ds.zero_stage": stage})
    few, many = (on_gpu(size, workload, algorithm, 2**p) for p in (power, power + 1))
    assert all(getattr(many, phase) <= getattr(few, phase) for phase in memory.PHASES)


def test_logits_are_those_of_the_code():
    log_probs = (ROOT / "bapo_openrlhf" / "training" / "worker" / "log_probs.py").read_text(encoding="utf-8")
    for name, constant in (("BLOCK", CONSTANTS.logit_block), ("TILE_ON_GPU", CONSTANTS.logit_tile)):
        assert f"\n{name} = 2**{math.log2(constant):.0f}" in log_probs


def test_logits_of_a_head_that_tensor_parallelism_cuts():
    """Each of the two processes has half of those of all tokens. A head that is the embeddings' stays whole."""
    cut = with_flags(WORKLOAD, {"ds.tensor_parallel_size": 2})
    assert memory.logit_bytes(SHAPES["7B"], cut, CONSTANTS, 3) == pytest.approx(3 * 6144 / 2 * 10 * 152064)
    whole = (memory.logit_bytes(SHAPES["4B"], one, CONSTANTS, 3) for one in (WORKLOAD, cut))
    assert next(whole) == next(whole) > 0


@pytest.mark.parametrize("reference", [False, True])
def test_replay_bytes_are_those_of_stored_groups(reference):
    """The equation agrees with the bytes of groups in the buffer: 512 tokens of prompt in 4096."""
    workload = with_flags(WORKLOAD, {} if reference else WITHOUT_REFERENCE)
    kept = {REFERENCE: ("a model", np.zeros(3584, np.float32))} if reference else {}
    response = Response(np.zeros(4096, np.int32), ((512, 4096),), np.zeros(3584, np.float32), 1.0, kept)
    group = Group(0, Prompt("x"), (response,) * 8, 0, 0)
    assert memory.replay_bytes(workload, 512, 3584, 5) == pytest.approx(5 * group.nbytes, rel=0.001)


def test_what_the_replay_buffer_holds():
    """As many as the hard buffer, and at most the groups of this step and of those that may be replayed in it."""
    flags = {"adapt.buffer_size": 20, "adapt.replay_steps": 3}
    assert with_flags(WORKLOAD, flags).replay_capacity == 20
    few = with_flags(WORKLOAD, flags | {"rollout.batch_size": 2})
    assert few.replay_capacity == 2 * (3 + 1) and with_flags(few, {"adapt.replay_steps": 0}).replay_capacity == 0
    budget = -(-few.response_tokens // 2)  # of a step: responses of two steps may end together
    assert with_flags(few, {"adapt.partial_rollout_tokens": budget}).replay_capacity == 16
    assert with_flags(few, {"algo.dynamic_filtering_enable": True}).replay_capacity == 20 < 4 * 8


def test_no_step_of_the_real_method_stores_more(make_group):
    """With rewards that are all replayable, the buffer is as full as is said."""
    flags = {"adapt.buffer_size": 100, "adapt.replay_steps": 2, "adapt.c2": ["0"], "adapt.c3": ["1"]}
    workload = with_flags(SMALL, flags)
    method = workload.args.adapt.make_method(batch_arithmetic(workload.args), 1)
    for step in range(6):
        method.begin_step(step)
        method.build_batch(step, [make_group([1, 0, 0, 0], prompt=f"{step} {n}", step=step) for n in range(24)], [])
    assert len(method.replay) == workload.replay_capacity == 72


def planned(workload=WORKLOAD, constants=CONSTANTS, steps=21):
    return Plan([SHAPES["7B"]], [8], workload, constants, steps)


def test_counts_by_hand():
    constants = replace(CONSTANTS, signal_share=0.5, replayable_share=0.01, hard_share=1.0, improved_share=0.25)
    result = planned(constants=constants).counts(BA_PPO)
    # 64 hard prompts every 5 steps: in 21 steps at t = 5, 10, 15, 20
    assert result["responses"] == pytest.approx(8 * (256 + 64 / 5))
    assert result["rollouts"] == 8 * (21 * 256 + 4 * 64)
    replayed = 0.01 * 3 * 256
    assert result["update_tokens"] == pytest.approx(8 * (128 + 16 / 5 + replayed) * 2048)
    assert result["trained"] == pytest.approx(result["x1"] + result["x2"] + result["x3"])
    # prompts of 204.8 tokens and responses of 2048, 4 bytes an id and a log-prob; those of the reference model too
    assert result["replay_bytes"] == pytest.approx(replayed * 8 * 4 * (204.8 + 3 * 2048))
    assert result["replay_bytes_most"] == 64 * 8 * 4 * (2048 + 3 * 4096)
    assert result["hard_bytes"] == pytest.approx(64 * 4 * 204.8)
    # The critic passes over the batch, or over all that is generated or replayed, and twice over fresh ones at first.
    assert result["critic_tokens"] == result["update_tokens"]
    words = {"adapt.critic_groups": "generated", "adapt.value_pretraining": 2, "critic.freezing_steps": 3,
             "adapt.critic_epochs": 3}  # fmt: skip
    taught = planned(with_flags(WORKLOAD, words), constants).counts(BA_PPO)
    assert taught["critic_tokens"] == pytest.approx(3 * 8 * 2048 * (256 + 64 / 5 + replayed + 2 * 4 * 256 / 21))
    assert planned(with_flags(WORKLOAD, words), constants).counts(PPO)["critic_tokens"] == 8 * 2048 * 256
    assert planned(constants=constants).counts(BAPO_GRPO)["critic_tokens"] == 0
    plain = planned(constants=constants).counts(PPO)
    assert plain["replay_bytes"] == plain["replay_bytes_most"] == plain["hard_bytes"] == 0


# ── Memory of a machine and on the disk ──

PRESET = workload_from("ba_ppo_qwen3_4b.yaml")
N = 4_022_468_096
WEIGHTS, STATES = 8 * 2 * N, 12 * N  # of 8 engines in 16 bits; master weights and Adam's two moments in fp32
EVALUATED = {"eval.dataset": "held_out.jsonl", "eval.steps": 7}  # between two syncs, which come every 5 steps


def host(flags=(), algorithm=BA_PPO, gpus=8, size="4B"):
    return memory.host_memory(SHAPES[size], with_flags(PRESET, dict(flags)), CONSTANTS, algorithm, gpus)


def test_a_machine_by_hand():
    """Engines asleep, delayed weights, and optimizer states of actor and critic are the 0.7 that Ray leaves."""
    kept = WEIGHTS + WEIGHTS + 2 * STATES
    assert host(EVALUATED).machine == pytest.approx(kept / 0.7) == pytest.approx(322e9, abs=0.5e9)
    assert host().machine == pytest.approx((kept - WEIGHTS) / 0.7)
    assert host(EVALUATED, gpus=16).machine == pytest.approx((2 * 2 * WEIGHTS + 2 * STATES) / 2 / 0.7)
    # Ray takes at most its limit.
    big = 14_770_033_664 * (12 + 12 + 8 * 2 + 8 * 2)
    assert big * 0.3 / 0.7 > 200e9 and host(EVALUATED, size="14B").machine == pytest.approx(big + 200e9)


@pytest.mark.parametrize(("flags", "algorithm", "expected"), [
    ({"vllm.enable_sleep": False}, BA_PPO, (0, 0, 2 * STATES)),
    ({"ds.enable_sleep": False}, BA_PPO, (WEIGHTS, 0, 0)),
    ({"ds.enable_sleep": False, "ds.adam_offload": True}, BA_PPO, (WEIGHTS, 0, 2 * STATES)),
    ({"vllm.tensor_parallel_size": 2}, BAPO_GRPO, (WEIGHTS / 2, 0, STATES)),
    (EVALUATED, BAPO_GRPO, (WEIGHTS, WEIGHTS, STATES)),
    (EVALUATED | {"eval.steps": 10}, BAPO_GRPO, (WEIGHTS, 0, STATES)),
    ({"eval.steps": 7}, BAPO_GRPO, (WEIGHTS, 0, STATES)),  # nothing to evaluate on
    ({"adapt.reevaluate_every": 3}, BAPO_GRPO, (WEIGHTS, WEIGHTS, STATES)),
    ({"adapt.rollout_delay": 2, "run.gradient_probe": 5}, BAPO_GRPO, (WEIGHTS, WEIGHTS, STATES)),
    (EVALUATED, GRPO, (WEIGHTS, 0, STATES)),  # its engines always have today's weights
])  # fmt: skip
def test_what_is_kept(flags, algorithm, expected):
    found = host(flags, algorithm)
    assert (found.engines, found.delayed, found.optimizers) == expected


def test_a_checkpoint_by_hand():
    """16-bit weights and the optimizer's states of each trained model, however many machines write it."""
    assert host().checkpoint == host(gpus=16).checkpoint == 2 * 14 * N == pytest.approx(112.6e9, abs=0.1e9)
    assert host(algorithm=BAPO_GRPO).checkpoint == 14 * N
    assert host({"ds.lora.rank": 4, "ds.lora.target_modules": ["q_proj"]}).checkpoint == 2 * (
        2 * N + 12 * 36 * 4 * (2560 + 4096)
    )


def test_the_page_has_a_row_for_each_number_of_gpus(capsys):
    assert main.run(["plan", "--config", str(ROOT / "configs" / "ba_ppo_qwen3_4b.yaml"), "--gpus", "8", "16"]) == 0
    lines = [line.strip("| ").split("|") for line in capsys.readouterr().out.splitlines() if "Qwen3-4B" in line]
    rows = [[cell.strip() for cell in row] for row in lines if len(row) == 8]
    assert [row[1] for row in rows] == ["8", "16"]
    assert rows[1] == ["Qwen3-4B", "16", "64.4", "0.0", "48.3", "48.3", "160.9", "112.6"]
