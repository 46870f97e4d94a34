"""The checks of a job's pods before its folder is claimed, so that a refused job leaves no trace in the store."""

from rlhfless_operator.controller.environments import environment_of
from rlhfless_operator.controller.resource import JobResource
from rlhfless_operator.job.instance_gpus import pods_by_stage
from rlhfless_operator.job.spec import API_VERSION, KIND, RLHFJob
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.pods.manifests import JobIdentity, StageFunction, service
from rlhfless_operator.platforms.pods.store_mounts import check_store_mounts


def check_mounts(job: RLHFJob, resource: JobResource, root: str, settings: ClusterSettings) -> None:
    """Check the mounts of a job's pods, and the way to its environment.

    Args:
        job: the job, with the cluster's defaults.
        resource: its resource.
        root: URI of its folder.

    Raises:
        ForeignFoldersError: its pods would mount the folders of other namespaces.
        NoWayToServersError: its pods could not reach the servers of its environment.
    """
    identity = JobIdentity(resource.namespace, resource.name, resource.uid, API_VERSION, KIND)
    environment_of(identity, job, settings)
    for stage, pods in pods_by_stage(job.spec).items():
        check_store_mounts(service(StageFunction(identity, stage, pods, root), settings), settings, resource.namespace)
