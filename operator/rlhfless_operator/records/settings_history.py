"""The history of a job's changeable settings: those that each step was learnt with."""

from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict

from rlhfless_functions import artifacts
from rlhfless_functions.api import StepSettings
from rlhfless_operator.records.folder import JobFolder

_FILE = "settings.jsonl"
_MOST_BYTES = 2**24


class SettingsSpan(BaseModel):
    """A line of `settings.jsonl`."""

    model_config = ConfigDict(frozen=True)

    from_step: int
    """First step with these settings; they apply until the next line's first step."""
    settings: StepSettings
    of: int | None = None
    """Number of lines of the file. A file that was cut has fewer."""


class SettingsHistory:
    """The settings of every step. It is immutable: a change makes a new history."""

    def __init__(self, spans: Iterable[SettingsSpan] = ()) -> None:
        self.spans = tuple(spans)

    def of(self, step: int) -> StepSettings | None:
        """Return the settings of a step; None if there is no record."""
        return next((span.settings for span in reversed(self.spans) if span.from_step <= step), None)

    def other_than(self, settings: StepSettings, steps: Iterable[int]) -> dict[int, StepSettings]:
        """Return the steps, among these, that were taken with different settings."""
        found = ((step, self.of(step)) for step in steps)
        return {step: then for step, then in found if then is not None and then != settings}

    def with_change(self, step: int, settings: StepSettings) -> "SettingsHistory":
        """Return the history in which a step and all later ones use these settings."""
        before = SettingsHistory(span for span in self.spans if span.from_step < step)
        if before.of(step) == settings:
            return before
        return SettingsHistory((*before.spans, SettingsSpan(from_step=step, settings=settings)))

    def changes(self) -> Iterator[tuple[int, list[str]]]:
        """Return each change during the run: its first step, and a description of the change."""
        for before, after in zip(self.spans, self.spans[1:], strict=False):
            yield after.from_step, differences(before.settings, after.settings)


def differences(before: StepSettings, after: StepSettings) -> list[str]:
    """Return the differences of two settings, by the names of fields in a document."""
    old, new = _fields(before), _fields(after)
    return [f"{name} {old[name]} → {new[name]}" for name in old if new.get(name, old[name]) != old[name]]


def read_settings_history(folder: JobFolder) -> SettingsHistory:
    """Return the history in a job's folder; empty if there is none.

    Raises:
        ArtifactCorruptError: the file is damaged.
    """
    uri = folder.file(_FILE)
    lines = artifacts.read_bytes(uri, most=_MOST_BYTES).splitlines() if artifacts.exists(uri) else []
    try:
        spans = [SettingsSpan.model_validate(artifacts.parse_sealed(line)) for line in lines]
        for span in spans:
            if span.of not in (None, len(lines)):
                raise ValueError(f"it has {len(lines)} of {span.of} lines")
        return SettingsHistory(span.model_copy(update={"of": None}) for span in spans)
    except ValueError as error:
        raise artifacts.ArtifactCorruptError(f"{uri} is damaged ({error}); restore it") from error


def write_settings_history(folder: JobFolder, history: SettingsHistory) -> None:
    """Write the whole history.

    Raises:
        ArtifactUnwritableError: it can't be written.
    """
    spans = (span.model_copy(update={"of": len(history.spans)}) for span in history.spans)
    lines = (artifacts.sealed_json(span.model_dump(mode="json")) for span in spans)
    artifacts.write_bytes(folder.file(_FILE), b"".join(line + b"\n" for line in lines))


def _fields(settings: StepSettings) -> dict[str, Any]:
    optimizer = settings.optimizer.model_dump(by_alias=True)
    fields = {f"spec.optimizer.{name}": value for name, value in optimizer.items()}
    # With a constant rate, nothing depends on the number of steps.
    length = {"the job's steps": settings.total_steps} if settings.optimizer.schedule != "constant" else {}
    return {**fields, **length}
