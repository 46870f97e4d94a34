"""The JSON patch that makes the scheduler place a new function pod near its job's other pods.

Kubernetes spreads the pods of a ReplicaSet over nodes and zones by default, and soft affinities don't outweigh that
(measured with kube-scheduler 1.34). The default does not apply to a pod with a spread constraint of its own. So a pod
without one gets a soft constraint that matches no pods.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rlhfless_functions.api import STAGES
from rlhfless_operator.planner.pools.placement import HOSTNAME, Preference, preferences
from rlhfless_operator.platforms.pods.manifests import JOB_LABEL, STAGE_LABEL

_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
_SPREAD = "topologySpreadConstraints"
# Without a selector it matches no pod, and all nodes rank equally.
_NO_SPREADING = [{"maxSkew": 1, "topologyKey": HOSTNAME, "whenUnsatisfiable": "ScheduleAnyway"}]


def placement_patch(pod: Mapping[str, Any], topology_keys: Sequence[str]) -> list[dict[str, Any]]:
    """Return the JSON patch (RFC 6902) that adds preferences to a function pod, besides the pod's own.

    Args:
        pod: pod of a job.
        topology_keys: node labels, the nearest domain first; if empty, nothing is added.
    """
    labels = pod["metadata"]["labels"]
    stage = labels.get(STAGE_LABEL)
    if stage not in STAGES or not topology_keys:
        return []
    terms = [_term(each, labels[JOB_LABEL]) for each in preferences(stage, topology_keys)]
    affinity = pod["spec"].get("affinity") or {}
    near = affinity.get("podAffinity") or {}
    near = {**near, _PREFERRED: [*(near.get(_PREFERRED) or []), *terms]}
    # "add" replaces an existing member.
    patch = [{"op": "add", "path": "/spec/affinity", "value": {**affinity, "podAffinity": near}}]
    if not pod["spec"].get(_SPREAD):
        patch.append({"op": "add", "path": f"/spec/{_SPREAD}", "value": _NO_SPREADING})
    return patch


def _term(preference: Preference, job: str) -> dict[str, Any]:
    return {
        "weight": preference.weight,
        "podAffinityTerm": {
            "topologyKey": preference.topology_key,
            "labelSelector": {"matchLabels": {JOB_LABEL: job, STAGE_LABEL: preference.stage}},
        },
    }
