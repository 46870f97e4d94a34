"""The experimental options that a job turns on."""

from collections.abc import Iterator

from pydantic import BaseModel

from rlhfless_functions.settings import Experimental
from rlhfless_operator.job.reading.fields import DocumentField, fields_of
from rlhfless_operator.job.spec import RLHFJobSpec


def is_experimental(field: DocumentField) -> bool:
    """Return whether an option is marked as one that has not shown a gain on its target yet."""
    return any(isinstance(part, Experimental) for part in field.constraints)


def experimental_options(spec: RLHFJobSpec) -> list[str]:
    """Return the experimental options that are not at their defaults, as `spec.generation.drafting: auto`."""
    return [text if value is None else f"{text}: {value}" for text, value in _turned_on("spec", spec)]


def _turned_on(path: str, section: BaseModel) -> Iterator[tuple[str, str | None]]:
    for attribute, field in zip(type(section).model_fields, fields_of(type(section)).values(), strict=True):
        value = getattr(section, attribute)
        place = f"{path}.{field.name}"
        if is_experimental(field) and value != field.info.default:
            yield place, None if isinstance(value, BaseModel) else str(value).lower()
        if isinstance(value, BaseModel):
            yield from _turned_on(place, value)
