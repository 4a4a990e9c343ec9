"""The adapter of reasoning-gym: every task of the library, names and levels, and text that tries to run."""

import ast
import importlib.metadata
import importlib.util
import json
import re
from collections import Counter
from contextlib import nullcontext
from operator import ne
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch  # noqa: F401 (rewards are tensors only if a process has loaded it)

from bapo_openrlhf.cli import main as cli
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.tasks import reasoning_gym as task
from bapo_openrlhf.tasks import worked
from bapo_openrlhf.workbench.evaluation.problems import Request, Sampling, load

pytest.importorskip("reasoning_gym")

ROOT = Path(__file__).resolve().parents[3]
SUMS = ROOT / "configs" / "smollm2" / "sums.yaml"
LIBRARY = Path(importlib.util.find_spec("reasoning_gym").origin).parent
TASKS = sorted(set(task.library().DATASETS) - set(task.REFUSED))


def problem_of(name: str):
    return task.problems(task.requested_kinds(name, None)[0], "train", 1, seed=0)[0]


def tagged(text: object) -> str:
    return f"First I think. <answer>{text}</answer>"


@pytest.fixture(scope="module", params=[5, pytest.param(1, marks=pytest.mark.slow)], ids=["a fifth", "all"])
def every_problem(request):
    """A problem of each task, or of every fifth task."""
    return {name: problem_of(name) for name in TASKS[:: request.param]}


def test_the_answer_and_the_solution_of_every_task_are_right_after_a_round_trip_through_a_file(every_problem):
    """Without steps, the solution is the answer. The answers of four tasks are not unique, and the library has none."""
    scores, without = {}, set()
    for name, problem in every_problem.items():
        label = json.loads(json.dumps({"label": problem.label}))["label"]
        entry = ast.literal_eval(label)["entry"]
        solution = worked.solution(name, entry, steps=False)
        assert (solution is None) is (entry["answer"] is None), name
        if solution is None:
            without.add(name)
        else:
            scores[name] = task.score(tagged(entry["answer"]), label), task.score(solution, label)
    assert len(worked.WITHOUT_ANSWER) == 4 and without == set(every_problem) & set(worked.WITHOUT_ANSWER)
    assert {name: both for name, both in scores.items() if both != (1.0, 1.0)} == {}


CONSTANT = (
    *("0", "0.0", "1", "-1", "True", "False", "yes", "no", "A", "None", "[]", "{}", "x", "0 0", "infeasible"),
    "6*4*1*1",
)


def fooled(name, problems=4):
    """Answers that all of some problems take for right: without the problem, cut, with NaN, or made of the question."""
    data, found = task.library().create_dataset(name, seed=7, size=problems), []
    entries = [data[number] for number in range(problems)]
    labels = [repr({"task": name, "parameters": {}, "entry": task._plain(entry)}) for entry in entries]
    whole = [str(entry["answer"]) for entry in entries]
    made = [[text[: len(text) // 2] for text in whole], [text[:1] for text in whole]]
    made.append([re.sub(r"-?[0-9.]+", "NaN", text) for text in whole])
    known = [entry["metadata"] for entry in entries]
    made.append([" ∧ ".join(metadata.get("premises", ())) for metadata in known])
    made.append([f"Integral({metadata.get('integrand')}, {metadata.get('variable')})" for metadata in known])
    tried = [([text] * problems) for text in CONSTANT] + [texts for texts in made if all(map(ne, texts, whole))]
    for texts in tried:
        if all(task.score(tagged(text), label) == 1 for text, label in zip(texts, labels, strict=True)):
            found.append(texts)
    return found


@pytest.mark.parametrize("names", [
    [*TASKS[::10], "number_sorting", "simple_integration", "intermediate_integration"],
    pytest.param(TASKS, marks=pytest.mark.slow),
], ids=["some", "all"])  # fmt: skip
def test_no_such_answer_is_right_for_all_problems_of_a_task(names):
    assert {name: found for name in names if (found := fooled(name))} == {}


def test_the_judges_that_are_fooled_are_refused(monkeypatch):
    names = {"coin_flip", "game_of_life_halting", "propositional_logic", "puzzle24"}
    assert names <= set(task.REFUSED)
    monkeypatch.setattr(task, "REFUSED", {})
    assert {name for name in names if fooled(name)} == names


HOSTILE = (
    "__import__('pathlib').Path({file!r}).write_text('run')", "(lambda: open({file!r}, 'w'))()", "9**9**9**9",
    "(" * 400 + ")" * 400, "[" * 3000, "x" * 100_000, "1e999", "nan", "\x00\ud800", "{{'a': 1}}", "[[0, 1], [1]]",
    "None", "", "٣ + ²", "NaN+nanj",
)  # fmt: skip


def test_no_text_runs_or_crashes_or_is_right_in_any_scorer(tmp_path):
    file = tmp_path / "made"
    for name, problem in ((name, problem_of(name)) for name in TASKS):
        for text in HOSTILE:
            assert task.score(tagged(text.format(file=str(file))), problem.label) < 1, (name, text)
            assert not file.exists(), (name, text)


DANGEROUS = {"eval", "exec", "__import__", "parse_expr", "sympify", "parse_latex", "lambdify", "system", "popen"}
LOOKED_AT = {  # Calls on text that the library itself has made, so no response reaches them.
    "algorithmic.number_sorting": "the entry's answer",
    "arithmetic.basic_arithmetic": "the entry's expression",
    "arithmetic.bitwise_arithmetic": "the entry's problem",
    "arithmetic.gsm_symbolic.generators_00_49": "templates",
    "arithmetic.gsm_symbolic.generators_50_99": "templates",
    "logic.propositional_logic": "a parser of its own with this name",
}


@pytest.mark.slow  # it parses all of the library
def test_each_module_that_evaluates_text_has_been_looked_at():
    """If another version calls `eval` in another place, this test names it."""
    result = set()
    for file in LIBRARY.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in DANGEROUS:
                result.add(".".join(file.relative_to(LIBRARY).with_suffix("").parts))
    names = (*task.FENCES, "codeio", "puzzle24")
    modules = {task.library().DATASETS[name][0].__module__.partition(".")[2] for name in names}
    assert result == modules | set(task.LITERALS) | set(LOOKED_AT)


@pytest.mark.parametrize(("formula", "numbers", "names"), [
    ("(3 + 5) * 7 / 2 - 1", True, True),
    ("x**2 + 3*x", False, True),
    ("sin(x)*exp(-x)/pi", False, True),
    ("2**100", False, False),
    ("2**(9*9*9)", False, False),
    ("2**-(99)", False, True),
    ("3**2", False, True),
    ("3.5*2", False, True),
    ("Integral(x, x)", False, False),
    ("x.__class__", False, False),
    ("xx", False, False),
    ("eval(x)", False, False),
    ("sin(x, evaluate=x)", False, False),
    ("True", False, False),
    ("[x for x in x]", False, False),
    ("1 +" * 200 + "1", False, False),
])  # fmt: skip
def test_harmless_formulas(formula, numbers, names):
    assert (task.harmless(formula, names=False), task.harmless(formula, names=True)) == (numbers, names)


@pytest.mark.parametrize(("response", "answer"), [
    ("<answer>1</answer> no: <answer>2</answer>", "2"),
    ("<answer>1</answer> and <answer>2", "1"),
    ("<answer><answer>3</answer>", "3"),
    ("<think> <answer>1</answer> or", None),
    ("</answer>12<answer>", None),
])  # fmt: skip
def test_the_last_answer_counts(response, answer):
    assert task.answer(response) == answer


def test_rewards_are_the_librarys_scores_and_say_what_was_answered():
    label, prompt = problem_of("chain_sum").label, "How much? <answer> </answer>"
    right = ast.literal_eval(label)["entry"]["answer"]
    responses = [tagged(right), tagged("no number"), f"It is {right}.", ""]
    got = task.reward_func([prompt + text for text in responses], [prompt] * 4, [label] * 4)
    assert got["rewards"].tolist() == got["scores"].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert got["extra_logs"]["answered"].tolist() == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("value", "score"),
    [(1 + 1e-9, 1.0), (-1e-9, 0.0), (1 - 1e-9, 1 - 1e-9), (0.5, 0.5), (1.5, None), (-0.1, None), (float("nan"), None)],
)
def test_a_score_outside_its_range_is_an_error_unless_it_was_rounded(monkeypatch, value, score):
    label = problem_of("chain_sum").label
    scorer = SimpleNamespace(score_answer=lambda answer, entry: value)
    monkeypatch.setattr(task, "_scorer", lambda name, parameters: scorer)
    with nullcontext() if score is not None else pytest.raises(ValueError, match="score of chain_sum"):
        assert task.score(tagged(1), label) == score


@pytest.mark.parametrize(
    "label", ["", "12", "{'task': 1}", "__import__('os')", "[1]", "{'task': 'puzzle24', 'parameters': {}, 'entry': {}}"]
)
def test_a_label_of_another_task_or_a_refused_one_is_an_error(label):
    """Another version may have written it."""
    with pytest.raises(ValueError, match="^label has the task puzzle24; " if "puzzle24" in label else "^label is "):
        task.score(tagged(1), label)


def test_names_levels_and_weights():
    easy, hard, gcd = task.requested_kinds("chain_sum@0,chain_sum@3:0.5,gcd:0", None)
    assert [kind.name for kind in (easy, hard, gcd)] == ["chain_sum@0", "chain_sum@3", "gcd"]
    assert [kind.weight for kind in (easy, hard, gcd)] == [1.0, 0.5, 0.0]
    assert easy.parameters["max_terms"] < hard.parameters["max_terms"] and gcd.parameters == {}


def test_the_file_gives_names_of_ones_own():
    kinds = {kind.name: kind for kind in task.requested_kinds(None, SUMS)}
    assert kinds["six"].weight == 0 and kinds["three"].task == "chain_sum"
    assert kinds["six"].parameters == {"min_terms": 6, "max_terms": 6, "min_digits": 1, "max_digits": 1}
    assert (kinds["tens"].steps, kinds["six"].steps) == (0.25, 1.0)
    assert [kind.weight for kind in task.requested_kinds("three:3,gcd", SUMS)] == [3.0, 1.0]


BAD = {  # --tasks, or the text of --config
    "chainsum": r"task is 'chainsum'; it must be one of reasoning-gym's 106; did you mean chain_sum",
    "codeio": "task is codeio; it is refused because it runs programs of its data",
    "chain_sum@99": r"reasoning-gym refuses chain_sum .*level is 99; it must be 0\.\.",
    "chain_sum:x": "--tasks has 'chain_sum:x'; each must be NAME, NAME@LEVEL or NAME:WEIGHT",
    "chain_sum,chain_sum": "--tasks has chain_sum twice",
    "chain_sum:0": "all weights are 0",
    "x: {task: chain_sum, terms: 3}": "x: terms is no parameter of chain_sum; it has min_terms",
    "x: {task: chain_sum, min_terms: 9, max_terms: 2}": "x: reasoning-gym refuses chain_sum with min_terms=9, max_t",
    "x: {task: chain_sum, weight: -1}": "x: weight is -1; it must be a number of at least 0",
    "x: {task: chain_sum, steps: 2}": "x: steps is 2; it must be a share within 0..1",
    "x: 3": "x is 3; it must be a mapping",
    "[]": "it must have a mapping of names",
    "train: {task: gcd}": "--tasks has train; the name stands for a part",
}


@pytest.mark.parametrize(("asked", "message"), BAD.items(), ids=range(len(BAD)))
def test_bad_names_and_files(tmp_path, asked, message):
    file = tmp_path / "kinds.yaml"
    file.write_text(asked)
    with pytest.raises(ConfigError, match=message):
        task.task_of_kinds(*((None, file) if ": " in asked or asked == "[]" else (asked, None)))


@pytest.mark.parametrize("installed", [None, "0.1.24"])
def test_another_version_or_none_names_the_command(monkeypatch, installed):
    real = importlib.import_module

    def missing(name):
        if installed is None and name.startswith("reasoning_gym"):
            raise ImportError("No module named 'reasoning_gym'")
        return real(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed)
    result = installed or r"none \(ImportError: No module named 'reasoning_gym'\)"
    with pytest.raises(ConfigError, match=rf"has version {result}; .*`pip install reasoning-gym==0\.1\.25`"):
        task.library.__wrapped__()


def test_no_question_is_in_two_parts_and_a_seed_repeats_them():
    [kind] = task.requested_kinds("chain_sum@2", None)
    parts = {part: task.problems(kind, part, 60, seed=1) for part in ("train", "warmup", "chain_sum@2")}
    texts = [problem.text for problems in parts.values() for problem in problems]
    assert len(texts) == 180 == len(set(texts))
    assert task.problems(kind, "train", 60, seed=1) == parts["train"]
    assert task.problems(kind, "train", 60, seed=2) != parts["train"]


def test_weights_are_shares_of_the_training_data_and_of_the_warm_up():
    configured = task.task_of_kinds("three:1,six:3,letter_counting:2,graph_color:2", SUMS)
    for part, shares in {"train": (5, 15, 10, 10), "warmup": (7, 20, 13, 0)}.items():  # no answer has a graph's colours
        tasks = Counter()
        for problem in configured.generate("", part, 40, 0):
            label = ast.literal_eval(problem.label)
            tasks[label["task"], label["parameters"].get("max_terms")] += 1
            assert (problem.solution is None) is (label["task"] in worked.WITHOUT_ANSWER)
        names = (("chain_sum", 3), ("chain_sum", 6), ("letter_counting", None), ("graph_color", None))
        assert tuple(tasks[name] for name in names) == shares


def test_a_share_of_the_solutions_writes_the_steps():
    """The same problem has its steps or not in every file. Without them, the solution is the answer."""

    def solved(share):
        kind = task.Kind("sums", "chain_sum", {"min_terms": 3, "max_terms": 3}, 1.0, share)
        return {problem.text: problem.solution for problem in task.problems(kind, "warmup", 800, seed=0)}

    whole, part, none = solved(1.0), solved(0.25), solved(0.0)
    written = [text for text in part if part[text] == whole[text]]
    assert 150 <= len(written) <= 250  # 200 expected, with a standard deviation of 12
    assert all(
        part[text] == none[text] == whole[text][whole[text].index("<answer>") :] for text in part.keys() - written
    )
    assert all(len(solution.split()) > 5 for solution in whole.values())


def test_a_kind_with_too_few_problems_says_so(tmp_path):
    file = tmp_path / "kinds.yaml"
    file.write_text("one: {task: chain_sum, min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}")
    with pytest.raises(ConfigError, match=r"^300 problems of one are asked for; there are only"):
        task.task_of_kinds(None, file).generate("", "one", 300, 0)


def test_labels_are_literals_even_if_an_entry_has_a_fraction():
    [kind] = task.requested_kinds("gsm_symbolic", None)
    data = task.library().create_dataset("gsm_symbolic", seed=0, size=8)
    assert "Fraction(" in repr(data[7]) and task._plain(data[7])["metadata"]["variables"]["serving_fraction"] == "2"
    problems = task.problems(kind, "train", 40, 0)
    assert all(ast.literal_eval(problem.label)["entry"] for problem in problems)


def test_an_integral_that_the_library_could_not_solve_is_no_problem(monkeypatch):
    made = [{"question": str(index), "answer": ["x**2 + C", "Integral(x, x) + C"][index % 2]} for index in range(40)]
    kind = task.Kind("integrals", "intermediate_integration", {}, 1.0, 1.0)
    monkeypatch.setattr(task, "library", lambda: SimpleNamespace(create_dataset=lambda *given, **named: made))
    assert {int(problem.text) % 2 for problem in task.problems(kind, "train", 8, 0)} == {0}
    made.clear()  # a generator that gives up
    with pytest.raises(ConfigError, match=r"^reasoning-gym cannot make entry 0 of integrals: "):
        task.problems(kind, "train", 1, 0)


@pytest.mark.parametrize("level", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_parameters_of_every_level_are_literals(level):
    """As they stand in each label. Parameters as usual are left out; some of these are no literals (aiw's)."""
    factory = task.library()
    for name in sorted(factory.DATASETS.keys() - task.REFUSED.keys()):
        try:
            [kind] = task.requested_kinds(f"{name}@{level}", None)
        except ConfigError:
            continue  # there is no such level
        assert ast.literal_eval(repr(kind.parameters)) == kind.parameters
        curriculum = factory.create_curriculum(name)
        curriculum.set_global_level(level)
        parameters, usual = curriculum.generate_configuration(), factory.DATASETS[name][1]()
        vars(usual).update(kind.parameters)
        assert {**vars(parameters), "seed": None, "size": None} == {**vars(usual), "seed": None, "size": None}, name


def test_a_worked_solution_is_right_step_by_step():
    """Each step is computed again by Python, and the library judges the answer."""
    for name in ("chain_sum", "basic_arithmetic", "products", "gcd", "countdown"):
        for problem in task.problems(task.requested_kinds(name, None)[0], "warmup", 40, seed=3):
            assert task.score(problem.solution, problem.label) == 1.0, problem
            for step in problem.solution.partition(" <answer>")[0].removesuffix(".").split(". "):
                values = {round(eval(side.replace("mod", "%").replace("/", "*1.0/")), 9) for side in step.split(" = ")}
                assert len(values) == 1, step


def test_steps_by_hand():
    assert worked.calculation("7 - (2 - 9)") == ["2 - 9 = -7", "7 - (-7) = 14"]
    assert worked.calculation("23 * 45 / 2") == ["23 * 45 = 23 * 40 + 23 * 5 = 920 + 115 = 1035", "1035 / 2 = 1035/2"]
    assert worked.divisor([48, 36]) == ["48 mod 36 = 12", "36 mod 12 = 0"]
    with pytest.raises(ValueError, match="is no expression"):
        worked.calculation("2 ** 3")


def test_prepare_writes_rows_that_train_and_evaluate_read(tmp_path):
    folder = tmp_path / "reasoning_gym"
    words = ["--config", str(SUMS), "--size", "train=20,test=4,warmup=10", "--out", str(folder)]
    assert cli.run(["prepare", "reasoning_gym", *words]) == 0
    rows = [json.loads(line) for line in (folder / "train.jsonl").open()]
    assert len(rows) == 20 and all(task.score("", row["label"]) == 0 for row in rows)
    kinds = json.loads((folder / "manifest.json").read_text())["parts"]["train"]["asked"]["kinds"]
    assert "chain_sum" in kinds and "tens" in kinds
    benchmark = load(
        "tens", Request("model", "name", ["tens"], tmp_path, Sampling(1, 1.0, 1.0, -1, 20, 42), [1], tmp_path)
    )
    assert len(benchmark.problems) == 4 and benchmark.reward == task.TASK.file


def test_prepare_needs_names_and_refuses_them_for_other_tasks(capsys):
    assert cli.run(["prepare", "reasoning_gym"]) == 2
    assert "reasoning_gym needs --tasks NAME,... or --config FILE" in capsys.readouterr().err
    assert cli.run(["prepare", "reasoning_gym", "--tasks", "gcd", "--generate", "magic"]) == 2
    assert f"generator is 'magic'; reasoning_gym has reasoning-gym {task.VERSION}" in capsys.readouterr().err
    assert cli.run(["prepare", "countdown", "--tasks", "gcd"]) == 2
    assert "--tasks and --config are only for reasoning_gym; the task is countdown" in capsys.readouterr().err
