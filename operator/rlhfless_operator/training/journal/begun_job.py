"""The document that a job was last driven with, as its folder has it, and its differences from a new one."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from rlhfless_functions import artifacts
from rlhfless_operator.job.reading.elsewhere import MOST_BYTES, read_begun
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.records.folder import JobFolder

_SHOWN = 60
_NAMED = 5


@dataclass(frozen=True)
class Change:
    """A field that differs between two documents."""

    path: str
    """Path of the field in a document: `spec.optimizer.learningRate`."""
    before: Any
    """Earlier value; None if it was not there."""
    now: Any
    """New value; None if it is not there."""

    def within(self, part: str) -> bool:
        """Return whether it changes a part of the spec, or a field within that part."""
        return re.match(rf"spec\.{re.escape(part)}(?![^.\[])", self.path) is not None

    def __str__(self) -> str:
        return f"{self.path} was {_shown(self.before)} and is {_shown(self.now)}"


def begun_job(folder: JobFolder) -> RLHFJob | None:
    """Return the job as it was last driven; None before its first driver.

    Raises:
        ArtifactCorruptError: its document is damaged, or of another format.
    """
    uri = folder.file("job.yaml")
    if not artifacts.exists(uri):
        return None
    try:
        content = artifacts.read_bytes(uri, most=MOST_BYTES)
        if not artifacts.is_sound(content):
            raise ValueError("its checksum is another: some of it has changed since it was written")
        return read_begun(content)
    except (yaml.YAMLError, ValueError) as error:
        raise artifacts.ArtifactCorruptError(
            f"{uri} is damaged or of another format ({error}); restore it, or run the job in another folder"
        ) from error


def write_begun_job(job: RLHFJob, folder: JobFolder) -> None:
    """Write down the document that a job is driven with.

    Raises:
        ArtifactUnwritableError: it can't be written.
    """
    text = f"{yaml.safe_dump(document_of(job), sort_keys=False)}# {artifacts.KEY}: {artifacts.BLANK}\n"
    artifacts.write_bytes(folder.file("job.yaml"), artifacts.seal(text.encode()))


def document_of(job: RLHFJob) -> dict[str, Any]:
    """Return a job as plain data, its defaults included."""
    document: dict[str, Any] = job.model_dump(mode="json", by_alias=True, exclude_none=True)
    critic = job.spec.algorithm.critic
    if critic is not None and critic.value_clip is None:
        # If left out, it would have its default.
        document["spec"]["algorithm"]["critic"]["valueClip"] = None
    return document


def changes_between(before: RLHFJob, job: RLHFJob) -> list[Change]:
    """Return the changes in a job's spec since an earlier document.

    A field that names its algorithm's default is no change.
    """
    return list(_changes("spec", _whole(before), _whole(job)))


def changes_since(job: RLHFJob, folder: JobFolder) -> list[Change]:
    """Return the changes in a job's spec since it was last driven; nothing if it never was."""
    before = begun_job(folder)
    return [] if before is None else changes_between(before, job)


def named(changes: Sequence[Change]) -> str:
    """Describe changes in a sentence, the first few of them."""
    shown = ", ".join(map(str, changes[:_NAMED]))
    return shown if len(changes) <= _NAMED else f"{shown}, and {len(changes) - _NAMED} more changed"


def _whole(job: RLHFJob) -> Any:
    spec = job.spec.model_copy(update={"algorithm": job.spec.algorithm.resolved()})
    return document_of(job.model_copy(update={"spec": spec}))["spec"]


def _changes(path: str, before: Any, now: Any) -> Iterator[Change]:
    if isinstance(before, dict) and isinstance(now, dict):
        for name in dict.fromkeys([*now, *before]):
            yield from _changes(f"{path}.{name}", before.get(name), now.get(name))
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for position, (old, new) in enumerate(zip(before, now, strict=True)):
            yield from _changes(f"{path}[{position}]", old, new)
    elif before != now:
        yield Change(path, before, now)


def _shown(value: Any) -> str:
    text = "left out" if value is None else str(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
