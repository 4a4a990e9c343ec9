"""The Countdown task against an independent parser and an independent search for solutions."""

import ast
import importlib.util
import itertools
import json
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_openrlhf.tasks import countdown

# ── References: a recursive-descent parser, and all values that numbers can make ──


class Parser:
    """value := term (+|- term)*; term := factor (*|/ factor)*; factor := number | ( value )."""

    def __init__(self, text):
        self.text, self.at, self.numbers = text, 0, []

    def parse(self):
        value = self.chain("+-", lambda: self.chain("*/", self.factor))
        if self.at != len(self.text):
            raise ValueError("text left over")
        return value

    def chain(self, operators, operand):
        value = operand()
        while self.at < len(self.text) and self.text[self.at] in operators:
            self.at += 1
            operator, right = self.text[self.at - 1], operand()
            if operator == "/" and right == 0:
                raise ValueError("division by zero")
            value = {"+": value + right, "-": value - right, "*": value * right, "/": value / (right or 1)}[operator]
        return value

    def factor(self):
        number = re.compile(r"0|[1-9][0-9]*").match(self.text, self.at)
        if number:
            self.at = number.end()
            self.numbers.append(int(number.group()))
            return Fraction(self.numbers[-1])
        if self.text[self.at : self.at + 1] != "(":
            raise ValueError("an operand is missing")
        self.at += 1
        value = self.chain("+-", lambda: self.chain("*/", self.factor))
        if self.text[self.at : self.at + 1] != ")":
            raise ValueError("a parenthesis is open")
        self.at += 1
        return value


def all_expressions(numbers):
    """(fully parenthesised text, value) of every expression over the numbers, each used once; any partial value."""
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


# ── Verification ──


@given(st.text("0123456789+-*/()", max_size=14))
@settings(max_examples=1500, deadline=None)
def test_agrees_with_another_parser_on_any_text(text):
    reference = Parser(text)
    try:
        expected = (reference.parse(), reference.numbers)
    except ValueError:
        expected = None
    try:
        found = countdown.evaluate(text)
    except countdown.ExpressionError:
        found = None
    assert found == expected


trees = st.recursive(
    st.integers(0, 30).map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner, st.booleans()).map(
        lambda t: f"({t[0]}{t[1]}{t[2]})" if t[3] else f"{t[0]}{t[1]}{t[2]}"
    ),
    max_leaves=6,
)


@given(trees)
@settings(max_examples=500, deadline=None)
def test_agrees_with_another_parser_on_expressions(text):
    reference = Parser(text)
    try:
        value = reference.parse()
    except ValueError:
        assert countdown.verify(text, reference.numbers, 1) == 0.0
        return
    assert countdown.evaluate(text) == (value, reference.numbers)


@pytest.mark.parametrize("numbers", [[2, 3], [6, 6], [1, 3, 4], [2, 2, 5]])
def test_every_expression_over_small_numbers(numbers):
    """Right for its own value only, and only where the numbers are exactly the given ones."""
    for text, value in all_expressions(numbers):
        for target in range(1, 30):
            assert countdown.verify(text, numbers, target) == float(value == target), text
        if value.denominator == 1:
            assert countdown.verify(text, numbers[:-1], int(value)) == 0.0
            assert countdown.verify(text, [*numbers, 1], int(value)) == 0.0
            assert countdown.verify(text, [numbers[0] + 1, *numbers[1:]], int(value)) == 0.0


def test_fractions_between_are_exact():
    assert countdown.verify("8/(3-8/3)", [3, 3, 8, 8], 24) == 1.0
    # In floats 1/49*49 is below 1.
    assert countdown.verify("1/49*49", [1, 49, 49], 1) == 1.0
    assert countdown.verify("9007199254740993*1", [1, 9007199254740993], 9007199254740992) == 0.0


def test_each_number_is_used_as_often_as_it_is_given():
    assert countdown.verify("5*5-1", [1, 5, 5], 24) == 1.0
    assert countdown.verify("5*5-1", [1, 5], 24) == 0.0
    assert countdown.verify("5*4+4", [4, 5], 24) == 0.0
    assert countdown.verify("24", [2, 4], 24) == 0.0


HOSTILE = [
    *(
        "",
        " ",
        "()",
        "(",
        ")",
        "3+",
        "*3",
        "3+5)",
        "((3+5)",
        "3 + 5",
        " 3+5",
        "3+5 ",
        "3+5\n",
        "\n3+5",
        "3+\\\n5",
        "3\t+5",
    ),
    *("3**5", "9**9**9**9", "9**9**9**9**9**9**9", "3//5", "3%5", "3@5", "3<<5", "3|5", "3^5", "3&5", "3<5", "3==5"),
    *("+3+5", "-3+5", "3--5", "3+-5", "~3+5", "not 3", "3 or 5", "3if 1else 5", "lambda:3", "[3][0]+5", "{3}", "3,5"),
    *(
        "3(5)",
        "(3)(5)",
        "3.real+5",
        "(3).__class__",
        "abs(3)+5",
        "__import__('os').system('true')",
        "x",
        "x:=8",
        "True",
    ),
    *(
        "1e999",
        "1e999-1e999",
        "3.0+5",
        ".3+5",
        "3.+5",
        "3j+5",
        "0x3+5",
        "0b11+5",
        "3_0",
        "3_+5",
        "03+5",
        "003+5",
        "3+05",
    ),
    *("3/0", "3/(5-5)", "3+5/0", "٣+5", "３+５", "3+５", "²+5", "3+5\x00", "\x003+5", "3＋5", "3−5", "3÷5", "(3+5）"),
    *("3+5#", "3+5;", "3+5=8", "8=3+5", "3+5<eos>3", "f'{3+5}'", "'8'", "...", "3+5\ud800", "3+5\u200b", "\ufeff3+5"),
    *("(" * 5000 + "3" + ")" * 5000 + "+5", "(" * 10**6, "9" * 10**6, "3+5" + "+0" * 10**5, "-" * 10**5 + "3"),
    "(" * 9 + "3" + ")" * 9 + "+5",
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text[:40]))
@pytest.mark.filterwarnings("error")
def test_hostile_answers_get_nothing(text):
    for numbers, target in (([3, 5], 8), ([3, 5], 15), ([3], 3), ([5], 5), ([3, 5], 243), ([30], 30)):
        assert countdown.verify(text, numbers, target) == 0.0


def test_long_or_deep_text_is_never_parsed(monkeypatch):
    """What makes hostile text cheap: the parser sees no more than a bounded amount."""

    class Parsed(Exception):
        pass

    def parse(text, **kwargs):
        raise Parsed

    monkeypatch.setattr(countdown, "ast", SimpleNamespace(parse=parse))
    with pytest.raises(Parsed):
        countdown.verify("3+5", [3, 5], 8)  # the check itself can fail
    for text in ("9" * (countdown.MAX_LENGTH + 1), "(" * (countdown.MAX_DEPTH + 1), "3+5\n", "x"):
        assert countdown.verify(text, [3, 5], 8) == 0.0


@given(st.text(max_size=80))
@settings(max_examples=500, deadline=None)
def test_no_text_raises(text):
    assert countdown.verify(text, [3, 5], 8) == float(text in ("3+5", "5+3"))
    countdown.answer(text)


@pytest.mark.parametrize(
    ("response", "expression"),
    [
        ("3+5", "3+5"),
        ("3+5<eos>", "3+5"),
        ("3+5<eos><pad><pad>", "3+5"),
        ("3+5<|im_end|>", "3+5"),
        ("3+5</s>", "3+5"),
        ("<eos>", ""),
        ("3+5<eos>3", None),
        ("3+5<eos>\n", None),
        ("3+5<unk>", None),
        ("<eos>3+5", None),
        ("3<eos>+5<eos>", None),
    ],
)
def test_only_special_tokens_may_follow_an_answer(response, expression):
    assert countdown.answer(response) == expression


# ── Problems ──


@pytest.mark.parametrize("level", countdown.LEVELS)
def test_problems_are_solvable_and_in_range(level):
    rng = random.Random(3)
    size, max_number, max_target = countdown.LEVELS[level]
    for _ in range(200 if size < 4 else 15):
        problem = countdown.make_problem(rng, level)
        assert len(problem.numbers) == size
        assert list(problem.numbers) == sorted(problem.numbers)
        assert all(1 <= number <= max_number for number in problem.numbers)
        assert 1 <= problem.target <= max_target
        reference = Parser(problem.solution)
        assert reference.parse() == problem.target
        assert sorted(reference.numbers) == list(problem.numbers)
        assert any(value == problem.target for _, value in all_expressions(list(problem.numbers)))


def test_partial_values_of_solutions_are_positive_integers():
    """Division only where it is exact: checked on every operation of the solution, in fully parenthesised form."""
    rng = random.Random(0)
    operations = set()
    for _ in range(500):
        text, value = countdown.random_expression(rng, [rng.randint(1, 12) for _ in range(4)])
        seen = []

        class Watching(Parser):
            def chain(self, operators, operand, seen=seen):
                result = super().chain(operators, operand)
                seen.append(result)
                return result

        assert Watching(text).parse() == value
        assert all(part.denominator == 1 and part > 0 for part in seen), text
        operations |= set(text) & set("+-*/")
    assert operations == set("+-*/")


def test_small_sets_are_found_whole():
    """All positive integers that two numbers make with exact division, and no others, turn up."""
    rng = random.Random(1)
    found = {countdown.random_expression(rng, [3, 6])[1] for _ in range(500)}
    assert found == {9, 3, 18, 2}


def test_expressions_have_only_the_parentheses_they_need():
    """Python's own unparser writes the fewest for a tree."""
    rng = random.Random(2)
    texts = [countdown.random_expression(rng, [rng.randint(1, 9) for _ in range(4)])[0] for _ in range(500)]
    assert [ast.unparse(ast.parse(text)).replace(" ", "") for text in texts] == texts
    assert any("(" in text for text in texts)


@pytest.mark.parametrize(
    ("numbers", "target", "prompt"),
    [([3, 5, 7], 22, "3 5 7:22="), ([10, 2], 5, "10 2:5="), ([1, 2, 3, 4], 99, "1 2 3 4:99=")],
)
def test_prompt_round_trip(numbers, target, prompt):
    assert countdown.format_prompt(numbers, target) == prompt
    assert countdown.parse_prompt(prompt) == (numbers, target)
    assert countdown.parse_prompt(f"user\nSolve {prompt}") == (numbers, target)


@pytest.mark.parametrize("prompt", ["", "3 5 7", "3:5=", "3 5:=", "3 5:٣=", "hello"])
def test_other_prompts_are_refused(prompt):
    with pytest.raises(ValueError, match="no Countdown prompt"):
        countdown.parse_prompt(prompt)


# ── Data sets ──


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_splits_have_no_common_problem_whatever_the_seed(tmp_path):
    train, test = set(), set()
    for seed in range(3):
        paths = countdown.write_splits(tmp_path / str(seed), 400, 80, seed)
        for path, seen, n in zip(paths, (train, test), (400, 80), strict=True):
            rows = rows_of(path)
            assert len(rows) == n == len({row["input"] for row in rows})
            for row in rows:
                numbers, target = countdown.parse_prompt(row["input"])
                assert row == {"input": countdown.format_prompt(numbers, target), "label": str(target)}
                seen.add((*sorted(numbers), target))
    assert not train & test
    assert len(train) > 800 and len(test) > 160  # the seeds differ


def test_same_seed_same_bytes(tmp_path):
    first = countdown.write_dataset(tmp_path / "a.jsonl", 50, 7).read_bytes()
    assert countdown.write_dataset(tmp_path / "new" / "b.jsonl", 50, 7).read_bytes() == first
    assert countdown.write_dataset(tmp_path / "c.jsonl", 50, 8).read_bytes() != first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "c.jsonl", "new"]


def test_mix_gives_each_level_its_share():
    problems = countdown.make_problems(101, 0, mix={"easy": 1, "medium": 1, "hard": 2})
    sizes = [len(problem.numbers) for problem in problems]
    assert sorted(sizes.count(size) for size in (2, 3)) == [25, 25]
    assert sizes.count(4) == 51
    assert sizes != sorted(sizes)
    assert {len(problem.numbers) for problem in countdown.make_problems(20, 0, mix={"hard": 1})} == {4}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0}, "at least 1"),
        ({"n": 5, "split": "dev"}, "'dev'"),
        ({"n": 5, "mix": {"huge": 1}}, "huge"),
        ({"n": 5, "mix": {}}, "weights"),
        ({"n": 5, "mix": {"easy": 0}}, "weights"),
        ({"n": 5, "mix": {"easy": -1, "hard": 2}}, "weights"),
        ({"n": 5000, "mix": {"easy": 1}}, "ask for fewer"),
    ],
)
def test_bad_requests_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        countdown.make_problems(seed=0, **arguments)


# ── Reward function ──


def test_reward_func_scores_queries():
    torch = pytest.importorskip("torch")
    prompt = "3 5 7:22="
    responses = [
        "3*5+7<eos>",
        "3*5+7",
        "7+5*3<eos><pad>",
        "3+5+7<eos>",
        "3*5<eos>",
        "22<eos>",
        "3*5+7<eos>1",
        "",
        "9**9**9",
    ]
    queries = [prompt + response for response in responses] + ["<bos>" + prompt + "3*5+7<eos>", "cut off:22=3*5+7<eos>"]
    n = len(queries)
    result = countdown.reward_func(queries, [prompt] * n, ["22"] * n, extra="ignored")
    assert result["rewards"].tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 0]
    assert torch.equal(result["scores"], result["rewards"])
    assert result["rewards"].dtype == torch.float32 and result["rewards"].shape == (n,)
    assert result["extra_logs"]["well_formed"].tolist() == [1, 1, 1, 1, 0, 0, 0, 0, 0, 1, 0]


def test_reward_func_takes_the_target_from_the_label():
    pytest.importorskip("torch")
    query = ["3 5:8=3*5<eos>"]
    assert countdown.reward_func(query, ["3 5:8="], ["15"])["rewards"].tolist() == [1.0]
    assert countdown.reward_func(query, ["3 5:8="], ["8"])["rewards"].tolist() == [0.0]


def test_reward_func_refuses_data_of_another_task():
    pytest.importorskip("torch")
    with pytest.raises(ValueError, match="no Countdown prompt"):
        countdown.reward_func(["What is 3+5? 8"], ["What is 3+5?"], ["8"])


def test_loads_by_path_alone_and_works_in_threads(tmp_path):
    """As OpenRLHF loads it: by its path, under another name, called in a thread; without torch until it is called."""
    code = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('reward_func', sys.argv[1])\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "assert callable(module.reward_func)\n"
        "assert not {'torch', 'numpy', 'bapo_openrlhf'} & set(sys.modules), 'heavy or needs the package'\n"
    )
    subprocess.run([sys.executable, "-I", "-c", code, countdown.__file__], check=True, cwd=tmp_path)

    pytest.importorskip("torch")
    spec = importlib.util.spec_from_file_location("reward_func", countdown.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    problems = countdown.make_problems(64, 0)

    def score(problem):
        query = problem.prompt + problem.solution + "<eos>"
        return module.reward_func([query], [problem.prompt], [str(problem.target)])["rewards"].item()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(score, problems)) == [1.0] * 64
