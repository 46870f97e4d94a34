"""The mutating webhook that changes new function pods: they terminate quickly, and are placed near each other
(`platforms/pods/affinity.py`).

Knative delays the function's SIGTERM by 30 s (its container's preStop hook), and sets the pod's grace period to the
longest request. Neither can be changed once the pod exists. Without the hook, the function terminates immediately, and
the pod after its grace period, because Knative's sidecar always waits for 30 s.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlhfless_operator.platforms.pods.affinity import placement_patch
from rlhfless_operator.platforms.pods.manifests import CONTAINER, JOB_LABEL

_GRACE = "terminationGracePeriodSeconds"


def review(body: Any, grace_seconds: int | None, topology_keys: Sequence[str] = ()) -> dict[str, Any]:
    """Answer an AdmissionReview. It allows every request, and changes only new function pods.

    Args:
        body: a review of `admission.k8s.io/v1` with its request.
        grace_seconds: the longest grace period of a function pod; None keeps Knative's.
        topology_keys: node labels with the node's location, the nearest domain first; empty leaves the placement to
            Kubernetes.

    Raises:
        ValueError: `body` is not such a review.
    """
    request = question_of(body)
    pod = _function_pod(request)
    if pod is None:
        return answer_to(request, [])
    quick = _quick_release(pod["spec"], grace_seconds) if grace_seconds is not None else []
    return answer_to(request, [*quick, *placement_patch(pod, topology_keys)])


def question_of(body: Any) -> Mapping[str, Any]:
    """Return the request of an AdmissionReview.

    Raises:
        ValueError: `body` is not such a review.
    """
    request = body.get("request") if isinstance(body, Mapping) and body.get("kind") == "AdmissionReview" else None
    if not isinstance(request, Mapping) or "uid" not in request:
        raise ValueError("not an AdmissionReview with a request")
    return request


def answer_to(request: Mapping[str, Any], patch: Sequence[Mapping[str, Any]], refusal: str = "") -> dict[str, Any]:
    """Return the AdmissionReview that allows a request with a JSON patch, or refuses it with the reason."""
    response: dict[str, Any] = {"uid": request["uid"], "allowed": not refusal}
    if refusal:
        response["status"] = {"code": 403, "message": refusal}
    elif patch:
        response |= {"patchType": "JSONPatch", "patch": base64.b64encode(json.dumps(patch).encode()).decode()}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}


def _function_pod(request: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the function pod that a request creates; None for any other request."""
    kind = request.get("kind") or {}
    if (kind.get("group"), kind.get("kind"), request.get("operation")) != ("", "Pod", "CREATE"):
        return None
    pod: Mapping[str, Any] = request.get("object") or {}
    labels = (pod.get("metadata") or {}).get("labels") or {}
    names = [container.get("name") for container in (pod.get("spec") or {}).get("containers") or []]
    return pod if JOB_LABEL in labels and CONTAINER in names else None


def _quick_release(spec: Mapping[str, Any], grace_seconds: int) -> list[dict[str, Any]]:
    """Return the JSON patch (RFC 6902) that makes a pod terminate quickly."""
    patch: list[dict[str, Any]] = []
    position = [container.get("name") for container in spec["containers"]].index(CONTAINER)
    if "preStop" in (spec["containers"][position].get("lifecycle") or {}):
        patch.append({"op": "remove", "path": f"/spec/containers/{position}/lifecycle/preStop"})
    if spec.get(_GRACE) is None or spec[_GRACE] > grace_seconds:
        # "add" replaces an existing member.
        patch.append({"op": "add", "path": f"/spec/{_GRACE}", "value": grace_seconds})
    return patch
