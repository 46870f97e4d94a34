"""The status names weights by the wire contract's own reference, and its file is what it always was."""

import pytest
from pydantic import ValidationError

from rlhfless_functions.api import WeightsReference
from rlhfless_operator.job.resource_status import ResourceStatus, dump_resource_status, read_resource_status
from rlhfless_operator.records.status import RLHFJobStatus

WEIGHTS = WeightsReference(version=4, uri="/runs/chat/weights/step-4")
ADAPTER = WeightsReference(version=2, uri="/models/base", adapter="/runs/chat/weights/step-2")
WRITTEN = (
    b'"weights":{"version":4,"uri":"/runs/chat/weights/step-4","adapter":null},"critic":null,'
    b'"checkpoint":null,"best":{"version":2,"uri":"/models/base","adapter":"/runs/chat/weights/step-2"}'
)
"""As every release has written it."""


def test_the_file_has_the_weights_as_every_release_has_written_them() -> None:
    status = RLHFJobStatus(weights=WEIGHTS, best=ADAPTER)
    assert WRITTEN in status.model_dump_json(by_alias=True).encode()
    assert RLHFJobStatus.model_validate_json(b"{" + WRITTEN + b"}") == status


def test_the_resource_has_them_without_nulls() -> None:
    content = dump_resource_status(ResourceStatus(weights=WEIGHTS, best=ADAPTER))
    assert content["weights"] == {"version": 4, "uri": "/runs/chat/weights/step-4"}
    assert read_resource_status(content) == ResourceStatus(weights=WEIGHTS, best=ADAPTER)


def test_no_version_is_below_that_of_the_model_as_given() -> None:
    with pytest.raises(ValidationError, match="greater than or equal to 0"):
        WeightsReference(version=-1, uri="/models/base")
