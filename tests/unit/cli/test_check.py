"""Each number that `bapo-openrlhf check` prints, computed by hand for a small run."""

import json
from pathlib import Path

import pytest

from bapo_openrlhf.cli import arguments, main
from bapo_openrlhf.launch.resume import keep_settings, own_folders
from bapo_openrlhf.launch.settings import settings_of
from bapo_openrlhf.record.checkpoint_store import CheckpointStore
from bapo_openrlhf.record.state_file import save_state

pytestmark = pytest.mark.usefixtures("without_models")

ROOT = Path(__file__).resolve().parents[3]
AGENT = f"--train.agent_func_path={ROOT / 'examples' / 'agent' / 'second_try.py'}"
MORE = "; for 100 steps or more, --train.num_episodes 10"  # of 11 steps


@pytest.fixture
def words(tmp_path) -> list[str]:
    """A run on 83 prompts, 8 per rollout, G = 4, at most 6 groups per batch, two actor ranks, one critic rank."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen2"}')
    (model / "pytorch_model.bin").touch()
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps({"input": f"{n}", "label": f"3 5 7:{n}"}) + "\n" for n in range(83)))
    reward = tmp_path / "reward.py"
    reward.write_text("def reward_func(queries, prompts, labels):\n    return {'rewards': [1.0]}\n")
    flags = {
        "actor.model_name_or_path": model, "actor.num_gpus_per_node": 2, "critic.num_gpus_per_node": 1,
        "ref.num_gpus_per_node": 1, "reward.remote_url": reward, "data.prompt_dataset": data,
        "data.label_key": "label", "data.max_len": 10240, "rollout.max_new_tokens": 8192, "rollout.batch_size": 8,
        "rollout.n_samples_per_prompt": 4, "train.batch_size": 16, "train.micro_batch_size": 2,
        "train.num_episodes": 3, "ds.attn_implementation": "sdpa", "vllm.num_engines": 3,
        "vllm.tensor_parallel_size": 2, "adapt.batch_size": 6, "adapt.buffer_size": 7, "adapt.rollout_delay": 5,
        "adapt.reevaluate_every": 2, "adapt.max_reevaluated_prompts": 3,
    }  # fmt: skip
    return [f"--{name}={value}" for name, value in flags.items()]


def report(capsys, *words: str, warned: int = 0) -> dict[str, str]:
    """The printed facts by name. `warned`: how many warnings there are."""
    assert main.run(["check", *words]) == 0
    out, err = capsys.readouterr()
    *lines, last = out.splitlines()
    assert err.count("warning: ") == err.count("\n") == warned and last == "configuration is valid"
    names = [line.split("  ")[0] for line in lines]
    assert len(set(names)) == len(names)
    return {name: line[len(name) :].strip() for name, line in zip(names, lines, strict=True)}


class TestNumbers:
    def test_ba_ppo(self, capsys, words):
        facts = report(capsys, "--algorithm=ba_ppo", *words)
        assert facts["actor"].endswith("model, 1 node(s) x 2 GPU(s)")
        assert facts["KL penalty"] == "0.01 to the reference policy, in the reward"
        assert facts["rollout batch"] == "8 prompts x G 4 responses"
        # 6 groups x 4 = 24 samples
        assert facts["training batch"] == "any number of samples up to 24 (= B 6 groups)"
        assert facts["optimizer steps"].startswith("2 per epoch of a full batch, each of 16 samples")  # 16 + 8
        assert facts["actor micro-batches"] == "6 per rank and full batch, of at most 2 samples"  # 24 / (2 ranks x 2)
        assert facts["critic micro-batches"] == "12 per rank and full batch, of at most 2 samples"
        assert facts["re-evaluation (X2)"] == "every m 2 steps, at most 3 prompts; hard at mean reward <= c1 1/8"
        assert facts["replay (X3)"] == "3 steps, c2 in [1/8, 1/2], c3 in [1/4, 5/8]"
        # 7 groups x 4 x (8192 x 12 + 2048 x 4) bytes = 2 981 888
        assert facts["replay buffer"] == "at most 7 groups, 2.8 MiB at 8192 response and 2048 prompt tokens"
        # 83 / 8 = 10.4; syncs at 5 and 10; again at 2, 4, 6, 8, 10, of which 10 meets a sync
        assert facts["epoch"] == "83 prompts = 11 trainer steps; 3 epochs"
        assert facts["per epoch"] == "2 syncs (v 5), 5 re-evaluations (m 2), 4 of them between syncs"
        assert facts["reward function"] == "4 processes for each rollout engine, 1 min and 4 GiB a call"
        assert facts["GPUs"] == "10 in total: 2 for actor, 1 for reference, 1 for critic, 6 for engines"
        # 11 steps x 3 epochs; 24 samples in optimizer steps of 16
        assert facts["whole run"] == "33 rollout steps, at most 66 optimizer steps" + MORE

    def test_without_batch_adaptation(self, capsys, words):
        kept = [word for word in words if not word.startswith("--adapt")]
        facts = report(capsys, "--algorithm=grpo", *kept)
        assert facts["batch adaptation"] == "none" and facts["training batch"] == "8 groups = 32 samples"
        assert facts["optimizer steps"].startswith("2 per epoch")
        assert not {"critic", "replay (X3)", "per epoch", "maximum shift", "reward function", "LoRA"} & facts.keys()
        # The flags of batch adaptation do not count.
        assert report(capsys, "--algorithm=grpo", *words, warned=1)["training batch"] == "8 groups = 32 samples"

    def test_parts_that_are_off(self, capsys, words):
        off = ["--adapt.replay_steps=0", "--adapt.reevaluate_every=0", "--adapt.rollout_delay=1"]
        facts = report(capsys, "--algorithm=ba_ppo", *words, *off, warned=1)
        assert (facts["re-evaluation (X2)"], facts["replay (X3)"]) == ("off", "off")
        assert facts["replay buffer"].startswith("at most 0 groups, 0.0 MiB")
        assert facts["per epoch"] == "11 syncs (v 1), 0 re-evaluations (m 0), 0 of them between syncs"

    @pytest.mark.parametrize(
        ("more", "name", "text"),
        [
            (["--ref.num_gpus_per_node=2", "--train.colocate_actor_ref"], "GPUs",
             "9 in total: 2 for actor + reference, 1 for critic, 6 for engines"),
            (["--adapt.kl_target=behaviour"], "GPUs", "9 in total: 2 for actor, 1 for critic, 6 for engines"),
            (["--adapt.max_shift_replayed=0.5", "--adapt.max_shift_fresh=1"], "maximum shift", "fresh 1, replayed 0.5"),
            (["--ckpt.save_steps=20", "--ckpt.path=/here"], "checkpoints", "every 20 steps in /here, with the buffers"),
            (["--train.max_epochs=2", "--train.num_episodes=1"], "whole run",
             "11 rollout steps, at most 44 optimizer steps" + MORE),
            (["--algo.dynamic_filtering_enable"], "epoch", "83 prompts = at most 11 trainer steps; 3 epochs"),
            ([AGENT, "--verifier.processes=0"], "reward function", "within the rollout engine, without limits"),
        ],
    )  # fmt: skip
    def test_one_fact(self, capsys, words, more, name, text):
        assert report(capsys, "--algorithm=ba_ppo", *words, *more)[name] == text

    def test_data_that_is_not_local(self, capsys, words):
        more = ["--algorithm=ba_ppo", *words, "--data.prompt_dataset=org/data"]
        facts = report(capsys, *more, warned=1)
        assert "--prompts" in facts["epoch"] and "per epoch" not in facts
        assert report(capsys, *more, "--prompts=17")["epoch"] == "17 prompts = 3 trainer steps; 3 epochs"

    @pytest.mark.parametrize("method", ["remix", f"{ROOT}/examples/custom_method/fifo_replay.py:FIFOReplay"])
    def test_a_method_without_x2_generates_nothing_again(self, capsys, words, method):
        not_its = ("--adapt.buffer_size", "--adapt.reevaluate_every", "--adapt.max_reevaluated_prompts")
        words = ["--algorithm=bapo_grpo", *(word for word in words if not word.startswith(not_its))]
        assert report(capsys, f"--adapt.method={method}", *words)["per epoch"] == "2 syncs (v 5)"

    def test_steps_of_a_method_that_draws_more_prompts(self, capsys, words):
        """83 prompts are 3 draws of 32. A run of 100 steps has no remedy."""
        more = ["--adapt.method=mopps", "--adapt.options", "candidates=4"]
        words = ["--algorithm=bapo_grpo", *words]
        epoch = report(capsys, *words, *more, warned=1)["epoch"]
        assert epoch.startswith("83 prompts = 3 trainer steps, each of which draws 32 and generates for 8; 3 ep")
        assert "num_episodes" not in report(capsys, *words, "--train.num_episodes=10")["whole run"]


def test_attention_that_another_machine_must_have(capsys, words, monkeypatch):
    monkeypatch.setenv("BAPO_OPENRLHF_CPU", "1")
    monkeypatch.setattr("bapo_openrlhf.launch.environment.find_spec", lambda name: None)
    assert report(capsys, *words, warned=1)["attention"] == "sdpa"
    assert main.run(["check", *words, "--ds.attn_implementation=flash_attention_2"]) == 0
    *_, warning, last = capsys.readouterr().out.splitlines()
    assert warning.startswith("warning: ds.attn_implementation is flash_attention_2; it needs the package flash-attn")
    assert last == "configuration is valid"


def test_data_that_is_there_is_looked_at_although_its_rows_are_given(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "math").mkdir(parents=True)
    (tmp_path / "data" / "math" / "train.jsonl").write_text("{}")
    assert main.run(["check", "--config", str(ROOT / "configs" / "ba_ppo_qwen3_4b.yaml"), "--prompts", "40000"]) == 2
    assert "no column 'input'" in capsys.readouterr().err


class TestStart:
    """`check` says how `train` would start now, and changes nothing."""

    @pytest.fixture
    def words(self, words, tmp_path) -> list[str]:
        return [*words, "--algorithm=ba_ppo", f"--run.dir={tmp_path}", "--run.name=x", "--ckpt.save_steps=2"]

    @pytest.fixture
    def saved(self, words, tmp_path) -> Path:
        """ckpt.path of a run with a checkpoint of step 4. A crash cut short the one of step 6."""
        args = arguments.parse(words)
        keep_settings(args, settings_of(args, 83), "then")
        store = CheckpointStore(tmp_path / "x/checkpoints", critic=True)
        for tag in ("global_step4", "global_step6"):
            save_state(store.begin(tag), {})
            for part in ("_actor", "_critic"):
                (store.path / part / tag).mkdir(parents=True)
                for file in (f"{tag}/model.pt", "latest"):
                    (store.path / part / file).write_text(tag)
        store.complete("global_step4", 4)
        return store.path

    def refused(self, capsys, words: list[str], *more: str) -> str:
        assert main.run(["check", *words, *more]) == 2
        out, err = capsys.readouterr()
        assert "training data " in out and "configuration is valid" not in out
        return err.splitlines()[-1]

    def test_an_earlier_run(self, capsys, words, tmp_path):
        (tmp_path / "x").mkdir()
        assert report(capsys, *words)["start"] == "from the beginning"
        (tmp_path / "x" / "metrics.jsonl").write_text('{"step": 1}\n')
        assert f"error: run.name is x, and {tmp_path}/x already has a run; give" in self.refused(capsys, words)
        with own_folders(arguments.parse(words)):
            says = f"error: run.name is x, and {tmp_path}/x already has a run that is going on: process "
            assert says in self.refused(capsys, words, "--run.overwrite")

    def test_a_resume_is_compared_with_the_beginning(self, capsys, words, saved):
        def tree():
            return {path: path.is_file() and path.read_bytes() for path in saved.rglob("*")}

        before = tree()
        assert "newest: global_step6" in self.refused(capsys, words)
        words = [*words, "--ckpt.load_enable"]
        assert report(capsys, *words)["start"] == "with step 5, from global_step4"
        assert "train.seed is 7, and was 42;" in self.refused(capsys, words, "--train.seed=7")
        assert main.run(["check", *words, "--train.num_episodes=4"]) == 0
        assert "from step 5 on, train.num_episodes is 4, and was 3" in capsys.readouterr().err and tree() == before

    def test_data_on_a_hub_is_compared_by_its_name(self, capsys, words, saved):
        words = [*words, "--ckpt.load_enable", "--data.prompt_dataset=org/data"]
        args = arguments.parse(words)
        keep_settings(args, settings_of(args, 7473), "then")
        assert report(capsys, *words, warned=1)["start"] == "with step 5, from global_step4"
        error = self.refused(capsys, words, "--data.prompt_dataset=org/other")
        assert "but data.prompt_dataset is org/other, and was org/data;" in error

    @pytest.mark.parametrize("elsewhere", [False, True])
    def test_the_rest_is_compared_if_the_rows_are_given(self, capsys, words, saved, tmp_path, elsewhere):
        words = [*words, "--ckpt.load_enable", "--prompts=83"]
        if elsewhere:
            (tmp_path / "train.jsonl").unlink()
        assert report(capsys, *words)["start"] == "with step 5, from global_step4"
        assert "but train.seed is 7, and was 42;" in self.refused(capsys, words, "--train.seed=7")
        (tmp_path / "train.jsonl").write_text('{"input": "?", "label": "3 5 7:1"}\n' * 83)
        assert "but data.prompt_dataset is 83 rows, " in self.refused(capsys, words)


def test_a_package_that_openrlhf_needs_is_named(capsys, words):
    assert main.run(["check", *words, "--use_ms"]) == 2
    assert "the package modelscope" in capsys.readouterr().err


def test_the_help_has_the_flags_of_check_itself(capsys):
    with pytest.raises(SystemExit):
        main.run(["check", "--help"])
    shown = capsys.readouterr().out
    assert "--prompts" in shown
