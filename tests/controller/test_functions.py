"""The functions of a job on a cluster, as its pods are told of them."""

from rlhfless_operator.controller.functions import functions_of
from rlhfless_operator.job.spec import API_VERSION, KIND
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.pods.manifests import JobIdentity
from rlhfless_operator.platforms.pool_member import PoolMember
from rlhfless_operator.training.requests.rehearsal import emulation_of
from tests.jobs import job

IDENTITY = JobIdentity("team", "job", "uid", API_VERSION, KIND)
SETTINGS = ClusterSettings(functions_image="image")


def test_the_pods_of_a_rehearsal_are_told_which_gpus_they_emulate() -> None:
    rehearsal = {"gpu": "H100", "trace": "/files/trace", "model": "Qwen2.5-7B"}
    rehearsed = job(rehearsal=rehearsal, generation={"instances": {"max": 2}})
    emulation = emulation_of(rehearsed)
    assert emulation is not None
    member = PoolMember("uid", "team", "job", {}, emulation=emulation)
    for function in functions_of(IDENTITY, member, rehearsed, "/artifacts/team/runs/job", SETTINGS, {}).values():
        assert function.env == {"RLHFLESS_EMULATION": emulation.model_dump_json()}
    member.emulation = None
    for function in functions_of(IDENTITY, member, job(), "/artifacts/team/runs/job", SETTINGS, {}).values():
        assert function.env == {}
