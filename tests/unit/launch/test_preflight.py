"""Bad input gives one ConfigError that names the flag and the value, before any model loads."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from bapo_openrlhf.cli import arguments
from bapo_openrlhf.data import prompts
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.flags import attention
from bapo_openrlhf.flags.openrlhf_flags import set_openrlhf_flags
from bapo_openrlhf.flags.rules import check_combinations
from bapo_openrlhf.flags.sizes import batch_arithmetic
from bapo_openrlhf.launch import preflight, reward_server
from bapo_openrlhf.launch.model_trial import Noisy
from bapo_openrlhf.launch.preflight import KEPT, check_inputs
from bapo_openrlhf.launch.questions import ANSWERS
from bapo_openrlhf.tasks import get_task

pytestmark = pytest.mark.usefixtures("without_models")

REWARD = "def reward_func(queries, prompts, labels):\n    return {'rewards': [0.5]}\n"


class Run:
    """A small valid run in a folder. `parse` and `check` take the flags that a test changes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text('{"model_type": "qwen2"}')
        (self.model / "pytorch_model.bin").touch()
        self.data = self.rows("train.jsonl", 8)
        self.reward = self.write("reward.py", REWARD)

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        return path

    def rows(self, name: str, count: int) -> Path:
        return self.write(name, "".join(f'{{"q": "1+{n}", "a": "{n + 1}"}}\n' for n in range(1, count + 1)))

    def parse(self, algorithm: str | None = "ba_ppo", **changed: object) -> SimpleNamespace:
        """The arguments of the run. In `changed`, __ is a dot, None leaves a flag out, and True gives it no value."""
        flags = {
            "actor__model_name_or_path": self.model,
            "actor__num_gpus_per_node": 2,
            "critic__num_gpus_per_node": 1,
            "ref__num_gpus_per_node": 1,
            "reward__remote_url": self.reward,
            "data__prompt_dataset": self.data,
            "data__input_key": "q",
            "data__label_key": "a",
            "rollout__batch_size": 8,
            "rollout__n_samples_per_prompt": 4,
            "train__batch_size": 8,
            "train__micro_batch_size": 2,
            "vllm__num_engines": 1,
            "run__dir": self.folder / "runs",
        } | changed
        words = ["--algorithm", algorithm] if algorithm else []
        for name, value in flags.items():
            if value is not None:
                words.append(f"--{name.replace('__', '.')}" + ("" if value is True else f"={value}"))
        return arguments.parse(words)

    def check(self, *, ahead: bool = False, **changed: object):
        return check_inputs(self.parse(**changed), ahead=ahead)

    def refusal(self, **changed: object) -> str:
        """The message of the ConfigError, which is one line."""
        with pytest.raises(ConfigError) as error:
            self.check(**changed)
        assert "\n" not in str(error.value)
        return str(error.value)


@pytest.fixture
def run(tmp_path) -> Run:
    return Run(tmp_path)


def test_a_good_run_passes(run):
    result = run.check()
    assert result.prompts == 8
    assert result.arithmetic.ranks == {"actor": 2, "critic": 1, "reference": 1}
    assert (result.arithmetic.capacity, result.arithmetic.group_size) == (8, 4)


def test_rows_are_kept_for_a_run_and_not_ahead(run):
    assert run.check(ahead=True).prompts == 8 and not (run.folder / "runs").exists()
    kept = run.check().kept["data.prompt_dataset"]
    assert Path(kept).parent == run.folder / "runs" / KEPT
    assert "," in run.refusal(run__dir=run.folder / "a,b")


def test_labels_are_tried_with_the_reward_function_of_a_task(run):
    rows = run.write("labels.jsonl", '{"q": "1+1", "a": {"ground_truth": "2"}}\n' * 8)
    assert "row 1: the label is " in run.refusal(data__prompt_dataset=rows, reward__remote_url=get_task("gsm8k").file)
    assert run.check(data__prompt_dataset=rows).prompts == 8  # a user's own


def test_max_samples_caps_the_prompts(run):
    rows = run.rows("more.jsonl", 9)
    assert run.check(data__prompt_dataset=rows, data__max_samples=8).prompts == 8


def test_max_samples_that_cut_the_evaluation_are_said(run):
    rows = run.write("held_out.jsonl", "".join(f'{{"q": "2+{n}", "a": "{n + 2}"}}\n' for n in range(9)))
    cut = run.check(eval__dataset=rows, eval__steps=1, data__max_samples=8).warnings
    assert len(cut) == 1 and cut[0].startswith("data.max_samples is 8, ")
    assert "only the first 8 of the 9 rows of eval.dataset" in cut[0]
    assert run.check(eval__dataset=rows, eval__steps=1, data__max_samples=9).warnings == ()


class TestModel:
    @pytest.mark.parametrize("content", ["[]", "null", '"qwen2"'])
    def test_a_configuration_that_is_no_object(self, run, content):
        (run.model / "config.json").write_text(content)
        assert run.refusal().endswith(f"; its config.json must be an object, and is {content}")

    def test_a_configuration_without_a_part_for_text(self, run):
        (run.model / "config.json").write_text('{"model_type": "qwen2", "text_config": null}')
        run.check()

    @pytest.mark.parametrize(
        ("config", "named"),
        [
            ({"model_type": "qwen2", "attention_dropout": 0.3}, "attention_dropout 0.3"),
            ({"model_type": "gpt2"}, "attn_pdrop 0.1"),  # by default
            ({"model_type": "mine", "text_config": {"hidden_dropout": 0.2}}, "hidden_dropout 0.2"),
        ],
    )
    def test_dropout_of_a_plain_run_is_said_once(self, run, config, named, monkeypatch):
        def answer_here(questions, question):
            if isinstance(question, Noisy):
                monkeypatch.setitem(ANSWERS, question, question.answer())
                questions._asked.append(question)

        monkeypatch.setattr("bapo_openrlhf.launch.questions.Questions.ask", answer_here)
        (run.model / "config.json").write_text(json.dumps(config))
        for algorithm in ("ppo", "grpo", "ba_ppo", "bapo_grpo"):
            said = [text for text in run.check(algorithm=algorithm).warnings if named in text]
            assert len(said) == (algorithm in ("ppo", "grpo"))
            assert all(text.startswith(f"actor.model_name_or_path is {run.model}, ") for text in said)

    def test_unset(self, run):
        text = run.refusal(actor__model_name_or_path=None, algorithm="grpo")
        assert text.startswith("actor.model_name_or_path is not set")

    def test_folder_without_config(self, run):
        (run.folder / "empty").mkdir()
        text = run.refusal(actor__model_name_or_path=run.folder / "empty")
        assert text.startswith(f"actor.model_name_or_path is {run.folder / 'empty'}; ") and "config.json" in text

    def test_weights_that_are_not_whole(self, run):
        (run.folder / "cut").mkdir()
        (run.folder / "cut" / "config.json").write_text("{}")
        (run.folder / "cut" / "model.safetensors").write_bytes(b"")
        text = run.refusal(critic__model_name_or_path=run.folder / "cut")
        assert text.startswith(f"critic.model_name_or_path is {run.folder / 'cut'}; model.safetensors has 0 bytes")

    @pytest.mark.parametrize("ahead", [True, False])
    def test_folder_without_tokenizer(self, run, monkeypatch, ahead):
        monkeypatch.setattr(preflight, "check_tokenizer", prompts.check_tokenizer)
        text = run.refusal(actor__model_name_or_path=run.model, ahead=ahead)
        assert text.startswith(f"actor.model_name_or_path is {run.model}; the folder has no tokenizer: ")

    def test_missing_folder(self, run, monkeypatch):
        (run.folder / "models").mkdir()
        monkeypatch.chdir(run.folder)
        for name in (run.folder / "none", "./none", "../none", "a/b/c", "models/none.json", "~/no/such/model"):
            text = run.refusal(actor__model_name_or_path=name)
            name = os.path.expanduser(name)
            where = "" if str(name)[0] == "/" else f" in the working directory {run.folder}"
            assert text == f"actor.model_name_or_path is {name}; there is no such model folder{where}"

    @pytest.mark.parametrize("absolute", [True, False])
    def test_missing_folder_beside_another(self, run, monkeypatch, absolute):
        """It is no name on the hub, and the folder with a name like it is said."""
        (run.folder / "runs" / "base_model").mkdir(parents=True)
        monkeypatch.chdir(run.folder)
        parent = run.folder / "runs" if absolute else Path("runs")
        text = run.refusal(actor__model_name_or_path=parent / "base_modle")
        assert text.startswith(f"actor.model_name_or_path is {parent / 'base_modle'}; there is no such model folder")
        assert text.endswith(f"; did you mean {parent / 'base_model'}?")
        assert "did you mean" not in run.refusal(actor__model_name_or_path=parent / "other")

    def test_a_file_is_no_model(self, run):
        assert "no such model folder" in run.refusal(actor__model_name_or_path=run.data)

    def test_critic(self, run):
        text = run.refusal(critic__model_name_or_path=run.folder / "none")
        assert text == f"critic.model_name_or_path is {run.folder / 'none'}; there is no such model folder"
        run.check(critic__model_name_or_path=run.folder / "none", algorithm="bapo_grpo")  # no critic there

    @pytest.mark.parametrize("name", ["Qwen/Qwen3-4B", "gpt2", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "a_b/c.d"])
    def test_hub_names_are_taken(self, run, name, monkeypatch):
        monkeypatch.chdir(run.folder)
        (run.folder / "Qwen").mkdir()
        run.check(actor__model_name_or_path=name, critic__model_name_or_path=name, ahead=True)

    def test_home_folder(self, run, monkeypatch):
        monkeypatch.setenv("HOME", str(run.folder))
        run.check(actor__model_name_or_path="~/model")


class TestData:
    """What the data must be is in tests/unit/data."""

    def test_unset(self, run):
        assert run.refusal(data__prompt_dataset=None).startswith("data.prompt_dataset is not set")

    @pytest.mark.parametrize("ahead", [True, False])
    def test_a_path_that_openrlhf_would_split(self, run, monkeypatch, ahead):
        (run.folder / "me@corp").mkdir()
        run.rows("me@corp/train.jsonl", 8)
        monkeypatch.chdir(run.folder / "me@corp")
        assert "/me@corp/train.jsonl has '@', " in run.refusal(data__prompt_dataset="train.jsonl", ahead=ahead)

    def test_evaluation_data_too(self, run):
        path = run.write("rows.jsonl", '{"q": "1", "a": "1"}\n{"q": "", "a": "1"}\n')
        text = run.refusal(eval__dataset=path)
        assert text == f"eval.dataset {path}, row 2: q is ''; it must be a text that is not empty"

    def test_nothing_is_downloaded_ahead(self, run, monkeypatch):
        monkeypatch.chdir(run.folder)
        assert run.check(data__prompt_dataset="org/data", ahead=True).prompts is None


@pytest.mark.parametrize("flag", ["actor.model_name_or_path", "critic.model_name_or_path"])
def test_a_dense_model_has_no_loss_of_a_router(run, flag):
    """OpenRLHF would look for it in the first optimizer step."""
    experts = run.folder / "experts"
    experts.mkdir()
    (experts / "config.json").write_text('{"model_type": "qwen3_moe", "output_router_logits": false}')
    (experts / "pytorch_model.bin").touch()
    models = {"actor__model_name_or_path": experts, "critic__model_name_or_path": experts}
    assert run.check(actor__aux_loss_coef=0.5, **models).prompts == 8
    models[flag.replace(".", "__")] = run.model
    text = run.refusal(actor__aux_loss_coef=0.5, **models)
    assert text.startswith(f"actor.aux_loss_coef is 0.5, and {flag} is {run.model}; it must be 0 then")
    assert run.check(**models).prompts == 8


class Pictures:
    """A run whose rows have images; the model has vision."""

    def __init__(self, run: Run) -> None:
        self.run = run
        (run.model / "config.json").write_text('{"model_type": "qwen2_vl", "vision_config": {}}')
        (run.model / "preprocessor_config.json").write_text("{}")
        self.good = self.image("good.png")

    def image(self, name: str, **options: object) -> Path:
        path = self.run.folder / name
        Image.new("RGB", (8, 8)).save(path, **options)
        return path

    def flags(self, *rows: dict, **changed: object) -> dict:
        """The flags of a run on one good row and then these rows."""
        good = {"q": "<image>Find x.", "a": "1", "images": [str(self.good)]}
        path = self.run.folder / "pictures.jsonl"
        path.write_text("".join(json.dumps(good | row) + "\n" for row in [{}, *rows]), encoding="utf-8")
        return {
            "algorithm": "bapo_grpo",
            "data__prompt_dataset": path,
            "data__max_images_per_prompt": 1,
            "data__apply_chat_template": True,
            **dict.fromkeys(("rollout__batch_size", "rollout__micro_batch_size", "train__micro_batch_size"), 1),
            "train__batch_size": 4,
        } | changed

    def check(self, *rows: dict, **changed: object):
        return self.run.check(**self.flags(*rows, **changed))

    def refusal(self, *rows: dict, **changed: object) -> str:
        """The message about the second row."""
        text = self.run.refusal(**self.flags(*rows, **changed))
        where, said = text.split(": ", 1)
        assert where == f"data.prompt_dataset {self.run.folder / 'pictures.jsonl'}, row 2"
        return said


@pytest.fixture
def pictures(run) -> Pictures:
    return Pictures(run)


class TestImages:
    @pytest.mark.parametrize(
        ("flags", "refused"),
        [
            ({}, True),
            ({"actor__freeze_visual_encoder": True}, False),
            ({"actor__freeze_visual_encoder": True, "ds__zero_stage": 3}, True),
            ({"actor__num_gpus_per_node": 1, "ds__zero_stage": 3}, False),
            ({"ds__tensor_parallel_size": 2, "ref__num_gpus_per_node": 2}, False),  # both ranks have the same samples
        ],
    )
    def test_rows_with_and_without_images(self, pictures, flags, refused):
        """Several ranks would wait for each other: one of them runs the part that sees, and another one does not."""
        rows = [{"q": "1 + 1?", "images": []}, {"q": "1 + 2?", "images": None}]
        if refused:
            assert pictures.refusal(*rows, **flags).startswith("the row has no image, and data.prompt_dataset ")
        else:
            pictures.check(*rows, **flags)

    def test_good_rows_pass(self, pictures):
        assert pictures.check().prompts == 1
        text_only = {"q": "2+2", "images": None}
        chat = {"q": [{"role": "system", "content": "Think."}, {"role": "user", "content": "<image>Find x."}]}
        parts = {"q": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Find x."}]}]}
        only_image = {"images": str(pictures.good)}
        empty = [text_only | {"images": []}, text_only | {"images": [None]}]
        rows, one_rank = (text_only, chat, parts, only_image, *empty), {"actor__num_gpus_per_node": 1}
        assert pictures.check(*rows, **one_rank).prompts == 7

    def test_a_run_without_images_is_left_alone(self, run):
        rows = '{"q": "what does <image> mean in HTML?", "a": "2", "images": null}\n' * 8
        for algorithm in ("ba_ppo", "bapo_grpo"):
            run.check(algorithm=algorithm, data__prompt_dataset=run.write("text.jsonl", rows))

    @pytest.mark.parametrize("algorithm", ["ba_ppo", "ppo"])
    def test_no_critic_with_images(self, pictures, algorithm):
        with pytest.raises(ConfigError) as error:
            pictures.run.parse(**pictures.flags(algorithm=algorithm))
        assert str(error.value) == (
            f"data.max_images_per_prompt is 1, and algo.advantage.estimator gae (algorithm {algorithm}) needs a "
            "critic; OpenRLHF has no critic for images: use --algorithm bapo_grpo, or grpo"
        )

    def test_no_critic_by_estimator(self, pictures):
        with pytest.raises(ConfigError, match=r"is 1, and algo.advantage.estimator gae needs a critic; .* bapo_grpo"):
            pictures.run.parse(**pictures.flags(algorithm=None))
        for algorithm in ("grpo", "bapo_grpo"):
            pictures.run.parse(**pictures.flags(algorithm=algorithm))
        pictures.run.parse(**pictures.flags(algorithm="bapo_grpo", algo__advantage__estimator="rloo"))

    @pytest.mark.parametrize("algorithm", ["ba_ppo", "ppo"])
    def test_no_critic_for_rows_with_images(self, pictures, algorithm):
        text = pictures.run.refusal(**pictures.flags(algorithm=algorithm, data__max_images_per_prompt=0))
        assert ", row 1: it has images, and the critic is " in text and "use --algorithm bapo_grpo, or grpo" in text

    @pytest.mark.parametrize(
        ("flag", "value"),
        [("ds.packing_samples", True), ("train.dynamic_batch_enable", True), ("ds.ring_attn_size", 2)],
    )
    @pytest.mark.parametrize("algorithm", ["grpo", "bapo_grpo"])
    def test_no_packing_with_images(self, pictures, algorithm, flag, value):
        """OpenRLHF itself refuses only the first flag. Later it switches packing on for the other two."""
        changed = {flag.replace(".", "__"): value, "algorithm": algorithm}
        with pytest.raises(ConfigError, match=rf"^data.max_images_per_prompt is 1, and {flag} packs samples; "):
            pictures.run.parse(**pictures.flags(**changed))

    def test_packing_without_images(self, run):
        assert run.parse(ds__packing_samples=True).ds.packing_samples

    @pytest.mark.parametrize("algorithm", ["grpo", "bapo_grpo"])
    def test_rows_with_images_in_a_run_without(self, pictures, algorithm):
        """OpenRLHF would train a model without vision on the text only, and say nothing."""
        text = pictures.run.refusal(**pictures.flags(algorithm=algorithm, data__max_images_per_prompt=None))
        assert text.endswith(", row 1: it has images: 1; data.max_images_per_prompt is 0, it must be at least 1")

    def test_more_images_than_allowed(self, pictures):
        row = {"q": "<image><image><image>?", "images": [str(pictures.good)] * 3}
        said = pictures.refusal(row, data__max_images_per_prompt=2)
        assert said == "it has images: 3; data.max_images_per_prompt is 2, it must be at least 3"
        pictures.check(row, data__max_images_per_prompt=3)

    def test_missing_file(self, pictures):
        assert pictures.refusal({"images": ["/no/such.png"]}) == "there is no image /no/such.png"

    def test_a_path_is_taken_from_the_working_directory(self, pictures, monkeypatch):
        monkeypatch.chdir(pictures.run.folder)
        pictures.check({"images": ["good.png"]})
        monkeypatch.chdir("/")
        assert pictures.refusal({"images": ["good.png"]}) == "there is no image good.png"

    def test_what_does_not_open(self, pictures):
        text = pictures.run.write("text.png", "no image")
        empty = pictures.run.write("empty.png", "")
        folder = pictures.run.folder
        for path in (text, empty, folder):
            assert pictures.refusal({"images": [str(path)]}).startswith(f"image {path} does not open: ")
        assert "does not open: " in pictures.refusal({"images": ["iVBOR" * 200]})  # base64 without data:image in front
        assert "does not open: " in pictures.refusal({"images": ["nul\0.png"]})

    @pytest.mark.parametrize("kind", ["png", "jpg"])
    def test_what_is_cut(self, pictures, kind):
        path = pictures.run.folder / f"cut.{kind}"
        Image.linear_gradient("L").save(path)
        pictures.check({"images": [str(path)]})
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        said = pictures.refusal({"images": [str(path)]})
        assert said.startswith(f"image {path} does not open: ") and "truncated" in said

    @pytest.mark.parametrize(("width", "height"), [(1, 201), (403, 2)])
    def test_too_thin(self, pictures, width, height):
        path = pictures.run.folder / "thin.png"
        Image.new("RGB", (width, height)).save(path)
        assert pictures.refusal({"images": [str(path)]}) == (
            f"image {path} has {width} x {height} pixels; the longer side must have at most 200 times the pixels of "
            "the shorter one"
        )
        Image.new("RGB", (200, 1)).save(path)
        pictures.check({"images": [str(path)]})

    def test_each_image_of_a_row_is_looked_at(self, pictures):
        row = {"q": "<image><image>?", "images": [str(pictures.good), "gone.png"]}
        assert pictures.refusal(row, data__max_images_per_prompt=2) == "there is no image gone.png"

    @pytest.mark.parametrize(
        "image", ["https://example.org/1.png", "http://example.org/1.png", "data:image/png;base64,AAAA"]
    )
    def test_addresses_and_inline_data_are_left_to_openrlhf(self, pictures, image):
        pictures.check({"images": [image]})

    @pytest.mark.parametrize(("image", "kind"), [({"bytes": None, "path": "1.png"}, "dict"), (7, "int")])
    def test_images_are_paths(self, pictures, image, kind):
        """OpenRLHF leaves out images that do not open, with a warning."""
        said = pictures.refusal({"images": [image]})
        assert said == f"an image is of type {kind}; it must be the path of a file"

    @pytest.mark.parametrize(
        ("row", "images", "places"),
        [
            ({"q": "Find x."}, 1, 0),
            ({"q": "<image><image>Find x."}, 1, 2),
            ({"images": None}, 0, 1),
            ({"images": []}, 0, 1),
            ({"q": [{"role": "user", "content": "Find x."}]}, 1, 0),
            ({"q": [{"role": "user", "content": [{"type": "text", "text": "Find x."}]}]}, 1, 0),
            ({"q": [{"role": "user", "content": "<image>"}, {"role": "user", "content": "<image>"}]}, 1, 2),
        ],
    )
    def test_as_many_images_as_places(self, pictures, row, images, places):
        assert pictures.refusal(row) == (
            f"{images} images (data.image_key images) and {places} <image> in the prompt; the two numbers must be equal"
        )

    def test_a_wrong_image_key_is_noticed(self, pictures):
        text = pictures.run.refusal(**pictures.flags(data__image_key="pictures"))
        assert "0 images (data.image_key pictures) and 1 <image> in the prompt" in text

    def test_places_need_a_chat_template(self, pictures):
        text = pictures.run.refusal(**pictures.flags(data__apply_chat_template=None))
        assert "only through a chat template: data.apply_chat_template" in text
        # with the model's own placeholder in the text, none is needed
        row = {"q": "<|vision_start|><|image_pad|><|vision_end|>Find x.", "a": "1", "images": [str(pictures.good)]}
        path = pictures.run.write("own.jsonl", json.dumps(row) + "\n")
        pictures.check(data__prompt_dataset=path, data__apply_chat_template=None)

    def test_other_formats(self, pictures):
        import pyarrow
        from pyarrow import parquet

        path = pictures.run.folder / "rows.parquet"
        row = {"q": "<image>Find x.", "a": "1", "images": [str(pictures.good)]}
        parquet.write_table(pyarrow.Table.from_pylist([row, row | {"images": ["gone.png"]}]), path)
        text = pictures.run.refusal(**pictures.flags(data__prompt_dataset=path))
        assert text == f"data.prompt_dataset {path}, row 2: there is no image gone.png"

    def test_evaluation_data_too(self, pictures):
        path = pictures.run.write("eval.jsonl", '{"q": "<image>?", "a": "1", "images": ["gone.png"]}\n')
        text = pictures.run.refusal(**pictures.flags(eval__dataset=path))
        assert text == f"eval.dataset {path}, row 1: there is no image gone.png"

    def test_a_model_without_vision(self, pictures):
        (pictures.run.model / "config.json").write_text('{"model_type": "qwen2"}')
        text = pictures.run.refusal(**pictures.flags())
        asked = f"data.max_images_per_prompt is 1, and actor.model_name_or_path is {pictures.run.model}"
        assert text.startswith(f"{asked}, a model without vision")
        pictures.run.check()  # without images it needs none

    def test_a_model_without_its_processor(self, pictures):
        (pictures.run.model / "preprocessor_config.json").unlink()
        assert "no image processor" in pictures.run.refusal(**pictures.flags())
        (pictures.run.model / "processor_config.json").write_text("{}")
        pictures.check()

    def test_a_config_that_is_no_json(self, pictures):
        (pictures.run.model / "config.json").write_text("{")
        assert "its config.json is not valid JSON" in pictures.run.refusal(**pictures.flags())

    def test_a_model_on_the_hub_is_left_alone(self, pictures, monkeypatch):
        monkeypatch.chdir(pictures.run.folder)
        pictures.check(actor__model_name_or_path="Qwen/Qwen2.5-VL-3B-Instruct", ahead=True)


DICT = 'it must be a dict with rewards, as in {"rewards": [1.0]}'


def test_a_folder_of_wandbs_runs_is_no_package(run, monkeypatch):
    (run.folder / "wandb").mkdir()
    monkeypatch.syspath_prepend(run.folder)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    own = [place for place in sys.path if not (Path(place) / "wandb" / "__init__.py").exists()]
    monkeypatch.setattr(sys, "path", own)
    assert run.refusal(logger__wandb__key="k").startswith("logger.wandb.key is set; it needs the package wandb")


class TestReward:
    def reward(self, run: Run, text: str) -> Path:
        return run.write("other.py", text)

    @pytest.mark.parametrize("more", ["none.py", "http://localhost:5000"])
    def test_one_file(self, run, more):
        both = f"{run.reward},{more}"
        text = f"reward.remote_url is {both}; it must be one .py file, or only addresses"
        assert run.refusal(reward__remote_url=both) == text

    def test_not_importable(self, run):
        path = self.reward(run, "1 / 0")
        result = run.refusal(reward__remote_url=path)
        assert result.startswith(f"reward.remote_url {path} cannot be imported: ZeroDivisionError")

    @pytest.mark.parametrize("text", ["", "def reward(queries, prompts, labels): ...", "reward_func = 3"])
    def test_no_function(self, run, text):
        path = self.reward(run, text)
        assert run.refusal(reward__remote_url=path).startswith(
            f"reward.remote_url {path} defines no function reward_func"
        )

    @pytest.mark.parametrize(
        "line",
        [
            "import subprocess; subprocess.run(['true'], stdout=sys.stderr)",
            "import faulthandler; faulthandler.enable(); faulthandler.disable()",
            "sys.stdout.buffer.write(b'x')",
            "sys.stdout.encoding.lower()",
            "sys.stdout.reconfigure(line_buffering=True)",
            "print('x', flush=True)",
        ],
    )
    def test_may_use_what_standard_output_has(self, run, line, capfd):
        del capfd  # so that standard error is a file
        text = f"import sys\ndef reward_func(queries, prompts, labels):\n    {line}\n    return {{'rewards': [1.0]}}\n"
        run.check(reward__remote_url=self.reward(run, text))

    def test_may_make_tokens_after_this_process_has_made_some_in_parallel(self, run, monkeypatch):
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
        line = "Tokenizer(WordLevel({'a': 0}, 'a')).encode_batch(['a'] * 1000)"
        text = (
            "from tokenizers import Tokenizer\nfrom tokenizers.models import WordLevel\n"
            f"def reward_func(queries, prompts, labels):\n    {line}\n    return {{'rewards': [1.0]}}\n"
        )
        namespace: dict[str, Any] = {}
        exec(text, namespace)
        namespace["reward_func"]([], [], [])
        run.check(reward__remote_url=self.reward(run, text), verifier__timeout=20)

    def test_raises(self, run):
        path = self.reward(run, "def reward_func(queries, prompts, labels):\n    raise KeyError('answer')\n")
        text = run.refusal(reward__remote_url=path)
        assert text == (
            f"reward.remote_url {path}: reward_func raised KeyError: 'answer' ({path}:2), called with an empty "
            "response to the first prompt"
        )

    def test_takes_too_long(self, run):
        """As in a run, where its process is killed: also if it holds the interpreter's lock."""
        path = self.reward(run, "import re\ndef reward_func(*a):\n    re.match('(a+)+b', 'a' * 99)\n")
        text = run.refusal(reward__remote_url=path, verifier__timeout=0.1)
        assert text.startswith(f"reward.remote_url {path}: reward_func took more than 0.1 s (verifier.timeout), called")
        assert text.endswith(f" ({path}:2)") and not multiprocessing.active_children()

    @pytest.mark.parametrize("processes", [0, 1])
    @pytest.mark.parametrize(
        ("code", "status"),
        [
            ("os._exit(3)", "exit status 3"),
            ("ctypes.string_at(0)", "killed by signal 11 (Segmentation fault)"),
        ],
    )
    def test_ends_its_process(self, run, code, status, processes):
        """A limit of memory is only that of a process of its own."""
        path = self.reward(run, f"import ctypes, os\ndef reward_func(*a):\n    {code}\n")
        assert run.refusal(reward__remote_url=path, verifier__processes=processes) == (
            f"reward.remote_url {path}: reward_func ended its process ({status}), called with an empty response to the "
            f"first prompt ({path}:2)"
        )
        path = run.write("loaded.py", f"import ctypes, os\n{code}\n")
        ended = f"reward.remote_url {path}: loading it ended its process ({status})"
        assert run.refusal(reward__remote_url=path, verifier__processes=processes) == ended

    def test_takes_too_much_memory(self, run):
        # It does not ask for memory itself, because a process of tests may have kept that much of what was freed.
        path = self.reward(
            run,
            "def reward_func(*a):\n    import resource\n"
            "    if resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY:\n"
            "        raise MemoryError\n    return {'rewards': [1.0]}\n",
        )
        assert run.refusal(reward__remote_url=path, verifier__memory_gib=0.25) == (
            f"reward.remote_url {path}: reward_func ran out of memory: more than 0.25 GiB beyond the loaded file "
            f"(verifier.memory_gib), called with an empty response to the first prompt ({path}:1)"
        )
        run.check(reward__remote_url=path, verifier__memory_gib=0.25, verifier__processes=0)

    @pytest.mark.parametrize("fails", [False, True])
    def test_what_it_prints_is_cut(self, run, capfd, fails):
        text = "import sys\ndef reward_func(*a):\n    print('one')\n"
        text += "    for n in range(3000): print('x' * 99, file=sys.stderr)\n"
        path = self.reward(run, text + ("    1 / 0\n" if fails else "    return {'rewards': [1.0]}\n"))
        if fails:
            run.refusal(reward__remote_url=path)
        else:
            run.check(reward__remote_url=path)
        out, err = capfd.readouterr()
        assert out == "" and err.startswith(("one\n" + ("x" * 99 + "\n") * 3000)[:4096] + "\n")
        assert err.rstrip().endswith(f"{path}: 295,908 bytes that its code printed are left out; the first 4,096 of a "
                                     "call are shown")  # fmt: skip

    @pytest.mark.parametrize("when", ["loading", "calling"])
    def test_what_c_code_prints_is_cut_too(self, run, capfd, when):
        """A library in C, or a program, knows only the descriptors."""
        prints = "os.write(1, b'c' * 9); subprocess.run(['head', '-c', '20000000', '/dev/zero'])"
        function = f"def reward_func(*a):\n    {prints if when == 'calling' else 'pass'}\n"
        load = prints if when == "loading" else ""
        path = self.reward(run, f"import os, subprocess\n{load}\n{function}    return {{'rewards': [1.0]}}\n")
        run.check(reward__remote_url=path)
        out, err = capfd.readouterr()
        assert out == "" and err.startswith("c" * 9 + "\0" * 4087 + "\n") and "19,995,913 bytes" in err[4096:]

    def test_an_import_that_never_ends(self, run):
        path = run.write("loaded.py", "while True: pass\ndef reward_func(*a): pass\n")
        assert run.refusal(reward__remote_url=path, verifier__timeout=0.5) == (
            f"reward.remote_url {path}: loading it took more than 0.5 s (verifier.timeout)"
        )

    def test_takes_other_arguments(self, run):
        path = self.reward(run, "def reward_func(queries):\n    return {'rewards': [1.0]}\n")
        text = run.refusal(reward__remote_url=path)
        assert "reward_func raised TypeError" in text
        assert text.endswith("; it must take the arguments queries, prompts, labels")

    def test_is_async(self, run):
        path = self.reward(run, "async def reward_func(queries, prompts, labels):\n    return {'rewards': [1.0]}\n")
        assert "; it must not be async" in run.refusal(reward__remote_url=path)

    @pytest.mark.parametrize(
        "text",
        [
            "import functools\nreward_func = functools.partial(lambda *a: None)\n",
            "class Reward:\n    def __call__(self, *a): pass\nreward_func = Reward()\n",
        ],
    )
    def test_a_function_that_is_an_object_has_a_place(self, run, text):
        path = self.reward(run, text)
        assert run.refusal(reward__remote_url=path).endswith(f" ({path}:2)")

    def test_without_a_place(self, run):
        path = self.reward(run, "reward_func = max\n")
        assert run.refusal(reward__remote_url=path).endswith(DICT)

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ("1.0", "returned 1.0, a float; " + DICT),
            ("[1.0]", "returned [1.0], a list; " + DICT),
            ("None", "returned None, a NoneType; " + DICT),
            ("{'reward': [1.0]}", "returned {'reward': [1.0]}; " + DICT),
            ("{'rewards': []}", "returned rewards = [] for one response; one finite number is needed"),
            ("{'rewards': [1.0, 0.0]}", "returned rewards = [1.0, 0.0] for one response; one finite number is needed"),
            ("{'rewards': float('nan')}", "returned rewards = nan for one response; one finite number is needed"),
            ("{'rewards': [float('inf')]}", "returned rewards = [inf] for one response; one finite number is needed"),
            ("{'rewards': 1.0, 'scores': 'x'}", "returned scores = 'x' for one response; one finite number is needed"),
            ("{'rewards': ['right']}", "returned rewards = ['right'] for one response; one finite number is needed"),
            ("{'rewards': [None]}", "returned rewards = [None] for one response; one finite number is needed"),
            ("{'rewards': 1.0, 'extra_logs': 3}", "returned extra_logs = 3; it must be a dict of numbers"),
        ],
    )
    def test_returns_no_reward(self, run, value, message):
        path = self.reward(run, f"def reward_func(*a):\n    return {value}\n")
        assert run.refusal(reward__remote_url=path) == f"reward.remote_url {path}: reward_func {message} ({path}:1)"

    @pytest.mark.parametrize("value", ["[1]", "0.25", "(True,)", "np.array([[0.5]])", "np.float32(2)"])
    def test_one_number_in_any_shape_is_fine(self, run, value):
        text = f"import numpy as np\ndef reward_func(*a):\n    return {{'rewards': {value}}}\n"
        run.check(reward__remote_url=self.reward(run, text))

    def test_gets_the_first_row_as_openrlhf_calls_it(self, run):
        note = run.folder / "note.json"
        path = self.reward(
            run,
            "import json\n"
            f"def reward_func(*a):\n    json.dump(a, open({str(note)!r}, 'w'))\n    return {{'rewards': [1.0]}}\n",
        )
        run.check(reward__remote_url=path)
        assert json.loads(note.read_text()) == [["1+1"], ["1+1"], ["2"]]

    def test_is_not_called_without_local_data(self, run):
        path = self.reward(run, "def reward_func(*a):\n    raise KeyError\n")
        run.check(reward__remote_url=path, data__prompt_dataset="org/data", ahead=True)
        with pytest.raises(ConfigError):
            run.check(reward__remote_url=path)

    def test_a_server_is_asked_as_a_function_is(self, run, monkeypatch):
        asked = []

        def check(*given, send_responses):
            asked.append((*given, send_responses))
            return ["it is slow"]

        monkeypatch.setattr(reward_server, "check_reward_servers", check)
        for sent in (False, True):
            flags = {"reward__remote_url": "http://a, http://b", "verifier__send_responses": sent or None}
            assert "it is slow" in run.check(**flags).warnings
        assert asked == [(["http://a", "http://b"], ("1+1", "2"), sent) for sent in (False, True)]

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [("", True), (", **others", True), (", responses", False), (", responses=None, **others", False)],
    )
    def test_prompts_that_it_cannot_find_are_said_unless_it_names_the_responses(self, run, arguments, said):
        path = self.reward(run, f"def reward_func(queries, prompts, labels{arguments}):\n    return {{'rewards': 1}}\n")
        args = run.parse(reward__remote_url=path)
        assert preflight.check_reward(args, ("1+1", "2"), ["so it is"]) == ["so it is"] * said

    @pytest.mark.parametrize("sent", [False, True])
    def test_prompts_that_a_server_cannot_find_are_said(self, run, monkeypatch, sent):
        monkeypatch.setattr(reward_server, "check_reward_servers", lambda *_, **__: [])
        args = run.parse(reward__remote_url="http://a", verifier__send_responses=sent or None)
        assert preflight.check_reward(args, ("1+1", "2"), ["so it is"]) == ["so it is"] * (not sent)


class TestBatch:
    @pytest.mark.parametrize("groups", [1, 2, 3, 5])
    def test_a_batch_may_hold_any_number_of_groups(self, run, groups):
        # 2 ranks x 6 = 12 samples = 3 groups of 4
        result = run.check(adapt__batch_size=groups, train__micro_batch_size=6, train__batch_size=12)
        assert result.arithmetic.capacity == groups

    def test_no_reference_ranks_where_no_reference_model_is_built(self, run):
        result = run.check(adapt__kl_target="behaviour", ref__num_gpus_per_node=7)
        assert result.arithmetic.ranks == {"actor": 2, "critic": 1}

    def test_no_engines(self, run):
        assert run.refusal(vllm__num_engines=None) == "vllm.num_engines is None; it must be at least 1"


class TestCombinations:
    REFUSED = ("train.partial_rollout_enable", "algo.dynamic_filtering_enable")

    @pytest.mark.parametrize("ranks", [(4, 2, 1), (2, 4, 1), (2, 2, 4), (2, 1, 3)])
    def test_dynamic_batching_takes_any_ranks(self, run, ranks):
        flags = dict(zip(("actor", "critic", "ref"), ranks, strict=True))
        args = run.parse("ba_ppo", **{f"{model}__num_gpus_per_node": count for model, count in flags.items()})
        args.train.dynamic_batch_enable = True  # the flag itself asks for packing
        assert tuple(batch_arithmetic(args).ranks.values()) == ranks

    def test_asynchronous_mode(self, run):
        ahead = {"train__async_enable": True}
        run.check(**ahead, adapt__max_staleness=0)
        for method in ("mopps", "dots", "exgrpo", "ar3po"):
            text = f"train.async_enable is True; it must be False with adapt.method {method}, because what it generates"
            assert run.refusal(**ahead, adapt__method=method).startswith(text)
        text = run.refusal(**ahead, rollout__vllm_generate_batch_size=4096)
        assert text.startswith("rollout.vllm_generate_batch_size is 4096; with adapt.method bapo it must be at most")
        assert run.refusal(adapt__max_staleness=1) == "adapt.max_staleness is 1; it needs train.async_enable"

    def test_a_probe_of_gradients_needs_them_in_one_process(self, run):
        every = {"run__gradient_probe": 4}
        run.check(**every, actor__num_gpus_per_node=1, critic__num_gpus_per_node=2)

    def test_length_penalties_of_responses_that_are_not_trained_on(self, run):
        """They are not known, and the advantages of the others would need them. With a critic they are not needed."""
        long, stop = {"reward__overlong_buffer_len": 4}, {"reward__stop_properly_penalty_coef": 0.5}
        for method in ("rollout_replay", "ar3po"):
            for flag, text in ((long, "overlong_buffer_len is 4.0"), (stop, "stop_properly_penalty_coef is 0.5")):
                refusal = run.refusal(algorithm="bapo_grpo", **flag, adapt__method=method)
                assert refusal.startswith(f"reward.{text}; with adapt.method {method} it must not be set, because ")
                run.check(algorithm="ba_ppo", **flag, adapt__method=method)
        for method in ("pods", "arpo", "bapo"):
            run.check(algorithm="bapo_grpo", **long, adapt__method=method)
            run.check(algorithm="bapo_grpo", **stop, adapt__method=method)

    @pytest.mark.parametrize(
        ("flag", "value"),
        [
            ("critic_lambd", 0.0),
            ("value_pretraining", 2),
            ("critic_groups", "generated"),
            ("critic_baseline", "batch"),
            ("length_adaptive_lambd", 0.05),
        ],
    )
    def test_flags_of_a_critic_need_a_critic_and_batch_adaptation(self, run, flag, value):
        run.check(algorithm="ba_ppo", **{f"adapt__{flag}": value})
        for algorithm, estimator, method in (("bapo_grpo", "group_norm", "bapo"), ("ppo", "gae", "none")):
            text = rf"^adapt\.{flag} is {value}; it needs .*estimator is {estimator} with adapt.method {method}$"
            with pytest.raises(ConfigError, match=text):
                check_inputs(run.parse(algorithm, **{f"adapt__{flag}": value}))

    @pytest.mark.parametrize("algorithm", ["ba_ppo", "bapo_grpo"])
    def test_resuming_is_allowed(self, run, algorithm):
        args = run.parse(algorithm, ckpt__load_enable=True)
        before = repr(args)
        check_combinations(args)
        set_openrlhf_flags(args)
        assert args.ckpt.load_enable is True and repr(args) == before

    @pytest.mark.parametrize("algorithm", ["ppo", "grpo", None])
    @pytest.mark.parametrize("flag", [*REFUSED, "ckpt.load_enable"])
    def test_left_alone_without(self, run, algorithm, flag):
        args = run.parse(algorithm, train__async_enable=True, **{flag.replace(".", "__"): True})
        before = repr(args)
        check_combinations(args)
        set_openrlhf_flags(args)
        assert repr(args) == before

    def test_behaviour_ratio_leaves_openrlhfs_correction_alone(self, run):
        correction = {"level": "seq", "mode": "mask", "gating": "tv", "threshold": "0.4"}
        args = run.parse(**{f"algo__advantage__is_correction_{key}": value for key, value in correction.items()})
        set_openrlhf_flags(args)
        advantage = args.algo.advantage
        assert (advantage.is_correction_level, advantage.is_correction_mode) == ("seq", "mask")
        assert (advantage.is_correction_gating, advantage.is_correction_threshold) == ("tv", [0.0, 0.4])

    def test_decoupled_ratio_is_openrlhfs_clipped_token_weight(self, run):
        args = run.parse(adapt__ratio="decoupled", algo__advantage__is_correction_threshold=3)
        set_openrlhf_flags(args)
        advantage = args.algo.advantage
        assert (advantage.is_correction_level, advantage.is_correction_mode) == ("token", "clip")
        assert (advantage.is_correction_gating, advantage.is_correction_threshold) == ("ratio", [0.0, 3.0])

    def test_decoupled_ratio_takes_a_correction_as_it_is_given(self, run):
        correction = {"level": "seq", "mode": "mask", "gating": "binary_kl", "threshold": "0.005"}
        flags = {f"algo__advantage__is_correction_{key}": value for key, value in correction.items()}
        args = run.parse(adapt__ratio="decoupled", **flags)
        set_openrlhf_flags(args)
        advantage = args.algo.advantage
        assert (advantage.is_correction_level, advantage.is_correction_mode) == ("seq", "mask")
        assert (advantage.is_correction_gating, advantage.is_correction_threshold) == ("binary_kl", [0.0, 0.005])


def test_attention_without_its_package(run, monkeypatch):
    """As on a machine with a GPU and without flash-attn."""
    monkeypatch.setenv("BAPO_OPENRLHF_CPU", "0")
    monkeypatch.setattr(attention, "find_spec", lambda name: None)
    assert run.refusal().startswith("ds.attn_implementation is flash_attention_2; it needs the package flash-attn")
    run.check(ds__attn_implementation="sdpa")
