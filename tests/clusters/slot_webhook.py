"""The operator's webhook for slots, as an emulated Knative meets it when it makes a pod."""

import base64
import json
from collections.abc import Awaitable, Callable
from typing import Any

from rlhfless_operator.controller.slot_admission import SlotAdmission
from rlhfless_operator.knative import KnativeClient
from tests.clusters.json_patch import patched


def giving_slots(client: KnativeClient) -> Callable[[dict[str, Any], str], Awaitable[dict[str, Any]]]:
    """What the webhook makes of a new pod in a namespace; a ValueError where it refuses it."""
    admission = SlotAdmission(client)

    async def admit(pod: dict[str, Any], namespace: str) -> dict[str, Any]:
        request = {"uid": "u", "operation": "CREATE", "namespace": namespace, "object": pod}
        answer = (await admission.review({"kind": "AdmissionReview", "request": request}))["response"]
        if not answer["allowed"]:
            raise ValueError(answer["status"]["message"])
        return patched(pod, json.loads(base64.b64decode(answer["patch"]))) if "patch" in answer else pod

    return admit
