"""The reward's function in a file that is not said to have one: found by its name or signature, without running it.

This module is light, because the control plane imports it too.
"""

import ast
from collections.abc import Sequence

DEFAULT = "reward"
_OWN_NAMES = ("compute_score", "reward_func")
"""Names that verl and OpenRLHF look for by default."""


def usual_function(body: Sequence[ast.stmt]) -> str:
    """Return the name of a file's reward: `reward`, or else its only function with the signature of one.

    Of several functions, the only one with the name that verl or OpenRLHF look for counts. If that leaves a choice, it
    is `reward` again, which the file lacks.
    """
    found = reward_functions(body)
    own = [name for name in found if name in _OWN_NAMES]
    only = next((names[0] for names in (found, own) if len(names) == 1), DEFAULT)
    return DEFAULT if DEFAULT in found else only


def reward_functions(body: Sequence[ast.stmt]) -> list[str]:
    """Return the names of the functions in TRL's, verl's or OpenRLHF's form that a file defines."""
    functions = [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return list(dict.fromkeys(node.name for node in functions if node.name[0] != "_" and _is_reward(node.args)))


def _is_reward(given: ast.arguments) -> bool:
    names = {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
    if {"solution_str", "solution_strs"} & names:
        return given.kwarg is not None or bool({"ground_truth", "ground_truths"} & names)
    return bool({"completions", "queries"} & names)
