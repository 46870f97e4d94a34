"""What a user is told to do about a fault."""

from typing import Any, get_args

from pydantic.fields import FieldInfo

from rlhfless_operator.job.reading.fields import walk
from rlhfless_operator.job.reading.remedies import PATTERN_REMEDIES
from rlhfless_operator.job.spec import RLHFJob


def has_pattern(part: Any) -> bool:
    """Whether a constraint, a type or an item of it has a pattern that pydantic checks."""
    inner = part.metadata if isinstance(part, FieldInfo) else getattr(part, "__metadata__", ())
    return bool(getattr(part, "pattern", None)) or any(has_pattern(each) for each in (*inner, *get_args(part)))


def test_every_pattern_has_words_for_what_it_asks() -> None:
    patterned = {
        ".".join(path).replace("[]", "")
        for path, field in walk(RLHFJob)
        if any(has_pattern(part) for part in (*field.info.metadata, field.info.annotation)) and field.model is None
    }
    assert patterned == set(PATTERN_REMEDIES)
