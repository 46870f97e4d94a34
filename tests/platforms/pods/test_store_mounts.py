"""A pod mounts its namespace's folder of the artifact store, and nothing else of it."""

from typing import Any

import pytest

from rlhfless_operator.job.pods import PodsSpec, VolumeSpec
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.pods.manifests import JobIdentity, StageFunction, service
from rlhfless_operator.platforms.pods.store_mounts import ForeignFoldersError, check_store_mounts

STORE = VolumeSpec(name="artifacts", claim="store", mount_path="/artifacts")
SETTINGS = ClusterSettings(functions_image="image", pods=PodsSpec(volumes=[STORE]))
JOB = JobIdentity("team", "job", "uid", "rlhfless.io/v1alpha1", "RLHFJob")


def manifest(settings: ClusterSettings = SETTINGS, **pods: Any) -> dict[str, Any]:
    asked = PodsSpec.model_validate(pods)
    own = settings.pods_in("team")
    merged = own.model_copy(update={"volumes": [*(own.volumes or []), *(asked.volumes or [])]})
    function = StageFunction(JOB, "learning", merged.model_copy(update={"template": asked.template}), "/artifacts/team")
    return service(function, settings)


def mounts(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = manifest["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    return [mount for mount in found if mount["name"] == "artifacts"]


def test_a_pod_mounts_its_namespaces_folder_where_the_operator_has_it() -> None:
    own = {"name": "artifacts", "mountPath": "/artifacts/team", "readOnly": False}
    assert mounts(manifest()) == [own | {"subPath": "team"}]
    check_store_mounts(manifest(), SETTINGS, "team")
    separate = SETTINGS.model_copy(update={"artifacts_claim": "separate"})
    assert mounts(manifest(separate)) == [own]
    check_store_mounts(manifest(separate), separate, "team")


def replaced(**mount: Any) -> dict[str, Any]:
    mounts = [{"name": "artifacts", "mountPath": "/artifacts/team", **mount}]
    return {"spec": {"containers": [{"name": "function", "volumeMounts": mounts}]}}


ANOTHER = {"volumes": [{"name": "x", "persistentVolumeClaim": {"claimName": "store"}}]}
FOREIGN = {
    "the whole claim": {"volumes": [{"claim": "store", "mountPath": "/all"}]},
    "another's folder": {"volumes": [{"claim": "store", "mountPath": "/all", "subPath": "theirs"}]},
    "no subPath": {"template": replaced(subPath=None)},
    "another's subPath": {"template": replaced(subPath="theirs")},
    "a subPath out": {"template": replaced(subPath="team/../theirs")},
    "an expression": {"template": replaced(subPathExpr="$(X)")},
    "another container": {
        "template": {
            "spec": {
                **ANOTHER,
                "initContainers": [{"name": "i", "volumeMounts": [{"name": "x", "mountPath": "/x"}]}],
            }
        }
    },
    "a device": {
        "template": {
            "spec": {**ANOTHER, "containers": [{"name": "c", "volumeDevices": [{"name": "x", "devicePath": "/x"}]}]}
        }
    },
}


@pytest.mark.parametrize("pods", FOREIGN.values(), ids=FOREIGN)
def test_a_job_that_mounts_more_is_refused(pods: dict[str, Any]) -> None:
    with pytest.raises(ForeignFoldersError, match=r"spec\.pods: the claim store holds .*by subPath: team"):
        check_store_mounts(manifest(**pods), SETTINGS, "team")


def test_a_job_may_mount_a_part_of_its_own_folder_and_other_claims() -> None:
    mine = [{"claim": "store", "mountPath": "/mine", "subPath": "team/models"}, {"claim": "x", "mountPath": "/x"}]
    check_store_mounts(manifest(volumes=mine), SETTINGS, "team")
    with pytest.raises(ValueError, match="not a path within the volume"):
        manifest(volumes=[{"claim": "store", "mountPath": "/mine", "subPath": "../theirs"}])
