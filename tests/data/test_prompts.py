"""Prompts on disk."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhfless_functions.data.prompts import Prompt, read_prompts, write_prompts

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(TOKENS, st.text(max_size=8), JSON, st.dictionaries(st.text(max_size=3), JSON)), max_size=4))
def test_prompts_come_back_as_they_were(rows: list[Any]) -> None:
    prompts = [
        Prompt(row, tokens, text, [{"role": "user", "content": text}] if row % 2 else None, truth, columns)
        for row, (tokens, text, truth, columns) in enumerate(rows)
    ]
    write_prompts("memory://data/prompts.parquet", prompts)
    assert read_prompts("memory://data/prompts.parquet") == prompts
    assert read_prompts("memory://data") == prompts


def test_prompts_are_read_in_the_order_asked_for(tmp_path: Path) -> None:
    write_prompts(str(tmp_path / "prompts.parquet"), [Prompt(row, [row], str(row)) for row in range(5)])
    assert [prompt.text for prompt in read_prompts(str(tmp_path), [4, 0, 4])] == ["4", "0", "4"]
    with pytest.raises(IndexError, match="rows 0 to 4, not 5"):
        read_prompts(str(tmp_path), [5])


def test_prompts_must_be_written_in_the_order_of_their_rows(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="in the order of their rows"):
        write_prompts(str(tmp_path / "prompts.parquet"), [Prompt(1, [], "")])
