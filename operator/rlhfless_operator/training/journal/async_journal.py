"""The record of an asynchronous job's steps: the weights that sample their groups, and the batches that they learnt
from.

Both are files that are created exclusively, before they are used. So are the pieces of a step whose groups are learnt
from as they come. So a later driver samples the rest of a step with the
weights that sampled its beginning, or newer ones with `newWeights: switch`. It learns from exactly what has been learnt
from already. The files stay: `rlhfless replay` takes a run's steps again from them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

from rlhfless_functions import artifacts
from rlhfless_functions.api import (
    BatchReference,
    JournalledPiece,
    Piece,
    SampleTask,
    WeightsReference,
    piece_uri,
)
from rlhfless_operator.planner.groups.group_buffer import ChosenGroup, GroupName
from rlhfless_operator.planner.groups.staleness import staleness
from rlhfless_operator.records.folder import JobFolder


class BegunRollout(BaseModel):
    """The weights and prompts that a step's groups are generated and prepared with."""

    model_config = ConfigDict(frozen=True)

    step: int
    """Step that will learn from them."""
    policy: WeightsReference
    """Weights that begin to sample them. With `newWeights: switch` newer ones may follow."""
    prompts: list[int] | None = None
    """Prompts that it draws. None if groups keep to their step, which draws them in rounds."""
    again: list[GroupName] = []
    """Dropped groups whose prompts are among its own."""
    cursor: dict[str, Any] = {}
    """Position in the training data after its prompts."""


class TakenGroup(BaseModel):
    """A group that a step learnt from."""

    model_config = ConfigDict(frozen=True)

    prompt: int
    """Row of its prompt in the dataset as it was read."""
    version: int
    """Oldest version of the weights that sampled any of it."""
    rollout: int | None = None
    """Rollout of the group; None if that has the step's number."""
    factor: float = 1.0
    """Factor of its advantages."""


class TakenPiece(JournalledPiece):
    """Groups of a step that it learns from before it has all of them; a learner reads the samples alone."""

    groups: list[TakenGroup]
    """Groups in the order of learning."""


class TakenStep(BaseModel):
    """The groups that a step learns from."""

    model_config = ConfigDict(frozen=True)

    step: int
    """Number of the step."""
    base: int
    """Version of the weights that it starts from."""
    groups: list[TakenGroup]
    """Groups in the order of learning."""
    batch: BatchReference
    """The same for the learner: the samples in their order, and their parts."""

    @property
    def staleness(self) -> float:
        """Mean number of versions between sampling and learning, over the groups."""
        return sum(staleness(self.step, group.version) for group in self.groups) / len(self.groups)


_Entry = TypeVar("_Entry", BegunRollout, TakenPiece, TakenStep)


class AsyncJournal:
    """The files of one job. Its calls wait for the store.

    Args:
        folder: of the job.
    """

    def __init__(self, folder: JobFolder) -> None:
        self._folder = folder

    def begin(self, begun: BegunRollout) -> BegunRollout:
        """Write down the weights and prompts of a step's groups. Return what an earlier driver has written, if one has.

        Raises:
            ArtifactError: the store does not answer.
        """
        return self._create(self._folder.begun(begun.step), begun)

    def take(self, taken: TakenStep) -> TakenStep:
        """Write down the groups that a step learns from. Return what an earlier driver has written, if one has.

        Raises:
            ArtifactError: the store does not answer.
        """
        return self._create(self._folder.taken(taken.step), taken)

    def add(self, step: int, number: int, piece: TakenPiece) -> TakenPiece:
        """Write a step's next piece down, of which a learner may learn from then on. Return what an earlier driver has
        written, if one has.

        Raises:
            ArtifactError: the store does not answer.
        """
        return self._create(piece_uri(self._folder.pieces(step), number), piece)

    def _create(self, uri: str, entry: _Entry) -> _Entry:
        if artifacts.create_json(uri, entry.model_dump(mode="json")):
            return entry
        return type(entry).model_validate(artifacts.read_json(uri))


def whole_rollout(begun: BegunRollout, batch: BatchReference, versions: Mapping[int, int]) -> TakenStep:
    """Return a step that learns from its own rollout.

    Args:
        begun: the weights and prompts of its groups.
        batch: all of its samples, group by group.
        versions: the oldest weights that sampled any of a group, by its prompt. Other groups have the weights that the
            step's generation began with.
    """
    prompts = dict.fromkeys(sample.prompt for sample in batch.samples)
    groups = [TakenGroup(prompt=prompt, version=versions.get(prompt, begun.policy.version)) for prompt in prompts]
    return TakenStep(step=batch.step, base=batch.step - 1, groups=groups, batch=batch)


def chosen_piece(chosen: Sequence[ChosenGroup], samples_per_prompt: int) -> TakenPiece:
    """Return groups of any rollouts as a piece of a step, in this order."""
    parts = sorted({each.group.part for each in chosen})
    numbers = {part: number for number, part in enumerate(parts)}
    each_sample = [(each, index) for each in chosen for index in range(samples_per_prompt)]
    stale = any(each.factor != 1 for each in chosen)
    return TakenPiece(
        samples=[SampleTask(prompt=each.group.name.prompt, index=index) for each, index in each_sample],
        parts=parts,
        part_of=[numbers[each.group.part] for each, _ in each_sample],
        factors=[each.factor for each, _ in each_sample] if stale else [],
        groups=[
            TakenGroup(
                prompt=each.group.name.prompt,
                version=each.group.version,
                rollout=each.group.name.rollout,
                factor=each.factor,
            )
            for each in chosen
        ],
    )


def step_of_pieces(step: int, pieces: Sequence[TakenPiece], *, at_once: bool = False) -> TakenStep:
    """Return a step that learns from the groups of its pieces, in their order.

    Args:
        at_once: whether it learns from them as a whole.
    """
    parts = list(dict.fromkeys(part for piece in pieces for part in piece.parts))
    numbers = {part: number for number, part in enumerate(parts)}
    stale = any(piece.factors for piece in pieces)
    batch = BatchReference(
        step=step,
        parts=parts,
        samples=[sample for piece in pieces for sample in piece.samples],
        pieces=[] if at_once else [Piece(samples=len(piece.samples), parts=piece.parts) for piece in pieces],
        part_of=[numbers[piece.parts[part]] for piece in pieces for part in piece.part_of],
        factors=[factor for piece in pieces for factor in piece.factors or [1.0] * len(piece.samples)] if stale else [],
    )
    groups = [group for piece in pieces for group in piece.groups]
    return TakenStep(step=step, base=step - 1, groups=groups, batch=batch)


def begun_rollouts(folder: JobFolder, first: int) -> list[BegunRollout]:
    """Return the rollouts from this number on that drivers have begun.

    Raises:
        ArtifactError: the store does not answer, or a file is damaged.
    """
    found: list[BegunRollout] = []
    while artifacts.exists(uri := folder.begun(first + len(found))):
        found.append(BegunRollout.model_validate(artifacts.read_json(uri)))
    return found


def taken_steps(folder: JobFolder, first: int) -> list[TakenStep]:
    """Return the steps from this number on for which drivers have taken groups.

    Raises:
        ArtifactError: the store does not answer, or a file is damaged.
    """
    found: list[TakenStep] = []
    while (taken := read_taken(folder, first + len(found))) is not None:
        found.append(taken)
    return found


def taken_pieces(folder: JobFolder, step: int) -> list[TakenPiece]:
    """Return the pieces of a step that drivers have written down.

    Raises:
        ArtifactError: the store does not answer, or a file is damaged.
    """
    found: list[TakenPiece] = []
    while artifacts.exists(uri := piece_uri(folder.pieces(step), len(found))):
        found.append(TakenPiece.model_validate(artifacts.read_json(uri)))
    return found


def read_taken(folder: JobFolder, step: int) -> TakenStep | None:
    """Return the groups that a step of an asynchronous job learnt from; None if nothing is written.

    Raises:
        ArtifactError: the store does not answer, or the file is damaged.
    """
    uri = folder.taken(step)
    return TakenStep.model_validate(artifacts.read_json(uri)) if artifacts.exists(uri) else None
