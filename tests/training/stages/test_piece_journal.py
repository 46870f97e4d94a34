"""The journal of a step's pieces: one sequence, whoever writes it, and nothing in it ever changes."""

from pathlib import Path

import pytest

from rlhfless_functions.api import SampleTask
from rlhfless_operator.training.stages.piece_journal import PieceJournal


def group(*prompts: int, samples: int = 2) -> list[SampleTask]:
    return [SampleTask(prompt=prompt, index=index) for prompt in prompts for index in range(samples)]


def prompts_of(journal: PieceJournal) -> list[list[int]]:
    return [list(dict.fromkeys(sample.prompt for sample in piece.samples)) for piece in journal.pieces]


def test_each_chunk_is_a_piece_in_the_order_of_arrival(tmp_path: Path) -> None:
    journal = PieceJournal(str(tmp_path / "pieces"))
    journal.prepared(group(3, 5), "first")
    journal.prepared(group(1), "second")
    batch = journal.batch(7)
    assert batch.step == 7
    assert batch.samples == group(3, 5, 1)
    assert [(piece.samples, piece.parts) for piece in batch.pieces] == [(4, ["first"]), (2, ["second"])]
    assert batch.parts == ["first", "second"]


def test_a_later_driver_goes_on_from_what_is_there(tmp_path: Path) -> None:
    folder = str(tmp_path / "pieces")
    PieceJournal(folder).prepared(group(3, 5), "first")
    journal = PieceJournal(folder)
    # An earlier driver's chunk of which it had written down a part, or all.
    journal.prepared(group(5, 3), "first")
    journal.prepared(group(5, 4), "second")
    assert prompts_of(journal) == [[3, 5], [4]]
    assert [piece.parts for piece in journal.pieces] == [["first"], ["second"]]


def test_of_two_drivers_that_write_a_number_the_first_counts(tmp_path: Path) -> None:
    folder = str(tmp_path / "pieces")
    superseded, journal = PieceJournal(folder), PieceJournal(folder)
    superseded.prepared(group(1, 2), "superseded")
    journal.prepared(group(2, 3), "new")
    superseded.prepared(group(3), "superseded again")
    assert prompts_of(journal) == [[1, 2], [3]]
    assert prompts_of(superseded) == prompts_of(PieceJournal(folder)) == prompts_of(journal)


def test_a_store_that_does_not_answer_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "pieces").write_text("no folder")
    with pytest.raises(Exception, match="pieces"):
        PieceJournal(str(tmp_path / "pieces")).prepared(group(1), "part")
