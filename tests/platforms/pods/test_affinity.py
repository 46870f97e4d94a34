"""The patch by which a function pod is placed near its job's others."""

from typing import Any

import pytest

from rlhfless_operator.planner.pools.placement import TOPOLOGY_KEYS
from rlhfless_operator.platforms.pods.affinity import placement_patch
from tests.clusters.json_patch import patched

PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
OWN = {
    "weight": 7,
    "podAffinityTerm": {"topologyKey": "rack", "labelSelector": {"matchLabels": {"app": "cache"}}},
}


def placed(stage: str = "generation", **spec: Any) -> dict[str, Any]:
    """The specification of a pod with the patch."""
    labels = {"rlhfless.io/job": "j", "rlhfless.io/stage": stage}
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [], **spec}}
    made: dict[str, Any] = patched(pod, placement_patch(pod, TOPOLOGY_KEYS))["spec"]
    return made


def test_a_pod_prefers_those_of_its_own_job() -> None:
    terms = placed()["affinity"]["podAffinity"][PREFERRED]
    selectors = [term["podAffinityTerm"]["labelSelector"]["matchLabels"] for term in terms]
    assert all(selector["rlhfless.io/job"] == "j" for selector in selectors)
    assert [selector["rlhfless.io/stage"] for selector in selectors] == [*["learning"] * 2, *["generation"] * 2]
    assert [term["podAffinityTerm"]["topologyKey"] for term in terms] == [*TOPOLOGY_KEYS] * 2


@pytest.mark.parametrize("stage", ["generation", "preparation", "learning"])
def test_nothing_that_it_is_given_can_keep_a_pod_from_running(stage: str) -> None:
    spec = placed(stage)
    assert spec["affinity"].keys() == {"podAffinity"}
    assert spec["affinity"]["podAffinity"].keys() == {PREFERRED}
    assert {each["whenUnsatisfiable"] for each in spec["topologySpreadConstraints"]} == {"ScheduleAnyway"}


def test_an_affinity_of_its_own_stays_before_ours() -> None:
    own = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}},
        "podAntiAffinity": {PREFERRED: [OWN]},
        "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [OWN["podAffinityTerm"]], PREFERRED: [OWN]},
    }
    affinity = placed(affinity=own)["affinity"]
    near = affinity["podAffinity"]
    assert near[PREFERRED][0] == OWN and len(near[PREFERRED]) == 5
    assert {**affinity, "podAffinity": {**near, PREFERRED: [OWN]}} == own


@pytest.mark.parametrize("affinity", [None, {}, {"podAffinity": None}, {"podAffinity": {PREFERRED: None}}])
def test_an_empty_affinity_is_as_none(affinity: Any) -> None:
    assert placed(affinity=affinity)["affinity"] == placed()["affinity"]


def test_spread_constraints_of_its_own_stay() -> None:
    own = [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}]
    assert placed(topologySpreadConstraints=own)["topologySpreadConstraints"] == own
    assert "labelSelector" not in placed()["topologySpreadConstraints"][0], "it matches no pod"


def test_pods_of_no_stage_and_clusters_without_topology_are_left_alone() -> None:
    pod = {"metadata": {"labels": {"rlhfless.io/job": "j"}}, "spec": {}}
    assert placement_patch(pod, TOPOLOGY_KEYS) == []
    pod["metadata"]["labels"]["rlhfless.io/stage"] = "generation"
    assert placement_patch(pod, []) == []
