"""Worked solutions: the steps of a calculation in words and numbers, which a supervised warm-up learns from.

A solution is short (about 20 to 60 tokens), and each step has one operation. The steps end before the answer.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

_OPERATIONS: dict[type, tuple[str, Callable[[Fraction, Fraction], Fraction]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
}


def calculation(expression: str) -> list[str]:
    """The steps of an expression with + - * / and parentheses, for example 12 + 3 * 4: "3 * 4 = 12", "12 + 12 = 24".

    A product of two numbers with several digits each has a step with its partial products.
    """
    steps: list[str] = []

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int() as number):
                return Fraction(number)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
                a, b = value(left), value(right)
                sign, compute = _OPERATIONS[type(op)]
                result = compute(a, b)
                operand = f"({b})" if b < 0 else str(b)
                steps.append(f"{a} {sign} {operand}{_partial(a, sign, b)} = {result}")
                return result
        raise ValueError(f"{expression!r} is no expression with + - * / and whole numbers")

    value(ast.parse(expression.strip(), mode="eval").body)
    return steps


def _partial(a: Fraction, sign: str, b: Fraction) -> str:
    """The partial products of a * b, for example " = 23 * 40 + 23 * 5 = 920 + 115" for 23 * 45; often nothing."""
    if sign != "*" or a < 10 or b < 10 or a.denominator != 1 or b.denominator != 1:
        return ""
    digits = str(b)
    parts = [int(digit) * 10 ** (len(digits) - 1 - place) for place, digit in enumerate(digits) if digit != "0"]
    if len(parts) < 2:
        return ""
    return f" = {' + '.join(f'{a} * {part}' for part in parts)} = {' + '.join(str(a * part) for part in parts)}"


def divisor(numbers: list[int]) -> list[str]:
    """Euclid's steps to the greatest common divisor, for example 48, 36: "48 mod 36 = 12", "36 mod 12 = 0"."""
    steps, result = [], numbers[0]
    for number in numbers[1:]:
        result, other = max(result, number), min(result, number)
        while other:
            steps.append(f"{result} mod {other} = {result % other}")
            result, other = other, result % other
    return steps


# Tasks of reasoning-gym whose entries have no answer: only a judge knows whether a response is right.
WITHOUT_ANSWER = ("boxnet", "graph_color", "rubiks_cube", "rush_hour")
# The steps of an entry of reasoning-gym, from its metadata, by the name of its task.
STEPS: dict[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "gcd": lambda metadata: divisor(metadata["numbers"]),
    **dict.fromkeys(
        ("basic_arithmetic", "chain_sum", "countdown", "products"),
        lambda metadata: calculation(metadata["expression"]),
    ),
}


def solution(task: str, entry: Mapping[str, Any], *, steps: bool = True) -> str | None:
    """The worked solution of a reasoning-gym entry, or only its answer without `steps` or STEPS; None: it has none."""
    if task in WITHOUT_ANSWER:
        return None
    sentences = [f"{step}." for step in STEPS[task](entry["metadata"])] if steps and task in STEPS else []
    return " ".join([*sentences, f"<answer>{entry['answer']}</answer>"])
