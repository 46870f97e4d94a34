"""Equality of answers; `pairs.jsonl` has the cases by kind."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_functions.rewards.mathematics.equality import same
from rlhfless_functions.rewards.mathematics.reading import read


def is_right(truth: str, answer: str) -> bool:
    expected, given = read(truth), read(answer)
    assert expected is not None, truth
    return given is not None and same(expected, given)


@pytest.mark.parametrize(
    "text", ["x^2 + 1", "(1, 2)", "[0, 1)", "2, 3", "12:30", "50%", "5 cm", "no", "{1, 2}", "2:3", "x > 3"]
)
def test_a_text_is_itself_and_not_its_last_number(text: str) -> None:
    assert is_right(text, text)
    assert not is_right(text, "2") and not is_right(text, "1") and not is_right(text, "3")


NUMBERS = st.lists(st.integers(-30, 30), min_size=2, max_size=4)


@given(mine=NUMBERS, theirs=NUMBERS)
def test_tuples_are_equal_in_order_and_lists_in_any(mine: list[int], theirs: list[int]) -> None:
    def written(numbers: list[int]) -> str:
        return ", ".join(map(str, numbers))

    assert is_right(f"({written(mine)})", rf"\left({written(theirs)}\right)") == (mine == theirs)
    assert is_right(written(mine), written(theirs)) == (sorted(mine) == sorted(theirs))


@given(number=st.integers(0, 10**12), other=st.integers(0, 10**12))
def test_an_integer_is_equal_to_itself_alone(number: int, other: int) -> None:
    assert is_right(str(number), f"{number:,}") and is_right(f"{number:,}", f"{number}.0")
    assert is_right(f"${number:,}", str(other)) == (number == other)
    assert is_right(str(number), f"{number}.5") is False
