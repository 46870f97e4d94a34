"""Equality of two readings as answers."""

import re
from itertools import permutations
from typing import Any

from latex2sympy2_extended.latex2sympy2 import latex2sympy
from math_verify import verify
from sympy import Basic, Eq, Expr, Mul, Rational, Set, Symbol
from sympy.core.function import AppliedUndef

from rlhfless_functions.rewards.mathematics.shapes import Expression, Items, Reading, Words

_TOLERANCE = 1e-6
"""Largest difference of numbers written as decimals: absolute, and relative below 1."""
_MOST_ORDERS = 6
"""Items of a list up to which each order is tried; above it the first match is taken."""


def same(truth: Reading, answer: Reading) -> bool:
    """Return whether the answer is the truth.

    - Lists and sets are compared without order; pairs, tuples and intervals with their order and brackets.
    - A side without unit, percent sign or `x =` agrees with one that has it. Two units must be the same.
    """
    if isinstance(truth, Words) or isinstance(answer, Words):
        return _same_words(truth, answer)
    if isinstance(truth, Expression) and isinstance(answer, Expression):
        return _same_expressions(truth, answer)
    if isinstance(truth, Items) and isinstance(answer, Items):
        return _same_items(truth, answer)
    items, other = (truth, answer) if isinstance(truth, Items) else (answer, truth)
    assert isinstance(items, Items) and isinstance(other, Expression)
    if len(items.items) == 1 and items.brackets in ("", "{}"):
        return same(items.items[0], other) if items is truth else same(other, items.items[0])
    if items.brackets == ":" and len(items.items) == 2:
        return _verified(_ratio(items), other.value)
    if items.brackets in ("", "()") and not _is_relation(other.value) and not isinstance(other.value, Set):
        return False
    return _same_sets(truth.latex, answer.latex)


def _same_words(truth: Reading, answer: Reading) -> bool:
    if isinstance(answer, Words) and answer.labelled is not None and not isinstance(truth, Words):
        return same(truth, answer.labelled)
    if isinstance(truth, Words) and truth.labelled is not None and not isinstance(answer, Words):
        return same(truth.labelled, answer)
    if isinstance(truth, Words) and isinstance(answer, Words):
        if truth.labelled is not None and answer.labelled is not None:
            return truth.text == answer.text and same(truth.labelled, answer.labelled)
        if answer.labelled is not None and len(truth.text) > 1:
            return same(truth, answer.labelled)
        if truth.text == answer.text:
            return True
        # One of two times of day may leave out its half of the day.
        short, long = sorted((truth.text, answer.text), key=len)
        return re.fullmatch(r"\d+:\d\d", short) is not None and long in (f"{short} am", f"{short} pm")
    words, other = (truth, answer) if isinstance(truth, Words) else (answer, truth)
    assert isinstance(words, Words)
    if isinstance(other, Expression) and isinstance(other.value, Symbol):
        return len(words.text) == 1 and other.value.name.lower() == words.text
    if isinstance(other, Items) and other.brackets == ":":
        return other.latex.replace(" ", "") == words.text
    return False


def _same_expressions(truth: Expression, answer: Expression) -> bool:
    if truth.unit and answer.unit and truth.unit != answer.unit:
        return False
    if truth.base and answer.base and truth.base != answer.base:
        return False
    if _same_amount(truth, answer):
        return True
    if answer.glued is not None and not getattr(truth.value, "free_symbols", True):
        return _same_expressions(truth, answer.glued)
    if truth.glued is not None and answer.unit:
        return _same_expressions(truth.glued, answer)
    return False


def _same_amount(truth: Expression, answer: Expression) -> bool:
    if truth.percent == answer.percent:
        return _verified(truth.value, answer.value)
    number, percent = (answer, truth) if truth.percent else (truth, answer)
    # 50 agrees with 50 %, because questions ask for percents. Below 1, a number is more often a share: 0.5 is 50 %.
    size = _number(number.value)
    alike = size is not None and abs(size) >= 1 and _verified(number.value, percent.value)
    share = Mul(percent.value, Rational(1, 100))
    return alike or _verified(number.value, share)


def _same_items(truth: Items, answer: Items) -> bool:
    kinds = {truth.brackets, answer.brackets}
    ordered = [same(mine, theirs) for mine, theirs in zip(truth.items, answer.items, strict=False)]
    in_order = len(truth.items) == len(answer.items) and all(ordered)
    if kinds <= {"", "{}"}:
        return (
            in_order
            or _in_some_order(list(truth.items), list(answer.items))
            or (kinds == {"{}"} and _same_sets(truth.latex, answer.latex))
        )
    if kinds == {":"}:
        return in_order or (len(truth.items) == len(answer.items) == 2 and _verified(_ratio(truth), _ratio(answer)))
    if "∪" in kinds:
        alike = kinds == {"∪"} and _in_some_order(list(truth.items), list(answer.items))
        return alike or (not kinds & {"", ":"} and _same_sets(truth.latex, answer.latex))
    if len(kinds) == 1 or kinds == {"", "()"}:
        return in_order
    # A list in square brackets, but not an interval, is a tuple.
    return kinds <= {"", "()", "[]"} and len(truth.items) > 2 and in_order


def _in_some_order(truths: list[Reading], answers: list[Reading]) -> bool:
    if len(truths) != len(answers):
        return False
    if len(truths) <= _MOST_ORDERS:
        equal = [[same(truth, answer) for answer in answers] for truth in truths]
        return any(
            all(row[place] for row, place in zip(equal, order, strict=True))
            for order in permutations(range(len(answers)))
        )
    left = list(answers)
    for truth in truths:
        found = next((answer for answer in left if same(truth, answer)), None)
        if found is None:
            return False
        left.remove(found)
    return True


def _ratio(items: Items) -> Any:
    first, second = items.items
    if isinstance(first, Expression) and isinstance(second, Expression):
        return Mul(first.value, 1 / second.value)
    return None


def _same_sets(truth: str, answer: str) -> bool:
    """Compare forms of a set as SymPy's sets: intervals with inequalities, unions, sets with repetitions."""
    try:
        return _verified(latex2sympy(truth, normalization_config=None), latex2sympy(answer, normalization_config=None))
    except Exception:
        return False


def _verified(truth: Any, answer: Any) -> bool:
    """Compare by the library, without three of its verdicts: small numbers that differ only after the sixth decimal
    place, equations without solutions, and the right side alone of an equation such as `x + y = 5`."""
    if truth is None or answer is None:
        return False
    if isinstance(truth, Eq) and isinstance(answer, Expr) and not _is_name(truth.lhs):
        return False
    # The library's own limits use alarms, which do not interrupt the arithmetic of large numbers.
    if not verify(truth, answer, allow_set_relation_comp=True, timeout_seconds=0):
        return False
    if isinstance(truth, Eq) and isinstance(answer, Eq):
        return _same_equations(truth, answer)
    mine, theirs = _number(_right_side(truth)), _number(_right_side(answer))
    if mine is None or theirs is None:
        return True
    return abs(mine - theirs) <= _TOLERANCE * min(1.0, max(abs(mine), abs(theirs)))


def _same_equations(truth: Eq, answer: Eq) -> bool:
    """Return whether equations are the same up to a factor, or have the same solutions, of which there is one."""
    from sympy import simplify, solve

    mine, theirs = truth.lhs - truth.rhs, answer.lhs - answer.rhs
    if mine.free_symbols != theirs.free_symbols:
        return False
    if simplify(mine - theirs) == 0:
        return True
    factor = simplify(mine / theirs) if theirs != 0 else None
    return (factor is not None and not factor.free_symbols) or bool(solve(mine, dict=True))


def _is_name(value: Any) -> bool:
    """Return whether a side of an equation names what is asked for: `x`, `f(x)`, `AB`, `dy/dx`."""
    parts = value.args if isinstance(value, Mul) else [value]
    return all(isinstance(part, Symbol | AppliedUndef) or (1 / part).is_Symbol for part in parts)


def _right_side(value: Any) -> Any:
    return value.rhs if isinstance(value, Eq) else value


def _is_relation(value: Any) -> bool:
    return bool(getattr(value, "is_Relational", False)) or type(value).__name__ in ("And", "Or", "Not")


def _number(value: Any) -> float | None:
    """Return a real number as a float; None if it is none, or not finite."""
    if not isinstance(value, Basic) or value.free_symbols:
        return None
    try:
        number = complex(value.evalf(20))
    except Exception:
        return None
    real = number.real
    return real if number.imag == 0 and abs(real) < float("inf") else None
