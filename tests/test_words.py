"""Docstrings are plain English: none begins as a subordinate clause."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import yaml

from tests.figures import ROOT, Docstring, docstrings, package_of, python_files

PACKAGES = sorted({package_of(file) for file in python_files("operator", "functions")})


def descriptions(schema: Any) -> Iterator[str]:
    """Every description of a schema."""
    if isinstance(schema, dict):
        if isinstance(text := schema.get("description"), str):
            yield text
        for each in schema.values():
            yield from descriptions(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from descriptions(each)


def plain(text: str) -> str:
    return " ".join(text.split())


@cache
def printed() -> str:
    """The texts of the reference and the CRD. They are changed as a page, with its readers in mind."""
    crd = yaml.safe_load((ROOT / "crds" / "rlhfjobs.rlhfless.io.yaml").read_text())
    return plain(" ".join([(ROOT / "docs" / "reference.md").read_text(), *descriptions(crd)]))


@pytest.mark.parametrize("package", PACKAGES)
def test_no_docstring_begins_as_a_clause(package: str) -> None:
    files = [file for file in python_files("operator", "functions") if package_of(file) == package]
    found = [
        each for file in files for each in docstrings(file) if each.is_clause and plain(each.text) not in printed()
    ]
    assert not found, "\n".join(
        f"{each.file.relative_to(ROOT)}:{each.line}: {each.text.split(chr(10))[0]}" for each in found
    )


@pytest.mark.parametrize(
    "text",
    [
        "What the sums are divided by.",
        "Of those that are left, the first.",
        "By which the reward is divided.",
        "Under which name the history has it.",
        "Whether it waits or works.",
        "How far the share is.",
    ],
)
def test_a_clause_is_recognized(text: str) -> None:
    assert Docstring(ROOT, 1, text).is_clause


@pytest.mark.parametrize(
    "text",
    ["The divisor of the sums.", "Whether the instance waits.", "Return what is left.", "Offset of a row.", "Howl."],
)
def test_a_plain_sentence_is_none(text: str) -> None:
    assert not Docstring(ROOT, 1, text).is_clause
