"""The servers of a job's environment, and what keeps its episodes: their pods, and the way to them."""

from rlhfless_operator.errors import UserError
from rlhfless_operator.job.pods import PodsSpec
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.pods.environment_manifests import (
    EnvironmentFunction,
    environment_pods,
    environment_service,
)
from rlhfless_operator.platforms.pods.manifests import JobIdentity, StageFunction
from rlhfless_operator.platforms.pods.shelter_manifests import ShelterFunction, shelter_pods, shelter_service
from rlhfless_operator.platforms.pods.store_mounts import check_store_mounts


class NoWayToServersError(UserError):
    """A job's restricted pods could not reach the servers of its environment."""


def environment_of(identity: JobIdentity, job: RLHFJob, settings: ClusterSettings) -> EnvironmentFunction | None:
    """Return the servers of a job's environment; None if it runs none.

    Raises:
        ForeignFoldersError: their pods would mount the folders of other namespaces.
        NoWayToServersError: the job's pods could not reach them.
    """
    environment, server = job.spec.environment, job.spec.environment_server
    if environment is None or server is None:
        return None
    if _has_no_way(settings):
        raise NoWayToServersError(
            "spec.environment: pods reach the job's server through Knative's gateway, and the operator's"
            " networkPolicy.functions.egress: restricted keeps them from it; have the gateway's pods listed in"
            " networkPolicy.functions.allow, or write the url of a server that runs already"
        )
    pods = environment_pods(environment.pods, settings.pods_in(identity.namespace))
    function = EnvironmentFunction(identity, server, pods)
    manifest = environment_service(function, settings)
    check_store_mounts(manifest, settings, identity.namespace, "spec.environment.pods")
    return function


def shelter_of(
    identity: JobIdentity, job: RLHFJob, generation: StageFunction, settings: ClusterSettings
) -> ShelterFunction | None:
    """Return what keeps a job's episodes while its actors are let go; None if they are not.

    Actors are kept as well where restricted pods could not reach it.

    Args:
        generation: the job's actors.

    Raises:
        ForeignFoldersError: its pod would mount the folders of other namespaces.
    """
    environment, server = job.spec.environment, job.spec.environment_server
    if environment is None or not job.spec.may_let_actors_go or _has_no_way(settings):
        return None
    own = environment.pods if server is None else PodsSpec()
    function = ShelterFunction(identity, shelter_pods(generation.pods, own), generation.env)
    section = "spec.environment.pods" if server is None else "spec.generation.pods"
    check_store_mounts(shelter_service(function, settings), settings, identity.namespace, section)
    return function


def gateways_of(job: RLHFJob, settings: ClusterSettings) -> frozenset[str]:
    """Return the address of the gateway to what a job's actors ask, if it runs any and the operator knows it."""
    if settings.ingress is None or not job.spec.has_environment_pods:
        return frozenset()
    return frozenset({settings.ingress})


def _has_no_way(settings: ClusterSettings) -> bool:
    """Return whether restricted pods could not reach a Service of the job."""
    return settings.egress == "restricted" and settings.ingress is None and not settings.egress_rules
