"""Job documents for all tests: the smallest job, with the parts that a test is about."""

import copy
from typing import Any

from rlhfless_operator.job.spec import API_VERSION, KIND, RLHFJob


def document(name: str = "job", /, **spec: Any) -> dict[str, Any]:
    """Return the smallest job's document, with parts of its spec replaced; None takes a part away."""
    parts = {
        "model": {"source": "org/model"},
        "rewards": [{"name": "right", "math": {}}],
        "data": {"source": "data.jsonl"},
        "steps": 10,
        **copy.deepcopy(spec),
    }
    given = {part: value for part, value in parts.items() if value is not None}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": given}


def job(name: str = "job", /, **spec: Any) -> RLHFJob:
    """Return `document` as a job."""
    return RLHFJob.model_validate(document(name, **spec))
