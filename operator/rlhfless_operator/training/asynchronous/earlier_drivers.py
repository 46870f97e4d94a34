"""The groups of an asynchronous job as earlier drivers have written them down."""

from dataclasses import dataclass, field

from rlhfless_functions import artifacts
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.records.journal import PlanRecord
from rlhfless_operator.training.asynchronous.free_groups import FreeGroups
from rlhfless_operator.training.data.prompts import Prompts
from rlhfless_operator.training.journal.async_journal import (
    TakenPiece,
    TakenStep,
    begun_rollouts,
    taken_pieces,
    taken_steps,
)
from rlhfless_operator.training.stages.preparation import results_before


@dataclass
class Unfinished:
    """The steps that earlier drivers have chosen groups for, and have not finished."""

    taken: dict[int, TakenStep] = field(default_factory=dict)
    """Steps that have all of their groups."""
    pieces: dict[int, list[TakenPiece]] = field(default_factory=dict)
    """Groups of the step after those."""
    plan: PlanRecord | None = None
    """The newest plan."""


def restore_groups(groups: FreeGroups, folder: JobFolder, prompts: Prompts, done: int, repeated: int) -> Unfinished:
    """Restore the groups, and the position in the data. Waits for the store.

    Args:
        groups: receive what is written down.
        done: number of steps that are done.
        repeated: the first step that a learner may repeat.

    Raises:
        ArtifactError: the store does not answer, or a file is damaged.
    """
    found = Unfinished()
    if done and (position := artifacts.read_json(folder.progress(done))):
        groups.restore(position["groups"])
        found.plan = PlanRecord.model_validate(position["plan"])
    for begun in begun_rollouts(folder, groups.last + 1):
        prompts.go_to(begun.cursor)
        groups.begin(begun)
    for number in groups.rollouts:
        for chunk in results_before(folder.batches(number, "training")):
            groups.prepared(number, chunk)
    for taken in taken_steps(folder, repeated):
        groups.remember(taken)
        if taken.step > done:
            groups.take(taken.step, taken.groups)
            found.taken[taken.step] = taken
    if groups.in_pieces:
        step = done + len(found.taken) + 1
        found.pieces[step] = taken_pieces(folder, step)
        for piece in found.pieces[step]:
            groups.take(step, piece.groups)
    return found
