"""Mathematics: published rows, the last box, and answers against labels, on cases that were checked by hand."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from math_verify import grader

from bapo_openrlhf.flags.config import VerifierConfig
from bapo_openrlhf.tasks import math as task
from bapo_openrlhf.tasks.task import BadRow
from bapo_openrlhf.training.engine.reward_pool import RewardPool

TABLE = Path(__file__).with_name("math_answers.jsonl")
CASES = [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]


def right(answer, label):
    return task.score(rf"So the answer is $\boxed{{{answer}}}$.", label) == 1.0


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_exactly_the_known_limits_are_judged_wrongly(every):
    """The others are judged as a person does. Only one limit gives a reward to a wrong answer."""
    cases = [case for case in CASES[::every] if case["category"] != "huge"]
    wrong = [case for case in cases if task.score(case["response"], case["label"]) != float(case["correct"])]
    assert wrong == [case for case in cases if case.get("limit")]
    assert [case["label"] for case in CASES if case.get("limit") and not case["correct"]] == ["-2, -2"]


# Each line is judged in turn. The time limit, which ends most of them, is a second.
JUDGE = """
import json, sys
from bapo_openrlhf.tasks import math as task
task.SECONDS = 1
for line in sys.stdin:
    response, label = json.loads(line)
    print(json.dumps([task.score(response, label), task.answer(response)]), flush=True)
"""


def judged_apart(cases):
    """[score, answer] of each (response, label), from a process that is killed if it hangs."""
    lines = "".join(json.dumps(case) + "\n" for case in cases)
    run = subprocess.run(
        [sys.executable, "-c", JUDGE], input=lines, capture_output=True, text=True, timeout=300, check=True
    )
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.slow
def test_huge_numbers_do_not_hang():
    cases = [case for case in CASES if case["category"] == "huge"]
    result = judged_apart([(case["response"], case["label"]) for case in cases])
    assert [score for score, _ in result] == [float(case["correct"]) for case in cases]


LONG = 100_000
PIECES = (" ", "~", "\\,", "\\text", ",", "1,", "1 ", "9", "1e1", "(", "x^", "%", "$", "\\left", "^\\circ", "_1")
HOSTILE = [
    "\\boxed{" * LONG,
    "\\boxed{" * LONG + "}" * LONG,
    "\\boxed{" + "{" * LONG,
    "\\boxed{" + "{" * LONG + "}" * LONG + "}",
    "\\boxed{" + "1" * LONG + "}",
    "\\boxed" + " " * LONG,
    ("\\boxed" + " " * 300) * 300,
    "\\boxed{" + "\\" * LONG + "}",
    "\\" * LONG + "boxed{2}",
    "{}" * LONG,
    *("\\boxed{\\{}", "\\boxed{\ud800}", "\\boxed{\x00}", "\\boxed{٣}", "\\boxed{²}"),
    *("\\boxed{" + (piece * 1000)[:990] + end + "}" for piece in PIECES for end in ("", "x")),
]


@pytest.mark.slow  # it waits for time limits
def test_hostile_answers_are_wrong_and_cost_little():
    assert [score for score, _ in judged_apart([(response, "7") for response in HOSTILE])] == [0.0] * len(HOSTILE)
    assert task.score("\\boxed{" + "1" * LONG + "}", "1" * LONG) == 0.0  # too long for a label, too


def test_an_answer_is_not_run(tmp_path):
    file = tmp_path / "written"
    for code in (f'__import__("os").system("touch {file}")', f'open("{file}", "w")', rf'\text{{open("{file}", "w")}}'):
        assert not right(code, "0")
    assert not file.exists()


# ---------------------------------------------------------------------------------------------------------- the box


def reference_boxed(response):
    """A reference that reads groups character by character, as TeX does. A box without braces has one character."""
    start = max(response.rfind("\\boxed"), response.rfind("\\fbox"))
    if start < 0:
        return None
    rest = re.sub(r"^\\(boxed|fbox)\s*", "", response[start:])
    if not rest.startswith("{"):
        return rest[0] if re.match(r"[a-z0-9](?:[^\wé{\\]|$)", rest) else None
    depth, content, escaped = 0, "", False
    for character in rest:
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return content[1:]
        content += character
    return None


@given(
    st.lists(st.sampled_from(["\\boxed", "\\fbox", "{", "}", "\\{", "\\}", "\\\\", " ", "\n", "1", "é"]), max_size=14)
)
@settings(max_examples=5 * settings.default.max_examples)
def test_the_last_box_counts(pieces):
    response = "".join(pieces)
    assume("\\\\boxed" not in response and "\\\\fbox" not in response)  # a line break, then a word
    assert task.boxed(response) == reference_boxed(response)


@pytest.mark.parametrize(("response", "answer"), [
    (r"\boxed{ 42. }", "42"),
    (r"\boxed{$\dfrac{1}{2}$}", r"\frac{1}{2}"),
    (r"\boxed{\left( 3, \frac{\pi}{2} \right)}", r"(3, \frac{\pi}{2})"),
    (r"\boxed{1{,}234\text{ cm}}", "1234"),
    (r"\boxed{2,1}", "2, 1"),
    (r"\boxed{\text{Tuesday}}", "Tuesday"),
    (r"\boxed{x_{\text{max}}}", r"x_{\text{max}}"),
    (r"\boxed{2+3\mathrm{i}}", "2+3i"),
    (r"\boxed{4.5e33}", r"4.5\times 10^{33}"),
    (r"\boxed{1 1/2}", r"1\frac{1}{2}"),
    (r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\boxedtext{1}", None),
    (r"\boxed{1} \boxedtext{2}", "1"),
    (r"\boxed{ \, }", None),
    (r"\boxed{42", None),
    ("\\boxed{" + "1" * 1001 + "}", None),
])  # fmt: skip
def test_answer_is_the_answer_without_layout_and_unit(response, answer):
    assert task.answer(response) == answer


@given(st.sampled_from(CASES))
def test_answer_does_not_change_its_own_writing(case):
    result = task.answer(case["response"])
    assume(result is not None)
    assert task.answer(rf"\boxed{{{result}}}") == result


# ------------------------------------------------------------------------------------------- answers against labels

WAYS = {
    "fraction": lambda x: rf"\frac{{{x.numerator}}}{{{x.denominator}}}",
    "dfrac": lambda x: rf"\dfrac{{{x.numerator}}}{{{x.denominator}}}",
    "slash": lambda x: f"{x.numerator}/{x.denominator}",
    "named": lambda x: rf"x = \frac{{{x.numerator}}}{{{x.denominator}}}",
    "unit": lambda x: rf"\frac{{{x.numerator}}}{{{x.denominator}}} \text{{ cm}}",
    "root": lambda x: rf"\frac{{\sqrt{{{x.numerator**2}}}}}{{{x.denominator}}}",
}


@given(
    st.fractions(min_value=Fraction(1, 20), max_value=30, max_denominator=20),
    st.fractions(min_value=Fraction(1, 20), max_value=30, max_denominator=20),
    st.booleans(),
    st.sampled_from(sorted(WAYS)),
    st.sampled_from(sorted(WAYS)),
)
def test_rational_numbers_are_equal_when_their_fractions_are(a, b, same, way, other):
    b = a if same else b
    assert right(WAYS[way](a), WAYS[other](b)) == (a == b)


@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9), st.booleans())
@example(1000, 1000, True)
@example(-1234567, -1234567, True)
@example(24, 240, False)
def test_thousands_separators_do_not_count(a, b, same):
    b = a if same else b
    for separator in (",", "{,}", ",\\!", "\\,"):
        assert right(f"{a:,}".replace(",", separator), str(b)) == (a == b)


@given(st.integers(1, 99), st.integers(1, 99), st.integers(-40, 40), st.integers(-40, 40), st.booleans())
@example(16, 91, -20, -32, False)
@example(53, 54, -10, -10, False)
def test_decimals_are_compared_by_their_leading_digits(a, b, power, other, same):
    b, other = (a, power) if same else (b, other)
    value, reference = Decimal(a).scaleb(power - 1), Decimal(b).scaleb(other - 1)
    for written in (rf"{a / 10} \times 10^{{{power}}}", f"{a / 10}e{power}"):
        assert right(written, rf"{b / 10} \times 10^{{{other}}}") == (value == reference), written


VALUES = (r"\frac{1}{2}", "-3", r"\sqrt{2}", "7", r"2\pi", r"1+\sqrt{5}", "0", "100", "n^2")


@given(st.lists(st.sampled_from(VALUES), min_size=2, max_size=5, unique=True), st.randoms(use_true_random=False))
@settings(max_examples=settings.default.max_examples // 5)
def test_several_values_have_no_order_and_a_tuple_has(values, random):
    shuffled = random.sample(values, len(values))
    label = ", ".join(values)
    assert right(", ".join(shuffled), label)
    assert right(rf"\{{{','.join(shuffled)}\}}", label)
    assert right(r" \text{ and } ".join(shuffled), label)
    assert not right(", ".join(shuffled[1:]), label)
    assert not right(", ".join([*shuffled[1:], "5"]), label)
    assert right(f"({','.join(shuffled)})", f"({label})") == (shuffled == values)


@pytest.mark.parametrize(("answer", "label", "expected"), [
    # letters in bold or italics are vectors, and no units
    ("2", r"2\mathbf{v}", False),
    (r"2\mathbf{v}", "2", False),
    (r"3\mathbf{i}+2", r"3\mathbf{i}+2\mathbf{j}", False),
    (r"\mathbf{a}\times", r"\mathbf{a}\times\mathbf{c}", False),
    ("3i+2j", r"3\mathbf{i}+2\mathbf{j}", True),
    # units to a negative power
    (r"4.5\times10^{33}\ \mathrm{erg\,s^{-1}}", "4.5e33", True),
    (r"2\ \text{cm}^{-1}", "2", True),
    (r"9.8\text{ m s}^{-2}", r"9.8\text{ m/s}^2", True),
    # complex numbers
    (r"\frac{1+2i}{5}", r"\frac15+\frac25i", True),
    (r"2i\sqrt3", r"2\sqrt3i", True),
    (r"3+4\,i", "3+4i", True),
    ("4", "4i", False),
    ("4i", "4", False),
    # a set of pairs
    (r"\{(2,3),(4,5)\}", "(2,3),(4,5)", True),
    # several values by name, or in the order of the label
    ("(m,n)=(3,2)", "m=2,n=3", False),
    ("(m,n)=(2,3)", "m=2,n=3", True),
    ("3,2", "x=2, y=3", False),
    ("(2,3)", "x=2, y=3", True),
    ("y=3, x=2", "x=2, y=3", True),
    ("x=3, y=2", "x=2, y=3", False),
    ("3, 2", "x=2, x=3", True),
    ("x=2", "x=2, y=3", False),
    # a choice, and its value
    (r"\textbf{(D)}\ 5", "D", True),
    # percents, characters, and the rest
    (r"33\frac13\%", r"\frac13", True),
    ("24。", "24", True),
    ("1、2", "1, 2", True),
    (r"\(\frac{33}{65}\)", r"\frac{33}{65}", True),
    ("2j", "2i", False),
    ("e^{2 i}", "e^{2i}", True),
    (r"12\textit{m}", "12", False),
    # units, signs and digits
    ("8 \\text{ cm}^2", "8\\mbox{ cm}^{2}", True),
    ("1.5 \\text{ Minutes}", "\\frac{3}{2}\\text{ minute}", True),
    ("1011", "1011_2", True),
    ("a_1", "a", False),
    ("6m", "6", False),
    ("a + b", "a + b + c", False),
    ("50", "\\frac{1}{2}", False),
    ("5", "0.5\\%", False),
    ("0.333333", "\\frac{1}{3}", True),
    ("0.33333", "\\frac{1}{3}", False),
    ("−5", "-5", True),
    ("25", "x^2+y^2=25", False),  # what is solved for may be left out, an equation may not
    ("5", "", False),
    # numbers of a few thousand digits
    ("2^{1009}", r"2\cdot 4^{504}", True),
    ("x^{99999^y}", "x^{99999^y}+0", True),
    ("2000!", r"2000\cdot 1999!", True),
    # a label that is no text
    ("7", 7, True),
    ("8", 7, False),
])  # fmt: skip
def test_forms_that_models_write(answer, label, expected):
    assert right(answer, label) == expected


# ------------------------------------------------------------------------------------ time limits, threads, loading


def test_a_busy_machine_does_not_end_a_judgement(monkeypatch):
    """Only the time of the process counts, so equal runs have equal rewards."""
    compare = grader.sympy_expr_eq
    monkeypatch.setattr(task, "SECONDS", 1)
    monkeypatch.setattr(grader, "sympy_expr_eq", lambda *given: time.sleep(1.5) or compare(*given))
    assert right("(x+1)^2", "x^2+2x+1")


def test_an_answer_that_takes_too_long_is_wrong(monkeypatch):
    """Also if a library that sympy calls catches each exception, as mpmath does."""

    def endless(*given, **named):
        try:
            while True:
                pass
        except BaseException:
            while True:
                pass

    assert right("(x+1)^2", "x^2+2x+1")
    monkeypatch.setattr(task, "SECONDS", 0.1)
    monkeypatch.setattr(grader, "sympy_expr_eq", endless)
    assert not right("(x+1)^2", "x^2+2x+1")


def test_the_judge_leaves_the_handler_and_the_timer_as_they_were():
    def own(number, frame):
        pass

    before = signal.signal(signal.SIGVTALRM, own)
    signal.setitimer(signal.ITIMER_VIRTUAL, 1000)
    try:
        assert not right("(x+1)^2", "x^2+1")
        assert signal.getsignal(signal.SIGVTALRM) is own
        assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] > 900
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def test_other_threads_can_judge_too():
    result = []
    thread = threading.Thread(target=lambda: result.extend([right("(x+1)^2", "x^2+2x+1"), right("2x", "3x")]))
    thread.start()
    thread.join()
    assert result == [True, False]


def test_the_file_is_light_until_something_has_to_be_compared():
    code = (
        "import sys; from bapo_openrlhf.tasks import math as task; "
        "assert task.score('\\\\boxed{42}', '42') == 1.0; task.problem({'problem': 'a', 'answer': '\\\\frac12'}); "
        "assert not {'torch', 'sympy', 'math_verify', 'openrlhf', 'numpy'} & set(sys.modules); "
        "assert task.score('\\\\boxed{x+x}', '2x') == 1.0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.slow  # a process of its own loads sympy
def test_it_serves_as_a_reward_file():
    with closing(RewardPool(task.TASK.file, VerifierConfig(processes=1, timeout=120, memory_gib=4))) as pool:
        prompt = r"What is 1+1, within \boxed{}?"
        for response, reward, boxed in ((r"\boxed{4/2}", 1.0, 1.0), (r"\boxed{3}", 0.0, 1.0), ("2", 0.0, 0.0)):
            result = pool.submit(prompt, prompt, "2", response).result()
            assert result == {"rewards": reward, "scores": reward, "extra_logs": {"boxed": boxed}}


def test_the_response_is_what_follows_the_prompt_or_the_one_that_is_given():
    """A prompt that a tokenizer changed, or that has images, is not in the query. Its own example is no answer."""
    prompt, changed = "2  +  2 is \\boxed{4}, cafe\u0301. ", "2 + 2 is \\boxed{4}, café. "
    texts = [r"\boxed{4}", r"\boxed{5}", "I do not know."]
    for asked, responses, known in (
        (prompt, None, 1.0),
        ("<s>" + prompt, None, 1.0),
        (changed, texts, 1.0),
        (changed, None, 0.0),  # in doubt no answer
    ):
        result = task.reward_func([asked + text for text in texts], [prompt] * 3, ["4"] * 3, responses, other="ignored")
        assert list(map(float, result["rewards"])) == list(map(float, result["scores"])) == [known, 0.0, 0.0]
        assert list(map(float, result["extra_logs"]["boxed"])) == [known, known, 0.0]
    assert list(map(float, task.reward_func([r"\boxed{42}"], [""], ["42"])["rewards"])) == [1.0]


@pytest.mark.parametrize(("opened", "text", "right"), [
    ("", r"<think> It may be \boxed{4}. Wait, I check it ag", 0.0),
    ("", r"<think> 2 + 2 </think> So \boxed{4}.", 1.0),
    ("", r"\boxed{4} <think> and now", 1.0),
    ("", r"So </think> \boxed{4}", 1.0),  # the prompt has opened it
    ("<think>", r"\boxed{4}. Wait", 0.0),
    ("<think>\n", r"\boxed{4}. Wait", 0.0),
    ("<think>", r"\boxed{5}</think>\boxed{4}", 1.0),
])  # fmt: skip
def test_a_box_within_unfinished_thinking_is_no_answer(opened, text, right):
    """Also if the prompt has begun it."""
    result = task.reward_func(["?"], [f"2 + 2?{opened}"], ["4"], [text])
    assert list(map(float, result["rewards"])) == list(map(float, result["extra_logs"]["boxed"])) == [right]


@pytest.mark.parametrize(("prompts", "labels"), [(["a", "b"], ["1"]), (["a"], ["1", "2"])])
def test_the_lists_must_be_of_one_length(prompts, labels):
    with pytest.raises(ValueError, match="zip"):
        task.reward_func(["a"], prompts, labels)


ROWS = {  # one row of each source, with its columns
    "train": ({"problem": "Find $x$.", "answer": "\\frac{3}{4}", "solution": ""}, r"\frac{3}{4}"),
    "aime24": ({"ID": "2024-I-1", "Problem": "Find $x$.", "Solution": "", "Answer": 204}, "204"),
    "amc": ({"id": 0, "problem": "Find $x$.", "answer": 142.0, "url": ""}, "142"),
    "math500": ({"problem": "Find $x$.", "solution": "", "answer": "\\left( 3, \\frac{\\pi}{2} \\right)"}, None),
    "minerva": ({"question": "Find $x$.", "answer": "4.5e33"}, "4.5e33"),
    "olympiad": ({"question": "Find $x$.", "final_answer": ["$\\frac{41}{12}$"], "is_multiple_answer": False,
                  "unit": "km", "answer_type": "Numerical", "error": None}, r"\frac{41}{12}"),
}  # fmt: skip


@pytest.mark.parametrize("part", ROWS)
def test_each_source_is_read(part):
    row, label = ROWS[part]
    assert set(task.TASK.parts[part].source.columns) <= set(row)
    result = task.problem(row)
    assert (result.text, result.label, result.images) == ("Find $x$.", label or row["answer"], ())


@pytest.mark.parametrize(("answer", "multiple", "label"), [
    (36.0, False, "36"),
    (0.5, False, "0.5"),
    (["$69$,$84$"], True, "69, 84"),
    (["312,123,231"], True, "312, 123, 231"),
    (["1", "$2$", 3.0], False, "1, 2, 3"),
    (["(-\\infty, 0) \\cup\\{1\\}."], False, "(-\\infty, 0) \\cup\\{1\\}"),
    ("\\$18.90", False, "\\$18.90"),
])  # fmt: skip
def test_labels_become_texts(answer, multiple, label):
    result = task.problem({"question": "Find $x$.", "final_answer": answer, "is_multiple_answer": multiple}).label
    assert result == label
    assert right(result, result)


@pytest.mark.parametrize(("change", "reason"), [
    ({"answer": None}, "answer is empty"),
    ({"answer": "  "}, "answer is empty"),
    ({"problem": ""}, "problem is empty"),
    ({"problem": 7}, "the text is no string: 7"),
    ({"answer": "proof"}, "label is no mathematics: 'proof'"),
    ({"answer": '["11"]'}, "label is no mathematics: '[\"11\"]'"),
    ({"answer": "."}, "label does not parse: '.'"),
    ({"answer": "\\frac{1}{2"}, "label does not parse: '\\\\frac{1}{2'"),
    ({"answer": "1}"}, "label does not parse: '1}'"),
    ({"answer": "1" * 1001}, "label does not parse: '111111111111...1111111111111'"),
])  # fmt: skip
def test_bad_rows_say_why(change, reason):
    with pytest.raises(BadRow) as error:
        task.problem({"problem": "Find x.", "answer": "1", **change})
    assert str(error.value) == reason
