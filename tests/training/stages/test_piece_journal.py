"""The journal of a step's pieces: one sequence, whoever writes it, and nothing in it ever changes."""

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhfless_functions.api import SampleTask
from rlhfless_operator.training.stages.piece_journal import PieceJournal, cut


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


@given(order=st.permutations(range(7)), chunks=st.integers(1, 7))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_fixed_order_is_the_same_whatever_arrives_first(order: list[int], chunks: int, tmp_path: Path) -> None:
    pieces = cut(group(*range(7)))
    folder = tmp_path / f"{order}-{chunks}"
    journal = PieceJournal(str(folder), pieces)
    for start in range(0, 7, chunks):
        arrived = order[start : start + chunks]
        journal.prepared(group(*arrived), f"part-{start}")
        done = sum(map(len, prompts_of(journal)))
        assert done <= min((n for n in range(7) if n not in order[: start + chunks]), default=7)
    assert [piece.samples for piece in journal.pieces] == pieces
    for piece in journal.pieces:
        assert all(f"part-{order.index(sample.prompt) // chunks * chunks}" in piece.parts for sample in piece.samples)


@given(groups=st.lists(st.integers(1, 4), min_size=1, max_size=20), pieces=st.integers(1, 24), seed=st.integers(0, 99))
def test_every_sample_is_in_one_piece_of_a_fixed_order_with_its_group(
    groups: list[int], pieces: int, seed: int
) -> None:
    prompts = list(range(len(groups)))
    random.Random(seed).shuffle(prompts)
    samples = [SampleTask(prompt=prompt, index=index) for prompt in prompts for index in range(groups[prompt])]
    found = cut(samples, pieces)
    assert [sample for piece in found for sample in piece] == samples
    assert len(found) == min(pieces, len(groups))
    held = [{sample.prompt for sample in piece} for piece in found]
    assert sum(map(len, held)) == len(groups)
    assert max(map(len, held)) - min(map(len, held)) <= 1


def test_a_store_that_does_not_answer_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "pieces").write_text("no folder")
    with pytest.raises(Exception, match="pieces"):
        PieceJournal(str(tmp_path / "pieces")).prepared(group(1), "part")
