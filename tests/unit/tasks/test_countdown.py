"""The Countdown task agrees with Python's own arithmetic and an independent search for solutions."""

import ast
import hashlib
import itertools
import random
import re
import subprocess
import sys
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.tasks import countdown
from bapo_openrlhf.tasks.task import BadRow

# ── References: Python's own arithmetic, and all values that numbers can make ──

# Two operators in a row or a sign, a leading zero, empty parentheses, a call.
NO_EXPRESSION = re.compile(r"(?:^|[-+*/(])[-+*/]|(?<![0-9])0[0-9]|\(\)|[0-9)]\(")


def computed(text):
    """The value of a text of digits, operators and parentheses, and its numbers. None: it is no expression."""
    if NO_EXPRESSION.search(text):
        return None
    try:
        value = eval(re.sub("[0-9]+", r"Fraction(\g<0>)", text))
    except (SyntaxError, ZeroDivisionError):
        return None
    return value, [int(number) for number in re.findall("[0-9]+", text)]


def all_expressions(numbers):
    """(fully parenthesised text, value) of every expression that uses each number once, with any partial values."""
    if len(numbers) == 1:
        yield str(numbers[0]), Fraction(numbers[0])
        return
    for size in range(1, len(numbers)):
        for chosen in itertools.combinations(range(len(numbers)), size):
            rest = [numbers[i] for i in range(len(numbers)) if i not in chosen]
            for left, a in all_expressions([numbers[i] for i in chosen]):
                for right, b in all_expressions(rest):
                    yield f"({left}+{right})", a + b
                    yield f"({left}-{right})", a - b
                    yield f"({left}*{right})", a * b
                    if b:
                        yield f"({left}/{right})", a / b


trees = st.recursive(
    st.integers(0, 30).map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner, st.booleans()).map(
        lambda t: f"({t[0]}{t[1]}{t[2]})" if t[3] else f"{t[0]}{t[1]}{t[2]}"
    ),
    max_leaves=6,
)


@example("3**5")
@example("-3+5")
@example("3--5")
@example("3(5)")
@example("03+5")
@example("3/(5-5)")
@given(st.text("0123456789+-*/()", max_size=14) | trees)
@settings(max_examples=20 * settings.default.max_examples)
def test_any_text_has_the_value_that_python_computes(text):
    try:
        actual = countdown.evaluate(text)
    except countdown.ExpressionError:
        actual = None
    assert actual == computed(text)


@pytest.mark.parametrize("numbers", [[2, 3], [6, 6], [1, 3, 4], [2, 2, 5]])
def test_every_expression_over_small_numbers(numbers):
    """An expression is right only for its own value, and only if the numbers are exactly the given ones."""
    for text, value in all_expressions(numbers):
        for target in range(1, 30):
            assert (countdown.value_over(text, numbers) == target) == (value == target), text
        if value.denominator == 1:
            assert countdown.value_over(text, numbers[:-1]) is None
            assert countdown.value_over(text, [*numbers, 1]) is None
            assert countdown.value_over(text, [numbers[0] + 1, *numbers[1:]]) is None


def test_long_text_is_never_parsed(monkeypatch):
    """Hostile text is cheap because the parser sees only a bounded amount."""
    monkeypatch.setattr(countdown, "ast", None)
    with pytest.raises(AttributeError):
        countdown.value_over("3+5", [3, 5])  # the check itself can fail
    for text in ("9" * (countdown.MAX_LENGTH + 1), "3+5\n", "x"):
        assert countdown.value_over(text, [3, 5]) is None


# ── The answer in a response ──


TAGGED = [
    ("3*5+7", "3*5+7"),
    ("3 * 5 + 7 = 22 ", "3*5+7"),
    (" $ 3*5+7 = 22 $ ", "3*5+7"),
    ("$3\\times5+7 = 22$", "3*5+7"),
    ("10\\div2", "10/2"),
    # As models write it:
    ("3×5+7", "3*5+7"),
    ("3 \\cdot 5 + 7 = 22", "3*5+7"),
    ("3∗5+7", "3*5+7"),
    ("10÷2", "10/2"),
    ("22–7", "22-7"),
    ("[3*5]+7", "(3*5)+7"),
    ("\\left(3*5\\right)+7", "(3*5)+7"),
    ("\\(3*5+7\\)", "3*5+7"),
    ("\\[ 3 \\times 5 + 7 = 22 \\]", "3*5+7"),
    # A true equation is an answer, and a false one is none:
    ("22 = 3*5+7", "3*5+7"),
    ("3*5+7 = 15+7 = 22", "3*5+7"),
    ("22", "22"),
    ("3*5+7 = 23", None),
    ("3+4 = 7 = 8", None),
    ("3*5+7 = 22/0", None),
    ("3*5+7 = 22 = 22 = 22 = 22 = 22", None),
    # No expression, or no one expression:
    ("", None),
    ("x = 3*5+7", None),
    ("3*5+7 =", None),
    ("3*5+7\n7+3*5", None),
    ("3\\timesx5+7", None),
    ("3*5+7<|im_end|>", None),
]


@pytest.mark.parametrize(("text", "expression"), TAGGED)
def test_answer_within_tags(text, expression):
    response = f"I try 7+15=22.\n<answer>{text}</answer>"
    for after in ("", "<|im_end|>", "\nDone.", " 7+3*5"):
        assert countdown.answer(response + after) == expression


@pytest.mark.parametrize(("response", "expression"), [
    ("<answer>1+2</answer> no: <answer>3+5</answer>", "3+5"),
    ("<answer>3+5</answer> no: <answer>wrong</answer>", None),  # the last one counts, not the last good one
    ("<answer>3+5</answer> no: <answer>1+2", "3+5"),  # cut off in the middle of another
    ("<answer> or <answer>3+5</answer>", "3+5"),
    ("<answer>3+5</answer></answer>", None),
    ("<answer>3+5", None),
    ("3+5</answer>", None),
    ("<ANSWER>3+5</ANSWER>", None),
    # Without tags, only special tokens may follow.
    ("3+5", "3+5"),
    ("3+5<eos><pad><pad>", "3+5"),
    ("3+5<|im_end|>", "3+5"),
    ("3+5</s>", "3+5"),
    ("3+5<end_of_utterance>", "3+5"),
    ("3+5<｜end▁of▁sentence｜>", "3+5"),
    ("<eos>", None),
    ("3+5<unk>", None),
    ("3 + 5", None),
    ("3+5=8", None),
])  # fmt: skip
def test_answer_of_a_whole_response(response, expression):
    assert countdown.answer(response) == expression


blanks = st.text(" \t\n", max_size=3)


@given(st.lists(st.sampled_from(["3", "15", "+", "-", "*", "/", "(", ")"]), min_size=1, max_size=9), st.data())
@settings(max_examples=5 * settings.default.max_examples)
def test_blanks_change_nothing_but_numbers(words, data):
    """Words stay separate: removing blanks is right only if it does not join two numbers."""
    text = "".join(data.draw(blanks) + word for word in words) + data.draw(blanks)
    parted = [word for word in re.split(r"\s+|(?<=\D)|(?=\D)", text) if word]
    one_number = any(a.isdigit() and b.isdigit() for a, b in itertools.pairwise(parted))
    assert countdown.answer(f"<answer>{text}</answer>") == (None if one_number else "".join(parted))


def test_solutions_have_positive_integers_as_partial_values_and_no_needless_parentheses():
    """Python's own unparser writes the fewest parentheses for a tree."""
    rng = random.Random(0)
    seen = set()
    for _ in range(500):
        text, value = countdown.random_expression(rng, [rng.randint(1, 12) for _ in range(4)])
        tree = ast.parse(text)
        operations = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.BinOp)]
        values = [countdown.evaluate(operation.replace(" ", ""))[0] for operation in operations]
        assert values[0] == value and all(part.denominator == 1 and part > 0 for part in values), text
        assert ast.unparse(tree).replace(" ", "") == text
        seen |= set(text)
    assert seen > set("+-*/(")


# ── Published rows, labels and prompts ──


@pytest.mark.parametrize(("row", "reason"), [
    ({"nums": None, "target": 5}, "nums is empty"),
    ({"nums": [2, 3], "target": None}, "target is empty"),
    ({"nums": [5], "target": 5}, "fewer than two nums"),
    ({"nums": [2, 0], "target": 2}, "nums are no positive integers"),
    ({"nums": [2, "3"], "target": 5}, "nums are no positive integers"),
    ({"nums": [2, True], "target": 3}, "nums are no positive integers"),
    ({"nums": "[2, 3]", "target": 5}, "nums are no positive integers"),
    ({"nums": [2, 3], "target": "5"}, "target is no positive integer"),
])  # fmt: skip
def test_bad_rows_say_why(row, reason):
    with pytest.raises(BadRow, match=f"^{reason}(:|$)"):  # what is counted
        countdown.problem(row)


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=6), st.integers(1, 10**6))
def test_label_round_trip(numbers, target):
    problem = countdown.problem({"nums": numbers, "target": target})
    assert countdown.parse_problem(problem.label) == (sorted(numbers), target)
    assert problem.key == problem.label  # so the order of the numbers makes no other problem
    assert countdown.parse_problem(problem.text) == (numbers, target)


@pytest.mark.parametrize(
    "label", ["", "22", "3 5 7", "3:5", "3 5:", "3 5:٣", "3 5 7:22=", " 3 5:8", "3 5:8\n", "3,5:8", "-3 5:2"]
)
def test_other_labels_are_refused(label):
    with pytest.raises(ValueError, match="it must be a Countdown problem such as '3 5 7:22'"):
        countdown.reward_func(["3+5"], [""], [label])


def test_prompts_say_the_whole_problem():
    problem = countdown.problem({"nums": [44, 19, 35, 44], "target": 98})
    assert list(countdown.TASK.prompts) == ["words", "short"]  # the first is the default
    assert countdown.TASK.prompts["short"](problem) == "44 19 35 44:98="
    words = countdown.TASK.prompts["words"](problem)
    assert [int(number) for number in re.findall(r"[0-9]+", words)] == [98, 44, 19, 35, 44]
    assert "44, 19, 35 and 44" in words and "<answer> </answer>" in words


# ── Generated problems ──


def generate(generator, part, n, seed=0):
    return list(countdown.generate(generator, part, n, seed))


@pytest.mark.parametrize("generator", countdown.GENERATORS)
def test_training_and_test_problems_differ_whatever_the_seed(generator):
    keys = {part: [] for part in countdown.TASK.parts}
    for seed in range(3):
        for part, n in (("train", 400), ("cd34", 80), ("cd4", 80)):
            result = [problem.key for problem in generate(generator, part, n, seed)]
            assert len(result) == len(set(result)) == n
            keys[part] += result
    assert not set(keys["train"]) & {*keys["cd34"], *keys["cd4"]}
    assert len(set(keys["train"])) > 800 and len(set(keys["cd34"])) > 160 and len(set(keys["cd4"])) > 160


@pytest.mark.parametrize(
    ("generator", "max_numbers", "targets"),
    [("published", {3: 99, 4: 99}, (10, 99)), ("small", {2: 25, 3: 12, 4: 9}, (1, 99))],
)
@pytest.mark.parametrize("part", ["train", "cd34", "cd4"])
def test_generated_problems_are_solvable_and_in_range(generator, part, max_numbers, targets):
    for problem in generate(generator, part, 24):
        assert problem.text == problem.label == problem.key
        numbers, target = countdown.parse_problem(problem.label)
        assert numbers == sorted(numbers)
        assert all(1 <= number <= max_numbers[len(numbers)] for number in numbers)
        assert targets[0] <= target <= targets[1]
        solution = next(text for text, value in all_expressions(numbers) if value == target)
        assert countdown.value_over(solution, numbers) == target


def test_published_ranges_are_reached_to_their_ends():
    problems = [countdown.parse_problem(problem.label) for problem in generate("published", "train", 2000)]
    targets = [target for _, target in problems]
    assert (min(targets), max(targets)) == (10, 99)
    for size in (3, 4):
        numbers = [number for numbers, _ in problems if len(numbers) == size for number in numbers]
        assert min(numbers) == 1 and max(numbers) == 99


@pytest.mark.parametrize(("generator", "part", "n", "sizes"), [
    ("small", "train", 102, [26, 51, 25]),  # 25.5, 51, 25.5: the first of the largest remainders
    ("small", "cd34", 100, [0, 50, 50]),
    ("published", "cd4", 1, [0, 0, 1]),
])  # fmt: skip
def test_each_part_has_its_sizes(generator, part, n, sizes):
    """Numbers of problems with 2, 3 and 4 numbers, which are mixed."""
    written = [len(countdown.parse_problem(problem.label)[0]) for problem in generate(generator, part, n)]
    assert [written.count(size) for size in (2, 3, 4)] == sizes
    assert n == 1 or written != sorted(written)


def test_same_seed_same_problems():
    first = generate("small", "train", 50, 7)
    assert generate("small", "train", 50, 7) == first != generate("small", "train", 50, 8)
    # What the quickstart trains on; another number means that its base model and measured results no longer hold.
    text = "".join(problem.text + "=\n" for problem in generate("small", "train", 1536))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "075d2c9cac381533"


def test_all_problems_of_a_level_are_found_and_no_more():
    """All problems with two numbers of 1..25 and a target of 1..99 by exact division, counted independently."""
    every = set()
    for a, b in itertools.combinations_with_replacement(range(1, 26), 2):
        values = {a + b, b - a, a * b} | ({b // a} if b % a == 0 else set())
        every |= {f"{a} {b}:{value}" for value in values if 1 <= value <= 99}
    train = {key for key in every if hashlib.sha256(f"{key}=".encode()).digest()[0] % 8}
    n = 4 * len(train)
    assert {problem.key for problem in generate("small", "train", n) if problem.key.count(" ") == 1} == train
    with pytest.raises(ConfigError, match=f"is {n + 4}.* {len(train)} different.* at most {n}"):
        generate("small", "train", n + 4)


def test_too_many_problems_are_refused_at_once():
    """Not at the first problem."""
    with pytest.raises(ConfigError, match="problems is 10000, 2500 of them of level easy"):
        countdown.generate("small", "train", 10_000, 0)


def test_parts_share_out_one_source_without_overlap():
    """The paper has 10,000 training problems and 200 test problems of Countdown-3to4, and 200 of Countdown-4."""
    parts = countdown.TASK.parts
    assert {name: part.count for name, part in parts.items()} == {"cd34": 200, "cd4": 200, "train": 10_000}
    assert parts["train"].source == parts["cd34"].source != parts["cd4"].source
    assert (parts["cd34"].first, parts["train"].first) == (0, 200) and all(part.shuffled for part in parts.values())


@pytest.mark.parametrize("generator", ["small", pytest.param("published", marks=pytest.mark.slow)])
def test_generators_have_sizes_that_they_can_make(generator):
    task = countdown.TASK
    assert set(task.sizes) == set(countdown.GENERATORS)
    sizes = task.sizes[generator]
    assert set(sizes) == set(task.parts)
    for part, n in sizes.items():
        assert len(list(task.generate(generator, part, n, 1))) == n
    assert task.sizes["published"] == {"train": 10_000, "cd34": 200, "cd4": 200}


def test_reward_func_scores_queries():
    """The prompt is only cut off, and the label decides, whatever the prompt says."""
    prompt = "1 2:3 as <answer>3*5+7</answer>="
    judged = {  # by query: reward, and whether the answer is well formed
        prompt + "3*5+7<eos>": (1, 1),
        prompt + "3+5+7<eos>": (0, 1),
        prompt + "3*5<eos>": (0, 0),
        prompt + "22<eos>": (0, 0),
        prompt: (0, 0),
        prompt + "5*3 is 15. <answer>5 * 3 + 7</answer><eos>": (1, 1),
        prompt + "<answer>3+5+7</answer>": (0, 1),
        "<bos>" + prompt + "3*5+7<eos>": (1, 1),
        "cut off=3*5+7<eos>": (0, 0),
    }
    n = len(judged)
    result = countdown.reward_func([*judged], [prompt] * n, ["3 5 7:22"] * n, extra="ignored")
    pairs = zip(result["rewards"].tolist(), result["extra_logs"]["well_formed"].tolist(), strict=True)
    assert [*pairs] == [*judged.values()] and torch.equal(result["scores"], result["rewards"])
    assert result["rewards"].dtype == torch.float32 and result["rewards"].shape == (n,)


def test_the_file_is_loaded_by_its_path_and_is_light(tmp_path):
    """OpenRLHF loads it under another name. Nothing heavy is imported."""
    code = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('reward_func', sys.argv[1])\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "result = module.reward_func(['3 5:8=3+5'], ['3 5:8='], ['3 5:8'])\n"
        "assert result['rewards'] == [1.0]\n"
        "assert not {'torch', 'numpy', 'datasets', 'transformers', 'tqdm'} & set(sys.modules), 'heavy'\n"
    )
    subprocess.run([sys.executable, "-I", "-c", code, countdown.__file__], check=True, cwd=tmp_path)
