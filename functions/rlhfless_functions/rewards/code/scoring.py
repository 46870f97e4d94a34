"""The share of its tests that the code of a response passes."""

import ast
import os
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rlhfless_functions.data.code_tests import CodeTests, TestsError, read_tests
from rlhfless_functions.rewards import reaper
from rlhfless_functions.rewards.calls import Call, Scorer
from rlhfless_functions.rewards.checks import WAIT_FACTOR, count
from rlhfless_functions.rewards.code.confinement import Confinement, best
from rlhfless_functions.rewards.code.extraction import judged_block
from rlhfless_functions.rewards.code.folders import fresh_folder
from rlhfless_functions.rewards.code.running import NotBegunError, run_tests, shares_of
from rlhfless_functions.rewards.groups import RewardGroup

_PATIENCE = 60.0
"""Seconds for the first program, which shows whether any runs."""
_USUAL_IMPORTS = """
import bisect, collections, copy, functools, heapq, itertools, json, math, operator, random, re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
from builtins import *
"""
"""Names that solutions of LeetCode's, APPS's and LiveCodeBench's functions use without an import, as their judges
define them."""


_HONEST = "import os\nos.waitpid(os.fork() or os._exit(0), 0)\nopen('mine', 'w').close()\nprint(input())"
_HONEST_WITHOUT_FILES = "print(input())"


def usable_confinement(memory: int, scratch: str) -> Confinement:
    """Return the closest confinement of this machine with which an honest program runs.

    Args:
        memory: bytes that the program may use.
        scratch: folder for its folder.

    Raises:
        RuntimeError: it runs with none. Then all responses would score 0.
    """
    closest = best()
    for confinement in (closest, replace(closest, asks=False)):
        honest = _HONEST if confinement.files else _HONEST_WITHOUT_FILES
        with fresh_folder(scratch) as folder, suppress(NotBegunError):
            tests = CodeTests(programs=[("1", "1")])
            if run_tests(honest, tests, "", _PATIENCE, memory, folder, confinement).passed:
                return confinement
    raise RuntimeError("this machine runs no program under the limits of tested code; reward.memory may be too small")


def code_scorer(
    tests_column: str | None, seconds: float, memory: int, scratch: str, confinement: Confinement
) -> Scorer:
    """Score the share of the tests that a response's code passes.

    A response without a code block scores 0. A test that runs out of time fails; the tests after it still run.

    Args:
        tests_column: column with the tests; see `data.code_tests`.
        seconds: time limit of one test, and of running the code itself.
        memory: bytes that all tests running at a time may use together.
        scratch: folder for working folders.
        confinement: what the code may do.
    """
    width, share = shares_of(len(os.sched_getaffinity(0)), memory)
    runner = ThreadPoolExecutor(width)

    def score(group: RewardGroup, call: Call) -> list[float]:
        tests = read_tests(group.columns, tests_column)
        before = _before(group, tests)

        def one(completion: str) -> tuple[float, str | None]:
            code = judged_block(completion, group.text)
            if code is None:
                return 0.0, None
            try:
                with fresh_folder(scratch) as folder:
                    verdict = run_tests(code, tests, before, seconds, share, folder, confinement)
            except (OSError, ValueError, MemoryError):
                # It used up the disk, the processes or the memory, or is not text.
                traceback.print_exc()
                return 0.0, "crashed"
            return verdict.passed / len(tests), verdict.fate

        scored = list(runner.map(one, group.completions))
        for _, fate in scored:
            count(call, fate)
        # Processes that left the process group are orphans now, and this process is their parent.
        reaper.end_descendants()
        return [score for score, _ in scored]

    return score


def longest_call(columns: dict[str, Any], name: str | None, seconds: float, responses: int) -> float:
    """Return the most seconds to test the responses to one prompt, one after the other.

    After a test that hangs, the code runs again, which may take as long once more.
    """
    try:
        return WAIT_FACTOR * 2 * len(read_tests(columns, name)) * seconds * responses
    except TestsError:
        return 0.0


def _before(group: RewardGroup, tests: CodeTests) -> str:
    """Return the text that runs before the code: the usual imports, and a prompt that is itself Python, as
    HumanEval's."""
    if tests.entry is None:
        return ""
    prompt = group.text if group.messages is None else group.messages[-1]["content"]
    try:
        is_code = isinstance(prompt, str) and f"def {tests.entry}" in prompt and bool(ast.parse(prompt))
    except (SyntaxError, ValueError, RecursionError):
        is_code = False
    return f"{_USUAL_IMPORTS}\n{prompt}" if is_code else _USUAL_IMPORTS
