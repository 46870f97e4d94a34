"""The public formats of columns with tests. docs/correctness.md has a table of them."""

import ast
import base64
import binascii
import io
import json
import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhfless_functions.data.code_tests.texts import units_of
from rlhfless_functions.data.code_tests.units import CodeTests, TestsError, Unit
from rlhfless_functions.data.rows import Row, lookup

TEST_COLUMNS = (
    "tests",
    "test",
    "test_list",
    "test_cases",
    "unit_tests",
    "input_output",
    "verification_info",
    "private_test_cases",
    "public_test_cases",
    "private_tests",
    "public_tests",
    "reward_model.ground_truth",
)
"""Names of the column with tests; the first that exists counts."""
_TOGETHER = (("public_test_cases", "private_test_cases"), ("public_tests", "private_tests", "generated_tests"))
"""Columns of LiveCodeBench and of CodeContests, which belong together."""
_NAMES = ("fn_name", "func_name", "function_name")
_OUTPUTS = ("output", "expected_output")
_PYTHON = ("python", "python3", "py")


def read_tests(row: Row, column: str | None = None) -> CodeTests:
    """Read the tests of a row, in any of the public formats.

    Args:
        row: the row's columns.
        column: column with the tests, nested ones with dots; by default the first of `TEST_COLUMNS` that the row has.

    Raises:
        TestsError: the row has no tests, or they can't be run, or they can't fail.
    """
    present = [name for name in ((column,) if column else TEST_COLUMNS) if lookup(row, name) is not None]
    if not present:
        wanted = f"column {column!r}" if column else f"any column {', '.join(TEST_COLUMNS)}"
        raise TestsError(f"there are no tests in {wanted}; set code.testsColumn to the column of the tests")
    together: Sequence[str] = () if column else next((names for names in _TOGETHER if present[0] in names), ())
    columns = [name for name in together if lookup(row, name) is not None] or present[:1]
    whose = f"column{'s' * (len(columns) > 1)} {' and '.join(map(repr, columns))}"
    found = _Found(row, _entry(row))
    try:
        for name in columns:
            found.add(_decoded(lookup(row, name)))
        return found.tests()
    except TestsError as error:
        raise TestsError(f"{whose}: {error}") from None
    except RecursionError:
        raise TestsError(f"{whose} has tests that are nested too deeply; simplify them") from None


@dataclass
class _Case:
    given: Any
    wanted: Any
    name: str | None
    """Name of the function to call; None for a program."""
    lines: bool
    """Whether each line of the input is an argument in JSON, as in LiveCodeBench."""


@dataclass
class _Found:
    """Collects the tests of a row's columns."""

    row: Row
    entry: str | None
    texts: list[str] = field(default_factory=list)
    cases: list[_Case] = field(default_factory=list)

    def add(self, value: Any) -> None:
        if isinstance(value, str):
            self.texts.append(value)
        elif isinstance(value, list):
            self._add_list(value)
        elif isinstance(value, dict):
            self._add_dict(value)
        else:
            raise TestsError(_unknown(value))

    def tests(self) -> CodeTests:
        if self.texts and self.cases:
            raise TestsError("it has both Python texts and inputs with outputs; keep one of the two")
        if self.texts:
            return CodeTests(units_of(self.texts, _setup(self.row), self.entry), entry=self.entry)
        if not self.cases:
            raise TestsError("it has no tests; remove the row, or give it some")
        calls = [case for case in self.cases if case.name is not None]
        if not calls:
            return CodeTests(programs=[(_text(case.given), _text(case.wanted)) for case in self.cases])
        if len(calls) < len(self.cases):
            raise TestsError("it tests both a program and a function; keep one of the two")
        # APPS and TACO put each output in a list. Whether they do shows only in all of them together.
        either = all(not case.lines and isinstance(case.wanted, list) and len(case.wanted) == 1 for case in calls)
        return CodeTests([_call(case, either) for case in calls], entry=calls[0].name)

    def _add_list(self, values: list[Any]) -> None:
        values = [_decoded(value) for value in values]
        if not all(isinstance(value, str) for value in values) and not all(isinstance(value, dict) for value in values):
            raise TestsError(_unknown(values))
        for value in values:
            if isinstance(value, dict):
                self._add_dict(value, one=True)
            else:
                self.add(value)

    def _add_dict(self, value: dict[str, Any], *, one: bool = False) -> None:
        """Add an object's tests.

        Args:
            one: whether it is one test, so that lists are lines; otherwise lists of input and output are tests.
        """
        language = str(value.get("language") or "python").lower()
        if language not in _PYTHON:
            raise TestsError(f"its tests are for {language}; the code reward runs Python: remove the row")
        entry = value.get("entry_point")
        if isinstance(entry, str):
            self.entry = _expression(entry)
        if (nested := _decoded(value.get("test_cases"))) is not None:
            self.add(nested)
        elif (text := value.get("test_code", value.get("functional"))) is not None:
            self.texts.append(f"{value.get('import_prefix') or ''}\n{text}")
        elif value.get("assert_case"):
            self._add_list(list(value["assert_case"]))
        elif "inputs" in value and "outputs" in value:
            self._add_columns(value, value["inputs"], value["outputs"])
        elif "input" in value and any(key in value for key in _OUTPUTS):
            wanted = next(value[key] for key in _OUTPUTS if key in value)
            if one or not isinstance(wanted, list):
                self._add_case(value, wanted)
            else:
                self._add_columns(value, value["input"], wanted)
        else:
            raise TestsError(_unknown(value))

    def _add_columns(self, value: dict[str, Any], inputs: Any, outputs: Any) -> None:
        """Add cases whose inputs and outputs are lists, as in APPS, TACO, verl's data and CodeContests."""
        inputs, outputs = _decoded(inputs), _decoded(outputs)
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise TestsError("its inputs and outputs are not two lists of the same length; correct them")
        name = _function_name(value)
        for given, wanted in zip(inputs, outputs, strict=True):
            self.cases.append(_Case(given, wanted, name, lines=name is not None and isinstance(given, str)))

    def _add_case(self, value: dict[str, Any], wanted: Any) -> None:
        form = str(value.get("testtype") or value.get("type") or "").lower()
        name = _function_name(value)
        if form.startswith("func"):
            name = name or _function_name({"metadata": self.row.get("metadata")}) or _function_name(self.row)
            if name is None:
                raise TestsError(
                    "its tests call a function and do not say which; give fn_name, or metadata with func_name, as"
                    " LiveCodeBench has it"
                )
        elif form in ("stdin", "stdin_stdout"):
            name = None
        elif form:
            raise TestsError(f"its tests are of the unknown type {form!r}; give stdin or functional")
        given = value["input"]
        self.cases.append(_Case(given, wanted, name, lines=name is not None and isinstance(given, str)))


def _call(case: _Case, either: bool) -> Unit:
    given, wanted = case.given, case.wanted
    if case.lines:
        try:
            given = [json.loads(line) for line in given.split("\n") if line.strip()]
            wanted = json.loads(wanted) if isinstance(wanted, str) else wanted
        except ValueError:
            raise TestsError(
                f"its input {given!r:.60} or output {wanted!r:.60} is not JSON, one argument a line; correct it, or"
                " give the arguments as a list"
            ) from None
    elif not isinstance(given, list):
        given = [given]
    arguments = given if case.lines else [_with_integer_keys(value) for value in given]
    return {"kind": "call", "name": case.name, "arguments": arguments, "expected": wanted, "either": either}


def _with_integer_keys(value: Any) -> Any:
    """JSON has only text as keys. As TACO's judge does, take keys that are all integers for integers."""
    if isinstance(value, dict) and value and all(key.lstrip("-").isdecimal() for key in value):
        return {int(key): inner for key, inner in value.items()}
    return value


def _text(value: Any) -> str:
    """Return standard input or output as text; a list has a line in each item."""
    if isinstance(value, list):
        if any(isinstance(line, list | dict) for line in value):
            raise TestsError(f"it has {value!r:.60} for a program's lines; give text")
        return "\n".join(map(str, value))
    if isinstance(value, dict) or value is None:
        raise TestsError(f"it has {value!r:.60} for a program's input or output; give text")
    return str(value)


def _function_name(value: Mapping[str, Any]) -> str | None:
    metadata = _decoded(value.get("metadata"))
    for place in (value, metadata if isinstance(metadata, dict) else {}):
        for key in _NAMES:
            if isinstance(place.get(key), str) and place[key]:
                return str(place[key])
    return None


def _entry(row: Row) -> str | None:
    entry = row.get("entry_point")
    return _expression(entry) if isinstance(entry, str) and entry.strip() else None


def _expression(text: str) -> str:
    try:
        ast.parse(text.strip(), mode="eval")
    except SyntaxError:
        raise TestsError(f"its entry_point {text!r:.60} is not a Python name; correct it") from None
    return text.strip()


def _setup(row: Row) -> str:
    """Return the text before MBPP's tests."""
    parts: list[str] = []
    for name in ("test_imports", "test_setup_code"):
        value = row.get(name)
        parts += value if isinstance(value, list) else [value] if isinstance(value, str) else []
    return "\n".join(parts)


def _decoded(value: Any) -> Any:
    """Return what JSON or LiveCodeBench's compressed form holds; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        held = json.loads(value)
    except (ValueError, RecursionError):
        held = _decompressed(value)
    return held if isinstance(held, list | dict | str) else value


def _decompressed(text: str) -> Any:
    """LiveCodeBench compresses its private tests: base64 of zlib of a pickled text of JSON."""
    try:
        held = _TextUnpickler(io.BytesIO(zlib.decompress(base64.b64decode(text, validate=True)))).load()
        return json.loads(held)
    except (binascii.Error, zlib.error, pickle.UnpicklingError, EOFError, ValueError, TypeError):
        return None


class _TextUnpickler(pickle.Unpickler):
    """Refuses everything that a pickle could run."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}")


def _unknown(value: Any) -> str:
    keys = sorted({str(key) for each in value for key in each}) if _are_dicts(value) else None
    held = f"items with {', '.join(keys)}" if keys else repr(value)[:80]
    return (
        "must hold Python tests, a list of them or of {input, output}, or an object with inputs and outputs, but holds"
        f" {held}; set code.testsColumn to the column of the tests"
    )


def _are_dicts(value: Any) -> bool:
    return isinstance(value, Sequence) and bool(value) and all(isinstance(each, dict) for each in value)
