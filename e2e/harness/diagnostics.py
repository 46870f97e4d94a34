"""What a person wants to see of a namespace when a test has failed in it."""

import contextlib

from harness.kubectl import Kubectl, KubectlError

_QUESTIONS = (
    ("get", "rlhfjobs,services.serving.knative.dev,revisions.serving.knative.dev,pods,pvc", "--output=wide"),
    ("describe", "rlhfjobs"),
    ("get", "events", "--sort-by=.lastTimestamp"),
)
_LOG_LINES = "60"
_LONGEST_ANSWER = 12_000


def describe(kubectl: Kubectl) -> str:
    """Objects, events, and the end of every container's log."""
    questions = list(_QUESTIONS)
    with contextlib.suppress(KubectlError):
        questions += [
            ("logs", pod["metadata"]["name"], f"--container={container['name']}", f"--tail={_LOG_LINES}")
            for pod in kubectl.list("pods")
            for container in pod["spec"]["containers"]
            if container["name"] != "queue-proxy"
        ]
    return "\n\n".join(_ask(kubectl, *question) for question in questions)


def _ask(kubectl: Kubectl, *question: str) -> str:
    try:
        answer = kubectl(*question)
    except KubectlError as error:
        answer = str(error)
    return f"$ kubectl {' '.join(question)}\n{answer[-_LONGEST_ANSWER:]}"
