"""The picture of a run in the terminal, and the command that shows it."""

import codecs
import io
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from fcntl import ioctl

import numpy as np
import pytest
from rich.console import Console

from bapo_openrlhf.cli import main as cli
from bapo_openrlhf.record import run_record as record
from bapo_openrlhf.record.follow import Seen
from bapo_openrlhf.workbench.findings import staleness_findings
from bapo_openrlhf.workbench.watch import curve, picture, warnings

WIDTHS = (60, 80, 200)


NUMBERS = {
    "groups/fresh": 8, "groups/reevaluated": 4, "groups/replayed": 12, "groups/capacity": 32, "groups/generated": 30,
    "groups/filtered": 16, "groups/unimproved": 2, "groups/cut": 0, "groups/failed": 0, "filtered/none_right": 10,
    "filtered/all_right": 6, "buffer/hard": 61, "buffer/hard_age_mean": 17.25, "buffer/replay": 5,
    "buffer/replay_age_mean": 1.5, "buffer/replay_bytes": 3 * 2**20, "threshold/c2": 0.285, "threshold/c3": 0.41,
    "threshold/average_reward": 0.426, "tokens/generated": 5000, "timing/generation": 1.5, "timing/ppo_train": 0.5,
    "timing/step_total": 2.0, "rollouts/step": 240, "staleness/rollout_policy": 1,
    "staleness/replayed_steps_mean": 2.25, "staleness/replayed_syncs_mean": 1.0,
    "gap/kl": 2.4e-5, "gap/absolute": 0.0031, "gap/cut_share": 0.0004,
    "gap/age": 1, "shift/fresh": 2.1e-5, "tv/fresh": 0.013, "importance/fresh_mean": 1.012,
    "importance/fresh_max": 1.13, "clip/fresh": 0.016, "shift/replayed": 1.2e-4, "tv/replayed": 0.029,
    "importance/replayed_mean": 0.939, "importance/replayed_max": 1.19,
}  # fmt: skip


def make_rows(count, **extra):
    return [
        {"step": step, "reward/fresh_mean": step / count, "rollouts/total": 240 * step, **NUMBERS, **extra}
        for step in range(1, count + 1)
    ]


RUN = {"name": "night", "algorithm": "ba_ppo", "seed": 7, "total_steps": 60}


def lines_of(seen, width=80, height=None):
    console = Console(file=io.StringIO(), width=width, height=height or 100, legacy_windows=False, _environ={})
    console.print(picture(seen, width, height))
    return console.file.getvalue().rstrip("\n").split("\n")


def section(lines, label):
    """The text from the line that begins with `label` up to the next line that begins with a word."""
    start = next(i for i, line in enumerate(lines) if line.startswith(label))
    end = next((i for i in range(start + 1, len(lines)) if not lines[i].startswith(" ")), len(lines))
    return " ".join(" ".join(lines[start:end]).split())


@pytest.mark.parametrize("width", WIDTHS)
def test_everything_is_said_at_every_width(width):
    lines = lines_of(Seen("folder", make_rows(24), RUN, {}, 1.0), width)
    assert max(map(len, lines)) <= width
    assert re.fullmatch(r"night · ba_ppo · seed 7 +running", lines[0])
    assert lines[1].endswith("  24/60 steps · 1 min 12 s left")  # 36 steps of 2 s
    parts = {
        "reward": ["now 1.000", f"last 8 steps {np.mean([s / 24 for s in range(17, 25)]):.3f}",
                   f"first 8 {np.mean(range(1, 9)) / 24:.3f}"],
        "generated": ["210 groups in 7 steps", "112 filtered", "70 none right", "42 all right", "14 unimproved"],
        "buffers": ["hard 61, 17.2 steps old", "replay 5, 1.5 steps old, 3.0 MiB"],
        "thresholds": ["c2 0.285", "c3 0.410", "average reward 0.426"],
        "rates": ["120 responses/s", "2,500 tokens/s", "5,760 responses so far"],
        "step": ["2 s", "generation 1.5 s", "ppo train 0.5 s"],
        "engine gap": ["KL 2.4e-05 a token", "log-probs differ by 3.1e-03", "0.04% of tokens would be cut", "1 step"],
        "policy": ["rollout weights 1 step old", "replayed groups 2.2 steps old", "1.0 syncs"],
    }  # fmt: skip
    for label, facts in parts.items():
        for fact in facts:
            assert fact in section(lines, label), (label, fact)
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("source")) :]
    assert [row.split() for row in table] == [
        ["source", "groups", "shift", "TV", "weight", "clipped", "step"],
        ["fresh", "8", "2.1e-05", "0.013", "1.012", "1.6%", "24"],
        ["replayed", "12", "1.2e-04", "0.029", "0.939", "-", "24"],
    ]


@pytest.mark.parametrize("height", range(20, 60))
def test_the_picture_fits_the_terminal(height):
    for width in WIDTHS:
        lines = lines_of(Seen("folder", make_rows(24), RUN, {}, 1.0, "cannot be reached " * 5), width, height)
        text = "\n".join(lines)
        assert len(lines) <= height and lines[0].startswith("night") and "cannot be reached" in text
        assert "\nreward " in text and "\nbatches " in text


def test_bars_show_where_the_batch_came_from():
    lines = lines_of(Seen("folder", make_rows(1), RUN))
    [(step, bar, counts)] = [line.split() for line in lines if re.match(r" +\d+  [█▓▒░]", line)]
    assert (step, counts) == ("1", "8+4+12")
    for sign, share in (("█", 8 / 32), ("▓", 4 / 32), ("▒", 12 / 32), ("░", 8 / 32)):
        assert abs(bar.count(sign) - share * len(bar)) <= 1


def test_a_run_without_batch_adaptation_has_less_to_say():
    rows = [{"step": 1, "reward/fresh_mean": 0.5, "groups/fresh": 4, "groups/generated": 4, "groups/capacity": 4}]
    text = "\n".join(lines_of(Seen("plain", rows)))
    assert text.startswith("plain") and "1 steps" in text and "4+0+0" in text and "now 0.500" in text
    assert not re.search(r"^(buffers|thresholds|step|policy|source|rates|held-out) ", text, re.M)
    for nothing in ({}, {"reward/fresh_mean": None, "tv/fresh": None}):
        assert lines_of(Seen("plain", [{"step": 1, **nothing}]))[0].startswith("plain")


SAID = "stopped by SIGTERM after step 5. It goes on with step 6: bapo-openrlhf train"
ENDED = RUN | {"ended": {"how": "stopped", "at": "2026-11-01T00:00:00+00:00", "status": 143, "text": SAID}}


def test_how_a_run_ended_is_said_first():
    stopped = Seen("x", make_rows(5), ENDED, {}, 9999.0)
    assert warnings(stopped) == [SAID] and lines_of(stopped)[1].endswith("  5/60 steps, which took 10 s")
    untrained = RUN | {"ended": ENDED["ended"] | {"how": "untrained", "text": "nothing was trained"}}
    for summary in ({}, {"steps": 60, "nothing_trained": "of an earlier run"}):
        seen = Seen("x", make_rows(5), untrained, summary, 9999.0)
        assert warnings(seen) == ["nothing was trained"] and lines_of(seen)[0].endswith(" untrained")
    killed = Seen("x", make_rows(5), RUN, {}, 9999.0, killed=True)
    assert warnings(killed) == ["the run was killed: its process is gone without a word"]
    assert "left" not in lines_of(killed)[1]


@pytest.mark.parametrize(("seen", "state"), [
    (Seen("x"), "no run here yet"),
    (Seen("x", [], RUN, {}, 30.0), "starting"),
    (Seen("x", [], RUN, {}, 700.0), "silent"),
    (Seen("x", make_rows(3), RUN, {}, 100.0), "running"),
    (Seen("x", make_rows(3), RUN, {}, 121.0), "silent"),
    (Seen("x", make_rows(3), RUN, {}, 590.0, begins=True), "running"),  # it was resumed, and loads its models
    (Seen("x", make_rows(3), RUN, {}, 610.0, begins=True), "silent"),
    (Seen("x", make_rows(3, **{"timing/step_total": 60.0}), RUN, {}, 590.0), "running"),
    (Seen("x", make_rows(3, **{"timing/step_total": 60.0}), RUN, {}, 610.0), "silent"),
    (Seen("x", make_rows(60), RUN, {}, 1.0), "finishing"),
    (Seen("x", make_rows(60), RUN, {"steps": 60}, 9999.0), "finished"),
    (Seen("x", make_rows(60), RUN, {"steps": 60, "nothing_trained": "why"}, 9999.0), "untrained"),
    (Seen("x", make_rows(5), ENDED, {}, 9999.0), "stopped"),
    (Seen("x", make_rows(5), RUN, {}, 1.0, killed=True), "killed"),
    (Seen("x", make_rows(60), RUN, {"steps": 60}, 1.0, killed=True), "finished"),
    (Seen("x", make_rows(5), RUN, {"steps": 60}, 1.0), "running"),  # the summary is of an earlier run
])  # fmt: skip
def test_state(seen, state):
    assert lines_of(seen)[0].endswith(f" {state}")
    assert seen.ended == (state in ("finished", "untrained"))
    assert bool([text for text in warnings(seen) if "may have stopped" in text]) == (state == "silent")


def test_a_run_that_was_resumed_under_another_name_is_as_far_as_its_steps():
    """Its record begins at the checkpoint."""
    rows = [row | {"step": 40 + row["step"], "rollouts/total": 240 * (40 + row["step"])} for row in make_rows(3)]
    lines = lines_of(Seen("x", rows, RUN, {}, 1.0))
    assert lines[1].endswith("  43/60 steps · 34 s left")  # 17 steps of 2 s
    assert "120 responses/s" in "\n".join(lines)
    assert lines_of(Seen("x", [*rows, rows[-1] | {"step": 60}], RUN, {}, 1.0))[0].endswith(" finishing")


def test_what_the_study_found_is_said_below_the_distances_and_is_no_warning():
    seen = Seen("x", make_rows(30, **{"shift/replayed": 0.25}), RUN, {}, 1.0)
    lines = lines_of(seen, 200)
    assert warnings(seen) == [] and not [line for line in lines if line.startswith("!")]
    [said] = staleness_findings(seen.recent, "the last 20 steps")
    assert section(lines, "distance") == f"distance {said}"


def test_a_finished_run_whose_number_of_steps_was_not_known():
    run = {"algorithm": "grpo", "seed": 0, "total_steps": None}
    lines = lines_of(Seen("old", make_rows(4), run, {"steps": 4, "seconds": {"whole_run": 185.6}}))
    assert lines[0].startswith("old · grpo · seed 0") and lines[1].endswith("  4/4 steps, which took 8 s")  # 2 s each
    assert lines_of(Seen("none", [], run, {"steps": 0}))[1] == "0/0 steps"


def test_warnings_that_matter():
    rows = make_rows(30)
    rows[2]["skipped_update"] = rows[20]["skipped_update"] = 1
    rows[3]["groups/failed"] = 5  # too long ago
    rows[12]["groups/failed"] = 2
    rows[13] |= {"groups/failed": 1, "groups/nonfinite": 1}
    seen = Seen("x", rows, RUN, {}, 1000.0, "connection lost")
    parts = ["connection lost", "no new step for 16 min 40 s, but a step takes 2 s", "2 of 30 updates .* step 21",
             "3 groups .* 20 steps: no reward", "1 group .* 20 steps: log-probs"]  # fmt: skip
    for part, said in zip(parts, warnings(seen), strict=True):
        assert re.match(part, said)
    for width in WIDTHS:
        text = " ".join(" ".join(lines_of(seen, width)).split())
        assert all(f"! {warning}" in text for warning in warnings(seen))


def test_what_others_wrote_cannot_steer_the_terminal():
    metadata = {"name": "\x1b]0;title\x07[bold red]n[/]", "algorithm": "a\nb"}
    text = "".join(lines_of(Seen("x\x1b[2J", make_rows(1), metadata, {}, 1, "\x1b[H")))
    assert "\x1b[2J" not in text and "\x1b]" not in text and "\x07" not in text and "\x1b[H" not in text
    assert "[bold red]n[/]" in text and "a b" in text


def dots(lines):
    """Heights of the dots in each column, from above."""
    result = {}
    for row, text in enumerate(lines):
        for column, char in enumerate(text):
            bits = ord(char) - 0x2800 if char != " " else 0
            # Unicode 2800: dots 1-3 and 7 are the left column from above, 4-6 and 8 the right one.
            for bit, (x, y) in enumerate([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3)]):
                if bits >> bit & 1:
                    result.setdefault(2 * column + x, set()).add(4 * row + y)
    return result


@pytest.mark.parametrize("count", [1, 2, 7, 500])
def test_the_curve_goes_through_the_values(count):
    values, wide, tall = np.random.default_rng(count).random(count).tolist(), 2 * 40, 4 * 6  # dots
    actual = dots(curve(values, 0.0, 1.0, columns=40, height=6))
    assert sorted(actual) == list(range(wide))
    for x, value in enumerate(np.interp(np.linspace(0, count - 1, wide), range(count), values)):
        heights = sorted(actual[x])
        assert any(abs(y - (1 - value) * (tall - 1)) <= 0.5 + 1e-9 for y in heights)
        assert heights == list(range(heights[0], heights[-1] + 1)), "no gaps"
        assert x == 0 or min(abs(a - b) for a in heights for b in actual[x - 1]) <= 1


def test_axes_of_the_curve():
    lines = lines_of(Seen("x", make_rows(48), RUN), 80)
    labelled = [line for line in lines if "┤" in line]
    values = [float(line.split("┤")[0]) for line in labelled]
    smoothed = [s / 48 for s in range(2, 48)]
    assert min(smoothed) - 0.05 < values[-1] < values[0] < max(smoothed) + 0.05 and len(labelled) >= 3
    assert np.allclose(np.diff(values), np.diff(values)[0], atol=0.006)
    assert lines[lines.index(labelled[-1]) + 2].split() == ["1", "48"]


def test_a_flat_curve_and_a_long_one():
    flat = lines_of(Seen("x", make_rows(5, **{"reward/fresh_mean": 0.25}), RUN))
    assert any("0.25" in line for line in flat) and len([line for line in flat if "┤" in line]) >= 3
    labelled = [line for line in lines_of(Seen("x", make_rows(10_000), RUN)) if "┤" in line]
    assert 0 <= float(labelled[-1].split("┤")[0]) < 0.2 and 0.8 < float(labelled[0].split("┤")[0]) <= 1


@pytest.fixture
def folder(tmp_path):
    """A run of 5 steps, of which 2 are finished."""
    run = tmp_path / "runs" / "night"
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps(RUN | {"total_steps": 5}))
    write(run, make_rows(2), "w")
    return run


def write(run, rows, mode="a"):
    with (run / "metrics.jsonl").open(mode) as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


COMMAND = [sys.executable, "-m", "bapo_openrlhf.cli", "watch"]


def test_once_is_one_picture(folder):
    command = [*COMMAND, str(folder), "--once"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "60"}, timeout=60)
    assert done.returncode == 0 and done.stderr == "" and "\x1b" not in done.stdout
    assert "2/5 steps" in done.stdout and max(map(len, done.stdout.splitlines())) <= 60


def test_no_run_there(tmp_path, capsys):
    for name in ("b", "a"):
        record.begin_run(tmp_path / "runs" / name, {})
    (tmp_path / "empty").mkdir()
    for words, part in (
        ([str(tmp_path / "empty"), "--once"], "it has no run.json"),
        ([str(tmp_path / "runs")], "these folders in it have one: a, b"),  # it would wait for ever
        ([str(tmp_path / "none")], "/none' does not exist"),
        ([], "RUN"),
    ):
        assert cli.run(["watch", *words]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and part in err


class Terminal:
    """A terminal of 24 lines and 60 columns."""

    def __init__(self, command):
        self.master, slave = pty.openpty()
        ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
        without = {"NO_COLOR", "COLUMNS", "LINES", "FORCE_COLOR"}
        environment = {key: value for key, value in os.environ.items() if key not in without}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            env=environment | {"TERM": "xterm-256color"}, preexec_fn=lambda: ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)
        self.output, self.decoder = "", codecs.getincrementaldecoder("utf-8")("replace")

    def until(self, pattern):
        """Read until the pattern is in the output since the last call, and return this output."""
        start, deadline = len(self.output), time.monotonic() + 60
        while not re.search(pattern, self.output[start:]):
            assert time.monotonic() < deadline, self.output[start:]
            if select.select([self.master], [], [], 0.5)[0]:
                self.output += self.decoder.decode(os.read(self.master, 65536))
        return self.output[start:]

    def close(self):
        self.process.kill()
        self.process.wait(60)
        os.close(self.master)


@pytest.fixture
def terminal():
    opened = []

    def start(command):
        opened.append(Terminal(command))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def test_live(terminal, folder):
    """The picture follows the file in place, without the alternate screen. Ctrl-C ends it."""
    shell = terminal([*COMMAND, str(folder)])
    assert "█" in shell.until(r"2/5 steps.*left")
    write(folder, make_rows(3)[2:])
    assert "\x1b[1A" in shell.until(r"3/5 steps")
    write(folder, make_rows(1), "w")
    shell.until(r"1/5 steps")
    longest = max(re.split("[\r\n]", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shell.output)), key=len)
    assert len(longest) <= 60, longest
    os.write(shell.master, b"\x03")
    shell.until(re.escape("\x1b[?25h"))  # the cursor is back
    assert shell.process.wait(60) == 0 and "Traceback" not in shell.output and "\x1b[?1049h" not in shell.output


def test_live_from_before_the_run_has_a_folder_until_its_end(terminal, tmp_path):
    """A folder with nothing but a lock is none yet."""
    folder = tmp_path / "run"
    shell = terminal([*COMMAND, str(folder)])
    shell.until(r"waiting for it")
    folder.mkdir()
    (folder / ".lock").write_text("")
    shell.until(r"waiting for it")
    (folder / "run.json").write_text(json.dumps(RUN))
    shell.until(r"0/60 steps")
    write(folder, make_rows(5))
    (folder / "summary.json").write_text(json.dumps({"steps": 5}))
    assert "finished" in shell.until(r"5/60 steps, which took 10 s") and shell.process.wait(60) == 0


def test_evaluations_are_told_from_the_first_to_the_last():
    rows = [{"step": step, "eval_sums_pass1": step / 10, "eval_sums_pass4": 0.9} for step in (2, 4, 6)]
    rows.append({"step": 8, "eval_failed": 3})
    lines = lines_of(Seen("x", make_rows(8), RUN, evaluations=rows))
    assert section(lines, "held-out") == "held-out sums 0.200 to 0.600 (steps 2 to 6)"


def test_rewards_of_0_everywhere_name_the_file_with_answers():
    nothing = make_rows(20, **{"reward/fresh_mean": 0.0})
    [said] = warnings(Seen("x", nothing, RUN, {}, 1.0))
    assert "answers.jsonl" in said
    assert warnings(Seen("x", [*nothing[:-1], make_rows(20)[-1]], RUN, {}, 1.0)) == []


def test_warnings_of_the_run_itself():
    """Those of which the rows say more are not shown twice."""
    of_run = [{"step": 1, "kind": "reward range", "text": "step 1: rewards go from 1 to 12"}]
    of_run += [{"step": 2, "kind": kind, "text": f"step 2: {kind}"} for kind in ("skipped", "failed", "nonfinite")]
    assert warnings(Seen("a run", make_rows(3), warnings=of_run)) == ["step 1: rewards go from 1 to 12"]
    seen = Seen("a run", make_rows(3), summary={"steps": 3, "nothing_trained": "nothing was trained: why"})
    assert warnings(seen) == ["nothing was trained: why"]
    seen.summary = {"steps": 2, "nothing_trained": "nothing was trained: why"}  # of another run of that name
    assert warnings(seen) == []
