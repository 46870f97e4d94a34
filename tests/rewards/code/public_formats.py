# ruff: noqa: E501 - tables are easier to read with one entry a line
"""Rows in the public formats of data sets for code, with a right and a wrong response. The rows are our own."""

import base64
import json
import pickle
import zlib
from dataclasses import dataclass
from typing import Any

PLUS, MINUS = "def plus(a, b):\n    return a + b", "def plus(a, b):\n    return 0"
PRINTS, PRINTS_WRONG = "a, b = map(int, input().split())\nprint(a + b)", "print(0)"
METHOD = "class Solution:\n    def plus(self, a: int, b: int) -> int:\n        return a + b"
METHOD_WRONG = METHOD.replace("a + b", "0")
SORTED, NOT_SORTED = "def order(xs: List[int]):\n    return tuple(sorted(xs))", "def order(xs):\n    return xs"
INPUTS, OUTPUTS = ["1 2\n", "0 5\n"], ["3\n", "5\n"]
STDIN = [{"input": given, "output": wanted} for given, wanted in zip(INPUTS, OUTPUTS, strict=True)]
PYTEST = "def test_sum():\n    assert plus(1, 2) == 3\n\ndef test_zero():\n    assert plus(0, 5) == 5"
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(0, 5) == 5"
CASES = (
    "import unittest\nclass TestCases(unittest.TestCase):\n    def setUp(self):\n        self.five = 5\n"
    "    def test_sum(self):\n        self.assertEqual(plus(1, 2), 3)\n"
    "    def test_zero(self):\n        self.assertEqual(plus(0, self.five), 5)"
)
LIVE = [
    {"input": "1\n2", "output": "3", "testtype": "functional"},
    {"input": "0\n5", "output": "5", "testtype": "functional"},
]
PRIVATE = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(LIVE[1:])))).decode()


@dataclass(frozen=True)
class PublicFormat:
    """A format with an example."""

    name: str
    """Data sets or programs that use it."""
    form: str
    """The row's tests in a few words."""
    meaning: str
    """The tests, as they are run."""
    row: dict[str, Any]
    right: str
    wrong: str
    tests: int
    """Number of tests of the row."""
    column: str | None = None


FORMATS = [
    PublicFormat("AceCode, MBPP (sanitized)", "`test_list`, `test_cases`: list of asserts; `test_imports`",
                 "each assert is a test, after the imports",
                 {"test_list": ["assert math.isclose(plus(1, 2), 3)", "assert plus(0, 5) == 5"], "test_imports": ["import math"]},
                 PLUS, MINUS, 2),
    PublicFormat("MBPP", "`test_list`, `test_setup_code`", "each assert is a test, after the setup",
                 {"test_list": ["assert plus(one, 2) == 3", "assert plus(0, 5) == 5"], "test_setup_code": "one = 1",
                  "challenge_test_list": []}, PLUS, MINUS, 2),
    PublicFormat("MBPP+", "`test`: a script with a loop of assertions", "the script is one test",
                 {"test": "inputs = [[1, 2], [0, 5]]\nresults = [3, 5]\ndef assertion(out, exp):\n    assert out == exp\n"
                          "for i, (inp, exp) in enumerate(zip(inputs, results)):\n    assertion(plus(*inp), exp)"},
                 PLUS, MINUS, 1),
    PublicFormat("HumanEval, HumanEval+", "`test` defines `check(candidate)`; `entry_point`",
                 "`check(entry_point)`, after the prompt and the usual imports",
                 {"test": f"METADATA = {{}}\n\n{CHECK}", "entry_point": "plus"}, PLUS, MINUS, 1),
    PublicFormat("LeetCodeDataset", "the same with `entry_point: Solution().plus`", "`check(Solution().plus)`",
                 {"test": CHECK, "entry_point": "Solution().plus"}, METHOD, METHOD_WRONG, 1, "test"),
    PublicFormat("KodCode", "`test`: pytest functions with `from solution import …`", "each function is a test",
                 {"test": f"from solution import plus\n\n{PYTEST}"}, PLUS, MINUS, 2),
    PublicFormat("KodCode", "the same with `pytest.raises`, `approx` and `parametrize`",
                 "each function is a test, which all of its parameters must pass",
                 {"test": "import pytest\nfrom solution import plus\n\n@pytest.mark.parametrize('a,b,c', [(1, 2, 3), (0, 5, 5)])\n"
                          "def test_sums(a, b, c):\n    assert plus(a, b) == pytest.approx(c)\n\ndef test_bad():\n"
                          "    with pytest.raises(TypeError):\n        plus('a', 1)"}, PLUS, MINUS, 2),
    PublicFormat("BigCodeBench", "`test`: a `unittest.TestCase`", "each method is a test",
                 {"test": CASES, "entry_point": "plus"}, PLUS, MINUS, 2),
    PublicFormat("one script", "`tests`: text with asserts, or with `if __name__ == \"__main__\":`", "the text is one test",
                 {"tests": "if __name__ == '__main__':\n    assert plus(1, 2) == 3"}, PLUS, MINUS, 1),
    PublicFormat("APPS, TACO", "`input_output`: JSON of `{inputs, outputs}`", "each pair is a test of a program",
                 {"input_output": json.dumps({"inputs": INPUTS, "outputs": OUTPUTS})}, PRINTS, PRINTS_WRONG, 2),
    PublicFormat("TACO", "the same, with a list of lines for each input and output", "lines are joined",
                 {"input_output": json.dumps({"inputs": [["1 2"], ["0 5"]], "outputs": [["3"], ["5"]]})}, PRINTS, PRINTS_WRONG, 2),
    PublicFormat("APPS, TACO", "the same with `fn_name`; each output in a list of its own",
                 "the function, or `Solution().fn_name`, returns the output or the only item of its list",
                 {"input_output": json.dumps({"fn_name": "plus", "inputs": [[1, 2], [0, 5]], "outputs": [[3], [5]]})},
                 METHOD, METHOD_WRONG, 2),
    PublicFormat("APPS, TACO", "the same, where outputs are values", "the function returns the value; tuples are lists",
                 {"input_output": json.dumps({"fn_name": "order", "inputs": [[[2, 1]], [[3, 1, 2]]], "outputs": [[1, 2], [1, 2, 3]]})},
                 SORTED, NOT_SORTED, 2),
    PublicFormat("verl (Eurus-2, DAPO-style)", "`reward_model.ground_truth`: JSON of `{inputs, outputs}`, `fn_name` or `assert_case`",
                 "as in APPS", {"data_source": "apps", "reward_model": {"style": "rule", "ground_truth": json.dumps(
                     {"inputs": INPUTS, "outputs": OUTPUTS})}}, PRINTS, PRINTS_WRONG, 2),
    PublicFormat("verl (sandbox fusion)", "`{assert_case: […]}`", "each assert is a test",
                 {"reward_model": {"ground_truth": json.dumps({"assert_case": ["assert plus(1, 2) == 3", "assert plus(0, 5) == 5"]})}},
                 PLUS, MINUS, 2),
    PublicFormat("LiveCodeBench", "`public_test_cases` and `private_test_cases` (compressed), `testtype: functional`; `metadata.func_name`",
                 "all of both; each line of the input is an argument in JSON",
                 {"public_test_cases": json.dumps(LIVE[:1]), "private_test_cases": PRIVATE,
                  "metadata": json.dumps({"func_name": "plus"})}, METHOD, METHOD_WRONG, 2),
    PublicFormat("LiveCodeBench", "the same with `testtype: stdin`", "each pair is a test of a program",
                 {"public_test_cases": json.dumps([{**STDIN[0], "testtype": "stdin"}]),
                  "private_test_cases": json.dumps([{**STDIN[1], "testtype": "stdin"}]), "metadata": "{}"}, PRINTS, PRINTS_WRONG, 2),
    PublicFormat("DeepCoder (rLLM)", "`tests`: list of `{input, output, testtype, metadata}`", "as in LiveCodeBench",
                 {"tests": json.dumps([{**case, "metadata": {"func_name": "plus"}} for case in LIVE])}, METHOD, METHOD_WRONG, 2),
    PublicFormat("open-r1, PrimeIntellect", "`verification_info`: `{language, test_cases}`, `type: stdin_stdout`",
                 "each pair is a test of a program; rows of other languages are refused",
                 {"verification_info": json.dumps({"language": "python", "test_cases": [
                     {**case, "type": "stdin_stdout"} for case in STDIN]})}, PRINTS, PRINTS_WRONG, 2),
    PublicFormat("PrimeIntellect", "the same with `type: function_call`, `fn_name`", "as in APPS",
                 {"verification_info": {"language": "python", "test_cases": [
                     {"type": "function_call", "fn_name": "plus", "input": [1, 2], "output": [3]},
                     {"type": "function_call", "fn_name": "plus", "input": [0, 5], "output": [5]}]}}, PLUS, MINUS, 2),
    PublicFormat("CodeContests", "`public_tests`, `private_tests`, `generated_tests`: `{input: […], output: […]}`",
                 "all of the three", {"public_tests": {"input": INPUTS[:1], "output": OUTPUTS[:1]},
                                      "private_tests": {"input": INPUTS[1:], "output": OUTPUTS[1:]},
                                      "generated_tests": {"input": [], "output": []}}, PRINTS, PRINTS_WRONG, 2),
    PublicFormat("Skywork-OR1", "`reward_model.ground_truth`: JSON of `{entry_point, test_code, import_prefix}`", "as in HumanEval",
                 {"reward_model": {"ground_truth": json.dumps({"entry_point": "Solution().plus", "import_prefix": "import math\n", "test_code": CHECK})}},
                 METHOD, METHOD_WRONG, 1),
    PublicFormat("NeMo Gym", "`verifier_metadata.unit_tests`: `{inputs, outputs}` (`testsColumn` names it)", "as in APPS",
                 {"verifier_metadata": {"unit_tests": {"inputs": INPUTS, "outputs": OUTPUTS}}}, PRINTS, PRINTS_WRONG, 2,
                 "verifier_metadata.unit_tests"),
]  # fmt: skip
