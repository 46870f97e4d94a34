"""What the document of a job that has begun means, also if an earlier version of rlhfless wrote it.

A job's folder keeps the document whole, defaults included. A version that adds a field, or gives it another name,
writes the same job otherwise; that must not be taken for a change of the job.
"""

import copy
from typing import Any

from pydantic import ValidationError

from rlhfless_operator.job.spec import RLHFJobSpec


def meaning(spec: dict[str, Any]) -> dict[str, Any]:
    """A spec as this version would write it, with what its algorithm's name stands for; unchanged if it is none now.

    Args:
        spec: in camelCase, whole but for what is null.
    """
    try:
        read = RLHFJobSpec.model_validate(_renamed(spec), by_alias=True, by_name=False)
    except ValidationError:
        return spec
    whole = read.model_copy(update={"algorithm": read.algorithm.resolved()})
    return whole.model_dump(mode="json", by_alias=True, exclude_none=True)


def _renamed(spec: dict[str, Any]) -> dict[str, Any]:
    """The spec with the names that its fields have now, and the nulls that mean something, which folders don't keep."""
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
