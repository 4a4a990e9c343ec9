"""Bad input gives one ConfigError that names the flag and the value, before any model loads."""

import json
import multiprocessing
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from bapo_openrlhf.cli import arguments
from bapo_openrlhf.data import prompts
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.flags.checked import set_openrlhf_flags
from bapo_openrlhf.launch import apart, environment, preflight, rewards
from bapo_openrlhf.launch.model_trial import warn_of_dropout
from bapo_openrlhf.launch.preflight import KEPT, check_inputs
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
            "actor__model_name_or_path": self.model, "reward__remote_url": self.reward,
            "data__prompt_dataset": self.data, "data__input_key": "q", "data__label_key": "a",
            "actor__num_gpus_per_node": 2, "critic__num_gpus_per_node": 1, "ref__num_gpus_per_node": 1,
            "rollout__batch_size": 8, "rollout__n_samples_per_prompt": 4, "train__batch_size": 8,
            "train__micro_batch_size": 2, "vllm__num_engines": 1, "run__dir": self.folder / "runs",
        } | changed  # fmt: skip
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


def test_rows_are_kept_for_a_run_and_not_ahead(run):
    assert run.check(ahead=True).prompts == 8 and not (run.folder / "runs").exists()
    assert Path(run.check().kept["data.prompt_dataset"]).parent == run.folder / "runs" / KEPT
    assert "," in run.refusal(run__dir=run.folder / "a,b")


def test_labels_are_tried_with_the_reward_function_of_a_task(run):
    rows = run.write("labels.jsonl", '{"q": "1+1", "a": {"ground_truth": "2"}}\n' * 8)
    assert "row 1: the label is " in run.refusal(data__prompt_dataset=rows, reward__remote_url=get_task("gsm8k").file)
    assert run.check(data__prompt_dataset=rows).prompts == 8  # a user's own


def test_what_the_machine_lacks_is_said(run, monkeypatch):
    monkeypatch.setattr(preflight, "warnings_of_machine", lambda: ["nvcc is 12.4"])
    assert run.check().warnings == ("nvcc is 12.4",)


def test_max_samples_that_cut_the_evaluation_are_said(run):
    rows = run.write("held_out.jsonl", "".join(f'{{"q": "2+{n}", "a": "{n + 2}"}}\n' for n in range(9)))
    (cut,) = run.check(eval__dataset=rows, eval__steps=1, data__max_samples=8).warnings
    assert cut.startswith("data.max_samples is 8, ") and "8 of the 9 rows of eval.dataset" in cut
    assert run.check(eval__dataset=rows, eval__steps=1, data__max_samples=9).warnings == ()


class TestModel:
    @pytest.mark.parametrize("content", ["[]", "{"])
    def test_a_configuration_that_is_no_object(self, run, content):
        (run.model / "config.json").write_text(content)
        assert run.refusal().startswith(f"actor.model_name_or_path is {run.model}; its config.json ")
        (run.model / "config.json").write_text('{"model_type": "qwen2", "text_config": null}')
        run.check()

    def test_dropout_of_a_plain_run_is_asked_for_once(self, run, monkeypatch):
        asked = []
        monkeypatch.setattr("bapo_openrlhf.launch.apart.Questions.ask", lambda _, *question: asked.append(question))
        for algorithm in ("ppo", "grpo", "ba_ppo", "bapo_grpo"):
            asked.clear()
            run.check(algorithm=algorithm)
            assert sum(function is warn_of_dropout for _, function, *_ in asked) == (algorithm in ("ppo", "grpo"))

    @pytest.mark.parametrize("flag", ["actor.model_name_or_path", "critic.model_name_or_path"])
    @pytest.mark.parametrize("files", [[], ["config.json"]])
    def test_a_folder_that_is_no_model(self, run, flag, files):
        """It has no configuration, or no weights. What its weights must be is in test_model_files.py."""
        (folder := run.folder / "folder").mkdir()
        for file in files:
            (folder / file).write_text("{}")
        assert run.refusal(**{flag.replace(".", "__"): folder}).startswith(f"{flag} is {folder}; ")

    def test_folder_without_tokenizer(self, run, monkeypatch):
        monkeypatch.setattr(preflight, "check_tokenizer", prompts.check_tokenizer)
        text = run.refusal(actor__model_name_or_path=run.model)
        assert text.startswith(f"actor.model_name_or_path is {run.model}; ") and "tokenizer" in text

    def test_missing_folder(self, run, monkeypatch):
        (run.folder / "models").mkdir()
        monkeypatch.chdir(run.folder)
        for name in (run.folder / "none", "./none", "models/none.json", "~/no/such/model"):
            text = run.refusal(actor__model_name_or_path=name)
            name = os.path.expanduser(name)
            assert text.startswith(f"actor.model_name_or_path is {name}; ")
            assert (str(run.folder) in text.replace(str(name), "")) == (str(name)[0] != "/")

    @pytest.mark.parametrize("absolute", [True, False])
    def test_missing_folder_beside_another(self, run, monkeypatch, absolute):
        """It is no name on the hub, and the folder with a name like it is said."""
        (run.folder / "runs" / "base_model").mkdir(parents=True)
        monkeypatch.chdir(run.folder)
        parent = run.folder / "runs" if absolute else Path("runs")
        text = run.refusal(actor__model_name_or_path=parent / "base_modle")
        assert text.endswith(f"; did you mean {parent / 'base_model'}?")
        assert "did you mean" not in run.refusal(actor__model_name_or_path=parent / "other")

    def test_a_critic_that_is_not_there_matters_only_if_it_is_loaded(self, run):
        for name in (run.folder / "none", run.data):
            assert run.refusal(critic__model_name_or_path=name).startswith(f"critic.model_name_or_path is {name}; ")
            run.check(critic__model_name_or_path=name, algorithm="bapo_grpo")

    @pytest.mark.parametrize("name", ["Qwen/Qwen3-4B", "gpt2", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "a_b/c.d"])
    def test_hub_names_are_taken(self, run, name, monkeypatch):
        monkeypatch.chdir(run.folder)
        (run.folder / "Qwen").mkdir()
        run.check(actor__model_name_or_path=name, critic__model_name_or_path=name, ahead=True)


@pytest.mark.parametrize("flag", ["data.prompt_dataset", "actor.model_name_or_path"])
def test_unset(run, flag):
    """What else the data must be is in tests/unit/data."""
    assert run.refusal(algorithm="grpo", **{flag.replace(".", "__"): None}).startswith(f"{flag} is not set")


@pytest.mark.parametrize("flag", ["actor.model_name_or_path", "critic.model_name_or_path"])
def test_a_dense_model_has_no_loss_of_a_router(run, flag):
    """OpenRLHF would look for it in the first optimizer step."""
    experts = shutil.copytree(run.model, run.folder / "experts")
    (experts / "config.json").write_text('{"model_type": "qwen3_moe", "output_router_logits": false}')
    models = {"actor__model_name_or_path": experts, "critic__model_name_or_path": experts}
    run.check(actor__aux_loss_coef=0.5, **models)
    models[flag.replace(".", "__")] = run.model
    said = run.refusal(actor__aux_loss_coef=0.5, **models)
    assert said.startswith(f"actor.aux_loss_coef is 0.5, and {flag} is {run.model}; ")
    run.check(**models)


@pytest.fixture
def pictures(run, monkeypatch):
    """pictures(row..., flag=value...): the flags of a run on one good row and then these rows; the model has vision.

    A path of an image is taken from the working directory.
    """
    monkeypatch.chdir(run.folder)
    (run.model / "config.json").write_text('{"model_type": "qwen2_vl", "vision_config": {}}')
    (run.model / "preprocessor_config.json").write_text("{}")
    Image.new("RGB", (8, 8)).save("good.png")

    def flags(*rows: dict, **changed: object) -> dict:
        good = {"q": "<image>Find x.", "a": "1", "images": ["good.png"]}
        text = "\n".join(json.dumps(good | row) for row in [{}, *rows])
        return {
            "algorithm": "bapo_grpo",
            "data__prompt_dataset": run.write("pictures.jsonl", text),
            "data__max_images_per_prompt": 2,
            "data__apply_chat_template": True,
            **dict.fromkeys(("rollout__batch_size", "rollout__micro_batch_size", "train__micro_batch_size"), 1),
            "train__batch_size": 4,
        } | changed

    return flags


def user(content: object) -> dict:
    return {"role": "user", "content": content}


class TestImages:
    @pytest.mark.parametrize(("flags", "refused"), [
        ({}, True),
        ({"actor__freeze_visual_encoder": True}, False),
        ({"actor__freeze_visual_encoder": True, "ds__zero_stage": 3}, True),
        ({"actor__num_gpus_per_node": 1, "ds__zero_stage": 3}, False),
        ({"ds__tensor_parallel_size": 2, "ref__num_gpus_per_node": 2}, False),  # both ranks have the same samples
    ])  # fmt: skip
    def test_rows_with_and_without_images(self, run, pictures, flags, refused):
        """Several ranks would wait for each other: one of them runs the part that sees, and another one does not."""
        flags = pictures({"q": "1 + 1?", "images": []}, {"q": "1 + 2?", "images": None}, **flags)
        if refused:
            assert "row 2: " in (text := run.refusal(**flags)) and "no image" in text
        else:
            run.check(**flags)

    def test_good_rows_pass(self, run, pictures):
        """Addresses and inline data are left to OpenRLHF."""
        Image.new("RGB", (300, 1)).save("long.png")  # a processor may refuse it: test_prompts.py
        chat = {"q": [{"role": "system", "content": "Think."}, user("<image>Find x.")]}
        parts = {"q": [user([{"type": "image"}, {"type": "text", "text": "Find x."}])]}
        names = (["long.png"], "good.png", ["https://example.org/1.png"], ["data:image/png;base64,AAAA"])
        text_only = [{"q": "2+2", "images": nothing} for nothing in (None, [], [None])]
        rows = [chat, parts, *({"images": name} for name in names), *text_only]
        assert run.check(**pictures(*rows, actor__num_gpus_per_node=1)).prompts == 1 + len(rows)

    @pytest.mark.parametrize(("row", "says"), [
        ({"q": "Find x."}, "1 images (data.image_key images) and 0 <image>"),
        ({"q": "<image><image>Find x."}, "1 images (data.image_key images) and 2 <image>"),
        ({"images": None}, "0 images (data.image_key images) and 1 <image>"),
        ({"q": [user("Find x.")]}, "1 images (data.image_key images) and 0 <image>"),
        ({"q": [user([{"type": "text", "text": "Find x."}])]}, "1 images (data.image_key images) and 0 <image>"),
        ({"q": [user("<image>"), user("<image>")]}, "1 images (data.image_key images) and 2 <image>"),
        ({"q": 3 * "<image>", "images": 3 * ["good.png"]}, "images: 3; data.max_images_per_prompt is 2"),
        ({"q": 2 * "<image>", "images": ["good.png", "gone.png"]}, "image gone.png"),
        ({"images": ["text.png"]}, "image text.png "),
        ({"images": ["cut.png"]}, "image cut.png "),
        ({"images": ["cut.jpg"]}, "image cut.jpg "),
        ({"images": ["."]}, "image . "),
        ({"images": ["iVBOR" * 200]}, "image iVBOR"),
        ({"images": ["nul\0.png"]}, "image nul\0.png"),
        ({"images": [{"path": "1"}]}, "image is of type dict"),
    ])  # fmt: skip
    def test_what_is_wrong_with_a_row_is_named(self, run, pictures, row, says):
        """OpenRLHF leaves out an image that does not open, with a warning."""
        run.write("text.png", "no image")
        for path in (Path("cut.png"), Path("cut.jpg")):
            Image.linear_gradient("L").save(path)
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        text = run.refusal(**pictures(row))
        assert text.startswith(f"data.prompt_dataset {run.folder}/pictures.jsonl, row 2: ") and says in text

    @pytest.mark.parametrize(("flags", "says"), [
        ({"algorithm": "ba_ppo", "data__max_images_per_prompt": 0}, "--algorithm"),  # no critic sees images
        ({"algorithm": "ppo", "data__max_images_per_prompt": 0}, "--algorithm"),
        ({"algorithm": "grpo", "data__max_images_per_prompt": None}, "data.max_images_per_prompt is 0"),
        ({"data__max_images_per_prompt": None}, "data.max_images_per_prompt is 0"),
        ({"data__image_key": "pictures"}, "data.image_key pictures"),
        ({"data__apply_chat_template": None}, "data.apply_chat_template"),
    ])  # fmt: skip
    def test_rows_with_images_in_a_run_that_cannot_see_them(self, run, pictures, flags, says):
        """OpenRLHF would train a model without vision on the text only, and say nothing."""
        text = run.refusal(**pictures(**flags))
        assert ", row 1: " in text and says in text

    def test_the_models_own_placeholder_needs_no_chat_template(self, run, pictures):
        row = {"q": "<|vision_start|><|image_pad|><|vision_end|>Find x.", "a": "1", "images": ["good.png"]}
        path = run.write("own.jsonl", json.dumps(row))
        run.check(**pictures(data__prompt_dataset=path, data__apply_chat_template=None))

    def test_of_an_evaluation_in_another_format(self, run, pictures):
        from pyarrow import Table, parquet

        path = run.folder / "rows.parquet"
        rows = [{"q": "<image>Find x.", "a": "1", "images": [name]} for name in ("good.png", "gone.png")]
        parquet.write_table(Table.from_pylist(rows), path)
        text = run.refusal(**pictures(eval__dataset=path))
        assert text.startswith(f"eval.dataset {path}, row 2: ") and "gone.png" in text

    def test_a_model_without_its_processor_or_vision(self, run, pictures):
        (run.model / "preprocessor_config.json").unlink()
        assert "image processor" in run.refusal(**pictures())
        (run.model / "processor_config.json").write_text("{}")
        run.check(**pictures())
        (run.model / "config.json").write_text('{"model_type": "qwen2"}')
        asked = f"data.max_images_per_prompt is 2, and actor.model_name_or_path is {run.model}"
        assert run.refusal(**pictures()).startswith(asked)
        run.check()  # without images it needs none


GOOD = "return {'rewards': [1.0]}"


def source(body: str, before: str = "", signature: str = "*a") -> str:
    """A reward file whose function begins in line 2."""
    return f"{before or 'import os, re, resource, subprocess, sys'}\ndef reward_func({signature}):\n    {body}\n"


# A file, the line that the error names, and what else it names.
REFUSED = {
    "not importable": ("1 / 0", 1, "ZeroDivisionError"),
    "no function": ("def reward(queries, prompts, labels): ...", 0, "reward_func"),
    "raises": (source("raise KeyError('answer')"), 3, "KeyError"),
    "other arguments": (source(GOOD, signature="queries"), 2, "queries, prompts, labels"),
    "async": (source(GOOD).replace("def", "async def"), 2, "async"),
    "no dict": (source("return 1.0"), 2, "1.0"),
    "no number": (source("return {'rewards': float('nan')}"), 2, "nan"),
    "an object": ("class Reward:\n    def __call__(self, *a): pass\nreward_func = Reward()", 2, "None"),
    "of C": ("reward_func = max", 0, "rewards"),
    "too slow": (source("re.match('(a+)+b', 'a' * 99)"), 2, "verifier.timeout"),  # it holds the interpreter's lock
    "too slow to load": ("while True: pass", 0, "loading it took more than 0.5 s"),
    "ends": (source("os._exit(3)"), 2, "exit status 3"),
    "ends in a run without processes of its own": (source("os._exit(3)"), 2, "exit status 3"),
    "ends in its import": ("import os; os._exit(3)", 0, "exit status 3"),
}


class TestReward:
    def test_is_called_once_as_openrlhf_calls_it_if_there_is_a_row(self, run):
        note = run.folder / "note.json"
        path = run.write("other.py", source(f"json.dump(a, open({str(note)!r}, 'x')); {GOOD}", "import json"))
        run.check(reward__remote_url=path, data__prompt_dataset="org/data", ahead=True)
        assert not note.exists()
        run.check(reward__remote_url=path)
        assert json.loads(note.read_text()) == [["1+1"], ["1+1"], ["2"]]

    def test_may_use_what_standard_output_has(self, run, capfd):
        del capfd  # so that standard error is a file
        lines = [
            "subprocess.run(['true'], stdout=sys.stderr)",
            "__import__('faulthandler').enable(); __import__('faulthandler').disable()",
            "sys.stdout.buffer.write(b'x')",
            "sys.stdout.encoding.lower()",
            "sys.stdout.reconfigure(line_buffering=True)",
            "print('x', flush=True)",
        ]
        run.check(reward__remote_url=run.write("other.py", source(f"{'; '.join(lines)}; {GOOD}")))

    def test_may_make_tokens_after_this_process_has_made_some_in_parallel(self, run, monkeypatch):
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
        before = "from tokenizers import Tokenizer; from tokenizers.models import WordLevel"
        text = source(f"Tokenizer(WordLevel({{'a': 0}}, 'a')).encode_batch(['a'] * 1000); {GOOD}", before)
        namespace: dict[str, Any] = {}
        exec(text, namespace)
        namespace["reward_func"]()
        run.check(reward__remote_url=run.write("other.py", text), verifier__timeout=20)

    @pytest.mark.parametrize("name", REFUSED)
    def test_is_refused_by_file_and_line(self, run, monkeypatch, name):
        text, line, named = REFUSED[name]
        if name == "too slow to load":
            monkeypatch.setattr(apart, "LOADING", 0.5)
        path = run.write("other.py", f"{text}\n")
        limits = {"verifier__timeout": 0.5 if "slow" in name else 20, "verifier__processes": int("without" not in name)}
        said = run.refusal(reward__remote_url=path, **limits)
        assert said.startswith(f"reward.remote_url {path}") and named in said
        assert (f"({path}:{line})" in said) if line else f"({path}:" not in said
        assert not multiprocessing.active_children()

    def test_takes_too_much_memory(self, run):
        """It does not ask for memory itself, because a process of tests may have kept that much of what was freed."""
        limit = "resource.getrlimit(resource.RLIMIT_DATA)[0]"
        body = f"if {limit} != resource.RLIM_INFINITY:\n        raise MemoryError\n    {GOOD}"
        flags = {"reward__remote_url": run.write("other.py", source(body)), "verifier__memory_gib": 0.25}
        assert "0.25 GiB beyond the loaded file (verifier.memory_gib)" in run.refusal(**flags)
        run.check(**flags, verifier__processes=0)

    def test_what_c_code_prints_is_cut_too(self, run, capfd):
        """A library in C, or a program, knows only the descriptors: when the file is loaded, and when it is called."""
        before = "import os, subprocess; os.write(1, b'c' * 9)"
        text = source(f"subprocess.run(['head', '-c', '20000000', '/dev/zero']); {GOOD}", before)
        run.check(reward__remote_url=run.write("other.py", text))
        out, err = capfd.readouterr()
        assert out == "" and err.startswith("c" * 9 + "\0" * 4087 + "\n") and "19,995,913 bytes" in err[4096:]

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [("", True), (", **others", True), (", responses", False), (", responses=None, **others", False)],
    )
    def test_prompts_that_it_cannot_find_are_said_unless_it_names_the_responses(self, run, arguments, said):
        path = run.write("other.py", source(GOOD, signature=f"queries, prompts, labels{arguments}"))
        args = run.parse(reward__remote_url=path)
        assert rewards.check_reward(args, ("1+1", "2"), ["so it is"]) == ["so it is"] * said

    @pytest.mark.parametrize(("body", "named"), [("os._exit(3)", "exit status 3"), ("1 / 0", ":4)")])
    def test_a_method_is_tried_in_a_process_too(self, run, body, named):
        path = run.write(
            "mine.py",
            "import os; from bapo_openrlhf.methods import Method\nclass Mine(Method):\n"
            f"    def build_batch(self, step, fresh, reevaluated):\n        {body}\n",
        )
        said = run.refusal(adapt__method=f"{path}:Mine")
        assert said.startswith("adapt.method") and named in said


@pytest.mark.parametrize(("ratio", "given", "wanted"), [
    ("behaviour", ("seq", "mask", "tv", 0.4), ("seq", "mask", "tv", [0.0, 0.4])),
    ("decoupled", (None, None, None, 3), ("token", "clip", "ratio", [0.0, 3.0])),
    ("decoupled", ("seq", "mask", "binary_kl", 0.005), ("seq", "mask", "binary_kl", [0.0, 0.005])),
])  # fmt: skip
def test_a_decoupled_ratio_is_openrlhfs_clipped_token_weight_unless_a_correction_is_given(run, ratio, given, wanted):
    names = [f"is_correction_{name}" for name in ("level", "mode", "gating", "threshold")]
    flags = {f"algo__advantage__{name}": value for name, value in zip(names, given, strict=True) if value}
    args = run.parse(adapt__ratio=ratio, **flags)
    set_openrlhf_flags(args)
    assert tuple(getattr(args.algo.advantage, name) for name in names) == wanted


def test_attention_without_its_package(run, monkeypatch):
    """As on a machine with a GPU and without flash-attn."""
    monkeypatch.setenv("BAPO_OPENRLHF_CPU", "0")
    monkeypatch.setattr(environment, "find_spec", lambda name: None)
    assert run.refusal().startswith("ds.attn_implementation is flash_attention_2; ")
    run.check(ds__attn_implementation="sdpa")
