"""Answers that try to run code, to hang or to overflow. Nothing runs, nothing raises, and the reward is 0."""

import ast
import builtins
import contextlib
import math
import re
import sys
import threading
from unittest import mock

import pytest
import torch  # noqa: F401 (rewards are tensors only if a process has loaded it)
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_openrlhf.tasks import countdown

PROMPT, LABEL, NUMBERS, TARGET = "3 5 7:22=", "3 5 7:22", [3, 5, 7], 22
RIGHT = {"3*5+7", "5*3+7", "7+3*5", "7+5*3"}
SPECIAL_TOKENS = ("<eos>", "<pad>", "</s>", "<|im_end|>")
BLANKS = [chr(code) for code in range(sys.maxunicode + 1) if chr(code).isspace()]


class Executed(BaseException):
    """An exception that `except Exception` does not catch."""


audited = {}  # what each thread does that is listened to; a server that another test left may run in another one


def hook(event, arguments):
    if audited and (events := audited.get(threading.get_ident())) is not None:
        events.append(event)


sys.addaudithook(hook)  # for good: Python has no way to take one back


@contextlib.contextmanager
def nothing_runs():
    """This thread may only parse a short text. It may make no code object, import, file, process or socket."""
    thread = threading.get_ident()

    def parses(source, filename, mode, flags=0, **keywords):
        return flags == ast.PyCF_ONLY_AST and mode == "eval" and len(source) <= countdown.MAX_LENGTH

    def imports_torch(name, *arguments, **keywords):
        return name.partition(".")[0] == "torch"  # which the reward function itself imports

    def only_if(allowed, function):
        def guarded(*arguments, **keywords):
            if threading.get_ident() == thread and not allowed(*arguments, **keywords):
                raise Executed(arguments)
            return function(*arguments, **keywords)

        return guarded

    rules = {"eval": lambda *_: False, "exec": lambda *_: False, "compile": parses, "__import__": imports_torch}
    guards = {name: only_if(allowed, getattr(builtins, name)) for name, allowed in rules.items()}
    with mock.patch.multiple(builtins, **guards):
        audited[thread] = []
        try:
            yield
        finally:
            events = audited.pop(thread)
    assert set(events) <= {"compile"}, events


def reward(text):
    """The reward of a response. It must be a number for any text."""
    with nothing_runs():
        result = countdown.reward_func([PROMPT + text], [PROMPT], [LABEL])
        direct = float(countdown.value_over(text, NUMBERS) == TARGET)
    values = [result["rewards"].item(), result["scores"].item(), result["extra_logs"]["well_formed"].item(), direct]
    assert all(math.isfinite(value) and value in (0.0, 1.0) for value in values)
    assert result["rewards"].item() >= direct  # they differ only where a right answer stands before or within tokens
    return values[0]


def tagged(text):
    """The same for a response in words."""
    return reward(f"3 times 5 is 15.\n<answer>{text}</answer><|im_end|>")


def test_the_guards_can_fail():
    for run in (
        lambda: eval("1"),
        lambda: exec("1"),
        lambda: compile("1", "", "eval"),
        lambda: __import__("os"),
        lambda: ast.parse("1+" * 32 + "1", mode="eval"),
    ):
        with pytest.raises(Executed), nothing_runs():
            run()
    code = compile("1", "", "eval")
    for run in (lambda: open("/dev/null").close(), lambda: type(hook)(code, {})()):
        with pytest.raises(AssertionError), nothing_runs():
            run()
    assert {reward(answer) for answer in RIGHT} == {1.0}
    assert {tagged(answer) for answer in RIGHT} == {1.0}


CODE = [
    "__import__('os').system('touch CANARY')", "3*5+7+0*__import__('os').system('touch CANARY')",
    "exec(\"open('CANARY','w')\")", "eval('22')", "(lambda: open('CANARY','w'))()",
    "[22 for x in [open('CANARY','w')]][0]", "().__class__.__bases__[0].__subclasses__()", "f\"{f'{open(chr(67))}'}\"",
    "f'{22:{10**9}}'", "'%1000000000d'%3", "'{0.__class__.__init__.__globals__}'.format(3)", "{}{0}{x}{{",
    "%s%n%x%(a)s", "'9'*10**9", "[0]*10**10", "x:=22", "await 22", "print(22)", "breakpoint()", "3*5+7\nimport os",
    "3*5+7#", "`touch CANARY`", "# coding: rot13\n22",
]  # fmt: skip
POWERS = [
    "9**9**9", "9**-9**9", "9<<9999999999", "9e999999999", "0x" + "f" * 50,
    "9" * 4301,  # beyond what Python converts
    "9" * 5_000_000, "9." * 1_000_000,
]  # fmt: skip
DEEP = [
    "(" * 100_000 + "3*5+7" + ")" * 100_000, "(" * 3_000_000, "((" * 32, "[" * 100_000 + "]" * 100_000, "f'{" * 100_000,
    "-" * 1_000_000 + "22", "lambda:" * 100_000 + "22",
]  # fmt: skip
LONG = [
    "3*5+7" + "+0" * 1_000_000, "3*5+7" + "-1+1" * 500_000, "1/" * 1_000_000 + "1", "3*5+7" + " " * 5_000_000,
    "3*5+7" + "\0" * 5_000_000, "0" * 5_000_000 + "3*5+7", "3*5+7" + "<|a" * 1_000_000, "3*5+7<|" + "a" * 5_000_000,
    "3*5+7" + "<|a|>" * 500_000 + "!", ("3*5+7" + "<eos>") * 500_000, PROMPT * 500_000, PROMPT + "3*5+7",
]  # fmt: skip
ZERO = ["3/0", "3/(5-5)", "7/0*0", "3*5+7+0/(3-3)", "3%0", "0**-1"]
CHARACTERS = [
    *("\0", "3*5+7\0", "\x003*5+7", "3*5\0+7", "3*5+7\x1a", "3*5+7\r", "3*5+7\x0b", "3*5+7\x85", "3*5+7\u2028"),
    *("٣*٥+٧", "3*5+٧", "۳*۵+۷", "३*५+७", "３*５+７", "3*5+７", "³*⁵+⁷", "3*5+⁷", "₃*₅+₇", "𝟑*𝟓+𝟕", "③*⑤+⑦", "Ⅲ*Ⅴ+Ⅶ"),
    *("3*5＋7", "3*5⁺7", "（3*5）+7", "3*5+7\u200b", "3\u200d*5+7", "\u202e7+5*3", "\ufeff3*5+7"),
    *("\ud800", "3*5+7\udfff", "3*5\ud83d+7", "\U0010ffff", "3*5+7\ufffe", "\ud83d\ude00" * 500_000),
    *("½", "3*5+7½", "22½", "∞", "NaN", "nan", "inf", "-inf", "Infinity", "1e400-1e400"),
    *("<EOS>", "3*5+7<EOS>", "3*5+7<eos >", "3*5+7<|A|>", "3*5+7<||>", "3*5+7<|eos|>7", "3*5+7<eos>\0", "<eos>3*5+7"),
]  # fmt: skip


@pytest.mark.parametrize(
    "text", [*CODE, *POWERS, *DEEP, *LONG, *ZERO, *CHARACTERS], ids=lambda text: ascii(text[:30])[1:-1]
)
@pytest.mark.filterwarnings("error")
def test_hostile_answers_get_nothing_and_do_nothing(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert reward(text) == 0.0
    assert tagged(text) == float("".join(text.split()) in RIGHT)  # blanks around a right answer are allowed there
    assert not list(tmp_path.iterdir())


TAGS = [
    "<answer>" * 1_000_000,
    "</answer>" * 1_000_000,
    "<answer>" * 500_000 + "3*5+7" + "</answer>" * 500_000,
    "</answer><answer>" * 500_000,
    "<answer>3*5+7</answer" * 500_000,
    "<answer>3*5+7</answer>" * 200_000 + "<answer>22</answer>",
    "<answer" * 1_000_000 + "3*5+7</answer>",
    "<answer>3*5+7</answer>" + "<answer>" + "</answer>",
    "<answer>3*5+7" + "=22" * 1_000_000 + "</answer>",
    "<answer>3*5+7=" + "2 " * 1_000_000 + "</answer>",
    "<answer>" + "3 " * 1_000_000 + "*5+7</answer>",
    "<answer>3*5+7" + " $" * 1_000_000 + "x</answer>",
    "<answer>3" + "\\times" * 500_000 + "5+7</answer>",
    "<answer>3*5+7" + "\\div1\\times1" * 200_000 + "</answer>",
    "<answer>3\\times\\times5+7</answer>",
    "<answer>__import__('os').system('touch CANARY')</answer>",
    "<answer>3*5+7</answer>\ud800<answer>\udfff</answer>",
]


@pytest.mark.parametrize("text", TAGS, ids=lambda text: ascii(text[:40])[1:-1])
@pytest.mark.filterwarnings("error")
def test_hostile_tags_get_nothing(text):
    assert reward(text) == 0.0


@pytest.mark.parametrize("blanks", [" " * 5_000_000, "\n" * 5_000_000, "".join(BLANKS) * 10_000])
def test_any_number_of_blanks_within_tags_and_of_special_tokens(blanks):
    assert reward("3*5+7" + "<eos>" + "<pad>" * 500_000) == 1.0
    assert reward(f"<answer>{blanks}3{blanks}*5+7{blanks}=22{blanks}</answer>") == 1.0
    assert reward(f"<answer>{blanks}3{blanks}*5+7{blanks}7</answer>") == 0.0


@pytest.mark.parametrize("blank", BLANKS, ids=ascii)
def test_no_blank_makes_one_number_of_two(blank):
    for blanks in (blank, blank * 2, blank * 3, f" {blank}", f"{blank}\n"):
        with nothing_runs():
            result = countdown.reward_func([f"15+7=<answer>1{blanks}5+7</answer>"], ["15+7="], ["7 15:22"])
        assert result["rewards"].item() == 0.0
        assert reward(f"<answer>3{blanks}*5+7</answer>") == 1.0


@pytest.mark.parametrize("size", [countdown.MAX_LENGTH - 1, countdown.MAX_LENGTH, countdown.MAX_LENGTH + 1])
@pytest.mark.parametrize("pattern", ["9", "9*", "9/", "1-", "(", ")", "()", "(9", "9)", "-", "9(", "((9)*", "*", "/9"])
def test_the_longest_texts_that_are_parsed(size, pattern):
    """Texts that reach the parser, as long and as strange as possible."""
    text = (pattern * size)[:size]
    for judge in (reward, tagged):
        assert judge(text) == 0.0
        assert judge(text[:-1] + "9") == 0.0


def bare(text):
    """A response without the special tokens at its end."""
    while text.endswith(SPECIAL_TOKENS):
        text = text[: text.rindex("<")]
    return text


@given(st.text(st.characters(exclude_categories=())))
@settings(max_examples=3 * settings.default.max_examples)
def test_any_text(text):
    assert reward(text) == float(bare(text) in RIGHT)
    assert tagged(text) == float("".join(text.split()).strip("$") in RIGHT)


# Made of what means something to a parser, so that more than noise is found.
pieces = [
    *"0123456789+-*/()[]{}<>|_.,:;=~!@#$%^&'\"\\ \n\t\0",
    *("**", "//", "3*5+7", *SPECIAL_TOKENS, "lambda:", "f'{", "}'"),
    *("__import__('os')", "if 1 else", "for x in", "9**9**9", "1e999", "0x", "7 ", "\ud800", "٣", PROMPT),
    *("<answer>", "</answer>", "<answer>3*5+7", "=22</answer>", " ", "$", "\\times", "\\div"),
]  # fmt: skip


@given(st.lists(st.sampled_from(pieces), max_size=30).map("".join))
@settings(max_examples=8 * settings.default.max_examples)
def test_any_mixture(text):
    result = reward(text)
    if "</answer>" in text:
        # The last closing tag, and the nearest opening one before it.
        inner = re.fullmatch(r"(?s).*<answer>(.*)</answer>.*?", text)
        expression = "".join(inner.group(1).split()) if inner else ""
    else:
        expression = bare(text)
    if expression in RIGHT:
        assert result == 1.0
    written = re.sub(r"[][()$]|\\(?=[][()])", "", expression).replace("\\times", "*")
    if not RIGHT.intersection(written.split("=")):
        assert result == 0.0


@given(st.sampled_from(sorted(RIGHT)), st.integers(0, 5), st.characters(exclude_categories=()))
@settings(max_examples=5 * settings.default.max_examples)
def test_one_character_more_makes_a_right_answer_wrong(answer, at, character):
    longer = answer[:at] + character + answer[at:]
    assert reward(longer) == 0.0
    harmless = character.isspace() or (character == "$" and at in (0, len(answer)))
    assert tagged(longer) == float(harmless)
