"""research/benchmarks/adaptation.py, short: what it drives is the real layer, and its pages say what was measured."""

import json
import math
import sys

import adaptation
import adaptation_layer
import adaptation_storage
import numpy as np
import pytest
import report
from adaptation_layer import LAYER, PERIOD, Run, World


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """What a tiny run writes: the result, the page and the picture. Its processes, for memory, are left out."""
    bytes_ = iter([(7.5, 30.0), (9.0, 18.0)])
    monkeypatch.setattr(
        adaptation, "memory_round", lambda *size: dict(zip(("groups", "experience"), next(bytes_), strict=True))
    )
    words = ["adaptation.py", "--groups", "16", "--tokens", "64", "--rounds", "2", "--step-seconds", "2.5"]
    monkeypatch.setattr(sys, "argv", [*words, "--results", str(tmp_path / "new")])
    monkeypatch.setattr(adaptation, "SCALES", (1, 2, 4))
    monkeypatch.setattr(adaptation, "ROUNDED", (20, 30))
    adaptation.main()
    folder = tmp_path / "new"
    return json.loads((folder / "adaptation.json").read_text()), (folder / "adaptation.md").read_text(), folder


def test_a_tiny_run(measured):
    result, page, folder = measured
    assert (folder / "adaptation.png").read_bytes().startswith(b"\x89PNG")
    assert result["setting"] == {"groups": 16, "group_size": 8, "tokens": 64, "prompt_tokens": 8}
    assert "--groups 16 --tokens 64 --rounds 2 --step-seconds 2.5" in result["command"]
    assert {"machine", "commit", "versions"} <= set(result)
    assert result["bytes_per_stored_token"] == (8 * 4 + 56 * 8) / 64
    for part in ("step", "checkpoint", "layer", "memory"):
        assert all(len(values) == 2 and all(value > 0 for value in values) for values in result[part].values()), part
    step = result["step"]
    for at, whole in enumerate(step["layer"]):
        assert whole == pytest.approx(sum(step[name][at] for name in LAYER))
    for at in range(2):
        received, trained, padded = (
            PERIOD * step[name][at] / step[f"{name}_a_sample"][at]
            for name in ("samples_to_groups", "groups_to_samples", "openrlhf_padding")
        )
        assert round(received) >= 5 * 16 * 8 and received / 8 == pytest.approx(round(received / 8))
        assert padded == pytest.approx(trained) and 0 < trained <= received
    names = {name.partition("/")[2] for name in result["layer"]}
    assert set(result["slopes"]) == names and len(result["layer"]) == 3 * len(names)
    for name in names:
        assert f"| {'a step' if name == 'layer' else name} | " in page
    assert "16 groups | 32 groups | 64 groups" in page
    assert "in 20 responses of 30 tokens" in page and "| float16 | 0." in page
    assert "| 8.25 (7.5 to 9) | 0.375 (0.25 to 0.5) |" in page  # the ratio is within a round
    assert "a measured step (2.5 s)" in page and "the paper's step (313 s)" in page
    share = sorted(100 * seconds / 2.5 for seconds in step["layer"])
    assert (
        f"| a measured step (2.5 s) | {adaptation.number(sum(share) / 2)} ({share[0]:.3g} to {share[1]:.3g}) % |"
        in page
    )


def test_too_few_groups(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["adaptation.py", "--groups", "3"])
    with pytest.raises(SystemExit):
        adaptation.main()
    assert "--groups is 3; it must be at least 4" in capsys.readouterr().err


def test_slopes_are_of_all_groups_together(monkeypatch):
    monkeypatch.setattr(adaptation, "SCALES", (1, 10, 100))
    layer = {f"{scale}/linear": [2e-6] for scale in (1, 10, 100)}
    layer |= {f"{scale}/square": [9.0, 1e-6 * scale, 0.0] for scale in (1, 10, 100)}  # its median counts
    layer |= {f"{scale}/constant": [1e-3 / scale] for scale in (1, 10, 100)}
    assert adaptation.slopes(layer, 256) == pytest.approx({"linear": 1, "square": 2, "constant": 0})


@pytest.mark.parametrize(("value", "text"), [(0.01234, "0.0123"), (12.345, "12.3"), (1234.5, "1,234"), (99.96, "100")])
def test_numbers(value, text):
    assert adaptation.number(value) == text


class TestRun:
    def test_is_driven_as_the_trainer_does(self):
        run = Run(32, World(8, 64, shared=True))
        named, policies, trained = [], [], []
        begin, build = run.method.begin_step, run.method.build_batch
        run.method.begin_step = lambda step: named.append(begin(step)) or named[-1]

        def built(step, fresh, again):
            batch = build(step, fresh, again)
            policies.append({group.weights_version for group in fresh})
            assert [group.prompt for group in again] == named[-1]
            assert all(group.weights_version == step for group in again)
            assert len(batch) <= 32
            trained.append(len(batch))
            return batch

        run.method.build_batch = built
        for _ in range(3):
            run.round()
        assert policies == [{step - step % 5} for step in range(15)]
        assert [step for step, prompts in enumerate(named) if prompts] == [5, 10]
        assert all(len(prompts) <= 16 for prompts in named) and len(named[10]) > 4
        assert sum(trained) > 0
        assert run.ledger.counts["generated"] == 15 * 32 + sum(map(len, named))
        assert len(run.method.replay) == 32 or run.method.replay.counts["expired"]

    def test_shared_arrays_are_one_array(self):
        world = World(8, 64, shared=True)
        one, two = world.groups(world.prompts(2), 0, 0)
        assert one.responses[0].token_ids is two.responses[7].token_ids
        assert one.prompt.id != two.prompt.id and len(one.prompt.text) == 4 * 8
        world = World(8, 64, shared=False)
        one, two = world.groups(world.prompts(2), 0, 0)
        assert not np.shares_memory(one.responses[0].token_ids, one.responses[1].token_ids)

    def test_means_over_a_round(self, monkeypatch):
        ticks = iter(np.arange(1000.0))
        monkeypatch.setattr(adaptation_layer.time, "perf_counter", lambda: float(next(ticks)))
        seconds = Run(16, World(8, 64, shared=True)).round()
        # a lap takes a tick, and laps that follow one another nothing else
        assert {name: seconds[name] for name in LAYER} == dict.fromkeys(LAYER, 1.0)
        assert seconds["layer"] == 4.0


def test_pieces_are_a_group(monkeypatch):
    ticks = iter(np.arange(1000.0))
    monkeypatch.setattr(adaptation_layer.time, "perf_counter", lambda: float(next(ticks)))
    result = adaptation_layer.pieces(World(8, 64, shared=True), 40)
    halves = {"hard buffer: name the oldest", "hard buffer: remove"}
    assert {round(1 / value) for name, value in result.items() if name not in halves} == {40}
    assert {round(1 / result[name]) for name in halves} == {20}


class TestStorage:
    def test_rounding(self):
        """Half of the last place is 2^-12 of a number in float16, 2^-9 in bfloat16, at most."""
        result = adaptation_storage.rounding(50, 1000)
        exact = -np.random.default_rng(0).exponential(0.5, (50, 1000)).astype(np.float32)
        # the largest log-probs lie between 4 and 8
        assert -8 < exact.min() < -4
        assert 0.5 * 2.0**-9 < result["float16"]["token_most"] <= math.expm1(2.0**-9)
        assert 0.5 * 2.0**-6 < result["bfloat16"]["token_most"] <= math.expm1(2.0**-6)
        half = exact.astype(np.float16).astype(float).sum(-1) - exact.astype(float).sum(-1)
        assert result["float16"]["response_most"] == pytest.approx(np.abs(np.expm1(half)).max(), rel=1e-6)
        assert result["float16"]["response_deviation"] == pytest.approx(np.sqrt((np.expm1(half) ** 2).mean()), rel=1e-6)

    def test_what_is_saved_is_what_was_there(self, tmp_path):
        run = Run(16, World(8, 64, shared=False))
        run.round()
        adaptation_storage.save_layer(tmp_path, run)
        loaded = []
        original = run.make_method
        run.make_method = lambda: loaded.append(original()) or loaded[-1]
        adaptation_storage.load_layer(tmp_path, run)
        saved, back = (list(method.replay) for method in (run.method, loaded[0]))
        assert [group.uid for group in back] == [group.uid for group in saved] != []
        assert np.array_equal(back[0].responses[3].token_ids, saved[0].responses[3].token_ids)
        assert len(loaded[0].hard) == len(run.method.hard) > 0

    def test_a_round(self):
        run = Run(16, World(8, 64, shared=False))
        run.round()
        result = adaptation_storage.checkpoint_round(run)
        assert result["layer_bytes"] > run.method.replay.nbytes
        assert result["experience_bytes"] > 28 / 7.5 * run.method.replay.nbytes

    @pytest.mark.slow
    def test_memory(self):
        result = adaptation_storage.memory_round(64, 8, 1024)
        # a group: an int32 and a float32 for each token; a sample: these and two masks of bool, and objects around them
        assert 7.5 <= result["groups"] < 14 and 10 <= result["experience"] < 24


class TestReport:
    def test_files(self, tmp_path, capsys):
        report.write(tmp_path / "a" / "b", "name", {"x": 1}, "# π\n")
        assert (tmp_path / "a/b/name.md").read_text(encoding="utf-8") == "# π\n"
        assert json.loads((tmp_path / "a/b/name.json").read_text()) == {"x": 1}
        assert "# π" in capsys.readouterr().out

    def test_what_is_no_number_is_an_error_and_the_page_is_there(self, tmp_path):
        with pytest.raises(ValueError):
            report.write(tmp_path, "name", {"x": math.nan}, "page\n")
        assert (tmp_path / "name.md").read_text() == "page\n"
