"""What a smoke run changes in each preset, and that it changes nothing else."""

import json
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import yaml

from bapo_openrlhf import user_file
from bapo_openrlhf.cli import arguments
from bapo_openrlhf.flags.config import flags_of
from bapo_openrlhf.flags.conflicts import COMBINATIONS
from bapo_openrlhf.flags.rule import Flags, check_rules
from bapo_openrlhf.launch.start import ON_THE_CPU
from bapo_openrlhf.workbench.smoke import reduce, reward, run

ROOT = Path(__file__).resolve().parents[3]
published = user_file.load("models", ROOT / "tests" / "stack" / "preset_models.py")


def parse(*words):
    return arguments.parse([str(word) for word in words])


def used(args, **facts):
    return {change.name: change.replacement for change in reduce.reductions(args, **facts)}


@pytest.fixture
def critic():
    return parse("--config", ROOT / "configs" / "ba_ppo_qwen3_4b.yaml")


@pytest.mark.parametrize("cpu", [True, False])
@pytest.mark.parametrize("preset", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_each_preset_keeps_all_other_flags(preset, cpu, tmp_path):
    """The file that `train` gets says what was asked for, but for the changes, and the checks of a start pass."""
    given = parse("--config", preset)
    changes = used(given, cpu=cpu)
    file = tmp_path / "config.yaml"
    defaults = {action.dest: action.default for action in arguments.build_parser("train")._actions}
    file.write_text(yaml.safe_dump(reduce.settings(given, defaults, changes)))
    args = parse("--config", file)
    before, after = (json.loads(json.dumps(flags_of(parse))) for parse in (given, args))
    assert {name for name in before if before[name] != after[name]} == {*changes, "config"}
    assert {name: after[name] for name in changes} == changes
    check_rules(COMBINATIONS, Flags.of(args))
    assert args.ckpt.save_steps == 1 and args.adapt.rollout_delay <= 2 and args.adapt.reevaluate_every <= 2
    assert args.data.max_samples <= args.rollout.batch_size * 2
    if cpu:
        assert {name: after[name] for name in ON_THE_CPU} == ON_THE_CPU
        assert args.rollout.batch_size <= 2 and args.rollout.max_new_tokens <= 16 and args.train.batch_size <= 8
        assert args.actor.num_gpus_per_node * args.actor.num_nodes <= 2 and args.vllm.num_engines <= 2
    if args.train.colocate_all:
        assert args.actor.num_gpus_per_node == args.vllm.num_engines * args.vllm.tensor_parallel_size


@pytest.mark.parametrize(
    ("delay", "every", "expected"),
    [(5, 10, (2, 2)), (5, 2, (2, 1)), (5, 0, (2, 0)), (1, 4, (1, 1)), (2, 4, (2, 2))],
)
def test_syncs_and_reevaluations_keep_their_order(critic, delay, every, expected):
    """Together with the fresh prompts after a sync, or between two syncs, so that the engines get their weights."""
    critic.adapt.rollout_delay, critic.adapt.reevaluate_every = delay, every
    actual = flags_of(critic) | used(critic, cpu=False)
    assert (actual["adapt.rollout_delay"], actual["adapt.reevaluate_every"]) == expected


def test_nothing_is_evaluated(critic):
    """`check` refuses eval.steps without data."""
    critic.eval.dataset, critic.eval.steps = "eval.jsonl", 4
    result = used(critic, cpu=False)
    assert (result["eval.dataset"], result["eval.steps"]) == (None, -1)


@pytest.mark.parametrize(("budget", "expected"), [(4096, 8), (3, 3)])
def test_responses_still_stop_when_they_are_short(critic, budget, expected):
    critic.adapt.partial_rollout_tokens = budget
    assert (flags_of(critic) | used(critic, cpu=True))["adapt.partial_rollout_tokens"] == expected
    assert "adapt.partial_rollout_tokens" not in used(critic, cpu=False)


def needed(args):
    return reduce.gpus_needed(args, reduce.reductions(args, cpu=False))


def test_gpus_needed_are_those_of_the_reduced_run(critic):
    """On one machine, and with fewer engines; these have GPUs of their own beside asynchronous training."""
    assert needed(critic) == 8
    critic.actor.num_nodes = critic.critic.num_nodes = critic.ref.num_nodes = 2
    critic.vllm.num_engines = 16
    assert needed(critic) == 8
    critic.train.async_enable = True
    assert needed(critic) == 16


def shrunk(name, cpu):
    config = published.config_of(name)
    text, vision = config.get_text_config(), getattr(config, "vision_config", None)
    changes = list(reduce.smaller("model", text, cpu=cpu))
    if vision is not None:
        changes += reduce.smaller("vision", vision, cpu=cpu, hidden=text.hidden_size)
    return text, vision, changes


@pytest.mark.parametrize("name", published.SIZES)
def test_a_published_model_with_gpus_only_loses_layers(name):
    text, vision, changes = shrunk(name, cpu=False)
    layers, width, heads, keys, mlp, vocabulary, _ = published.SIZES[name]
    result = (text.hidden_size, text.num_attention_heads, text.num_key_value_heads, text.intermediate_size)
    assert result == (width, heads, keys, mlp) and text.vocab_size == vocabulary
    assert text.num_hidden_layers == len(text.layer_types) == 2
    assert (changes[0].name, changes[0].value, changes[0].replacement) == ("model num_hidden_layers", layers, 2)
    assert len(changes) == 1 + (vision is not None)
    if vision is not None:
        assert (vision.depth, vision.out_hidden_size, vision.fullatt_block_indexes) == (2, width, [1])


@pytest.mark.parametrize("name", published.SIZES)
def test_a_published_model_on_the_cpu(name):
    text, vision, _ = shrunk(name, cpu=True)
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    assert text.vocab_size == published.SIZES[name][5]
    assert (text.num_hidden_layers, text.hidden_size, text.num_attention_heads, head) == (2, 64, 2, 32)
    assert text.num_key_value_heads == 1  # several heads share a key, as before
    if vision is not None:
        assert sum(text.rope_parameters["mrope_section"]) == head // 2
        assert vision.hidden_size % vision.num_heads == 0 and vision.out_hidden_size == text.hidden_size


@pytest.fixture
def folder(tmp_path):
    """A model's folder without weights that can be used: its file of weights is broken."""
    (tmp_path / "given").mkdir()
    config = published.transformers.Qwen2Config(
        vocab_size=99, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4
    )
    config.save_pretrained(tmp_path / "given")
    (tmp_path / "given" / "model.safetensors").write_text("no weights")
    (tmp_path / "given" / "tokenizer.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize("scores", [False, True])
def test_the_small_model_has_the_files_of_the_given_one_and_new_weights(folder, scores):
    reduce.make_small_model("given", folder / "given", folder / "small", cpu=True, scores=scores)
    kind = getattr(published.transformers, f"AutoModelFor{'SequenceClassification' if scores else 'CausalLM'}")
    result, loading = kind.from_pretrained(folder / "small", output_loading_info=True)
    assert not loading["missing_keys"] and str(result.dtype) == "torch.bfloat16"
    assert result.config.vocab_size == 99 and result.config.num_key_value_heads == 2
    assert not scores or result.score.weight.shape == (1, 64)
    assert (folder / "small" / "tokenizer.json").read_text() == "{}"


def test_a_reward_model_has_a_head_of_its_own_although_it_is_the_actors_folder(folder):
    model = SimpleNamespace(model_name_or_path=str(folder / "given"))
    models = {"actor": model, "critic": model, "reward": model}
    args = SimpleNamespace(**models, run=SimpleNamespace(dir=str(folder), name="mine"))
    names, _ = run.Smoke(args, {}, None)._small_models(True)
    configs = [json.loads(Path(name, "config.json").read_text()) for name in names.values()]
    heads = [config["architectures"][0].removeprefix("Qwen2For") for config in configs]
    assert [*names] == [f"{role}.model_name_or_path" for role in models]
    assert heads == ["CausalLM", "CausalLM", "SequenceClassification"] and len({*names.values()}) == 2


def test_a_model_that_is_not_here_and_a_hub_that_cannot_be_read(monkeypatch):
    def fail(name, **_):
        raise OSError("no route to the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ValueError, match=r"actor.model_name_or_path is A/B; .*no route"):
        reduce.source_folder("actor.model_name_or_path", "A/B")


def test_rewards_are_decided_by_the_text_and_the_true_function_is_called(tmp_path):
    true = tmp_path / "true.py"
    true.write_text(
        "def reward_func(queries, prompts, labels, **kwargs):\n"
        "    if labels == ['bad']:\n        raise KeyError('bad')\n"
        "    return {'rewards': 9.0, 'extra_logs': {'length': len(queries[0] + kwargs['responses'][0])}}\n"
    )
    reward.write_reward(tmp_path / "smoke.py", str(true), -1.0, 3.0)
    function = user_file.load("reward", tmp_path / "smoke.py").reward_func

    def value(result):
        return float(result["rewards"][0])

    groups = []
    for prompt in map(str, range(40)):
        queries = [f"{prompt} answer {number}" for number in range(8)]
        result = [function([query], [prompt], ["good"], ["x"]) for query in queries]
        assert [value(f) for f in result] == [value(function([q], [prompt], ["other"], ["x"])) for q in queries]
        assert [float(f["extra_logs"]["length"][0]) for f in result] == [len(query) + 1 for query in queries]
        groups.append([value(f) for f in result])
    assert {number for group in groups for number in group} == {-1.0, 3.0}
    assert sum(len(set(group)) == 2 for group in groups) > 25  # most groups have something to learn from
    assert any(group.count(3.0) <= 1 for group in groups)  # and some are hard
    with pytest.raises(KeyError, match="bad"):
        function(["query"], ["prompt"], ["bad"], [""])
    with pytest.raises(ValueError, match="one finite number"):
        reward.by_hash(lambda *_, **__: {"rewards": [float("nan")]}, 0.0, 1.0)(["q"], ["p"], [""], [""])
