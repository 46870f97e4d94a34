"""Texts of others command no terminal."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rlhfless_operator.commands.exits import fail
from rlhfless_operator.console import PlainConsole
from rlhfless_operator.formatting import clipped, excerpt, printable

COMMANDS = "\x1b]0;title\x07\x1b[2J\x9b31m\x7f\u202e"


@given(st.text(st.characters()))
def test_printable_text_has_no_control_characters_and_keeps_the_rest(text: str) -> None:
    shown = printable(text)
    assert all(character.isprintable() or character in "\n\t" or ord(character) >= 0xA0 for character in shown)
    assert printable(shown) == shown
    if text.isascii() and text.isprintable():
        assert shown == text


def test_a_console_shows_commands_and_obeys_none() -> None:
    out = io.StringIO()
    console = PlainConsole(file=out, force_terminal=True, width=100)
    table = Table()
    table.add_row(COMMANDS)
    console.print(COMMANDS, markup=False)
    console.print(table)
    with Live(Text(COMMANDS), console=console):
        pass
    text = out.getvalue()
    assert "\\x1b]0;title" in text
    for command in ("\x1b]0;", "\x1b[2J\\x9b", "\x9b", "\x07", "\u202e"):
        assert command not in text


def test_an_error_commands_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fail(f"no such job {COMMANDS}")
    assert capsys.readouterr().err == "error: no such job \\x1b]0;title\\x07\\x1b[2J\\x9b31m\\x7f\\u202e\n"


def test_clipped_text_says_so() -> None:
    assert (clipped("abc", 3), clipped("abcd", 3)) == ("abc", "ab…")


@given(st.text(st.characters()), st.integers(1, 60))
def test_an_excerpt_is_printable_and_no_longer_than_asked(text: str, most: int) -> None:
    shown = excerpt(text, most)
    assert len(shown) <= most
    assert printable(shown) == shown
    if len(printable(text)) <= most:
        assert shown == printable(text)


def test_of_a_very_long_text_only_the_beginning_is_looked_at() -> None:
    """A failure with a message of 4 MB held the operator up for two seconds."""

    class Unread(str):
        def translate(self, table: object) -> str:
            raise AssertionError(f"all {len(self)} characters were looked at")

    assert excerpt(Unread("x" * 4_000_000), 10) == "xxxxxxxxx…"
