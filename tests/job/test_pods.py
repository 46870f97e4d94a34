"""The pods of a function: what a job may say, and how stage, job and cluster are laid over one another."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rlhfless_operator.job.pods import PodsSpec, ResourcesSpec, VolumeSpec, merge_pods, overlay


def pods(**fields: Any) -> PodsSpec:
    return PodsSpec.model_validate(fields)


def test_quantities_are_numbers_or_text() -> None:
    spec = pods(resources={"limits": {"nvidia.com/gpu": 1, "memory": "16Gi", "cpu": "500m"}})
    assert spec.resources == ResourcesSpec(limits={"nvidia.com/gpu": "1", "memory": "16Gi", "cpu": "500m"})


def test_a_template_may_say_what_is_no_request_for_gpus() -> None:
    template = {"spec": {"nodeSelector": {"nvidia.com/gpu": "true"}, "containers": [{"name": "a", "tty": True}]}}
    assert pods(template=template).template == template


@pytest.mark.parametrize("quantity", [0.5, "many", "1 Gi", True, None, "-1", ""])
def test_anything_else_is_no_quantity(quantity: Any) -> None:
    with pytest.raises(ValidationError, match="is not a quantity: write a whole number"):
        pods(resources={"limits": {"cpu": quantity}})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"volumes": [{"mountPath": "/data"}]}, "write one of claim, hostPath, secret and configMap"),
        ({"volumes": [{"mountPath": "/data", "claim": "a", "secret": "b"}]}, "write one of claim"),
        ({"volumes": [{"mountPath": "data", "claim": "a"}]}, "is not absolute; begin it with /"),
        ({"volumes": [{"mountPath": "/data", "hostPath": "a"}]}, "is not absolute; begin it with /"),
        ({"volumes": [{"mountPath": "/tmp/", "claim": "a"}]}, "rlhfless itself mounts /tmp/; choose another path"),
        ({"env": {"RLHFLESS_TOKEN": "mine"}}, "rlhfless itself sets RLHFLESS_TOKEN; remove it"),
        ({"env": {"A": 1}}, "valid string"),
        (
            {"template": {"spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": 1}}}]}}},
            "template: prices, pools and plans count no GPUs there; write nvidia.com/gpu in resources.limits",
        ),
        (
            {"template": {"spec": {"initContainers": [{}, {"resources": {"requests": {"amd.com/gpu": "2"}}}]}}},
            "write amd.com/gpu in resources.limits",
        ),
    ],
)
def test_what_cannot_work_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        pods(**fields)


def test_a_stage_comes_before_its_job_and_that_before_the_cluster() -> None:
    cluster = pods(
        image="a", nodeSelector={"pool": "x", "zone": "1"}, envFrom=["s3"], env={"A": "1"}, sharedMemory="1Gi"
    )
    job = pods(image="b", nodeSelector={"pool": "y"}, env={"A": "2", "B": "2"}, priorityClass="low")
    stage = pods(env={"B": "3"}, envFrom=["hub"], resources={"limits": {"cpu": 2}})
    assert merge_pods(cluster, job, stage) == pods(
        image="b",
        nodeSelector={"pool": "y", "zone": "1"},
        envFrom=["s3", "hub"],
        env={"A": "2", "B": "3"},
        sharedMemory="1Gi",
        priorityClass="low",
        resources={"limits": {"cpu": 2}},
    )


def test_of_two_volumes_at_one_path_the_nearer_one_counts() -> None:
    cluster = pods(volumes=[{"hostPath": "/srv", "mountPath": "/files"}, {"claim": "runs", "mountPath": "/artifacts"}])
    job = pods(volumes=[{"claim": "mine", "mountPath": "/files/"}])
    merged = merge_pods(cluster, job).volumes
    assert merged == [
        VolumeSpec(claim="runs", mount_path="/artifacts"),
        VolumeSpec(claim="mine", mount_path="/files/"),
    ]


def test_templates_are_laid_over_one_another() -> None:
    below = pods(template={"spec": {"hostNetwork": True, "containers": [{"name": "user-container", "tty": True}]}})
    above = pods(template={"spec": {"hostNetwork": None, "containers": [{"name": "user-container", "stdin": True}]}})
    assert merge_pods(below, above).template == {
        "spec": {"containers": [{"name": "user-container", "tty": True, "stdin": True}]}
    }


def test_an_overlay_merges_named_things_by_name_and_replaces_other_lists() -> None:
    base = {"a": [{"name": "x", "v": 1}, {"name": "y", "v": 1}], "b": [1, 2], "c": {"d": 1, "e": 1}}
    over = {"a": [{"name": "y", "v": 2}, {"name": "z"}], "b": [3], "c": {"e": None, "f": {"g": None, "h": 1}}}
    assert overlay(base, over) == {
        "a": [{"name": "x", "v": 1}, {"name": "y", "v": 2}, {"name": "z"}],
        "b": [3],
        "c": {"d": 1, "f": {"h": 1}},
    }


NAMES = st.sampled_from("abc")
PODS = st.builds(
    PodsSpec,
    image=st.none() | NAMES,
    node_selector=st.none() | st.dictionaries(NAMES, NAMES),
    env=st.none() | st.dictionaries(NAMES, NAMES),
    env_from=st.none() | st.lists(NAMES, unique=True),
    shared_memory=st.none() | st.integers(1, 3),
    volumes=st.none()
    | st.lists(
        st.builds(lambda claim, path: VolumeSpec(claim=claim, mount_path=path), NAMES, st.sampled_from(["/x", "/y"])),
        unique_by=lambda volume: volume.mount_path,
    ),
    template=st.none() | st.dictionaries(NAMES, st.integers(0, 2) | st.dictionaries(NAMES, st.integers(0, 2))),
)


@given(PODS, PODS)
def test_merging_is_idempotent_and_nothing_is_its_neutral_element(low: PodsSpec, high: PodsSpec) -> None:
    merged = merge_pods(low, high)
    assert merge_pods(merged, high) == merged
    assert merge_pods(PodsSpec(), low) == merge_pods(low, PodsSpec()) == low
    assert set((high.env or {}).items()) <= set((merged.env or {}).items())
