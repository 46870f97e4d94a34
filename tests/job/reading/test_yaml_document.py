"""YAML as the API server's tools read it, with the line of every field."""

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_operator.job.reading.yaml_document import Document, UnreadableDocumentError, read_document


def fault(text: str) -> tuple[int, str]:
    """Line and words of the one thing that is wrong."""
    with pytest.raises(UnreadableDocumentError) as caught:
        read_document(text)
    (only,) = caught.value.faults
    return only.line, f"{only.message}; {only.remedy}"


def test_every_field_and_item_has_its_line() -> None:
    document = read_document("a: 1\nb:\n  c: x\n  d:\n    - 1\n    - {e: 2}\n")
    assert document.content == {"a": 1, "b": {"c": "x", "d": [1, {"e": 2}]}}
    lines = {("a",): 1, ("b",): 2, ("b", "c"): 3, ("b", "d"): 4, ("b", "d", 0): 5, ("b", "d", 1, "e"): 6}
    assert {path: document.line(path) for path in lines} == lines


def test_what_is_missing_has_the_line_of_what_is_around_it() -> None:
    document = read_document("a:\n\n  b:\n    c: 1\n")
    assert document.line(("a", "b", "x", 0)) == 3
    assert document.line(("x",)) == 1
    assert document.value(("a", "b", "c")) == 1
    assert document.value(("a", "b", "c", "d")) is None
    assert document.value(("x",)) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("-5", -5),
        ("1e-6", 1e-6),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("2.", 2.0),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("1:30", "1:30"),
        ("2024-01-02", "2024-01-02"),
        ("30s", "30s"),
        ("1.2.3", "1.2.3"),
        (".inf", float("inf")),
        ("-.inf", float("-inf")),
        ('"5"', "5"),
        ("'yes'", "yes"),
        ("!!str 5", "5"),
        ("123456789012345678901", 123456789012345678901.0),
        ("9" * 5000, float("inf")),
        ("|\n  two\n  lines\n", "two\nlines\n"),
    ],
)
def test_plain_scalars_are_what_kubectl_makes_of_them(text: str, value: Any) -> None:
    assert read_document(f"a: {text}").content == {"a": value}


def test_not_a_number_is_read_as_such() -> None:
    value = read_document("a: .nan").content["a"]
    assert value != value


@pytest.mark.parametrize("text", ["yes", "No", "on", "OFF", "y", "010", "0x1F", "0b1", "1_000"])
def test_what_yaml_versions_read_differently_is_refused(text: str) -> None:
    line, words = fault(f"a:\n  b: {text}\n")
    assert line == 2
    assert text in words
    assert "in quotes" in words


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 1, "empty"),
        ("# only a comment\n", 1, "empty"),
        ("null\n", 1, "empty"),
        ("---\na: 1\n---\nb: 2\n", 4, "second document"),
        ("- a\n- b\n", 1, "is a list"),
        ("just words\n", 1, "is text"),
        ("a: 1\nb: 2\na: 3\n", 3, "second time (first in line 1)"),
        ("a: {b: 1,\n b: 2}\n", 2, "second time"),
        ("a: 1\n\tb: 2\n", 2, "not with a tab"),
        ("a: [1, 2\nb: 3\n", 2, "not YAML"),
        ('a: "open\n', 2, "quotes"),
        ("a: b: c\n", 1, "colons"),
        ("a: *nothing\n", 1, "undefined alias"),
        ("a: &a [*a]\n", 1, "contains itself"),
        ("5: x\n", 1, "put it in quotes"),
        ("? [a]\n: x\n", 1, "name must be text"),
        ("a: !!python/object:os.system x\n", 1, "not supported"),
        ("a: !custom {}\n", 1, "not supported"),
        ("a: !!binary aGk=\n", 1, "not supported"),
        ("<<: 5\n", 1, "needs a mapping"),
        ("a: \x07\n", 1, "not allowed in YAML"),
        ('a: "\\UFFFFFFFF"\n', 1, "not YAML"),
        ("a: " + "[" * 5000, 1, "nested too deeply"),
        ("a:\n  " + "[" * 40 + "]" * 40, 2, "nested too deeply"),
        ("a: &a " + "[" * 30 + "]" * 30 + "\nb: " + "[" * 30 + "*a" + "]" * 30, 1, "nested too deeply"),
    ],
)
def test_each_broken_document_has_one_fault_in_its_line(text: str, line: int, words: str) -> None:
    found, message = fault(text)
    assert words in message
    assert found == line


def test_how_deep_a_document_may_be_does_not_depend_on_the_process() -> None:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(50_000)  # as the operator does
    try:
        assert "nested too deeply" in fault("a: " + "[" * 5000)[1]
    finally:
        sys.setrecursionlimit(limit)
    assert read_document("a: " + "[" * 39 + "]" * 39).content


def test_several_faults_are_found_at_once() -> None:
    with pytest.raises(UnreadableDocumentError) as caught:
        read_document("a: yes\nb: 1\nb: 2\nc: !x 1\n")
    assert [fault.line for fault in caught.value.faults] == [1, 3, 4]


def test_anchors_and_merges_are_followed() -> None:
    document = read_document("p: &p {a: 1, b: 1}\nq: &q {b: 2, c: 2}\nz:\n  <<: [*p, *q]\n  c: 3\nw: *p\n")
    assert document.content["z"] == {"a": 1, "b": 1, "c": 3}
    assert document.content["w"] == {"a": 1, "b": 1}
    assert document.line(("z", "c")) == 5
    assert document.line(("z", "a")) == 1


def test_aliases_cannot_make_a_document_explode() -> None:
    layers = ["a0: &a0 [1,1,1,1,1,1,1,1,1]"] + [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    assert "too large" in fault("\n".join(layers))[1]


@given(st.text(max_size=40))
def test_any_text_is_a_document_or_unreadable(text: str) -> None:
    try:
        assert isinstance(read_document(text), Document)
    except UnreadableDocumentError as error:
        assert error.faults
