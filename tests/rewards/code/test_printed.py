"""When a program's output is right."""

import pytest

from rlhfless_functions.rewards.code.printed import same_output


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("6\n", "6"),
        ("1 2 \n3\n\n", "1 2\n3"),
        ("\n6", "6\n"),
        ("6\r\n7\r\n", "6\n7\n"),
        ("0.333333", "0.33333333"),
        ("2.0 3", "2.00 3"),
        ("2", "2.0"),
        ("1e-3", "0.001"),
        ("  *\n ***", "  *\n ***"),
    ],
)
def test_white_space_at_ends_and_the_last_digits_do_not_matter(said: str, wanted: str) -> None:
    assert same_output(said, wanted)


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("", "6"),
        ("6", "7"),
        ("6 7", "6\n7"),
        ("*\n ***", "  *\n ***"),
        ("0.33", "0.33333333"),
        ("1000000008", "1000000007"),
        ("2.0", "2"),
        ("nan", "0.5"),
        ("yes", "Yes"),
        ("0.5 0.5", "0.5"),
        ("0.5\n0.25", "0.5 0.25"),
    ],
)
def test_what_is_printed_matters(said: str, wanted: str) -> None:
    assert not same_output(said, wanted)
