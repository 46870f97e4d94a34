"""The manifest of what keeps a job's episodes: one pod at most, with the job's token and the actors' policy."""

import asyncio
from typing import Any

import yaml

from rlhfless_operator.job.pods import PodsSpec
from rlhfless_operator.platforms.pods import manifests
from rlhfless_operator.platforms.pods.manifests import JobIdentity
from rlhfless_operator.platforms.pods.shelter_manifests import ShelterFunction, shelter_pods, shelter_service
from tests.platforms.pods.test_manifests import EVERYTHING, JOB, ON_ANY_CLUSTER, SETTINGS
from tests.prerequisites import needs_cluster


def service(pods: PodsSpec | None = None) -> dict[str, Any]:
    return shelter_service(ShelterFunction(JOB, pods or PodsSpec(), {"RLHFLESS_X": "1"}), SETTINGS)


def test_it_is_one_pod_which_belongs_to_the_job_and_which_only_the_cluster_reaches() -> None:
    made = service()
    metadata = made["metadata"]
    assert (metadata["namespace"], metadata["name"]) == ("team", "chat-shelter")
    assert metadata["ownerReferences"][0]["uid"] == JOB.uid
    assert metadata["labels"]["networking.knative.dev/visibility"] == "cluster-local"
    template = made["spec"]["template"]
    annotations = {name.rpartition("/")[2]: value for name, value in template["metadata"]["annotations"].items()}
    assert annotations.items() >= {"min-scale": "0", "max-scale": "1", "initial-scale": "0"}.items()
    assert template["spec"]["containerConcurrency"] == 0, "all actors ask it at a time"


def test_it_runs_in_the_functions_image_with_the_jobs_token() -> None:
    (found,) = service()["spec"]["template"]["spec"]["containers"]
    assert found["image"] == SETTINGS.functions_image
    assert found["command"][-1] == "rlhfless_functions.environments.shelter"
    assert found["readinessProbe"]["httpGet"]["path"] == "/healthz"
    token, *others = found["env"]
    assert token["valueFrom"]["secretKeyRef"] == {"name": "chat-token", "key": "token"}
    assert others == [{"name": "HOME", "value": "/tmp"}, {"name": "RLHFLESS_X", "value": "1"}]
    assert found["securityContext"]["runAsNonRoot"] and found["securityContext"]["readOnlyRootFilesystem"]


def test_it_has_the_actors_stores_and_secrets_and_nothing_that_brings_them_to_a_gpu() -> None:
    pods = shelter_pods(PodsSpec.model_validate(EVERYTHING), PodsSpec())
    made = service(pods)["spec"]["template"]["spec"]
    (found,) = made["containers"]
    assert "nvidia.com/gpu" not in yaml.safe_dump(made)
    assert not {"nodeSelector", "runtimeClassName", "affinity"} & made.keys()
    assert found["resources"] == {"requests": {"cpu": "1", "memory": "1Gi"}}
    given = PodsSpec.model_validate(EVERYTHING)
    assert (pods.image, pods.env, pods.env_from, pods.volumes) == (
        given.image,
        given.env,
        given.env_from,
        given.volumes,
    )


def test_the_policy_of_the_stages_is_its_own() -> None:
    labels = service()["spec"]["template"]["metadata"]["labels"]
    selector = manifests.network_policy(JOB, SETTINGS)["spec"]["podSelector"]
    assert selector["matchLabels"].items() <= labels.items()
    assert labels[manifests.STAGE_LABEL] not in selector["matchExpressions"][0]["values"]


@needs_cluster("the manifest is not shown to a cluster")
def test_a_real_cluster_takes_it() -> None:
    from rlhfless_operator.controller.main import connect
    from rlhfless_operator.knative import KnativeClient

    async def ask() -> None:
        job = JobIdentity("default", "chat", "0b1f", JOB.api_version, JOB.kind)
        pods = shelter_pods(PodsSpec.model_validate(ON_ANY_CLUSTER), PodsSpec())
        async with connect() as api:
            client = KnativeClient(api, field_manager="rlhfless-tests")
            await client.services.apply(shelter_service(ShelterFunction(job, pods), SETTINGS), dry_run=True)

    asyncio.run(ask())
