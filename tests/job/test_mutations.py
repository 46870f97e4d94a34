"""Ten thousand documents that are almost jobs: each is a job, or is refused with a remedy for every fault."""

import random
from contextlib import suppress

import pytest

from rlhfless_operator.controller.resource import JobResource, next_action, resolved
from rlhfless_operator.controller.tenancy.folders import OutsideStoreError, place_of
from rlhfless_operator.job.reading.validation import InvalidJobError
from rlhfless_operator.job.resource_status import ResourceStatus
from tests.job.mutations import mutated


@pytest.mark.parametrize("seed", range(10))
def test_validation_never_fails_by_itself(seed: int) -> None:
    chance = random.Random(seed)
    refused = 0
    for _ in range(1_000):
        document = mutated(chance)
        document["metadata"] |= {"namespace": "ns", "uid": "u", "generation": 1, "resourceVersion": "1"}
        resource = JobResource.of(document)
        next_action(resource, ResourceStatus())
        next_action(resource, ResourceStatus(phase="Failed", observed_generation=1, completion_time="x"))
        try:
            job = resolved(resource.job(), "/files")
            with suppress(OutsideStoreError):
                assert place_of(job.spec.artifacts.uri, "ns", "job", "/artifacts").root.startswith("/artifacts/ns/")
        except InvalidJobError as error:
            refused += 1
            assert error.faults
            for fault in error.faults:
                assert fault.message, document
                assert fault.remedy, document
    assert refused > 300
