"""What function pods are changed in when they are made, so that they go quickly: the answers of a mutating webhook.

Knative lets 30 s pass before the function is told to end (its container's preStop hook), and gives the pod as long to
end as a request may last. Neither can be changed once the pod is there. Without the hook, the function ends at once,
and the pod when its grace period is over: Knative's sidecar waits for 30 s by itself.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlhfless_operator.platforms.manifests import CONTAINER, JOB_LABEL

_GRACE = "terminationGracePeriodSeconds"


def review(body: Any, grace_seconds: int) -> dict[str, Any]:
    """The answer to an AdmissionReview. Everything is allowed, and nothing is changed but new function pods.

    Args:
        body: a review of `admission.k8s.io/v1` with its request.
        grace_seconds: the longest grace period of a function pod.

    Raises:
        ValueError: this is no such review.
    """
    request = question_of(body)
    return answer_to(request, _patch(request, grace_seconds))


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


def _patch(request: Mapping[str, Any], grace_seconds: int) -> list[dict[str, Any]]:
    """The JSON patch (RFC 6902) of what a request would make; empty for all that is no function pod."""
    kind = request.get("kind") or {}
    if (kind.get("group"), kind.get("kind"), request.get("operation")) != ("", "Pod", "CREATE"):
        return []
    pod = request.get("object") or {}
    labels = (pod.get("metadata") or {}).get("labels") or {}
    spec = pod.get("spec") or {}
    names = [container.get("name") for container in spec.get("containers") or []]
    if JOB_LABEL not in labels or CONTAINER not in names:
        return []
    patch: list[dict[str, Any]] = []
    position = names.index(CONTAINER)
    if "preStop" in (spec["containers"][position].get("lifecycle") or {}):
        patch.append({"op": "remove", "path": f"/spec/containers/{position}/lifecycle/preStop"})
    if spec.get(_GRACE) is None or spec[_GRACE] > grace_seconds:
        # To add a member that is there replaces it.
        patch.append({"op": "add", "path": f"/spec/{_GRACE}", "value": grace_seconds})
    return patch
