"""Pods that use GPUs in turns, while the DRA driver is away, and where the operator is killed during a hand-over."""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from harness.dra_driver import DraDriver
from harness.images import Images
from harness.jobs import KEPT, ONE_GPU, Jobs, finish_as, reach, run_undisturbed, short
from harness.kubectl import Kubectl, is_ready
from harness.options import Options
from harness.processes import Processes
from harness.storage import Storage
from harness.turns import AwakeSpans, has_slept, is_awake, pods_of
from rlhfless_functions.api import STAGES
from tests.prerequisites import needs_claims

pytestmark = needs_claims("no GPU is used in turns")

CLAIM = "rlhfless-default-0-0"
OPERATORS = {"app.kubernetes.io__instance": "rlhfless"}
FUNCTION_PODS = ("get", "pods", "--selector=rlhfless.io/job", "--output=name")
NOT_PREPARED = "FailedPrepareDynamicResources"
NO_DEVICES = "cannot allocate all claims"
"""The scheduler says so instead, once the kubelet has deleted the ResourceSlices of a driver that is away for 30 s."""
QUIET_SECONDS = 5.0
"""A hand-over takes less than a tenth of it."""
SLOW_STEPS: dict[str, Any] = {
    "steps": 6,
    "batch": {"promptsPerStep": 16, "samplesPerPrompt": 8, "minibatchSamples": 32, "microbatchTokens": 16384},
    "algorithm": {"epochs": 8},
}
"""A job whose pods sleep for seconds while another generates or learns: two looks at a pod and a stop between them take
as long as a whole step of a short job."""


@pytest.fixture
def driver(options: Options) -> Iterator[DraDriver]:
    """The DRA driver, which runs again afterwards."""
    if options.dra_driver is None:
        pytest.skip("RLHFLESS_E2E_DRA_DRIVER names no command that kills and starts the DRA driver")
    driver = DraDriver(options.dra_driver)
    driver.start()
    yield driver
    driver.start()


@pytest.fixture(scope="module")
def processes(kubectl: Kubectl, images: Images) -> Iterator[Processes]:
    """The processes of the namespace's pods."""
    processes = Processes(kubectl, images.operator)
    yield processes
    processes.remove()


@pytest.mark.parametrize("stage", STAGES)
def test_a_lost_pod_is_replaced_while_the_driver_of_its_claim_is_away(
    one_slot: Jobs, kubectl: Kubectl, storage: Storage, driver: DraDriver, undisturbed: str, stage: str
) -> None:
    name = f"slots-driver-in-{stage}"
    root = reach(stage, one_slot, storage, short(name, **ONE_GPU))
    driver.kill()
    lost = {pod["metadata"]["name"] for pod in pods_of(kubectl, name, stage)}
    kubectl("delete", "pods", *sorted(lost), "--grace-period=0", "--force", "--ignore-not-found", "--wait=false")

    def replaced(status: dict[str, Any]) -> bool:
        # Other pods use the claim: the kubelet has it prepared already.
        ready = {pod["metadata"]["name"] for pod in pods_of(kubectl, name, stage) if is_ready(pod)}
        return bool(ready - lost) or status.get("phase") == "Succeeded"

    one_slot.wait(name, f"another {stage} pod is ready while the driver is away", replaced, 240)
    driver.start()
    finish_as(undisturbed, one_slot, storage, name, root)


def test_pods_whose_claim_no_driver_prepares_are_told_of(
    one_slot: Jobs, kubectl: Kubectl, storage: Storage, driver: DraDriver, undisturbed: str
) -> None:
    name = "slots-without-driver"
    # While a pod of an earlier job uses the claim, the kubelet has it prepared.
    kubectl.wait_until("no pod of another job is left", lambda: not kubectl(*FUNCTION_PODS), 180)
    driver.kill()
    one_slot.apply(short(name, **ONE_GPU))

    def told(status: dict[str, Any]) -> bool:
        message = health(status).get("message", "")
        return (CLAIM in message and NOT_PREPARED in message) or NO_DEVICES in message

    status = one_slot.wait(name, "PodsHealthy says that its pods' claim is not prepared", told, 240)
    print(health(status)["message"])
    assert health(status)["status"] == "False"
    driver.start()
    one_slot.wait(name, "its pods are healthy", lambda status: health(status).get("status") == "True", 300)
    finish_as(undisturbed, one_slot, storage, name, storage.job(name))


@pytest.fixture(scope="module")
def undisturbed_slow(one_slot: Jobs, storage: Storage) -> str:
    """Checksum of the weights of a job of slow steps to which nothing happens."""
    return run_undisturbed(one_slot, storage, short("slots-undisturbed", **SLOW_STEPS, **KEPT))


@pytest.mark.parametrize("stage", STAGES)
def test_the_operator_is_killed_when_a_pod_has_slept_and_the_next_has_not_woken(
    one_slot: Jobs, kubectl: Kubectl, storage: Storage, processes: Processes, undisturbed_slow: str, stage: str
) -> None:
    """The pod that is to wake is stopped in its sleep. So the hand-over stays where it is for as long as it takes."""
    name = f"slots-between-before-{stage}"
    root = storage.job(name)
    awake = AwakeSpans(kubectl, name)
    one_slot.apply(short(name, **SLOW_STEPS, **ONE_GPU))
    operators = [pod for pod in kubectl.list("pods", **OPERATORS) if is_ready(pod)]
    next_one = stop_in_its_sleep(one_slot, kubectl, processes, name, stage)
    try:
        wait_until_all_sleep(kubectl, name, next_one)
        for operator in operators:
            processes.kill(operator)
    finally:
        processes.go_on(next_one)
    for operator in operators:
        kubectl.wait_until("the operator was killed", partial(started_again, kubectl, operator), 120)

    def ended(status: dict[str, Any]) -> bool:
        awake.look()
        return status.get("phase") == "Succeeded"

    one_slot.wait(name, "succeeded", ended, 900)
    awake.check()
    finish_as(undisturbed_slow, one_slot, storage, name, root, all_steps=SLOW_STEPS["steps"])


def stop_in_its_sleep(jobs: Jobs, kubectl: Kubectl, processes: Processes, job: str, stage: str) -> dict[str, Any]:
    """Wait until the pod of a stage was awake and sleeps again, and stop it before its next turn; that pod."""

    def stopped() -> dict[str, Any] | None:
        phase = jobs.status(job).get("phase")
        assert phase not in ("Failed", "Succeeded"), f"{job}: {phase} before its {stage} pod was stopped in its sleep"
        for pod in pods_of(kubectl, job, stage):
            if not is_ready(pod):
                continue
            processes.prepare(pod["spec"]["nodeName"])
            if not has_slept(kubectl, pod["metadata"]["name"]):
                continue
            processes.stop(pod)
            if has_slept(kubectl, pod["metadata"]["name"]):
                return pod
            # It woke in the meantime.
            processes.go_on(pod)
        return None

    return kubectl.wait_until(f"{job}: the {stage} pod sleeps after its first turn", stopped, 400)


def wait_until_all_sleep(kubectl: Kubectl, job: str, stopped: dict[str, Any]) -> None:
    """Wait until no pod of a job is awake, and stays so: the one that was stopped is the next."""
    since: float | None = None

    def quiet() -> bool:
        nonlocal since
        others = [pod["metadata"]["name"] for pod in pods_of(kubectl, job)]
        others.remove(stopped["metadata"]["name"])
        if any(is_awake(kubectl, pod) for pod in others):
            since = None
            return False
        since = since or time.monotonic()
        return time.monotonic() > since + QUIET_SECONDS

    kubectl.wait_until(f"{job}: all pods sleep, and {stopped['metadata']['name']} does not wake", quiet, 300)


def health(status: dict[str, Any]) -> dict[str, Any]:
    """The condition `PodsHealthy`; empty if there is none yet."""
    return next((each for each in status.get("conditions", []) if each["type"] == "PodsHealthy"), {})


def started_again(kubectl: Kubectl, pod: dict[str, Any]) -> bool:
    """Whether containers of a pod have been started again since it was looked at."""
    return restarts_in(kubectl.get("pod", pod["metadata"]["name"])) > restarts_in(pod)


def restarts_in(pod: dict[str, Any]) -> int:
    """How often its containers had been started again when a pod was looked at."""
    return sum(each["restartCount"] for each in pod["status"]["containerStatuses"])
