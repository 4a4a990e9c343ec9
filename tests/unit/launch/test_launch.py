"""What a start writes to the run's folder before anything loads, and what the end adds. No Ray, no models."""

import json
import shutil
import signal
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

import pytest

from bapo_openrlhf import flash_attention
from bapo_openrlhf.cli import arguments
from bapo_openrlhf.cpu import stack as cpu
from bapo_openrlhf.errors import ConfigError, Ended, RunError
from bapo_openrlhf.flags.checked import Checked
from bapo_openrlhf.launch import resume
from bapo_openrlhf.launch import start as launch
from bapo_openrlhf.record import run_record as record
from bapo_openrlhf.record.checkpoint_store import CheckpointStore
from bapo_openrlhf.record.state_file import save_state
from bapo_openrlhf.training.driver.signals import Signals

NO_FLAGS = {"help", "==SUPPRESS=="}  # of the parser's actions
COMMAND = ("bapo-openrlhf", "train", "--config", "my run.yaml")


@pytest.fixture
def start(tmp_path, monkeypatch):
    """start(flag=value...) launches a run that trains nothing, and returns the record that the training would find."""
    monkeypatch.setenv(cpu.SWITCH, "0")
    result = []

    def run(
        *, prompts: int | None = None, candidates: int = 1, fails: bool = False, does: Callable = lambda: None,
        metrics: dict | None = None, **flags,
    ) -> tuple[dict, dict]:  # fmt: skip
        words = {
            "algorithm": "bapo_grpo", "actor.model_name_or_path": "model", "reward.remote_url": "reward.py",
            "rollout.batch_size": 4, "rollout.n_samples_per_prompt": 4, "train.batch_size": 8,
            "train.micro_batch_size": 2, "run.dir": tmp_path / "runs", "run.name": "mine",
            "ckpt.path": tmp_path / "checkpoints",
        } | {name.replace("__", "."): value for name, value in flags.items()}  # fmt: skip
        argv = [f"--{name}" if value is True else f"--{name}={value}" for name, value in words.items()]

        def train(args, signals) -> None:
            run.checked, run.asked = args.checked, args.ckpt.load_enable
            folder = Path(args.run.dir) / args.run.name
            result.append((record.read_run(folder), sorted(path.name for path in folder.iterdir())))
            record.append_rows(folder, record.METRICS, 1, [{"rollouts/total": 16} | (metrics or {})])
            record.append_rows(folder, record.PROBES, 1, [{"uid": 0}])
            does()
            if fails:
                raise KeyboardInterrupt

        monkeypatch.setattr(launch, "_train", train)
        args = arguments.parse(argv)
        launch.launch(args, Checked(prompts=prompts, candidates=candidates), Signals(), COMMAND)
        return result[-1][0], record.read_summary(tmp_path / "runs" / "mine")

    run.begun = result
    return run


def save(path: Path, step: int, *more: str, whole: bool = True, adapted: bool = True) -> None:
    """Write a checkpoint of the actor, with more files by their paths below its parts. Plain OpenRLHF has no state."""
    store, tag = CheckpointStore(path, critic=False), f"global_step{step}"
    if adapted:
        save_state(store.begin(tag), {})
    (path / "_actor" / tag).mkdir(parents=True, exist_ok=True)
    for name in ("_actor/model.pt", *more):
        part, _, file = name.partition("/")
        (path / part / tag / file).write_text("weights")
    (path / "_actor" / "latest").write_text(tag)
    if whole and adapted:
        store.complete(tag, step)


def test_a_run_that_trained_nothing_has_a_status_of_its_own(start, tmp_path):
    with pytest.raises(Ended) as end:
        start(metrics={"skipped_update": 1, "groups/generated": 4, "groups/with_signal": 0})
    folder = tmp_path / "runs" / "mine"
    assert end.value.code == 3 and end.value.text == record.read_summary(folder)["nothing_trained"]
    ended = record.read_run(folder)["ended"]
    assert (ended["how"], ended["status"], ended["text"]) == ("untrained", 3, end.value.text)


def test_a_run_that_trained_says_where_its_model_is(start, tmp_path, capsys):
    _, summary = start(metrics={"groups/with_signal": 1}, ckpt__output_dir=tmp_path / "saved")
    says = f"finished: the model is in {tmp_path}/saved; next: bapo-openrlhf report {tmp_path}/runs/mine"
    assert summary["nothing_trained"] is None and capsys.readouterr().err.splitlines()[-1] == says


def test_run_json_is_there_before_training(start):
    metadata, summary = start(prompts=10, train__num_episodes=3, train__seed=7)
    given = {name: metadata[name] for name in ("name", "algorithm", "seed", "total_steps")}
    assert given == {"name": "mine", "algorithm": "bapo_grpo", "seed": 7, "total_steps": 9}
    assert metadata["versions"]["python"].startswith("3.") and "command" in metadata and "commit" in metadata
    assert "resumed" not in metadata
    assert (summary["seed"], summary["rollouts"], summary["started"]) == (7, 16, metadata["started"])
    assert start.begun[0][1] == ["run.json"]
    assert start(run__overwrite=True)[0]["total_steps"] is None  # nobody knows the number of prompts


def test_the_run_gets_what_the_checks_worked_out(start, tmp_path, monkeypatch):
    """The checkpoint is chosen last, because that may delete what a crash left unfinished."""
    metadata, _ = start(prompts=10, candidates=3)
    assert metadata["total_steps"] == 1  # a step takes 4 x 3 prompts from the data
    assert (start.checked.candidates, start.checked.resume_tag) == (3, None)
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").touch()
    start(prompts=10, candidates=3, eval__dataset="rows.jsonl", run__overwrite=True)
    assert start.checked.evaluated == "rows.jsonl"  # as it was given, because the project may be moved
    assert "checked" not in " ".join(metadata["config"])
    save(tmp_path / "checkpoints", 2)
    start(prompts=10, ckpt__load_enable=True)
    assert (start.checked.resume_tag, start.asked) == ("global_step2", True)


def test_every_flag_is_in_it_as_it_was_given(start):
    metadata, _ = start(
        adapt__ratio="decoupled", algo__kl__init_coef=0.02, data__prompt_dataset="data.jsonl", adapt__c1="0.1"
    )
    flags = metadata["config"]
    assert flags["algo.advantage.is_correction_level"] == "off"  # OpenRLHF is given "token"
    assert flags["data.prompt_dataset"] == "data.jsonl" and flags["adapt.c1"] == "0.1" and flags["adapt.c2"] is None
    assert flags["algo.kl.init_coef"] == 0.02 and flags["verifier.timeout"] == 60.0
    assert flags.keys() >= {action.dest for action in arguments.build_parser("prog")._actions} - NO_FLAGS


def test_keys_are_not_written_down(start, monkeypatch, tmp_path):
    monkeypatch.setattr(record.sys, "orig_argv", ["python", "--logger.wandb.key", "s3cret"])
    metadata, _ = start(logger__wandb__key="s3cret")
    assert metadata["config"]["logger.wandb.key"] == "***" and metadata["command"].endswith("--logger.wandb.key '***'")
    for path in (tmp_path / "runs" / "mine").iterdir():
        assert "s3cret" not in path.read_text(), path.name
    assert start(run__overwrite=True)[0]["config"]["logger.wandb.key"] is None


class TestEnd:
    @pytest.fixture
    def end(self, start, tmp_path):
        """end(error, saves, flag=value...): what run.json says of the end, and the error that goes on."""

        def of(error: BaseException | None, saves=lambda: None, **flags) -> tuple[dict, BaseException | None]:
            def does():
                saves()
                if error:
                    raise error

            caught = None
            try:
                start(does=does, **flags)
            except (Ended, RunError, OSError) as raised:
                caught = raised
            metadata = record.read_run(tmp_path / "runs" / "mine")
            assert datetime.fromisoformat(metadata["ended"].pop("at")) >= datetime.fromisoformat(metadata["started"])
            return metadata["ended"], caught

        return of

    @pytest.mark.parametrize(("error", "how", "status", "text"), [
        (None, "finished", 0, ""),
        (RunError("step 3, training: the actor died"), "failed", 1, "step 3, training: the actor died"),
        (OSError(28, "No space left on device"), "failed", 1, "OSError: [Errno 28] No space left on device"),
    ])  # fmt: skip
    def test_that_it_finished_or_failed(self, end, error, how, status, text):
        assert end(error) == ({"how": how, "status": status, "text": text}, error)

    @pytest.mark.parametrize(("flags", "more"), [({}, ""), ({"run__overwrite": True}, " --run.overwrite=false")])
    def test_that_it_was_stopped_and_goes_on_after_the_newest_whole_checkpoint(self, end, tmp_path, flags, more):
        def saves():
            for step in (2, 4, 5):
                save(tmp_path / "checkpoints", step, whole=step < 5)

        ended, raised = end(Ended("stopped", 143, "stopped by SIGTERM after step 4"), saves, **flags)
        command = f"bapo-openrlhf train --config 'my run.yaml' --ckpt.load_enable{more}"
        assert ended == {"how": "stopped", "status": 143, "text": raised.text}
        assert (raised.how, raised.code) == ("stopped", 143)
        assert raised.text.startswith("stopped by SIGTERM after step 4. ")
        assert raised.text.endswith(f"step 5: {command}")

    def test_that_ray_was_stopped_while_it_started(self, end):
        """Ray's own handler of SIGTERM exits."""
        ended, raised = end(SystemExit(signal.SIGTERM))
        assert (ended["how"], ended["status"]) == ("stopped", 143) and ended["text"] == raised.text
        assert raised.text.startswith("stopped by SIGTERM before the first step. No step is saved, so it begins again")

    def test_of_openrlhfs_own_checkpoint(self, end, tmp_path):
        saves = partial(save, tmp_path / "checkpoints", 3, whole=False)
        ended, _ = end(Ended("stalled", 75, "stalled"), saves, algorithm="grpo", train__batch_size=16)
        assert ended["how"] == "stalled" and " step 4: bapo-openrlhf" in ended["text"]

    @pytest.mark.parametrize("flags", [{}, {"ckpt__disable_ds": True}])
    def test_without_a_checkpoint_it_begins_again(self, end, flags):
        text = end(Ended("stopped", 130, "stopped by SIGINT within step 0, training"), **flags)[0]["text"]
        assert text.startswith("stopped by SIGINT within step 0, training. No step is saved")
        assert ("ckpt.disable_ds" in text) == bool(flags) and "bapo-openrlhf train" in text

    def test_keys_are_not_said(self, end, monkeypatch):
        monkeypatch.setitem(globals(), "COMMAND", ("train", "--logger.wandb.key", "s3cret"))
        ended, raised = end(Ended("stopped", 143, "stopped"), logger__wandb__key="s3cret")
        assert "s3cret" not in raised.text + ended["text"] and "'***'" in raised.text

    def test_a_resume_forgets_how_the_run_ended_before(self, start, end):
        end(Ended("stopped", 143, "stopped"))
        start(ckpt__load_enable=True)
        assert "ended" not in start.begun[-1][0]


class TestResume:
    @pytest.fixture
    def go(self, start, tmp_path):
        """go(flag=value...) begins a run on files, go(step, ...) resumes it after that step. Both return run.json."""
        (tmp_path / "rows.jsonl").write_text(20 * '{"input": "1+1="}\n')
        (tmp_path / "reward.py").write_text("one")
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2"}')
        (tmp_path / "model" / "pytorch_model.bin").touch()
        defaults = {
            "data__prompt_dataset": tmp_path / "rows.jsonl", "reward__remote_url": tmp_path / "reward.py",
            "actor__model_name_or_path": tmp_path / "model", "ckpt__save_steps": 2, "prompts": 20, "fails": True,
        }  # fmt: skip

        def run(step: int = 0, *, adapted: bool = True, files: Sequence[str] = (), **flags) -> dict:
            if step:
                save(tmp_path / "checkpoints", step, *files, adapted=adapted)
                flags |= {"ckpt__load_enable": True}
            if not adapted:
                flags = {"algorithm": "grpo", "train__batch_size": 16} | flags
            with pytest.raises(KeyboardInterrupt):
                start(**defaults | flags)
            return record.read_run(tmp_path / "runs" / "mine")

        return run

    @pytest.mark.parametrize("adapted", [True, False])
    @pytest.mark.parametrize(("flags", "says"), [
        ({"data__input_key": "x", "train__seed": 1}, ["train.seed is 1, and was 42", "data.input_key is x, and "]),
        ({"prompts": 8}, ["data.prompt_dataset is 8 rows, blake2b ", "and was 20 rows, blake2b "]),
        ({"actor__num_gpus_per_node": 4}, ["actor.num_nodes x actor.num_gpus_per_node is 4, and was 8"]),
    ])  # fmt: skip
    def test_a_change_is_refused_by_name(self, go, tmp_path, adapted, flags, says):
        """What else is a change is in test_settings.py."""
        go(adapted=adapted)
        metadata = (tmp_path / "runs/mine/run.json").read_text()
        with pytest.raises(ConfigError, match=r"^ckpt\.load_enable ") as error:
            go(2, adapted=adapted, **flags)
        assert all(part in str(error.value) for part in says) and str(error.value).count(", and was ") == len(flags)
        assert (tmp_path / "runs/mine/run.json").read_text() == metadata

    def test_another_estimator_is_refused_before_a_checkpoint_without_its_critic(self, go, capsys):
        go()
        with pytest.raises(ConfigError, match=r"algorithm is ba_ppo, .*; algo\.advantage\.estimator is gae, "):
            go(2, algorithm="ba_ppo")
        assert "skipped" not in capsys.readouterr().err

    @pytest.mark.parametrize("adapted", [True, False])
    def test_what_changes_is_said_and_recorded(self, go, tmp_path, capsys, adapted):
        """Each change once, by the first step with it. The record has the values that are in use."""
        first = go(adapted=adapted)
        assert "changed" not in first and first["config"]["train.num_episodes"] == 1
        capsys.readouterr()
        (tmp_path / "reward.py").write_text("mended")
        second = go(2, adapted=adapted, train__num_episodes=3, vllm__gpu_memory_utilization=0.5, run__logs="progress")
        said = capsys.readouterr().err
        third = go(4, adapted=adapted, train__num_episodes=4, vllm__gpu_memory_utilization=0.5)
        digests = [metadata["inputs"]["reward.remote_url"] for metadata in (first, second)]
        changes = [
            (3, "train.num_episodes", 1, 3), (3, "vllm.gpu_memory_utilization", 0.95, 0.5),
            (3, "reward.remote_url", *digests), (5, "train.num_episodes", 3, 4),
        ]  # fmt: skip
        for step, flag, before, now in changes[:3]:
            assert f"ckpt.load_enable: from step {step} on, {flag} is {now}, and was {before}\n" in said
        assert said.count("from step") == 3
        assert [tuple(row[name] for name in ("step", "flag", "before", "now")) for row in third["changed"]] == changes
        assert third["changed"][:3] == second["changed"]
        assert [row["at"] for row in third["changed"]] == [second["resumed"][0]] * 3 + third["resumed"][1:]
        assert third["config"]["train.num_episodes"] == 4 and third["total_steps"] == 20
        assert third["started"] == first["started"] and len(third["resumed"]) == 2

    def test_rollout_weights_are_for_their_number_of_ranks(self, go, tmp_path):
        go()
        go(2, vllm__tensor_parallel_size=2)
        with pytest.raises(ConfigError, match=r"but vllm\.tensor_parallel_size is 1, and was 2;"):
            go(4, files=["_adapt/rollout_weights_rank0.safetensors"])

    def test_rollouts_ahead_are_for_a_run_that_is_ahead(self, go):
        ahead = {"train__async_enable": True, "vllm__enable_sleep": False}
        go(**ahead)
        go(2, **ahead, adapt__max_staleness=1)
        with pytest.raises(ConfigError, match=r"but adapt\.max_staleness is 0, and was 1;"):
            go(4, **ahead, adapt__max_staleness=0)

    def test_ranks_are_those_of_the_checkpoint(self, go, capsys):
        """A start that made no checkpoint does not count: 8 ranks began, 4 wrote, 8 were given again, 4 resume."""
        go()
        four = {"actor__num_gpus_per_node": 2, "actor__num_nodes": 2}
        files = [f"_actor/{rank}_optim_states.pt" for rank in range(4)]
        go(2, files=files, **four)
        with pytest.raises(ConfigError, match=r"^actor\.num_nodes x actor\.num_gpus_per_node is 8, and 4 actor ranks"):
            go(2, files=files)
        metadata = go(2, files=files, **four)
        [row], flag = metadata["changed"], "actor.num_nodes x actor.num_gpus_per_node"
        assert (row["step"], row["flag"], row["before"], row["now"]) == (3, flag, "8", "4")
        assert capsys.readouterr().err.count(f"from step 3 on, {flag} is 4, and was 8\n") == 1

    @pytest.mark.parametrize("step", [0, 2])
    def test_without_a_checkpoint_or_its_settings_the_run_goes_on_as_it_is_told(self, go, tmp_path, capsys, step):
        """An older version wrote no settings beside its checkpoints."""
        go()
        if step:
            (tmp_path / "checkpoints/settings.json").unlink()
        assert go(step, ckpt__load_enable=True, actor__adam__lr=1e-5)["config"]["actor.adam.lr"] == 1e-5
        assert (f"{tmp_path}/checkpoints/settings.json is not there" in capsys.readouterr().err) == bool(step)
        with pytest.raises(ConfigError, match=r"actor\.adam\.lr is 1e-06, and was 1e-05"):
            go(4)

    def test_settings_that_are_damaged(self, go, tmp_path):
        go()
        (tmp_path / "checkpoints/settings.json").write_text("{")
        with pytest.raises(ConfigError, match=r"^ckpt\.path is .*settings\.json is "):
            go(2)

    @pytest.mark.parametrize("file", ["run.json", "settings.json"])
    def test_a_full_disk_is_said_in_one_line(self, start, monkeypatch, file):
        def full(path, *_):
            raise OSError(28, "No space left on device", str(path))

        writers = {"run.json": (record, "write_atomically"), "settings.json": (resume, "write_document")}
        monkeypatch.setattr(*writers[file], full)
        with pytest.raises(ConfigError, match=rf"^run\.name is mine; .*/{file} .*: No space left on device$"):
            start(ckpt__save_steps=1)

    def test_a_run_that_can_save_nothing_leaves_no_settings(self, go, tmp_path):
        go(ckpt__save_steps=-1)  # but a signal would
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["settings.json"]
        shutil.rmtree(tmp_path / "checkpoints")
        go(ckpt__disable_ds=True, run__overwrite=True)
        assert not (tmp_path / "checkpoints").exists()


class TestEarlierRun:
    @pytest.fixture
    def folder(self, start, tmp_path) -> Path:
        """The folder of a run that ended, with all that it wrote, and a file of its user's."""
        start()
        folder = tmp_path / "runs" / "mine"
        for name in ("model/config.json", "checkpoints/_actor/latest", "train.log", "notes.txt"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(name)
        return folder

    @staticmethod
    def tree(folder: Path) -> dict[str, str]:
        """The folder's files, without the byte code that Python writes beside a file that it imports."""
        files = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "__pycache__"]
        return {str(path.relative_to(folder)): path.read_text() for path in files}

    @pytest.mark.parametrize(
        ("flags", "ended"),
        [({}, True), ({}, False), ({"algorithm": "grpo"}, True), ({"ckpt__load_enable": True}, True)],
    )
    def test_is_refused_with_the_ways_out(self, start, folder, flags, ended):
        if not ended:
            (folder / "summary.json").unlink()
        before = self.tree(folder)
        with pytest.raises(ConfigError) as error:
            start(**flags)
        says = str(error.value)
        assert says.startswith(f"run.name is mine, and {folder} ")
        assert "--run.name" in says and "--run.overwrite" in says
        assert ("ckpt.path" in says) == ("ckpt__load_enable" in flags)
        assert self.tree(folder) == before

    def test_is_replaced(self, start, folder, tmp_path):
        start(run__overwrite=True, ckpt__path=folder / "checkpoints")
        assert start.begun[-1][1] == ["checkpoints", "notes.txt", "run.json"]

    def test_one_without_a_step_is_none(self, start, tmp_path):
        """A first try that failed before its first step must not stand in the way of the second."""
        record.begin_run(tmp_path / "runs" / "mine", {"started": "now"})
        (tmp_path / "runs" / "mine" / record.METRICS).touch()
        start()

    @pytest.mark.parametrize("flag", ["actor", "critic", "reward"])
    @pytest.mark.parametrize("place", ["model", "checkpoints/global_step9_hf"])
    def test_a_model_that_the_new_run_needs_is_not_deleted(self, start, folder, flag, place):
        if place != "model":
            shutil.copytree(folder / "model", folder / place)
        before = self.tree(folder)
        flags = {"algorithm": "ba_ppo", f"{flag}__model_name_or_path": folder / place}
        if flag == "reward":  # the critic would be the same model
            flags |= {"algorithm": "bapo_grpo", "reward__remote_url": ""}
        with pytest.raises(ConfigError, match=rf"^{flag}\.model_name_or_path is .*/mine/{place}, .* would delete; "):
            start(run__overwrite=True, **flags)
        assert self.tree(folder) == before

    @pytest.mark.parametrize("how", ["run__overwrite", "ckpt__load_enable"])
    @pytest.mark.parametrize(
        ("flag", "ending"), [("reward__remote_url", ""), ("train__agent_func_path", ""), ("adapt__method", ":Mine")]
    )
    def test_a_copy_of_the_users_file_that_the_new_run_needs_is_not_deleted(self, start, folder, flag, ending, how):
        (folder / record.CODE).mkdir()
        file = folder / record.CODE / "0_mine.py"
        file.write_text("from bapo_openrlhf.methods import BAPO\n\n\nclass Mine(BAPO): ...\n")
        before = self.tree(folder)
        with pytest.raises(ConfigError, match=rf"^{flag.replace('__', '.')} is {file}{ending}, .* would delete; copy"):
            start(**{flag: f"{file}{ending}", how: True})
        assert self.tree(folder) == before

    def test_nothing_is_deleted_if_the_run_cannot_start(self, start, folder, tmp_path, monkeypatch):
        before = self.tree(folder)
        CheckpointStore(tmp_path / "checkpoints", critic=False).begin("global_step2")
        with pytest.raises(ConfigError, match=r"^ckpt\.path is "):
            start(run__overwrite=True)  # its ckpt.path is another folder
        shutil.rmtree(tmp_path / "checkpoints")
        monkeypatch.setattr(record, "provenance", lambda secret: 1 / 0)  # the last step before the start
        with pytest.raises(ZeroDivisionError):
            start(run__overwrite=True, algorithm="grpo")
        assert self.tree(folder) == before

    @pytest.mark.parametrize("algorithm", ["grpo", "bapo_grpo"])
    @pytest.mark.parametrize("place", ["_actor/global_step100", "_critic/best_global_step100", "global_step100_hf"])
    def test_checkpoints_of_any_kind_are_not_written_over(self, start, tmp_path, algorithm, place):
        """OpenRLHF would delete the oldest of them, or write over one with the same step."""
        (tmp_path / "checkpoints" / place).mkdir(parents=True)
        newest = place.rpartition("/")[2].removesuffix("_hf")
        with pytest.raises(ConfigError, match=rf"^ckpt\.path is {tmp_path / 'checkpoints'}, .*{newest}\)"):
            start(algorithm=algorithm)
        start(algorithm=algorithm, ckpt__path=tmp_path / "others")

    def test_a_model_of_another_run_is_not_written_over(self, start, folder):
        before = self.tree(folder)
        for again in ({}, {"ckpt__load_enable": True}):  # no checkpoint is there, so it would begin
            with pytest.raises(ConfigError, match=f"^ckpt.output_dir is {folder}/model, "):
                start(run__name="other", ckpt__output_dir=folder / "model", **again)
        assert self.tree(folder) == before
        start(run__name="other", ckpt__output_dir=folder / "model", run__overwrite=True)
        assert self.tree(folder) == before  # the end of the training writes it


def test_with_a_gpu_flash_attn_need_not_be_there(monkeypatch):
    """OpenRLHF is imported after this."""
    monkeypatch.setenv(cpu.SWITCH, "0")

    monkeypatch.setattr(flash_attention, "is_missing", lambda: True)
    monkeypatch.setattr(flash_attention, "set_up", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        launch._train(None, Signals())


def test_another_sync_than_nccls_on_shared_gpus(start):
    """OpenRLHF takes CUDA IPC only with nccl, and otherwise a group of NCCL with two ranks on a GPU."""
    together = {"train__colocate_all": True, "vllm__num_engines": 8}
    with pytest.raises(ConfigError, match=r"^vllm\.sync_backend is gloo; .*train\.colocate_all"):
        start(**together, vllm__sync_backend="gloo")
    for other in (
        {"vllm__sync_backend": "nccl"},
        {"vllm__sync_backend": "gloo", "vllm__sync_with_ray": True},
        {"vllm__sync_backend": "gloo", "train__async_enable": True},
        {"vllm__sync_backend": "gloo", "train__colocate_all": False},
    ):
        start(**together | other, run__overwrite=True)


def test_all_that_a_machine_without_a_gpu_cannot_do_is_in_one_error(start, monkeypatch):
    monkeypatch.setenv(cpu.SWITCH, "1")
    needed = "--vllm.enforce_eager true --vllm.sync_backend gloo --ds.attn_implementation eager"
    with pytest.raises(ConfigError, match=rf"a run needs {needed} \("):
        start()


PYDANTIC = """ValidationError: 1 error for ModelConfig
  Value error, the length (48) is too large. [type=value_error, input_value=ArgsKwargs((), {'model': 1}), input_type=A]
    For further information visit https://errors.pydantic.dev/2.14/v/value_error"""


@pytest.mark.parametrize(("error", "says"), [
    ("the actor\n  died", "the actor died"),
    ('Traceback:\n  File "worker.py", line 3\nValueError: adapt.c1 is 2', "ValueError: adapt.c1 is 2"),
    ('  File "a.py", line 3, in a\n    a(\n     ^\nValueError: two\nlines\n  of it', "ValueError: two lines of it"),
    ('  File "worker.py", line 3\n' + PYDANTIC,
     "ValidationError: 1 error for ModelConfig Value error, the length (48) is too large."),
    ("", "RuntimeError"),  # never an empty line
])  # fmt: skip
def test_the_line_of_a_workers_error(error, says):
    assert launch._last_line(RuntimeError(error)) == says


class TestWhoseRecord:
    @pytest.fixture
    def made(self, start, tmp_path, monkeypatch):
        """made(name, steps, saves, flag=value...) begins a run that is killed. It returns its rows before and after."""
        times = iter(f"2026-11-27T08:{n:02}:00+00:00" for n in range(60))
        monkeypatch.setattr(record, "now", lambda: next(times))

        def run(name: str = "mine", steps: int = 1, saved: tuple[int, ...] = (), **flags) -> int:
            folder, path = tmp_path / "runs" / name, Path(flags.get("ckpt__path", tmp_path / f"ck_{name}"))

            def does():
                for step in range(2, steps + 1):
                    record.append_rows(folder, record.METRICS, step, [{}])
                for step in saved:
                    save(path, step)
                raise KeyboardInterrupt

            flags = {"run__name": name, "ckpt__path": path, "ckpt__save_steps": 10} | flags
            with pytest.raises(KeyboardInterrupt):
                start(does=does, **flags)
            return len(record.read_metrics(folder))

        return run

    @staticmethod
    def refused(made, says: str, **flags) -> None:
        with pytest.raises(ConfigError, match=says):
            made(ckpt__load_enable=True, **flags)

    @pytest.mark.parametrize("algorithm", ["grpo", "bapo_grpo"])
    def test_a_wrong_path_does_not_erase_it(self, made, tmp_path, algorithm):
        made(steps=25, saved=(10, 20), algorithm=algorithm, train__batch_size=16)
        wrong, right = tmp_path / "wrong", tmp_path / "ck_mine"
        again = {"algorithm": algorithm, "train__batch_size": 16}
        self.refused(made, rf"^ckpt\.path is {wrong}, .*/mine made 25 steps, .*{right}; ", ckpt__path=wrong, **again)
        right.rename(tmp_path / "unmounted")
        self.refused(made, "^ckpt.path is .*settings.json", **again)
        right.mkdir()
        (tmp_path / "unmounted" / "settings.json").rename(right / "settings.json")
        self.refused(made, "^ckpt.path is .* every 10 steps;", **again)
        assert len(record.read_metrics(tmp_path / "runs/mine")) == 25

    def test_one_that_was_resumed_had_a_checkpoint(self, made, tmp_path):
        made(steps=2, saved=(2,), ckpt__save_steps=-1)  # a signal asked for it
        made(steps=3, ckpt__save_steps=-1, ckpt__load_enable=True)
        shutil.rmtree(tmp_path / "ck_mine/_adapt")
        shutil.rmtree(tmp_path / "ck_mine/_actor")
        self.refused(made, "^ckpt.path is .*resumed", ckpt__save_steps=-1)

    @pytest.mark.parametrize(("steps", "flags"), [
        (9, {}),  # killed before the first checkpoint
        (10, {}),  # and in it, because the record of a step is written first
        (30, {"ckpt__save_steps": -1}),
        (30, {"ckpt__disable_ds": True}),
    ])  # fmt: skip
    @pytest.mark.parametrize("algorithm", ["grpo", "bapo_grpo"])
    def test_a_run_that_saved_nothing_begins_again(self, made, tmp_path, steps, flags, algorithm):
        flags = {"algorithm": algorithm, "train__batch_size": 16, "ckpt__load_enable": True} | flags
        assert [made(steps=steps, **flags) for _ in range(2)] == [steps, steps]
        assert "resumed" not in record.read_run(tmp_path / "runs/mine")

    @pytest.mark.parametrize("ended", [True, False])
    def test_of_another_run_is_not_continued(self, made, tmp_path, ended):
        made("mine", steps=12, saved=(10,))
        made("other", steps=96, saved=(90,))
        other = tmp_path / "runs/other"
        if ended:
            record.write_summary(other, {})
        before = TestEarlierRun.tree(other)
        says = rf"^run\.name is other, and {other} .*{tmp_path}/ck_mine: its ckpt\.path was {tmp_path}/ck_other; "
        self.refused(made, says, name="other", ckpt__path=tmp_path / "ck_mine")
        assert TestEarlierRun.tree(other) == before
        made("new", steps=11, ckpt__path=tmp_path / "ck_mine", ckpt__load_enable=True)  # a new record is nobody's

    @pytest.mark.parametrize("damage", [{"ckpt.path": 3}, {"ckpt.save_steps": None}])
    def test_a_damaged_one_is_named(self, made, tmp_path, damage):
        made(steps=3)
        file = tmp_path / "runs/mine/run.json"
        run = json.loads(file.read_text())
        file.write_text(json.dumps(run | {"config": run["config"] | damage}))
        self.refused(made, rf"^{file} is damaged: ")

    def test_a_run_that_ended_goes_on_with_more_episodes(self, made, tmp_path):
        made(steps=12, saved=(10,))
        record.write_summary(tmp_path / "runs/mine", {})
        assert made(ckpt__load_enable=True, train__num_episodes=2) == 12 + 1  # the trainer drops what it repeats
        assert record.read_summary(tmp_path / "runs/mine") == {}

    def test_a_run_that_was_moved_goes_on(self, made, start, tmp_path, monkeypatch):
        """Its record and its checkpoints know each other, wherever both are now."""
        made(steps=12, saved=(10,))
        made("unsaved", steps=3)
        (tmp_path / "disk").mkdir()
        for name in ("runs", "ck_mine", "ck_unsaved"):
            (tmp_path / name).rename(tmp_path / "disk" / name)
        for name, resumes in (("mine", True), ("unsaved", False)):
            moved = {"run__dir": tmp_path / "disk/runs", "ckpt__path": tmp_path / f"disk/ck_{name}"}
            made(name, steps=0, ckpt__load_enable=True, **moved)
            assert ("resumed" in start.begun[-1][0]) is resumes
