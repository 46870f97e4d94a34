# ruff: noqa: E501 - tables are easier to read with one entry a line
"""The formats of tests columns: which are read, and what is refused with the remedy."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_functions.data.code_tests import TestsError, read_tests

APPS = {"inputs": ["1"], "outputs": ["2"]}


def calls(row: dict[str, Any]) -> list[tuple[Any, Any, bool]]:
    return [(unit["arguments"], unit["expected"], unit["either"]) for unit in read_tests(row).units]


def test_the_column_is_the_first_of_the_usual_ones_or_the_named_one() -> None:
    row = {"test": "assert f() == 1", "tests": None, "mine": {"inner": ["assert f() == 1", "assert f() == 1"]}}
    assert len(read_tests(row)) == 1
    assert len(read_tests(row, "mine.inner")) == 2
    with pytest.raises(TestsError, match=r"no tests in column 'other'; set code\.testsColumn"):
        read_tests(row, "other")


@pytest.mark.parametrize(
    ("outputs", "either"),
    [([[3], [5]], True), ([[3], [5, 6]], False), ([[3], []], False), ([3, 5], False), ([[[1]], [[2, 3]]], True)],
)
def test_an_output_may_be_in_a_list_of_its_own_only_if_all_are(outputs: list[Any], either: bool) -> None:
    found = calls({"tests": {"fn_name": "f", "inputs": [[1], [2]], "outputs": outputs}})
    assert found == [([1], outputs[0], either), ([2], outputs[1], either)]


@pytest.mark.parametrize(
    ("given", "arguments"),
    [([1, 2], [1, 2]), ([[1, 2]], [[1, 2]]), (5, [5]), ("[1, 2]\n3", [[1, 2], 3]), ('"a"', ["a"]), ([], []),
     ([{"1": "a", "-2": "b"}], [{1: "a", -2: "b"}]), ([{"a": 1}], [{"a": 1}])],
)  # fmt: skip
def test_arguments_are_lists_or_json_by_lines(given: Any, arguments: list[Any]) -> None:
    assert calls({"tests": {"fn_name": "f", "inputs": [given], "outputs": [1]}})[0][0] == arguments


def test_livecodebenchs_outputs_are_values_never_wrapped() -> None:
    case = {"input": "[1]", "output": "[3]", "testtype": "functional"}
    assert calls({"tests": [case], "metadata": {"func_name": "f"}}) == [([[1]], [3], False)]


@pytest.mark.parametrize(
    ("given", "text"),
    [("1\n2", "1\n2"), (["1", "2"], "1\n2"), ([1, 2], "1\n2"), (7, "7"), ("", "")],
)
def test_a_programs_input_is_text_or_lines(given: Any, text: str) -> None:
    assert read_tests({"tests": [{"input": given, "output": "x"}]}).programs == [(text, "x")]


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        (None, "no tests in any column"),
        (7, "must hold Python tests, a list of them or of {input, output}, .* but holds 7; set code.testsColumn"),
        ([], "no tests; remove the row"),
        ("[]", "no tests; remove the row"),
        ([1], r"holds \[1\]"),
        ([{"input": "1"}], "holds .*'input': '1'"),
        ({"inputs": []}, "holds .*'inputs'"),
        ({"inputs": ["1", "2"], "outputs": ["1"]}, "not two lists of the same length"),
        ({"inputs": [[["1"]]], "outputs": ["1"]}, "for a program's lines; give text"),
        ({"inputs": [None], "outputs": ["1"]}, "None for a program's input"),
        ({"fn_name": "f", "inputs": ["a b"], "outputs": ["1"]}, "is not JSON, one argument a line"),
        ([{"input": "1", "output": "1", "testtype": "functional"}], "do not say which; give fn_name"),
        ([{"input": "1", "output": "1", "type": "interactive"}], "unknown type 'interactive'"),
        ({"language": "cpp", "test_cases": []}, "are for cpp; the code reward runs Python: remove the row"),
        (["assert f(1) == 2", {"input": "1", "output": "2"}], "must hold Python tests"),
        ([{"input": "1", "output": "2", "fn_name": "f"}, {"input": "1", "output": "2"}], "both a program and a function"),
        ("72", "assert nothing"),
        (["", ""], "assert nothing"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_refused_with_the_column_and_the_remedy(tests: Any, words: str) -> None:
    with pytest.raises(TestsError, match=words):
        read_tests({"tests": tests, "prompt": "q"})


def test_an_entry_point_that_is_no_name_is_refused() -> None:
    with pytest.raises(TestsError, match="entry_point 'no name'"):
        read_tests({"test": "def check(f):\n    assert f()", "entry_point": "no name"})


def test_a_pickle_of_anything_but_text_is_not_opened() -> None:
    import base64
    import os
    import pickle
    import zlib

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, ("evil",)

    payload = base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()
    with pytest.raises(TestsError):
        read_tests({"private_test_cases": payload})


tests_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20) | st.sampled_from(["assert f(1)", "def check(c): assert c"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["input", "output", "inputs", "outputs", "fn_name", "testtype", "test_cases"]), inner),
    max_leaves=12,
)  # fmt: skip


@given(tests_values, st.booleans())
def test_any_value_is_read_or_refused_and_json_makes_no_difference(value: Any, as_json: bool) -> None:
    held = json.dumps(value) if as_json and not isinstance(value, str) else value
    try:
        tests = read_tests({"tests": held})
    except TestsError:
        return
    assert len(tests) > 0
