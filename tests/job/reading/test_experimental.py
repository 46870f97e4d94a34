"""Options that have not shown a gain yet: their docstrings say so, and a document that turns one on is told."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhfless_operator.job.reading.experimental import experimental_options, is_experimental
from rlhfless_operator.job.reading.fields import walk
from rlhfless_operator.job.reading.validation import load_job
from rlhfless_operator.job.spec import RLHFJob


def test_the_options_that_are_marked_are_those_whose_docstrings_say_the_word() -> None:
    options = [(".".join(path), field) for path, field in walk(RLHFJob)]
    marked = {path for path, field in options if is_experimental(field)}
    assert marked == {path for path, field in options if "experimental" in (field.info.description or "")}
    assert "spec.generation.drafting" in marked


def test_what_is_experimental_is_off_by_default(tiny_job: Callable[..., Path]) -> None:
    assert experimental_options(load_job(tiny_job()).spec) == []


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({"generation": {"drafting": "auto"}}, ["spec.generation.drafting: auto"]),
        ({"learning": {"compile": True}}, ["spec.learning.compile: true"]),
        (
            {"async": {"newWeights": "switch", "kvCache": "keep"}},
            ["spec.async", "spec.async.newWeights: switch", "spec.async.kvCache: keep"],
        ),
    ],
)
def test_each_one_that_is_turned_on_is_named(
    tiny_job: Callable[..., Path], spec: dict[str, Any], named: list[str]
) -> None:
    assert experimental_options(load_job(tiny_job(**spec)).spec) == named
