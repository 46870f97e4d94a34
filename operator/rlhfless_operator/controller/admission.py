"""What function pods are changed in when they are made: the answers of a mutating webhook. They go quickly, and are
placed near each other (`platforms/affinity.py`).

Knative lets 30 s pass before the function is told to end (its container's preStop hook), and gives the pod as long to
end as a request may last. Neither can be changed once the pod is there. Without the hook, the function ends at once,
and the pod when its grace period is over: Knative's sidecar waits for 30 s by itself.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlhfless_operator.platforms.affinity import placement_patch
from rlhfless_operator.platforms.manifests import CONTAINER, JOB_LABEL

_GRACE = "terminationGracePeriodSeconds"


def review(body: Any, grace_seconds: int | None, topology_keys: Sequence[str] = ()) -> dict[str, Any]:
    """The answer to an AdmissionReview. Everything is allowed, and nothing is changed but new function pods.

    Args:
        body: a review of `admission.k8s.io/v1` with its request.
        grace_seconds: the longest grace period of a function pod; it goes as Knative has it without one.
        topology_keys: labels of nodes that say where they are, the nearest domain first; pods are placed as Kubernetes
            does without any.

    Raises:
        ValueError: this is no such review.
    """
    request = question_of(body)
    pod = _function_pod(request)
    if pod is None:
        return answer_to(request, [])
    quick = _quick_release(pod["spec"], grace_seconds) if grace_seconds is not None else []
    return answer_to(request, [*quick, *placement_patch(pod, topology_keys)])


def question_of(body: Any) -> Mapping[str, Any]:
    """The request of an AdmissionReview.

    Raises:
        ValueError: this is no such review.
    """
    request = body.get("request") if isinstance(body, Mapping) and body.get("kind") == "AdmissionReview" else None
    if not isinstance(request, Mapping) or "uid" not in request:
        raise ValueError("not an AdmissionReview with a request")
    return request


def answer_to(request: Mapping[str, Any], patch: Sequence[Mapping[str, Any]], refusal: str = "") -> dict[str, Any]:
    """The AdmissionReview that allows a request with a JSON patch, or refuses it with the reason."""
    response: dict[str, Any] = {"uid": request["uid"], "allowed": not refusal}
    if refusal:
        response["status"] = {"code": 403, "message": refusal}
    elif patch:
        response |= {"patchType": "JSONPatch", "patch": base64.b64encode(json.dumps(patch).encode()).decode()}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}


def _function_pod(request: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The pod that a request would make; None for all that is no function pod."""
    kind = request.get("kind") or {}
    if (kind.get("group"), kind.get("kind"), request.get("operation")) != ("", "Pod", "CREATE"):
        return None
    pod: Mapping[str, Any] = request.get("object") or {}
    labels = (pod.get("metadata") or {}).get("labels") or {}
    names = [container.get("name") for container in (pod.get("spec") or {}).get("containers") or []]
    return pod if JOB_LABEL in labels and CONTAINER in names else None


def _quick_release(spec: Mapping[str, Any], grace_seconds: int) -> list[dict[str, Any]]:
    """The JSON patch (RFC 6902) by which a pod goes quickly."""
    patch: list[dict[str, Any]] = []
    position = [container.get("name") for container in spec["containers"]].index(CONTAINER)
    if "preStop" in (spec["containers"][position].get("lifecycle") or {}):
        patch.append({"op": "remove", "path": f"/spec/containers/{position}/lifecycle/preStop"})
    if spec.get(_GRACE) is None or spec[_GRACE] > grace_seconds:
        # To add a member that is there replaces it.
        patch.append({"op": "add", "path": f"/spec/{_GRACE}", "value": grace_seconds})
    return patch
