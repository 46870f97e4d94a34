"""The fields of the job document as a flat list: the valid paths, and the type of each."""

import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from rlhfless_functions.settings.base import parse_bytes, parse_duration, parse_money
from rlhfless_operator.job.keep_alive import parse_keep_alive

Path = tuple[str | int, ...]
"""Keys and list positions from the top of a document."""

Unit = Literal["duration", "bytes", "money"]
_UNITS: dict[Any, Unit] = {
    parse_duration: "duration",
    parse_keep_alive: "duration",
    parse_bytes: "bytes",
    parse_money: "money",
}


@dataclass(frozen=True)
class DocumentField:
    """One field of a model."""

    name: str
    """Its name in a document."""
    info: FieldInfo
    kind: Any
    """Its type, without None and without the list around it."""
    nullable: bool
    many: bool
    """Whether it is a list."""
    constraints: tuple[Any, ...] = ()
    """Bounds and validators of the field, and those inside an optional type."""

    @property
    def model(self) -> type[BaseModel] | None:
        """The model that describes the field, or each of its items."""
        return self.kind if isinstance(self.kind, type) and issubclass(self.kind, BaseModel) else None

    @property
    def unit(self) -> Unit | None:
        """The unit of a text such as `30s` or `16Gi`."""
        for part in self.constraints:
            if isinstance(part, BeforeValidator) and part.func in _UNITS:
                return _UNITS[part.func]
        return None

    @property
    def unit_of_each(self) -> Unit | None:
        """The unit of a mapping's values."""
        if get_origin(self.kind) is not dict or get_origin(values := get_args(self.kind)[1]) is not Annotated:
            return None
        return DocumentField(self.name, self.info, values, False, False, get_args(values)[1:]).unit

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values of a choice; empty if the field is not a choice."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()


@cache
def fields_of(model: type[BaseModel]) -> dict[str, DocumentField]:
    """Return the fields of one model by their names in a document, in the order of their definition."""
    found = {}
    for attribute, info in model.model_fields.items():
        kind, nullable = _without_none(info.annotation)
        constraints = tuple(info.metadata)
        if get_origin(kind) is Annotated:
            kind, *inner = get_args(kind)
            constraints += tuple(inner)
        many = get_origin(kind) is list
        if many:
            (kind,) = get_args(kind)
            kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
        name = info.alias or attribute
        found[name] = DocumentField(name, info, kind, nullable, many, constraints)
    return found


def walk(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], DocumentField]]:
    """Yield every field below `model`, sections before their fields. Fields of a list's items are below `name[]`."""
    for field in fields_of(model).values():
        yield (*prefix, field.name), field
        if field.model is not None:
            yield from walk(field.model, (*prefix, f"{field.name}[]" if field.many else field.name))


def model_at(model: type[BaseModel], path: Path) -> type[BaseModel] | None:
    """Return the model that describes the mapping at `path`; None if there is no mapping of known fields."""
    found: type[BaseModel] | None = model
    for part in path:
        if isinstance(part, int):
            continue
        field = fields_of(found).get(part) if found is not None else None
        found = field.model if field is not None else None
    return found


def show_path(path: Path) -> str:
    """Return `("spec", "rewards", 0, "weight")` as `spec.rewards[0].weight`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if get_origin(annotation) in (Union, types.UnionType):
        rest = [part for part in get_args(annotation) if part is not type(None)]
        if len(rest) == 1:
            return rest[0], True
    return annotation, False
