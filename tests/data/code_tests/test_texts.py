# ruff: noqa: E501 - tables are easier to read with one entry a line
"""Python tests are run as their form means, or refused: none can pass whatever the code does."""

import pytest

from rlhfless_functions.data.code_tests.texts import units_of
from rlhfless_functions.data.code_tests.units import TestsError


def kinds(*texts: str, entry: str | None = None) -> list[str]:
    return [
        " ".join(str(unit[key]) for key in ("kind", "owner", "name", "entry", "main") if key in unit)
        for unit in units_of(texts, "", entry)
    ]


PYTEST = "def test_sum():\n    assert plus(1, 2) == 3\n\ndef test_zero():\n    assert plus(0, 0) == 0"
CASE = "import unittest\nclass TestPlus(unittest.TestCase):\n    def test_sum(self):\n        self.assertEqual(plus(1, 2), 3)"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("assert plus(1, 2) == 3", ["script False"]),
        (PYTEST, ["function test_sum", "function test_zero"]),
        ("from solution import plus\n\n" + PYTEST, ["function test_sum", "function test_zero"]),
        (PYTEST + "\n\nif __name__ == '__main__':\n    test_sum()", ["function test_sum", "function test_zero"]),
        (PYTEST + "\ntest_sum()\ntest_zero()", ["script False"]),
        (PYTEST + "\ntest_sum()", ["function test_zero"]),
        ("async def test_sum():\n    assert await plus(1, 2) == 3", ["function test_sum"]),
        ("import pytest\ndef test_bad():\n    with pytest.raises(ValueError):\n        plus('a', 1)", ["function test_bad"]),
        ("import pytest\n@pytest.mark.parametrize('a, b', [(1, 2)])\ndef test_sum(a, b):\n    assert plus(a, b) == 3",
         ["function test_sum"]),
        ("def verify(a):\n    assert plus(a, 0) == a\ndef test_sum():\n    verify(1)", ["function test_sum"]),
        ("def test_sum():\n    plus(1, 2) == 3", ["function test_sum"]),
        ("class TestPlus:\n    def test_sum(self):\n        assert plus(1, 2) == 3", ["method TestPlus test_sum"]),
        (CASE, ["method TestPlus test_sum"]),
        (CASE + "\nif __name__ == '__main__':\n    unittest.main()", ["method TestPlus test_sum"]),
        ("from unittest import TestCase\nclass Base(TestCase):\n    def test_a(self):\n        self.assertTrue(plus(1, 1))\n"
         "class Sub(Base):\n    pass", ["method Base test_a", "method Sub test_a"]),
        ("if __name__ == '__main__':\n    assert plus(1, 2) == 3", ["script True"]),
        ("def main():\n    assert plus(1, 2) == 3\nif __name__ == '__main__':\n    main()", ["script True"]),
        ("plus(1, 2) == 3", ["script False"]),
        ("not plus(0, 0)", ["script False"]),
        ("plus(1, 2) == 3 and plus(0, 0) == 0", ["script False"]),
        ("if plus(1, 2) != 3:\n    raise ValueError", ["script False"]),
        ("import sys\nif plus(1, 2) != 3:\n    sys.exit(1)", ["script False"]),
        ("import numpy as np\nnp.testing.assert_allclose(plus(1, 2), 3)", ["script False"]),
        ("def assertion(out, exp):\n    assert out == exp\nfor a, b in [(1, 1)]:\n    assertion(plus(a, 0), b)", ["script False"]),
        ("assert sum(10, 15) == 6", ["script False"]),
        ("import solution\nassert solution.plus(1, 2) == 3", ["script False"]),
        ("def check(candidate):\n    assert candidate(1, 2) == 3\ncheck(plus)", ["script False"]),
    ],
)  # fmt: skip
def test_a_text_is_run_as_its_form_means(text: str, expected: list[str]) -> None:
    assert kinds(text) == expected


def test_humanevals_check_is_called_with_the_rows_entry_point() -> None:
    text = "METADATA = {}\n\ndef check(candidate):\n    assert candidate(1, 2) == 3"
    assert kinds(text, entry="plus") == ["check plus"]
    with pytest.raises(TestsError, match=r"defines check\(candidate\) and never calls it; .*entry_point"):
        kinds(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "assert nothing"),
        ("# a comment", "assert nothing"),
        ("'''a docstring'''", "assert nothing"),
        ("pass", "assert nothing"),
        ("import math", "assert nothing"),
        ("x = plus(1, 2)", "assert nothing"),
        ("plus(1, 2)", r"asserts nothing, so that any code passes it; write assert plus\(1, 2\) =="),
        ("print(plus(1, 2))", "asserts nothing"),
        ("assert True", "assert nothing"),
        ("x = 3\nassert x == 3", "assert nothing"),
        ("def test_sum():\n    plus(1, 2)", "assert nothing"),
        ("def test_sum():\n    assert True", "assert nothing"),
        ("class TestPlus:\n    def sum(self):\n        assert plus(1, 2) == 3", "assert nothing"),
        ("def verify():\n    assert plus(1, 2) == 3", r"defines verify\(\) and never calls it"),
        ("import doctest\ndoctest.testmod()", "assert nothing"),
        ("try:\n    plus(1, 2)\nexcept ValueError:\n    pass", "assert nothing"),
        ("assert plus(1, 2 == 3", "is not Python"),
        ("print plus(1, 2)", "is not Python"),
        ("import no_such_module\nassert plus(1, 2) == 3", "imports 'no_such_module', which is not installed"),
        ("from your_module import plus\nassert plus(1, 2) == 3", "import from solution"),
        ("from .plus import plus\nassert plus(1, 2) == 3", "import from solution"),
        ("def test_print(capsys):\n    plus(1, 2)\n    assert capsys.readouterr().out == '3'", "fixture 'capsys'"),
        ("from unittest.mock import patch\nwith patch('builtins.input'):\n    assert plus(1, 2) == 3", "does not reach the code"),
        ("from unittest import mock\nassert plus(1, 2) == 3", "does not reach the code"),
        ("import io, sys\nsys.stdout = io.StringIO()\nassert plus(1, 2) == 3", "does not reach the code"),
        ("import io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()):\n    plus(1, 2)\nassert plus(0, 0) == 0",
         "does not reach the code"),
    ],
)  # fmt: skip
def test_a_text_that_any_code_or_no_code_passes_is_refused(text: str, words: str) -> None:
    with pytest.raises(TestsError, match=words):
        kinds(text)


def test_texts_before_the_first_test_are_setup_and_do_not_count() -> None:
    units = units_of(
        ["import math", "root = Node(1)", "assert depth(root) == 1", "", "assert depth(None) == 0"], "", None
    )
    assert [unit["text"] for unit in units] == [
        f"import math\nroot = Node(1)\n{test}" for test in ("assert depth(root) == 1", "assert depth(None) == 0")
    ]
    with pytest.raises(TestsError, match=r"test 2 .* asserts nothing"):
        kinds("assert plus(1, 2) == 3", "plus(3, 4)")
    with pytest.raises(TestsError, match=r"test 2 .* asserts nothing"):
        kinds("assert plus(1, 2) == 3", "x = plus(3, 4)")


def test_skipped_tests_do_not_count() -> None:
    assert kinds("import pytest\n@pytest.mark.skip\ndef test_later():\n    assert later()\n" + PYTEST) == [
        "function test_sum",
        "function test_zero",
    ]


def test_imports_that_may_fail_need_not_be_installed() -> None:
    assert kinds("try:\n    import no_such_module\nexcept ImportError:\n    pass\nassert plus(1, 2) == 3") == [
        "script False"
    ]
