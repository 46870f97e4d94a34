"""The reader of a job from a YAML file. It reports all faults of the file at once."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rlhfless_operator.job.reading import remedies
from rlhfless_operator.job.reading.fields import Path as FieldPath
from rlhfless_operator.job.reading.fields import fields_of, model_at, show_path
from rlhfless_operator.job.reading.file_contents import check_contents
from rlhfless_operator.job.reading.job_files import check_files
from rlhfless_operator.job.reading.overrides import override
from rlhfless_operator.job.reading.trackers import missing_trackers
from rlhfless_operator.job.reading.yaml_document import (
    Document,
    DocumentFault,
    UnreadableDocumentError,
    read_document,
    value_at,
)
from rlhfless_operator.job.rule import Violation
from rlhfless_operator.job.spec import API_VERSION, KIND, RLHFJob


@dataclass(frozen=True)
class Fault:
    """A fault of a job document."""

    path: str
    """Path of the field, such as `spec.rewards[0].weight`; empty for the document as a whole."""
    line: int
    """Line of the file, counted from 1; 0 for a value from `--set`."""
    value: Any
    """Value of the field; None if it is missing."""
    message: str
    """The fault, as a phrase for the user."""
    remedy: str
    """The remedy, as a phrase for the user."""

    def __str__(self) -> str:
        place = f"{self.path}: " if self.path else ""
        return f"{place}{self.message}; {self.remedy}"


class InvalidJobError(ValueError):
    """The document is not a valid job.

    Args:
        source: name of the file, for the message.
        faults: all faults, at least one, in the order of the file.
    """

    def __init__(self, source: str, faults: list[Fault]) -> None:
        super().__init__(
            "\n".join(f"{f'{source}:{fault.line}' if fault.line else '--set'}: {fault}" for fault in faults)
        )
        self.source = source
        self.faults = faults


def load_job(path: str | Path, *, files: bool = True, packages: bool = False, settings: Sequence[str] = ()) -> RLHFJob:
    """Read a job file. Relative paths in it stay relative: see `RLHFJob.resolve_paths`.

    Args:
        path: path of the YAML file.
        files: also check the local files that the job names, and their contents.
        packages: also check that the packages of the job's trackers are installed.
        settings: values that override the file's, such as `spec.steps=5` (`overrides.override`).

    Raises:
        InvalidJobError: the job is invalid. It holds every fault that can be found before the job runs.
    """
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        fault = Fault("", 1, None, f"the file cannot be read: {error.strerror}", "name a job file")
        raise InvalidJobError(str(path), [fault]) from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        fault = Fault("", line, None, f"the byte {error.object[error.start]:#04x} is not UTF-8", "save it as UTF-8")
        raise InvalidJobError(str(path), [fault]) from error
    base = path.parent if files else None
    return parse_job(text, str(path), base=base, packages=packages, settings=settings)


def parse_job(
    text: str,
    source: str = "job.yaml",
    *,
    base: Path | None = None,
    packages: bool = False,
    settings: Sequence[str] = (),
) -> RLHFJob:
    """Read a job from text.

    Args:
        text: YAML.
        source: name of the text in messages.
        base: folder that the job's paths are relative to; None skips the check of its files.
        packages: also check that the packages of the job's trackers are installed.
        settings: values that override the text's.

    Raises:
        InvalidJobError: the job is invalid. It holds every fault of the text and of the files.
    """
    unreadable: list[DocumentFault] = []
    try:
        document = read_document(text)
    except UnreadableDocumentError as error:
        if error.document is None:
            faults = [Fault(show_path(one.path), one.line, None, one.message, one.remedy) for one in error.faults]
            raise InvalidJobError(source, faults) from None
        document, unreadable = error.document, error.faults
    document, unset = override(document, settings)
    search = _Search(document)
    # Values from the command line replace those of the text, even unreadable ones.
    search.take_unreadable([*unset, *(fault for fault in unreadable if document.line(fault.path))])
    job = search.run()
    if job is not None and base is not None:
        search.look_at_files(job, base)
    if job is not None and packages:
        search.look_at_packages(job)
    if job is None or search.faults:
        raise InvalidJobError(source, sorted(search.faults, key=lambda fault: fault.line))
    return job


def parse_content(content: dict[str, Any], source: str) -> RLHFJob:
    """Read a job from plain data, as the API server returns it.

    Args:
        source: name of the content in messages.

    Raises:
        InvalidJobError: the job is invalid. It holds every fault; their line numbers mean nothing.
    """
    search = _Search(Document(content))
    job = search.run()
    if job is None or search.faults:
        raise InvalidJobError(source, search.faults)
    return job


_SMALLEST_JOB: dict[str, Any] = {
    "apiVersion": API_VERSION,
    "kind": KIND,
    "metadata": {"name": "job"},
    "spec": {
        "model": {"source": "model"},
        "rewards": [{"name": "reward", "math": {}}],
        "data": {"source": "data"},
        "steps": 1,
    },
}


class _Search:
    """The search for all faults of a document.

    Pydantic checks rules over several fields only if every field is valid. So each round replaces faulty values with
    harmless ones and checks the document again. Faults that a later round finds in replaced values are not the user's,
    and are dropped.
    """

    def __init__(self, document: Document) -> None:
        self.faults: list[Fault] = []
        self._document = document
        self._content: dict[str, Any] = copy.deepcopy(document.content)
        self._filled: set[FieldPath] = set()

    def run(self) -> RLHFJob | None:
        """Return the valid parts of the job; None if too little is valid."""
        if self._document.content.get("kind", KIND) != KIND:
            self._found(("kind",), "this is not a job", f"write kind: {KIND}")
            return None
        for path in self._numbers_without_unit():
            self._found(path, *remedies.number_without_unit(path, self._document.value(path)))
            self._fill(path)
        while True:
            try:
                return RLHFJob.model_validate(self._content, by_alias=True, by_name=False)
            except ValidationError as error:
                known = len(self._filled)
                for details in error.errors(include_url=False):
                    self._take(details)
                if len(self._filled) == known and not self._fill_around(error.errors(include_url=False)):
                    return None

    def _fill_around(self, errors: list[ErrorDetails]) -> bool:
        """Fill the parents of filled values that are missing now, and return whether anything changed."""
        before = copy.deepcopy(self._content)
        for details in errors:
            path: FieldPath = details["loc"]
            self._fill(path[:-1] if details["type"] == "missing" else path)
        return self._content != before

    def take_unreadable(self, faults: list[DocumentFault]) -> None:
        """Record the text's faults, and continue with the rest of the document."""
        for fault in faults:
            if fault.of_name and model_at(RLHFJob, fault.path[:-1]) is not None:
                continue  # No field has such a name. The remedy for an unknown field helps more.
            self._found(fault.path, fault.message, fault.remedy, line=fault.line)
            if fault.line:
                self._fill(fault.path)

    def look_at_files(self, job: RLHFJob, base: Path) -> None:
        """Add the faults of the files that the valid parts of the job name."""
        for fault in [*check_files(job, base), *check_contents(job, base)]:
            if not self._touched(fault.path):
                self._found(fault.path, fault.message, fault.remedy)

    def look_at_packages(self, job: RLHFJob) -> None:
        """Add the trackers whose packages are not installed."""
        for name in missing_trackers(job.spec.tracking):
            remedy = f"pip install {name}, or remove the field"
            self._found(("spec", "tracking", name), f"the package {name} is not installed", remedy)

    def _numbers_without_unit(self) -> list[FieldPath]:
        """Return the paths of durations, amounts and prices that are bare numbers: the API server refuses these."""
        found: list[FieldPath] = []

        def look(content: Any, path: FieldPath) -> None:
            if isinstance(content, list):
                for position, item in enumerate(content):
                    look(item, (*path, position))
            elif isinstance(content, dict) and (model := model_at(RLHFJob, path)) is not None:
                for name, field in fields_of(model).items():
                    value = content.get(name)
                    if field.unit is not None and _is_number(value):
                        found.append((*path, name))
                    elif field.model is not None:
                        look(value, (*path, name))
                    elif field.unit_of_each is not None and isinstance(value, dict):
                        found.extend((*path, name, key) for key, each in value.items() if _is_number(each))

        look(self._content, ())
        return found

    def _take(self, details: ErrorDetails) -> None:
        path: FieldPath = details["loc"]
        kind = details["type"]
        if kind == "rules":
            self._take_violations(path, details["ctx"]["violations"])
            return
        if any(filled[: len(path)] == path for filled in self._filled):
            return
        if kind == "missing":
            if not self._misspelt(path):
                self._found(path, *remedies.missing_field(path))
        elif kind == "extra_forbidden":
            self._found(path, *remedies.unknown_field(path, self._document.content))
            if (meant := remedies.intended_sibling(path)) is not None:
                self._filled.add((*path[:-1], meant))
        elif kind == "value_error":
            path, advice = remedies.broken_rule(path, str(details["ctx"]["error"]))
            self._found(path, *advice)
        else:
            self._found(path, *remedies.wrong_value(path, details))
        self._fill(path)

    def _take_violations(self, spec: FieldPath, violations: list[Violation]) -> None:
        for violation in violations:
            reads = [(*spec, *field.split(".")) for field in violation.reads]
            field = (*spec, *violation.field.split("."))
            if not any(self._touched(read) for read in reads):
                message, _, remedy = violation.message.rpartition("; ")
                self._found(field, message, remedy)
            for read in reads:
                if _harmless(read) is not None or value_at(self._content, read) is not None:
                    self._fill(read)
                self._filled.add(read)

    def _misspelt(self, path: FieldPath) -> bool:
        """Return whether an unknown name that was already reported is a misspelling of this missing field."""
        siblings = self._document.value(path[:-1])
        return isinstance(siblings, dict) and any(
            remedies.intended_sibling((*path[:-1], name)) == path[-1] for name in siblings
        )

    def _found(self, path: FieldPath, message: str, remedy: str, *, line: int | None = None) -> None:
        value, line = self._document.value(path), self._document.line(path) if line is None else line
        self.faults.append(Fault(show_path(path), line, value, message, remedy))

    def _touched(self, path: FieldPath) -> bool:
        """Return whether this search has replaced a value at, above or below `path`."""
        return any(filled[: len(path)] == path[: len(filled)] for filled in self._filled)

    def _fill(self, path: FieldPath) -> None:
        """Put a harmless value at `path`, or remove the nearest optional field around it."""
        self._filled.add(path)
        if not path:
            self._content = copy.deepcopy(_SMALLEST_JOB)
            return
        parent = value_at(self._content, path[:-1])
        harmless = _harmless(path)
        if harmless is not None and parent is not None:
            parent[path[-1]] = harmless
        elif isinstance(parent, dict) and path[-1] in parent:
            del parent[path[-1]]
        else:
            self._fill(path[:-1])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _harmless(path: FieldPath) -> Any:
    if path[-2:-1] == ("rewards",) and isinstance(path[-1], int):
        return {"name": f"reward-{path[-1]}", "math": {}}
    return copy.deepcopy(value_at(_SMALLEST_JOB, path))
