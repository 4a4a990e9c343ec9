"""`bapo-openrlhf buffer`: its lists of a state that was written by hand."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from bapo_openrlhf.cli import main as cli
from bapo_openrlhf.record.checkpoint_store import CheckpointStore
from bapo_openrlhf.record.state_file import CheckpointError, load_state, save_state

HARD = [("2+2=", "0", 3), ("What is\n1+1? [b]x[/b] \x1b[2J", "1/8", 8)]  # prompt, mean, step


def response(reward, tokens, extra=None):
    return {
        "token_ids": np.arange(2 + tokens, dtype=np.int32) + 10,
        "action_spans": [[2, 2 + tokens]],
        "log_probs": np.full(tokens, -0.25, np.float32),
        "reward": reward,
        "extras": {"info": {"digits": 2.0, "odd": float("nan")}, "score": reward, "truncated": False,
                   "mm_train_inputs": extra},
        "policy_step": None,
    }  # fmt: skip


def group(uid, text, rewards, step, policy_step, lengths, extra=None):
    prompt = {"text": text, "label": "7", "images": None}
    responses = [response(reward, count, extra) for reward, count in zip(rewards, lengths, strict=True)]
    about = {"reward_range": ["0", "1"], "generated": list(rewards), "relative_to": "generated"}
    return {"uid": uid, "step": step, "policy_step": policy_step, "prompt": prompt, "responses": responses} | about


def state(method="bapo", version=1):
    return {
        "version": 1,
        "step": 10,  # the last one was 9
        "engine_step": 8,
        "torch_rng": torch.arange(5, dtype=torch.uint8),
        "method": {
            "method": method,
            "version": version,
            "hard": {
                "entries": [
                    {"prompt": {"text": text, "label": "4", "images": None}, "mean": mean, "step": step}
                    for text, mean, step in HARD
                ],
                "counts": {"added": 2},
            },
            "replay": {
                "groups": [
                    group(40, "3*4=", [1.0, 0.0, 0.0, 0.0], 7, 4, [1, 2, 3, 4]),
                    group(52, "An apple", [1.0, 1.0, 0.0, 0.0], 9, 8, [5, 5, 5, 5]),
                    group(53, "3*5=", [0.5, 0.5, 0.5, 0.0], 9, 8, [1, 1, 1, 1],
                          {"pixels": torch.ones(2, dtype=torch.bfloat16)}),
                ],
                "counts": {"added": 3},
            },
        },
    }  # fmt: skip


def save(path, tag="global_step10", content=None):
    """A whole checkpoint, like the trainer writes it."""
    store = CheckpointStore(path, critic=False)
    folder = store.begin(tag)
    for part in ("_actor", "_critic"):
        (path / part / tag).mkdir(parents=True)
        (path / part / tag / "model.pt").write_text(f"{part} of {tag}")
    save_state(folder, content or state())
    store.complete(tag, int(tag.split("step")[1]))
    return folder


@pytest.fixture
def checkpoints(tmp_path):
    path = tmp_path / "runs" / "night" / "checkpoints"
    path.mkdir(parents=True)
    save(path)
    return path


@pytest.fixture
def command(capsys):
    """Run the command. Return its exit status, its lines and the lines on standard error."""

    def run(*argv):
        status = cli.run(["buffer", *map(str, argv)])
        done = capsys.readouterr()
        return status, done.out.splitlines(), done.err.splitlines()

    return run


def listed(lines):
    """The cells of the list. The prompt is one cell."""
    start = next(i for i, line in enumerate(lines) if line.startswith("buffer "))
    return [line.split(None, 5) for line in lines[start + 1 :] if line.startswith(("hard ", "replay "))]


def tree(path):
    return {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.rglob("*") if file.is_file()}


# ── The list ──

ROWS = [
    ["hard", "0.000", "6", "-", "-", "2+2="],
    ["hard", "0.125", "1", "-", "-", "What is 1+1? [b]x[/b]  [2J"],
    ["replay", "0.250", "2", "10", "40", "3*4="],
    ["replay", "0.500", "0", "20", "52", "An apple"],
    ["replay", "0.375", "0", "4", "53", "3*5="],
]


def test_list_by_hand(checkpoints, command):
    before = tree(checkpoints)
    status, lines, errors = command(checkpoints)
    assert status == 0 and errors == []
    assert [[cell.strip() for cell in row] for row in listed(lines)] == ROWS
    folder = checkpoints / "_adapt" / "global_step10"
    assert lines[:3] == [
        f"{folder}: 10 steps done, engines hold the weights of step 8",
        "hard buffer: 2 prompts, mean reward 0.062, 1 to 6 steps old (mean 3.5)",
        "replay buffer: 3 groups, mean reward 0.375, 0 to 2 steps old (mean 0.7), 34 generated tokens",
    ]
    assert tree(checkpoints) == before


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--buffer", "hard"], [0, 1]),
        (["--buffer", "replay"], [2, 3, 4]),
        (["--limit", "2"], [0, 1]),
        (["--buffer", "replay", "--limit", "1"], [2]),
    ],
)
def test_buffer_and_limit(checkpoints, command, flags, expected):
    status, lines, _ = command(checkpoints, *flags)
    assert status == 0
    assert [[cell.strip() for cell in row] for row in listed(lines)] == [ROWS[i] for i in expected]
    more = {2: "and 3 more (--limit)", 1: "and 2 more (--limit)"}
    assert not flags[-1].isdigit() or lines[-1] == more[len(expected)]


def test_nothing_chosen_and_nothing_stored(command, tmp_path):
    content = state()
    content["method"]["hard"]["entries"] = []
    save(tmp_path / "half", content=content)
    assert command(tmp_path / "half", "--buffer", "hard")[1][-1] == "no entry was chosen"
    content["method"]["replay"]["groups"] = []
    save(tmp_path / "empty", content=content)
    assert command(tmp_path / "empty")[1][-1] == "both buffers are empty"


def test_responses_as_text(checkpoints, command, monkeypatch):
    """The tokenizer returns what it must decode: only the generated tokens."""

    class Tokenizer:
        @classmethod
        def from_pretrained(cls, name):
            if name != "mine":
                raise OSError(f"no\n {name}")
            return cls()

        def decode(self, ids):
            return "<" + ",".join(map(str, ids)) + ">\n\x1b[2J"

    transformers = type(sys)("transformers")
    transformers.AutoTokenizer = Tokenizer
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    _, lines, _ = command(checkpoints, "--buffer", "replay", "--limit", "1", "--tokenizer", "mine")
    start = next(i for i, line in enumerate(lines) if line.startswith("replay  "))
    assert [line.strip() for line in lines[start + 1 : start + 5]] == [
        "1: <12>  [2J",
        "0: <12,13>  [2J",
        "0: <12,13,14>  [2J",
        "0: <12,13,14,15>  [2J",
    ]
    status, _, errors = command(checkpoints, "--tokenizer", "other")
    assert status == 2 and errors == ["error: tokenizer 'other' cannot be loaded: no other"]


# ── Which checkpoint ──


def test_every_folder_that_stands_for_a_checkpoint(checkpoints, command, monkeypatch):
    other = state()
    other["step"] = 4
    save(checkpoints, "global_step4", other)

    def steps(path):
        status, lines, errors = command(path)
        assert status == 0 and errors == []
        return int(lines[0].split(": ")[1].split()[0])

    for path in (checkpoints, checkpoints.parent, f"{checkpoints}/"):
        assert steps(path) == 10, path
    assert steps(checkpoints / "_adapt" / "global_step4") == 4
    monkeypatch.chdir(checkpoints / "_adapt" / "global_step4")
    assert steps(".") == 4 and steps("../global_step10") == 10 and steps("../..") == 10
    copy = checkpoints.parent / "copied"
    (checkpoints / "_adapt" / "global_step4").rename(copy)
    assert steps(copy) == 4


def test_a_damaged_checkpoint_is_named(checkpoints, command):
    old = save(checkpoints, "global_step4", state() | {"step": 4})
    model = checkpoints / "_actor" / "global_step10" / "model.pt"
    model.write_text("short")
    status, lines, errors = command(checkpoints)
    assert status == 0 and "4 steps done" in lines[0]
    assert len(errors) == 1 and "global_step10 is skipped" in errors[0] and "model.pt has 5 bytes" in errors[0]
    status, lines, errors = command(checkpoints / "_adapt" / "global_step10")
    assert status == 0 and "10 steps done" in lines[0] and errors == [], "its buffers can be read"
    tensors = old / "state.safetensors"
    raw = bytearray(tensors.read_bytes())
    raw[-1] ^= 1
    tensors.write_bytes(raw)
    status, _, errors = command(old)
    assert status == 2 and errors[-1].endswith(
        "state.safetensors is damaged or belongs to another save than state.json"
    )
    status, _, errors = command(checkpoints)
    assert status == 2 and "global_step10 is skipped" in errors[0] and "global_step4 is skipped" in errors[1]
    assert "has no whole checkpoint with buffers" in errors[2]


def test_a_save_that_did_not_end(checkpoints, command):
    store = CheckpointStore(checkpoints, critic=False)
    store.begin("global_step12")
    status, lines, errors = command(checkpoints)
    assert status == 0 and "10 steps done" in lines[0] and "global_step12 is skipped" in errors[0]
    assert "has no whole checkpoint with buffers" in command(checkpoints / "_adapt" / "global_step12")[2][0]


@pytest.mark.parametrize("kind", ["other", "none", "newer"])
def test_another_methods_state_is_named(tmp_path, command, kind):
    content = {"other": state("fifo"), "none": {"step": 1, "method": 3}, "newer": state(version=2)}[kind]
    save(tmp_path / "ckpt", content=content)
    status, _, errors = command(tmp_path / "ckpt")
    named = {"other": "'fifo', version 1", "none": "None, version None", "newer": "'bapo', version 2"}[kind]
    assert status == 2 and f"method {named}; only 'bapo', version 1, can be listed" in errors[0]


def test_no_state_of_batch_adaptation(command, tmp_path):
    (tmp_path / "plain" / "_actor" / "global_step5").mkdir(parents=True)
    (tmp_path / "file").touch()
    for name in ("plain", "file", "nowhere"):
        status, _, errors = command(tmp_path / name)
        assert status == 2 and f"{name} has no whole checkpoint with buffers (_adapt/TAG); " in errors[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--limit", "0"], "limit is 0; it must be at least 1"),
        (["--buffer", "soft"], "invalid choice: 'soft'"),
    ],
)
def test_bad_flags_are_one_line(checkpoints, command, flags, message):
    status, lines, errors = command(checkpoints, *flags)
    assert status == 2 and lines == [] and len(errors) == 1 and message in errors[0]


# ── Without torch ──


def test_it_needs_no_torch(checkpoints):
    """Although the state has torch tensors, one with a type that numpy does not have."""
    code = (
        "import sys\n"
        "for name in ('torch', 'ray', 'vllm', 'transformers', 'matplotlib'): sys.modules[name] = None\n"
        "from bapo_openrlhf.cli.main import run\n"
        "sys.exit(run(['buffer', sys.argv[1]]))"
    )
    done = subprocess.run([sys.executable, "-c", code, checkpoints], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "3*5=" in done.stdout


def test_state_without_tensors_is_the_same_but_for_them(tmp_path):
    content = state() | {"empty": np.zeros((0, 3), np.float32), "flags": np.array([True, False]), "scalar": np.int64(3)}
    save_state(tmp_path, content)
    whole, without = load_state(tmp_path), load_state(tmp_path, tensors=False)
    assert without["torch_rng"] is None and torch.equal(whole["torch_rng"], content["torch_rng"])
    for name in ("empty", "flags", "scalar"):
        assert np.array_equal(without[name], content[name]) and without[name].dtype == content[name].dtype
        assert without[name].shape == content[name].shape
    pairs = zip(whole["method"]["replay"]["groups"], without["method"]["replay"]["groups"], strict=True)
    for one, other in pairs:
        for a, b in zip(one["responses"], other["responses"], strict=True):
            assert a["token_ids"].tobytes() == b["token_ids"].tobytes() and a["token_ids"].dtype == b["token_ids"].dtype
            assert a["log_probs"].tobytes() == b["log_probs"].tobytes()
    assert without["method"]["replay"]["groups"][2]["responses"][0]["extras"]["mm_train_inputs"] == {"pixels": None}
    os.truncate(tmp_path / "state.safetensors", 40)
    with pytest.raises(CheckpointError, match="has 40 bytes"):
        load_state(tmp_path, tensors=False)
