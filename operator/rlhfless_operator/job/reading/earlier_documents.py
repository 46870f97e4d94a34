"""Read the stored document of a job that has begun, even if an earlier version of rlhfless wrote it.

A job's folder keeps the whole document, defaults included. A version that adds or renames a field writes the same job
differently. Such a difference must not count as a change of the job.
"""

import copy
from typing import Any

from pydantic import ValidationError

from rlhfless_operator.job.spec import RLHFJobSpec


def meaning(spec: dict[str, Any]) -> dict[str, Any]:
    """A spec as this version would write it, with the defaults of its algorithm; unchanged if it is invalid now.

    Args:
        spec: in camelCase, complete except for null values.
    """
    try:
        read = RLHFJobSpec.model_validate(_renamed(spec), by_alias=True, by_name=False)
    except ValidationError:
        return spec
    whole = read.model_copy(update={"algorithm": read.algorithm.resolved()})
    return whole.model_dump(mode="json", by_alias=True, exclude_none=True)


def _renamed(spec: dict[str, Any]) -> dict[str, Any]:
    """The spec with current field names, and with the meaningful nulls that folders don't keep."""
    spec = copy.deepcopy(spec)
    algorithm = spec.get("algorithm", {})
    if algorithm.get("critic") is not None:
        algorithm["critic"].setdefault("valueClip", None)
    correction = algorithm.get("importanceSampling")
    if correction == {}:
        correction["mode"] = "none"  # cap: null
    elif correction and "cap" in correction:
        correction["high"] = correction.pop("cap")
    return spec
