"""Publishing a status: few requests, and never over another operator's."""

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import pytest

from rlhfless_operator.controller.resource import JobResource, StoredJob
from rlhfless_operator.controller.status_writer import ResourceGoneError, StatusWriter, SupersededError
from rlhfless_operator.job.resource_status import DriverStatus, ResourceStatus, read_resource_status
from rlhfless_operator.knative import ApiError, ConflictError, NotFoundError
from rlhfless_operator.knative.errors import error_of
from tests.jobs import small_job


class Server:
    """One resource with the API server's rules for versions and merge patches."""

    def __init__(self) -> None:
        self.body = small_job()
        self.body["metadata"] |= {"namespace": "ns", "uid": "u", "generation": 1, "resourceVersion": "1"}
        self.requests: list[str] = []
        self.trouble: list[Exception] = []
        self.gone = False
        self.before_patch: Callable[[], None] = lambda: None

    async def patch(self, namespace: str, name: str, patch: dict[str, Any], *, subresource: str) -> StoredJob:
        self.requests.append("patch")
        await asyncio.sleep(0)
        if self.trouble:
            raise self.trouble.pop()
        self.before_patch()
        assert subresource == "status"
        if patch["metadata"]["resourceVersion"] != self.body["metadata"]["resourceVersion"]:
            raise ConflictError(409, "Conflict", "changed")
        self.change(status=patch["status"])
        return StoredJob.model_validate(copy.deepcopy(self.body))

    async def get(self, namespace: str, name: str) -> StoredJob:
        self.requests.append("get")
        if self.gone:
            raise NotFoundError(404, "NotFound", "deleted")
        return StoredJob.model_validate(copy.deepcopy(self.body))

    def change(self, *, status: dict[str, Any]) -> None:
        merged = self.body.setdefault("status", {})
        for field, value in status.items():
            merged[field] = value
            if value is None:
                del merged[field]
        self.body["metadata"]["resourceVersion"] = str(int(self.body["metadata"]["resourceVersion"]) + 1)


def writer_of(server: Server, identity: str = "me") -> StatusWriter:
    content = copy.deepcopy(server.body.get("status") or {})
    resource = JobResource.of(copy.deepcopy(server.body))
    return StatusWriter(server, resource, content, read_resource_status(content), identity)  # type: ignore[arg-type]


def mine(step: int, identity: str = "me") -> ResourceStatus:
    return ResourceStatus(phase="Running", step=step, driver=DriverStatus(operator=identity, lease=1))


async def test_what_has_not_changed_is_not_written() -> None:
    server = Server()
    writer = writer_of(server)
    writer.update(mine(1))
    await writer.flush()
    await writer.flush()
    writer.update(mine(1))
    await writer.flush()
    assert server.requests == ["patch"]
    assert server.body["status"]["step"] == 1


async def test_changes_in_quick_succession_become_one_write() -> None:
    server = Server()
    writer = writer_of(server)
    running = asyncio.create_task(writer.run())
    writer.update(mine(1))
    # The writer gathers by now.
    await asyncio.sleep(0)
    for step in range(2, 50):
        writer.update(mine(step))
    while server.body.get("status", {}).get("step") != 49:
        await asyncio.sleep(0.01)
    running.cancel()
    assert server.requests == ["patch"]


async def test_a_change_of_the_document_is_no_obstacle() -> None:
    server = Server()
    writer = writer_of(server)
    server.change(status={})
    writer.update(mine(1))
    await writer.flush()
    assert server.requests == ["patch", "get", "patch"]
    assert server.body["status"]["step"] == 1


async def test_what_the_watch_shows_saves_a_conflict() -> None:
    server = Server()
    writer = writer_of(server)
    server.change(status={})
    writer.seen(JobResource.of(server.body), {})
    writer.update(mine(1))
    await writer.flush()
    writer.seen(JobResource.of({**server.body, "metadata": {**server.body["metadata"], "resourceVersion": "1"}}), {})
    writer.update(mine(2))
    await writer.flush()
    assert server.requests == ["patch", "patch"], "nor does an old event do harm"


async def test_another_operators_status_is_never_overwritten() -> None:
    server = Server()
    first, second = writer_of(server, "first"), writer_of(server, "second")
    first.update(mine(1, "first"))
    await first.flush()
    with pytest.raises(SupersededError, match="first runs ns/job now"):
        second.update(mine(0, "second"))
        await second.flush()
    assert server.body["status"]["driver"]["operator"] == "first"


async def test_whoever_takes_a_job_over_knows_its_last_driver_and_writes() -> None:
    server = Server()
    first = writer_of(server, "first")
    first.update(mine(1, "first"))
    await first.flush()
    second = writer_of(server, "second")
    second.update(mine(1, "second"))
    await second.flush()
    assert server.body["status"]["driver"]["operator"] == "second"
    with pytest.raises(SupersededError):
        first.update(mine(2, "first"))
        await first.flush()


async def test_a_driver_learns_from_the_watch_that_it_is_superseded() -> None:
    server = Server()
    writer = writer_of(server)
    writer.update(mine(1))
    await writer.flush()
    running = asyncio.create_task(writer.run())
    await asyncio.sleep(0)
    server.change(status={"driver": {"operator": "another", "lease": 2}})
    writer.seen(JobResource.of(server.body), server.body["status"])
    with pytest.raises(SupersededError, match="another runs"):
        await running


async def test_one_that_waits_does_not_stop_the_driver() -> None:
    server = Server()
    driver = writer_of(server, "driver")
    driver.update(mine(1, "driver"))
    await driver.flush()
    waiting = writer_of(server, "waiting")
    waiting.update(waiting.status.model_copy(update={"reason": "WaitingForLease"}))
    await waiting.flush()
    driver.update(mine(2, "driver"))
    await driver.flush()
    assert server.body["status"]["step"] == 2
    assert server.body["status"]["reason"] == ""


async def test_an_outage_is_waited_out() -> None:
    server = Server()
    server.trouble = [error_of(503, b""), error_of(403, b""), ApiError(0, "Unreachable", "connection refused")]
    writer = writer_of(server)
    writer.update(mine(1))
    await writer.flush()
    assert server.body["status"]["step"] == 1


async def test_a_deleted_resource_ends_it() -> None:
    server = Server()
    server.trouble = [NotFoundError(404, "NotFound", "deleted")]
    writer = writer_of(server)
    writer.update(mine(1))
    with pytest.raises(ResourceGoneError):
        await writer.flush()


async def test_a_resource_that_was_deleted_after_a_change_ends_it() -> None:
    server = Server()
    writer = writer_of(server)
    server.change(status={})
    server.gone = True
    writer.update(mine(1))
    with pytest.raises(ResourceGoneError):
        await writer.flush()


async def test_what_changes_while_it_is_written_is_written_too() -> None:
    server = Server()
    writer = writer_of(server)

    def hurry() -> None:
        if writer.status.step == 1:
            writer.update(mine(2))

    server.before_patch = hurry
    writer.update(mine(1))
    await writer.flush()
    assert server.body["status"]["step"] == 2
