"""The servers of a job's environment: their pods, and the way to them."""

from rlhfless_operator.errors import UserError
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.pods.environment_manifests import (
    EnvironmentFunction,
    environment_pods,
    environment_service,
)
from rlhfless_operator.platforms.pods.manifests import JobIdentity
from rlhfless_operator.platforms.pods.store_mounts import check_store_mounts


class NoWayToServersError(UserError):
    """A job's restricted pods could not reach the servers of its environment."""


def environment_of(identity: JobIdentity, job: RLHFJob, settings: ClusterSettings) -> EnvironmentFunction | None:
    """Return the servers of a job's environment; None if it runs none.

    Raises:
        ForeignFoldersError: their pods would mount the folders of other namespaces.
        NoWayToServersError: the job's pods could not reach them.
    """
    environment = job.spec.environment
    if environment is None or environment.server is None:
        return None
    if settings.egress == "restricted" and settings.ingress is None and not settings.egress_rules:
        raise NoWayToServersError(
            "spec.environment: pods reach the job's server through Knative's gateway, and the operator's"
            " networkPolicy.functions.egress: restricted keeps them from it; have the gateway's pods listed in"
            " networkPolicy.functions.allow, or write the url of a server that runs already"
        )
    pods = environment_pods(environment.pods, settings.pods_in(identity.namespace))
    function = EnvironmentFunction(identity, environment.server, pods)
    manifest = environment_service(function, settings)
    check_store_mounts(manifest, settings, identity.namespace, "spec.environment.pods")
    return function


def gateways_of(job: RLHFJob, settings: ClusterSettings) -> frozenset[str]:
    """Return the address of the gateway to the servers, if a job runs some and the operator knows it."""
    environment = job.spec.environment
    if environment is None or environment.server is None or settings.ingress is None:
        return frozenset()
    return frozenset({settings.ingress})
