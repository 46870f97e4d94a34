"""What an asynchronous job writes down of each step: which weights sample its groups, and what it learnt from.

Both are files that are created exclusively, before anybody acts on them. So a driver that comes later samples the rest
of a step with the weights that sampled its beginning, or newer ones with `newWeights: switch`. It learns from exactly
what has been learnt from already. The files stay: `rlhfless replay` takes a run's steps again from them.
"""

from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel, ConfigDict

from rlhfless_functions import artifacts
from rlhfless_functions.api import BatchReference, WeightsReference
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.training.staleness import staleness


class BegunRollout(BaseModel):
    """With what a step's groups are generated and prepared."""

    model_config = ConfigDict(frozen=True)

    step: int
    """The step that will learn from them."""
    policy: WeightsReference
    """The weights that begin to sample them. With `newWeights: switch` newer ones may go on."""
    critic: WeightsReference | None = None
    """The critic that values them, where one is trained."""


class TakenGroup(BaseModel):
    """A group that a step learnt from."""

    model_config = ConfigDict(frozen=True)

    prompt: int
    """Row of its prompt in the dataset as it was read."""
    version: int
    """The oldest weights that sampled any of it."""


class TakenStep(BaseModel):
    """What a step learns from."""

    model_config = ConfigDict(frozen=True)

    step: int
    """Its number."""
    base: int
    """The weights that it starts from."""
    groups: list[TakenGroup]
    """Its groups, in the order of learning."""
    batch: BatchReference
    """The same for the learner: the samples in their order, and where they are."""

    @property
    def staleness(self) -> float:
        """Versions between sampling and learning, mean over the groups."""
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
        """Write down with what a step's groups are made; what an earlier driver has written, where one has.

        Raises:
            ArtifactError: the store does not answer.
        """
        return self._create(self._folder.begun(begun.step), begun)

    def take(self, begun: BegunRollout, batch: BatchReference, versions: Mapping[int, int]) -> TakenStep:
        """Write down what a step learns from; what an earlier driver has written, where one has.

        Args:
            begun: with what its groups were made.
            batch: all of its samples, group by group.
            versions: the oldest weights that sampled any of a group, by its prompt. Groups that are not named have
                those that the step's generation began with.

        Raises:
            ArtifactError: the store does not answer.
        """
        prompts = dict.fromkeys(sample.prompt for sample in batch.samples)
        groups = [TakenGroup(prompt=prompt, version=versions.get(prompt, begun.policy.version)) for prompt in prompts]
        taken = TakenStep(step=batch.step, base=batch.step - 1, groups=groups, batch=batch)
        return self._create(self._folder.taken(batch.step), taken)

    def _create(self, uri: str, entry: _Entry) -> _Entry:
        if artifacts.create_exclusive(uri, entry.model_dump_json().encode()):
            return entry
        return type(entry).model_validate(artifacts.read_json(uri))


def read_taken(folder: JobFolder, step: int) -> TakenStep | None:
    """What a step of an asynchronous job learnt from; None where nothing is written.

    Raises:
        ArtifactError: the store does not answer, or the file is damaged.
    """
    uri = folder.taken(step)
    return TakenStep.model_validate(artifacts.read_json(uri)) if artifacts.exists(uri) else None
