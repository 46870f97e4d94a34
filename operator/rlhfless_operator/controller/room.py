"""The number of generation instances that a step of a job may use on this cluster."""

from typing import Any

from rlhfless_operator.controller.resource import JobResource
from rlhfless_operator.job.actor_range import ActorRange, actor_range
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.knative import ApiError, Kind, KnativeClient, KubernetesObject, UnavailableError
from rlhfless_operator.platforms.base import PlatformUnavailableError
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.room import room_in_pool, room_in_quotas, why_not_in_quotas


class Room:
    """Finds how many instances a job may use if its document does not say.

    Args:
        settings: the operator's settings, with the pools and the defaults of function pods.
    """

    def __init__(self, client: KnativeClient, settings: ClusterSettings) -> None:
        self._quotas = client.resource(Kind("", "v1", "resourcequotas", KubernetesObject))
        self._settings = settings

    async def actors(self, resource: JobResource, job: RLHFJob) -> ActorRange:
        """Return the job's range of instances, limited by its pool.

        If the job names no maximum, it is as many as its pool and its namespace's quotas have room for. Quotas that the
        operator may not read do not count.

        Raises:
            PlatformUnavailableError: the API server does not answer, or the job is asynchronous and a quota has no room
                for all of its stages at once.
        """
        pool = room_in_pool(job, self._settings, resource.namespace)
        asynchronous = job.spec.asynchronous is not None
        named = job.spec.generation.instances.max is not None
        quotas = await self._quotas_of(resource.namespace) if asynchronous or not named else []
        if refusal := why_not_in_quotas(job, self._settings, quotas):
            raise PlatformUnavailableError(refusal)
        if named:
            found = actor_range(job.spec)
        else:
            quota = room_in_quotas(job, self._settings, quotas)
            found = actor_range(job.spec, min((room for room in (pool, quota) if room is not None), default=None))
        return found.within(pool) if pool else found

    async def _quotas_of(self, namespace: str) -> list[dict[str, Any]]:
        try:
            listing = await self._quotas.list(namespace)
        except UnavailableError as error:
            raise PlatformUnavailableError(f"the namespace's quotas could not be read: {error}") from error
        except ApiError:
            return []
        return [quota.model_dump(mode="json", by_alias=True) for quota in listing.items]
