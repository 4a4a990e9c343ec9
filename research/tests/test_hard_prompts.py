"""Part 2 of decision_design.md: never solved and solved, by hand, with an evaluation that is made up."""

import json

import hard_prompts
import pytest


def counts(**changed):
    """128 problems, of which the first 64 have no right response and the others 2 of 64: a success of 1.6 %."""
    return {f"sum {n}": 0 if n < 64 else 2 for n in range(128)} | changed


def test_never_solved_are_those_without_any_right_response():
    assert hard_prompts.never_solved(counts()) == [f"sum {n}" for n in range(64)]
    assert "sum 3" not in hard_prompts.never_solved(counts(**{"sum 3": 1}))


@pytest.mark.parametrize("each", [0, 4])
def test_a_base_model_with_another_success_is_refused(each):
    with pytest.raises(ValueError, match="it must be 1% to 5%"):
        hard_prompts.never_solved(dict.fromkeys(counts(), each))


def test_solved_are_those_with_at_least_two_right_responses():
    scores = {"none": [0.0] * 16, "one": [1.0] + [0.0] * 15, "two": [0.0, 1.0, 1.0], "partial": [0.5] * 16}
    assert hard_prompts.solved(scores) == ["two"]


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """A project's folder with the hard sums and the base's counts. Returns what was asked: model, file and number."""
    hard = tmp_path / "runs" / "hard_sums"
    hard.mkdir(parents=True)
    rows = [{"input": f"sum {n}", "label": str(n)} for n in range(128)]
    (hard / "trained.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(hard_prompts, "BASE_COUNTS", tmp_path / "results" / "hard_base.csv")
    calls = []

    def evaluate(model, problems, runs, out, root, *, limit, seed):
        calls.append((model.name, problems.name, runs, limit, seed))
        texts = [json.loads(line)["input"] for line in problems.open()][:limit]
        if problems.name == "trained.jsonl":
            return {text: [1.0] * counts()[text] + [0.0] * (runs - counts()[text]) for text in texts}
        return {text: [float(n < place) for n in range(runs)] for place, text in enumerate(texts)}

    monkeypatch.setattr(hard_prompts, "evaluate", evaluate)
    return tmp_path, calls


def test_the_base_is_asked_once_and_fixed(asked):
    root, calls = asked
    for _ in range(2):
        hard_prompts.write_base(root)
    assert calls == [("steps_model", "trained.jsonl", 64, 128, 42)] and hard_prompts.read_base() == counts()
    hard_prompts.write_never(root)
    never = [json.loads(line) for line in (root / "runs" / "hard_sums" / "never.jsonl").open()]
    assert [row["label"] for row in never] == [str(n) for n in range(64)]
    again = json.loads((root / "runs" / "eval" / "hard_base_again" / "solved.json").read_text())
    assert calls[1:] == [("steps_model", "never.jsonl", 16, 64, 43)]  # new responses
    assert (again["solved"], again["of"]) == (62, 64)  # all but those with none and one


def test_a_trained_model_is_asked_once_with_the_same_responses_for_each_arm(asked):
    root, calls = asked
    hard_prompts.write_base(root)
    hard_prompts.write_never(root)
    run = root / "runs" / "studies" / "one"
    run.mkdir(parents=True)
    for _ in range(2):
        hard_prompts.solved_by(run, root)
    assert calls[2:] == [("model", "never.jsonl", 16, 64, 43)]
    assert json.loads((run / "solved.json").read_text())["right"]["sum 5"] == 5


def test_counts_of_other_problems_are_refused(asked):
    root, _ = asked
    hard_prompts.write_base(root)
    path = root / "runs" / "hard_sums" / "trained.jsonl"
    path.write_text(path.read_text().replace('"sum 7"', '"sum 7000"'))
    with pytest.raises(ValueError, match="other problems"):
        hard_prompts.write_never(root)
