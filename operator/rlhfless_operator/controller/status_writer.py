"""Publishes one job's status with few writes, and never overwrites another operator's.

Every write names the version of the resource that it is based on. If that is not the newest, the writer reads the
resource again and retries after a change of the document. If `status.driver` names another operator, the writer ends.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from rlhfless_operator.controller.resource import JobResource, StoredJob
from rlhfless_operator.job.resource_status import ResourceStatus, changes_of, dump_resource_status
from rlhfless_operator.knative import ApiError, ConflictError, NotFoundError, ResourceClient

_logger = logging.getLogger(__name__)

GATHER_SECONDS = 0.02
"""Changes within this many seconds, such as a step's end and the next one's beginning, go into one write."""
INTERVAL_SECONDS = 0.25
"""Shortest time between background writes, in seconds."""
_LONGEST_PAUSE_SECONDS = 10.0


class SupersededError(Exception):
    """Another operator has taken the job over."""


class ResourceGoneError(Exception):
    """The resource has been deleted."""


class StatusWriter:
    """The status of one resource.

    Args:
        jobs: client without patience, since the writer retries itself, with the newest status.
        resource: the resource.
        content: its status on the server.
        status: the same status, parsed.
        identity: this operator's name in `status.driver`.
    """

    def __init__(
        self,
        jobs: ResourceClient[StoredJob],
        resource: JobResource,
        content: Mapping[str, Any],
        status: ResourceStatus,
        identity: str,
    ) -> None:
        self.status = status
        """The status to publish; set it with `update`."""
        self._jobs = jobs
        self._namespace, self._name, self._uid = resource.namespace, resource.name, resource.uid
        self._identity = identity
        self._published = dict(content)
        self._version = resource.version
        self._superseded_by: str | None = None
        self._changed = asyncio.Event()
        self._writing = asyncio.Lock()

    def update(self, status: ResourceStatus) -> None:
        """Publish a status soon."""
        self.status = status
        self._changed.set()

    def seen(self, resource: JobResource, content: Mapping[str, Any]) -> None:
        """Take over a newer version of the resource from the watch: the next write starts from it.

        If another operator drives the job, nothing more is written.
        """
        if _newer(resource.version, self._version):
            if self._is_foreign(content):
                self._superseded_by = str(content["driver"]["operator"])
                self._changed.set()
            else:
                self._version, self._published = resource.version, dict(content)

    async def run(self) -> None:
        """Publish changes until cancelled.

        Raises:
            SupersededError, ResourceGoneError
        """
        while True:
            await self._changed.wait()
            await asyncio.sleep(GATHER_SECONDS)
            await self.flush()
            await asyncio.sleep(INTERVAL_SECONDS)

    async def flush(self) -> None:
        """Publish changes now. If the API server does not answer, wait for it.

        Raises:
            SupersededError: another operator runs the job; nothing was written.
            ResourceGoneError: the resource has been deleted.
        """
        pause = GATHER_SECONDS
        async with self._writing:
            while True:
                self._changed.clear()
                if self._superseded_by is not None:
                    raise SupersededError(f"{self._superseded_by} runs {self._namespace}/{self._name} now")
                try:
                    if changes := changes_of(self._published, dump_resource_status(self.status)):
                        patch = {"metadata": {"resourceVersion": self._version}, "status": changes}
                        self._take(await self._jobs.patch(self._namespace, self._name, patch, subresource="status"))
                    if not self._changed.is_set():
                        return
                except ConflictError:
                    await self._read_again()
                except NotFoundError as error:
                    raise ResourceGoneError(str(error)) from error
                except ApiError as error:
                    pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                    _logger.warning("%s/%s: status not written yet: %s", self._namespace, self._name, error)
                    await asyncio.sleep(pause)

    async def _read_again(self) -> None:
        try:
            answer = await self._jobs.get(self._namespace, self._name)
        except NotFoundError as error:
            raise ResourceGoneError(str(error)) from error
        except ApiError:
            return
        if self._is_foreign(answer.status):
            self._superseded_by = str(answer.status["driver"]["operator"])
        else:
            self._take(answer)

    def _take(self, answer: StoredJob) -> None:
        self._version, self._published = answer.metadata.resource_version, answer.status

    def _is_foreign(self, content: Mapping[str, Any]) -> bool:
        driver = content.get("driver") or {}
        known = self._published.get("driver") or {}
        return driver != known and driver.get("operator") not in (None, self._identity)


def _newer(version: str, than: str) -> bool:
    """Return whether a resourceVersion is newer. Versions that are not numbers are not compared."""
    return version.isdecimal() and than.isdecimal() and int(version) > int(than)
