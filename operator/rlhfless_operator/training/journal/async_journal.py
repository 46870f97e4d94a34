"""The record of an asynchronous job's steps: the weights that sample their groups, and the batches that they learnt
from.

Both are files that are created exclusively, before they are used. So a later driver samples the rest of a step with the
weights that sampled its beginning, or newer ones with `newWeights: switch`. It learns from exactly what has been learnt
from already. The files stay: `rlhfless replay` takes a run's steps again from them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

from rlhfless_functions import artifacts
from rlhfless_functions.api import BatchReference, SampleTask, WeightsReference
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


_Entry = TypeVar("_Entry", BegunRollout, TakenStep)


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


def chosen_groups(step: int, chosen: Sequence[ChosenGroup], samples_per_prompt: int) -> TakenStep:
    """Return a step that learns from groups of any rollouts, in this order."""
    groups = [
        TakenGroup(
            prompt=each.group.name.prompt,
            version=each.group.version,
            rollout=each.group.name.rollout,
            factor=each.factor,
        )
        for each in chosen
    ]
    parts = sorted({each.group.part for each in chosen})
    numbers = {part: number for number, part in enumerate(parts)}
    each_sample = [(each, index) for each in chosen for index in range(samples_per_prompt)]
    stale = any(each.factor != 1 for each in chosen)
    batch = BatchReference(
        step=step,
        parts=parts,
        samples=[SampleTask(prompt=each.group.name.prompt, index=index) for each, index in each_sample],
        part_of=[numbers[each.group.part] for each, _ in each_sample],
        factors=[each.factor for each, _ in each_sample] if stale else [],
    )
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


def read_taken(folder: JobFolder, step: int) -> TakenStep | None:
    """Return the groups that a step of an asynchronous job learnt from; None if nothing is written.

    Raises:
        ArtifactError: the store does not answer, or the file is damaged.
    """
    uri = folder.taken(step)
    return TakenStep.model_validate(artifacts.read_json(uri)) if artifacts.exists(uri) else None
