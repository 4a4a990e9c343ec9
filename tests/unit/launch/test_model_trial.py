"""Models that transformers or vLLM would not load whole are refused, and whole ones are not. No numbers are loaded."""

import json
import shutil
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.launch.apart import ANSWERS, Questions
from bapo_openrlhf.launch.model_trial import (
    check_generation,
    check_loading,
    check_schedule,
    check_sync,
    warn_of_dropout,
)

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1, "vocab_size": 32, "max_position_embeddings": 64,
         "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
# vLLM has no kernels for smaller mixtures of experts.
EXPERTS = SIZES | {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 2,
                   "num_local_experts": 2, "num_experts_per_tok": 1}  # fmt: skip
VISION = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2}
ROTARY = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
IMAGES = {"image_token_id": 28, "video_token_id": 29, "vision_start_token_id": 30, "vision_end_token_id": 31}
KINDS = {
    "llama": SIZES,
    "llama tied": SIZES | {"tie_word_embeddings": True},
    "qwen2 tied": SIZES | {"tie_word_embeddings": True},
    "qwen3": SIZES | {"head_dim": 8},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 32, "n_positions": 64},
    "gpt_neox": {name: size for name, size in SIZES.items() if name != "num_key_value_heads"},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 32},
    "mixtral": EXPERTS,
    "qwen2_vl": {"text_config": SIZES | {"rope_parameters": ROTARY}, "vision_config": VISION} | IMAGES,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name, sizes in KINDS.items():
        config = transformers.AutoConfig.for_model(name.split()[0], **sizes)
        kind = transformers.AutoModelForImageTextToText if "vl" in name else transformers.AutoModelForCausalLM
        kind.from_config(config).to(torch.bfloat16).save_pretrained(root / name)
    return root


@pytest.fixture
def folder(models, tmp_path):
    return lambda kind="qwen3": shutil.copytree(models / kind, tmp_path / kind)


def weights_of(folder) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def write(folder, weights) -> None:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def change(folder, file="config.json", **values) -> None:
    path = folder / file
    changed = json.loads(path.read_text()) | values
    path.write_text(json.dumps({name: value for name, value in changed.items() if value is not None}))


def load(folder, role="actor", **more) -> list[str]:
    return check_loading(f"{role}.model_name_or_path is {folder}", str(folder), role, **more)


def refusal(check) -> str:
    """The message of the error, after flag and value."""
    with pytest.raises(ConfigError) as error:
        check()
    return str(error.value).partition("; ")[2]


class TestLoaded:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("form", ["safetensors", "bin"])
    def test_a_whole_model(self, folder, kind, form):
        path = folder(kind)
        if form == "bin":
            torch.save(weights_of(path), path / "pytorch_model.bin")
            (path / "model.safetensors").unlink()
        assert load(path) == []
        if kind != "qwen2_vl":  # OpenRLHF has no critic for images
            assert load(path, "critic") == []
            assert "score.weight" in refusal(lambda: load(path, "reward"))

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.data())
    def test_each_weight_counts(self, models, tmp_path_factory, data):
        """One that is missing, too many, or of another shape is named, and nothing else."""
        kind = data.draw(st.sampled_from(sorted(KINDS.keys() - {"qwen2_vl"})))
        path = tmp_path_factory.mktemp("broken") / kind
        shutil.copytree(models / kind, path)
        weights = weights_of(path)
        name = data.draw(st.sampled_from(sorted(weights)))
        how = data.draw(st.sampled_from(["missing", "surplus", "shape"]))
        head = name in ("lm_head.weight", "embed_out.weight")
        part = name if kind not in ("mixtral", "qwen2_moe") or "expert" not in name else name.split(".mlp.")[0]
        part = "lm_head.weight" if head else part  # as transformers names it
        if how == "surplus":
            changed = name.replace("layers.1.", "layers.2.").replace("h.1.", "h.2.")
            # transformers takes any name with "attn.bias" for a table that an old version of GPT-2 saved.
            changed = f"{name.replace('bias', 'weight')}.more" if changed == name else changed
            write(path, weights | {changed: weights[name].clone()})
            assert any(changed in warning for warning in load(path))
            assert load(path, "critic") == [] or not head
            return
        if how == "missing":
            del weights[name]
        else:
            weights[name] = torch.zeros(3, 5, dtype=torch.bfloat16)
        write(path, weights)
        if "expert" not in name:
            assert part in refusal(lambda: load(path))
        else:
            refusal(lambda: load(path))  # a part of a tensor that transformers merges
        if head:
            assert load(path, "critic") == []

    @pytest.mark.parametrize(("kind", "saved"), [
        ("qwen2 tied", lambda weights: {"lm_head.weight": weights["model.embed_tokens.weight"].clone(), **weights}),
        ("llama tied", lambda weights: {name.removeprefix("model."): one for name, one in weights.items()}),
        ("llama", lambda weights: weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
    ], ids=["a tied head", "without the prefix of a model with a head", "a table that old versions saved"])  # fmt: skip
    def test_what_is_whole_too(self, folder, kind, saved):
        path = folder(kind)
        write(path, saved(weights_of(path)))
        assert load(path) == load(path, "critic") == []

    def test_a_model_that_is_tied_no_more_needs_its_head(self, folder):
        path = folder("qwen2 tied")
        change(path, tie_word_embeddings=False)
        assert "it has no weights lm_head.weight, " in refusal(lambda: load(path))
        assert load(path, "critic") == []  # it needs no language model

    def test_a_reward_model_has_a_head_that_gives_one_score(self, folder):
        path = folder()
        weights = weights_of(path)
        write(path, weights | {"value.weight": torch.zeros(1, 16)})
        assert load(path, "reward", head="value") == []
        assert "it has no weights score.weight, the head that gives a score" in refusal(lambda: load(path, "reward"))
        change(path, value_head_prefix="value")  # it wins, as in OpenRLHF
        assert load(path, "reward") == []
        write(path, weights | {"value.weight": torch.zeros(2, 16)})
        for role in ("reward", "critic"):
            assert "its weights value.weight are [2, 16], " in refusal(lambda role=role: load(path, role))

    def test_quantized_weights(self, folder):
        path = folder()
        weights = weights_of(path)
        name = "model.layers.0.mlp.up_proj.weight"
        write(path, weights | {name: weights[name].to(torch.float8_e4m3fn)})
        assert "its weights are quantized (F8_E4M3)" in refusal(lambda: load(path))
        write(path, weights | {name: weights[name].double()})  # F64, which is not F6_E2M3
        assert load(path) == []
        write(path, weights)
        change(path, quantization_config={"quant_method": "gptq"})
        assert "its weights are quantized (gptq)" in refusal(lambda: load(path, "critic"))

    def test_what_transformers_refuses(self, folder):
        path = folder()
        change(path, "generation_config.json", pad_token_id=-1)
        assert "pad_token_id" in refusal(lambda: load(path))
        change(path, "generation_config.json", pad_token_id=0)
        change(path, auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"})
        assert "modeling_mine.py" in refusal(lambda: load(path))
        change(path, model_type=None, auto_map=None)
        assert "model_type" in refusal(lambda: load(path))

    def test_adapters_are_of_its_matrices(self, folder):
        for kind, ours, others in (("qwen3", "q_proj", "c_attn"), ("gpt2", "c_attn", "q_proj")):
            path = folder(kind)
            assert load(path, adapted=(ours,)) == []
            with pytest.raises(ConfigError, match=rf"^ds\.lora\.target_modules is {others}; "):
                load(path, adapted=(others,))
        assert load(folder("llama"), adapted=("lm_head",)) == []
        with pytest.raises(ConfigError, match=r"^ds\.lora\.target_modules is lm_head; .*tie_word_embeddings"):
            load(folder("llama tied"), adapted=("lm_head",))


class TestGenerates:
    def ask(self, folder, longest=64) -> list[str]:
        return check_generation(f"actor.model_name_or_path is {folder}", str(folder), longest)

    def test_a_model_that_vllm_takes(self, folder):
        path = folder()
        assert self.ask(path) == []
        assert "max_position_embeddings=64" in refusal(lambda: self.ask(path, 65))

    def test_what_generates_no_text(self, folder):
        path = folder()
        change(path, architectures=None)
        assert "it for a Qwen3Model, which generates no text" in refusal(lambda: self.ask(path))

    def test_quantized_weights(self, folder):
        path = folder()
        says = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}
        (path / "hf_quant_config.json").write_text(json.dumps(says))
        assert "quantized (modelopt)" in refusal(lambda: self.ask(path))


@pytest.mark.parametrize(("config", "named"), [
    ({"model_type": "qwen2", "attention_dropout": 0.3}, ["attention_dropout 0.3"]),
    ({"model_type": "gpt2"}, ["attn_pdrop 0.1"]),  # by default
    ({"model_type": "mine", "text_config": {"hidden_dropout": 0.2}}, ["hidden_dropout 0.2"]),
    ({"model_type": "qwen2"}, []),
])  # fmt: skip
def test_dropout_is_named(tmp_path, config, named):
    (tmp_path / "config.json").write_text(json.dumps(config))
    warnings = warn_of_dropout(f"actor.model_name_or_path is {tmp_path}", str(tmp_path))
    assert len(warnings) == len(named) and all(name in text for name, text in zip(named, warnings, strict=True))


KIND_OF_SCHEDULE = ["linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup",
                    "inverse_sqrt", "cosine_with_min_lr", "cosine_warmup_with_min_lr"]  # fmt: skip


@given(
    kind=st.sampled_from(KIND_OF_SCHEDULE),
    rate=st.sampled_from([1e-8, 1e-7, 1e-6]),
    warm_up=st.sampled_from([0.0, 0.03, 0.5, 1.0]),
    steps=st.integers(1, 40),
)
def test_a_schedule_is_refused_if_a_run_with_it_would_fail(kind, rate, warm_up, steps):
    """The reference makes all steps of a run."""
    try:
        optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=rate)
        more = {"min_lr_rate": 0.1} if "min_lr" in kind else {}
        schedule = transformers.get_scheduler(kind, optimizer, -int(-steps * warm_up // 1), steps, more)
        for _ in range(steps):
            optimizer.step()
            schedule.step()
        fails = False
    except (ZeroDivisionError, ValueError):
        fails = True
    check = partial(check_schedule, f"actor.lr_scheduler is {kind}", "actor", kind, rate, warm_up, 0.1, steps)
    if fails:
        assert kind == "polynomial" and "with a learning rate of" in refusal(check)
    else:
        assert check() == []


@pytest.mark.parametrize(
    ("kind", "says"), [("qwen3", None), ("gpt2", None), ("gpt_neox", "lm_head"), ("mixtral", "mlp")]
)
def test_vllm_takes_the_names_that_a_sync_sends(models, kind, says):
    """It begins a group of processes, so that each model is asked about in a process of its own."""
    folder = str(models / kind)
    check = partial(check_sync, f"actor.model_name_or_path is {folder}", folder, 64)
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as apart:
        if says is None:
            assert apart.submit(check).result() == []
        else:
            assert says in refusal(apart.submit(check).result)


def unknown(about: str) -> list[str]:
    return [about]


def test_questions_are_answered_in_order_and_once():
    """The process of the answers does not know the function that is defined here, and ends."""
    ANSWERS.clear()
    fine, other, wrong = (
        ("actor.lr_scheduler is polynomial", check_schedule, "actor", "polynomial", 1e-6, share, 0.1, 9)
        for share in (0, 0.5, 1)
    )
    with Questions() as questions:
        for question in (fine, fine, other, wrong, ("f is 3", unknown)):
            questions.ask(*question)
        with pytest.raises(ConfigError, match=r"lr_warmup_ratio 1 it fails after step 9 of 9"):
            questions.answers()
    assert {(about, function, tuple(rest)): [] for about, function, *rest in (fine, other)} == ANSWERS
    with Questions() as questions:
        questions.ask(*fine)  # without a process
        assert questions.answers() == []
        questions.ask("f is 3", unknown)
        with pytest.raises(ConfigError, match=r"^f is 3; a process that tried it ended \(exit status 1\)$"):
            questions.answers()
