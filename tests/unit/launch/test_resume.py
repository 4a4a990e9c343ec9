"""The checkpoint from which a run continues, with the store's own files. No Ray, no models."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.flags.paths import run_folder
from bapo_openrlhf.launch.resume import Start, choose_start, products_by_step, take
from bapo_openrlhf.record import run_record as record
from bapo_openrlhf.record.checkpoint_store import CheckpointStore
from bapo_openrlhf.record.state_file import save_state

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


class Run:
    def __init__(self, path: Path, *, critic: bool = False) -> None:
        self.path, self.critic, self.ranks = path, critic, 2
        self.store = CheckpointStore(path, critic=critic)
        self.models = ("_actor", "_critic") if critic else ("_actor",)

    def write_models(self, tag: str) -> None:
        """Write the models as OpenRLHF does; `latest` names the last checkpoint."""
        for part in self.models:
            folder = self.path / part / tag
            folder.mkdir(parents=True)
            (folder / "model.pt").write_text(f"{part} {tag}")
            for rank in range(self.ranks):
                (folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").write_text(f"{part} {tag} {rank}")
            (folder.parent / "latest").write_text(tag)

    def save(self, *tags: str, finished: bool = True) -> None:
        for tag in tags:
            folder = self.store.begin(tag)
            self.write_models(tag)
            save_state(folder, {"tag": tag})
            if finished:
                self.store.complete(tag, 0)

    def convert(self, tag: str) -> None:
        converted = {part: self.path / "converted" / part for part in self.models}
        for folder in converted.values():
            folder.mkdir(parents=True)
            (folder / "optimizer_state.pt").touch()
        self.store.add_universal(tag, converted)

    def start(
        self, *, adapted: bool = True, universal: bool = False, actors: int = 2, critics: int = 2
    ) -> SimpleNamespace:
        args = SimpleNamespace(
            ckpt=SimpleNamespace(path=str(self.path), load_enable=True, output_dir=str(self.path.parent / "model")),
            adapt=SimpleNamespace(enabled=adapted, method="bapo" if adapted else "none"),
            ds=SimpleNamespace(use_universal_ckpt=universal),
            actor=SimpleNamespace(model_name_or_path="model", num_nodes=1, num_gpus_per_node=actors),
            critic=SimpleNamespace(
                model_name_or_path="model" if self.critic else None, num_nodes=critics, num_gpus_per_node=1
            ),
            reward=SimpleNamespace(model_name_or_path=None, remote_url=["reward.py"]),
            train=SimpleNamespace(agent_func_path=None),
            run=SimpleNamespace(dir=str(self.path.parent / "runs"), name="default", overwrite=False),
        )
        before = self.tree()
        start = choose_start(args)
        assert self.tree() == before  # `check` does so while a run goes on
        args.tag = start.tag
        take(start, args)
        return args

    def refused(self, says: str, **given) -> None:
        """The start is refused by a message that begins so, and nothing changes."""
        before = self.tree()
        with pytest.raises(ConfigError, match=f"^{says}"):
            self.start(**given)
        assert self.tree() == before

    def goes_on_from(self, tag: str) -> None:
        args = self.start()
        assert (args.ckpt.load_enable, args.tag) == (True, tag)
        self.store.check(tag)
        for part in self.models:  # what OpenRLHF reads
            assert (self.path / part / "latest").read_text() == tag

    def tree(self) -> dict[str, bytes | None]:
        return {
            str(entry.relative_to(self.path)): entry.read_bytes() if entry.is_file() else None
            for entry in self.path.rglob("*")
        }


@pytest.fixture(params=[False, True], ids=["actor", "actor and critic"])
def run(request, tmp_path) -> Run:
    return Run(tmp_path / "checkpoints", critic=request.param)


def lines(capsys) -> list[str]:
    out, err = capsys.readouterr()
    assert out == ""
    assert all(line.startswith("ckpt.load_enable: ") for line in err.splitlines())
    return [line.removeprefix("ckpt.load_enable: ") for line in err.splitlines()]


class TestNoCheckpoint:
    def test_starts_from_the_beginning_and_says_so(self, run, capsys):
        args = run.start()
        assert (args.ckpt.load_enable, args.tag) == (False, None)  # OpenRLHF would look for one
        assert lines(capsys) == ["there is no checkpoint: starting from the beginning"]
        assert not run.path.exists()

    def test_unfinished_ones_only(self, run, capsys):
        run.save("global_step1", "global_step2", finished=False)
        run.store.begin("global_step3")
        args = run.start()
        assert (args.ckpt.load_enable, args.tag) == (False, None)
        assert sorted(lines(capsys)[:3]) == [f"global_step{n} was not finished: removed" for n in (1, 2, 3)]
        assert not any("global_step" in name for name in run.tree())  # the models are gone, too


@pytest.mark.parametrize("named", [True, False])
def test_latest_is_written_anew(run, named):
    """If it names another, or is gone. Which one is the newest is in test_checkpoint_store.py."""
    run.save("global_step10", "global_step9")
    for part in run.models if not named else ():
        (run.path / part / "latest").unlink()
    run.goes_on_from("global_step10")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


class TestDamage:
    def test_none_is_whole(self, run, capsys):
        run.save("global_step1", "global_step2")
        for tag in ("global_step1", "global_step2"):
            flip(run.path / "_adapt" / tag / "manifest.json")
        run.refused(f"ckpt.path is {run.path}; none .*: global_step2, global_step1$")
        assert len(lines(capsys)) == 2

    def test_an_unfinished_one_is_removed_and_a_damaged_one_passed_over(self, run, capsys):
        run.save("global_step1", "global_step2")
        run.save("global_step3", finished=False)
        flip(run.path / "_adapt" / "global_step2" / "state.safetensors")
        run.goes_on_from("global_step1")
        assert [line.split()[0] for line in lines(capsys)] == ["checkpoint", "global_step3", "resuming"]
        assert not (run.path / "_actor" / "global_step3").exists()

    def test_a_checkpoint_without_the_critic_that_is_now_asked_for(self, tmp_path, capsys):
        Run(tmp_path).save("global_step1")
        Run(tmp_path, critic=True).refused(f"ckpt.path is {tmp_path}; none .*: global_step1")
        assert "global_step1" in lines(capsys)[0]

    def test_a_folder_that_is_a_link_is_not_followed(self, run, tmp_path):
        run.save("global_step1")
        (run.path / "_adapt").rename(tmp_path / "elsewhere")
        (run.path / "_adapt").symlink_to(tmp_path / "elsewhere")
        run.refused(f"ckpt.path is {run.path}; {run.path / '_adapt'} ")


class TestOtherRanks:
    """Two ranks of each model wrote the checkpoint."""

    def test_are_refused_with_the_command_that_converts(self, run):
        run.save("global_step4")
        says = r"actor\.num_nodes x actor\.num_gpus_per_node is 3, and 2 actor ranks .* global_step4"
        for universal in (False, True):
            command = rf"`bapo-openrlhf universal {run.path}`.*--ds\.use_universal_ckpt"
            run.refused(f"{says}.*{command}", actors=3, universal=universal)
        run.convert("global_step4")
        run.refused(rf"{says}(?!.*bapo-openrlhf).*--ds\.use_universal_ckpt", actors=3)

    def test_of_the_critic(self, run):
        run.save("global_step4")
        if run.critic:
            run.refused(r"critic\.num_nodes x critic\.num_gpus_per_node is 1, and 2 critic ranks", critics=1)
        else:
            assert run.start(critics=1).tag == "global_step4"

    @pytest.mark.parametrize("ranks", [(1, 3), (3, 1), (2, 2)])
    def test_resume_what_was_converted(self, run, ranks, capsys):
        run.save("global_step2", "global_step4")
        run.convert("global_step4")
        args = run.start(universal=True, actors=ranks[0], critics=ranks[1])
        assert (args.tag, args.ds.use_universal_ckpt) == ("global_step4", True)
        for part in run.models:  # what DeepSpeed reads, and what `next_step` reads
            for name in ("latest", "latest_universal"):
                assert (run.path / part / name).read_text() == "global_step4"
        assert lines(capsys) == ["resuming from global_step4"]
        assert run.start().ds.use_universal_ckpt is False  # without the flag it is loaded as it was saved

    def test_the_same_ranks_need_no_conversion(self, run, capsys):
        """So a scheduler may always give the flag."""
        run.save("global_step4")
        args = run.start(universal=True)
        assert (args.tag, args.ds.use_universal_ckpt) == ("global_step4", False)
        assert lines(capsys)[0].startswith("global_step4 ") and not list(run.path.glob("*/latest_universal"))


class TestForeign:
    """Checkpoints of a run without batch adaptation have no buffers."""

    def test_are_refused_and_no_hindrance_beside_one_that_is_whole(self, run):
        run.write_models("global_step3")
        run.refused(f"ckpt.path is {run.path}; .* without batch adaptation")
        run.save("global_step1")
        run.goes_on_from("global_step1")
        assert (run.path / "_actor" / "global_step3").exists()


class TestPlain:
    """Without batch adaptation DeepSpeed's `latest` names the checkpoint, and nothing is deleted."""

    def test_no_other_file_is_looked_at(self, run, capsys):
        run.save("global_step1", "global_step2")
        run.save("global_step3", finished=False)
        flip(run.path / "_adapt" / "global_step2" / "state.safetensors")
        before = run.tree()
        args = run.start(adapted=False)
        assert (args.ckpt.load_enable, args.tag) == (True, "global_step3")
        assert run.tree() == before and lines(capsys) == ["resuming from global_step3"]

    def test_actor_and_critic_are_of_one_step(self, tmp_path):
        """A crash in a save leaves one of them at the older step, or without a checkpoint in the first save."""
        run = Run(tmp_path / "checkpoints", critic=True)
        for tag in ("global_step9", "global_step10", "best_global_step10"):
            run.write_models(tag)
        for old, new, wanted in (("_actor", "_critic", "global_step9"), ("_critic", "_actor", "global_step10")):
            (run.path / old / "latest").write_text(wanted)
            (run.path / new / "latest").write_text("best_global_step10")
            assert run.start(adapted=False).tag == wanted
            assert [(run.path / part / "latest").read_text() for part in run.models] == [wanted, wanted]
        (run.path / "_critic" / "latest").unlink()
        args = run.start(adapted=False)
        assert (args.ckpt.load_enable, args.tag) == (False, None)  # or OpenRLHF would find the actor's

    def test_one_that_is_not_there_is_named(self, run):
        run.write_models("global_step3")
        shutil.rmtree(run.path / "_actor" / "global_step3")
        run.refused(f"ckpt.path is {run.path}; {run.path}/_actor/global_step3 ", adapted=False)
        (run.path / "_actor" / "latest").write_bytes(b"global_st\xff")
        run.refused(rf"ckpt.path is {run.path}; {run.path}/_actor/latest .*b'global_st\\xff'", adapted=False)


class TestProducts:
    """The way a CPU multiplies bfloat16 matrices, by the step from which a run does it so."""

    @pytest.fixture
    def part(self, tmp_path):
        """A part of a run: from the checkpoint with this tag, or from the beginning."""
        args = SimpleNamespace(run=SimpleNamespace(dir=str(tmp_path), name="mine"))

        def start(way: str | None, tag: str | None = None) -> dict[str, str]:
            ways = products_by_step(args, way, Start(tag)) if way else None
            record.begin_run(run_folder(args), {"started": "now", "bf16_products": ways}, resumes=tag is not None)
            return ways

        return start

    def test_a_resume_on_the_other_kind_says_so_once(self, part, capsys):
        assert part("direct") == {"1": "direct"}
        assert part("float32", "global_step4") == {"1": "direct", "5": "float32"}
        [line] = lines(capsys)
        assert "bfloat16" in line and "'direct'" in line
        assert part("float32", "best_global_step8") == {"1": "direct", "5": "float32"}
        assert lines(capsys) == []
        assert part("direct", "global_step3") == {"1": "direct"}  # an earlier checkpoint: the other steps are gone
        assert lines(capsys) == []

    @pytest.mark.parametrize("begun", [True, False])
    def test_a_run_that_was_begun_on_a_gpu_or_with_an_earlier_version(self, part, capsys, begun):
        if begun:
            part(None)
        assert part("direct", "global_step4") == {"5": "direct"}
        assert lines(capsys) == []
