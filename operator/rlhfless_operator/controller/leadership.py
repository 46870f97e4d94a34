"""Leader election: a Lease of the cluster decides which of several operators leads."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio.client import ApiClient, ApiException, V1Lease, V1ObjectMeta
from kubernetes.aio.leaderelection.electionconfig import Config
from kubernetes.aio.leaderelection.leaderelection import LeaderElection
from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock

_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class LeadershipLostError(Exception):
    """The Lease could not be renewed in time; another operator may lead now."""


@dataclass(frozen=True)
class Election:
    """The Lease and its timing, in seconds."""

    namespace: str
    name: str = "rlhfless-operator"
    duration: int = 15
    """Time without a renewal after which the Lease is free."""
    renewal: int = 10
    """Time without a successful renewal after which a leader stops leading."""
    retry: int = 2
    """Time between attempts, and between renewals."""


async def lead(
    client: ApiClient,
    election: Election,
    identity: str,
    operate: Callable[[asyncio.Event], Awaitable[None]],
    ended: asyncio.Event,
) -> None:
    """Wait until this operator leads, and operate until told to end. Then release the Lease for the next one.

    Args:
        operate: runs the operator; it must end when the given event is set.
        ended: ends the wait; afterwards `operate` must observe it.

    Raises:
        LeadershipLostError: the Lease was lost, and `operate` has ended because of it.
    """
    lock = _Lock(election.name, election.namespace, identity, client)
    elector = LeaderElection(
        Config(
            lock,
            election.duration,
            election.renewal,
            election.retry,
            onstarted_leading=_nothing,
            onstopped_leading=_nothing,
        )
    )
    if not await _unless(ended, elector.acquire()):
        await lock.release()
        return
    stop = asyncio.Event()
    renewing = asyncio.create_task(elector.renew_loop())
    operating = asyncio.ensure_future(operate(stop))
    try:
        await asyncio.wait({renewing, operating}, return_when=asyncio.FIRST_COMPLETED)
        lost = renewing.done()
        stop.set()
        await operating
        if lost:
            raise LeadershipLostError("the Lease could not be renewed in time; another operator may lead now")
    finally:
        renewing.cancel()
        operating.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await operating
        if not renewing.done() or renewing.cancelled():
            await lock.release()


def own_namespace() -> str | None:
    """Return the namespace of the pod that this process runs in; None outside a cluster."""
    return _OWN_NAMESPACE.read_text().strip() if _OWN_NAMESPACE.exists() else None


async def _unless(ended: asyncio.Event, work: Coroutine[Any, Any, object]) -> bool:
    """Work until the work is done or the event is set. Returns whether the work is done."""
    working, ending = asyncio.create_task(work), asyncio.create_task(ended.wait())
    try:
        await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return True
        return False
    finally:
        for task in (working, ending):
            task.cancel()
        await asyncio.gather(working, ending, return_exceptions=True)


async def _nothing() -> None:
    """Do nothing: this module checks the election's outcome itself."""


class _Lock(LeaseLock):
    """A Lease that retries failed requests and can be released."""

    async def get(self, name: str, namespace: str) -> Any:
        try:
            return await super().get(name, namespace)
        except (aiohttp.ClientError, OSError) as error:
            return False, ApiException(status=0, reason=str(error))

    async def create(self, name: str, namespace: str, election_record: Any) -> bool:
        # The parent's method passes a parameter of a type that the API refuses.
        lease = V1Lease(metadata=V1ObjectMeta(name=name), spec=self.update_lease(election_record))
        try:
            await self.api_instance.create_namespaced_lease(namespace, lease)
        except (ApiException, aiohttp.ClientError, OSError):
            return False
        return True

    async def update(self, name: str, namespace: str, updated_record: Any) -> bool:
        try:
            return bool(await super().update(name, namespace, updated_record))
        except (aiohttp.ClientError, OSError):
            return False

    async def release(self) -> None:
        """Release the Lease, if this operator still holds it."""
        with contextlib.suppress(ApiException, aiohttp.ClientError, OSError):
            lease = await self.api_instance.read_namespaced_lease(self.name, self.namespace)
            if lease.spec is not None and lease.spec.holder_identity == self.identity:
                lease.spec.holder_identity = ""
                await self.api_instance.replace_namespaced_lease(self.name, self.namespace, lease)
