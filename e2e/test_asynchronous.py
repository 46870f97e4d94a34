"""An asynchronous job loses its operator, its pods and Knative's proxies: no group is lost or learnt from twice."""

from collections.abc import Iterator
from typing import Any

import pytest

from harness.audit import Replayer, prompts_of, switched_responses
from harness.chart import Chart
from harness.jobs import Jobs, short, steps_of
from harness.kills import kill
from harness.kubectl import Kubectl
from harness.options import Options
from harness.storage import Storage

VICTIMS = ("operator", "generation", "preparation", "learning", "activator", "queue-proxy")
STEPS = len(VICTIMS) + 3
STALENESS = 1
AHEAD: dict[str, Any] = {
    "async": {"maxStaleness": STALENESS},
    "checkpoints": {"keepRollouts": True, "everySteps": 2},
    "generation": {"instances": {"min": 2, "max": 2}, "keepAlive": "5m"},
    # There is a pod of each stage to kill at any time.
    "preparation": {"keepAlive": "5m"},
    "learning": {"keepAlive": "5m"},
}


@pytest.fixture
def jobs(chart: Chart, kubectl: Kubectl) -> Iterator[Jobs]:
    """The jobs."""
    yield Jobs(kubectl)
    names = ("ahead", "ahead-undisturbed", "switching")
    kubectl("delete", "rlhfjobs", *names, "--ignore-not-found", "--timeout=120s")


def test_whatever_is_killed_no_group_is_lost_or_doubled_and_the_replay_has_the_weights(
    jobs: Jobs, kubectl: Kubectl, storage: Storage, options: Options, replayer: Replayer
) -> None:
    jobs.apply(short("ahead-undisturbed", steps=STEPS, **AHEAD))
    jobs.wait_succeeded("ahead-undisturbed", 900)
    wanted = prompts_of(storage, storage.job("ahead-undisturbed"), steps=STEPS, staleness=STALENESS)

    jobs.apply(short("ahead", steps=STEPS, **AHEAD))
    victims = [victim for victim in VICTIMS if victim != "queue-proxy" or options.kill_queue_proxies is not None]
    for done, victim in enumerate(victims, start=1):
        jobs.wait("ahead", f"step {done} is done", lambda status, done=done: status.get("step", 0) >= done, 600)
        if victim not in ("operator", "activator", "queue-proxy"):
            labels = {"rlhfless.io__job": "ahead", "rlhfless.io__stage": victim}
            kubectl.wait_until(f"a pod of {victim}", lambda labels=labels: kubectl.list("pods", **labels), 300)
        assert jobs.status("ahead").get("phase") != "Succeeded", f"it was over before {victim} was killed"
        kill(kubectl, options, victim, "ahead")
    status = jobs.wait_succeeded("ahead", 1200)
    assert status["step"] == STEPS
    assert status["driver"]["lease"] >= 2, "another operator went on"
    assert steps_of(storage, storage.job("ahead")) == list(range(1, STEPS + 1))
    taught = prompts_of(storage, storage.job("ahead"), steps=STEPS, staleness=STALENESS)
    assert taught == wanted, "the groups are those of a run to which nothing happened"
    assert "the same weights bit for bit" in replayer.replay(storage.job("ahead"))


def test_responses_that_go_on_with_newer_weights_are_whole_and_the_replay_has_the_weights(
    jobs: Jobs, kubectl: Kubectl, storage: Storage, options: Options, replayer: Replayer
) -> None:
    root = storage.job("switching")
    # Actors that decode for long, beside a learner that is quick, meet newer weights.
    changes = {"async": {"maxStaleness": 2, "newWeights": "switch"}, "sampling": {"maxResponseTokens": 384}}
    jobs.apply(short("switching", steps=STEPS, **{**AHEAD, **changes}))
    for done, victim in enumerate(("generation", "operator", "generation", "learning"), start=1):
        jobs.wait("switching", f"step {done} is done", lambda status, done=done: status.get("step", 0) >= done, 600)
        kill(kubectl, options, victim, "switching")
    assert jobs.wait_succeeded("switching", 1200)["step"] == STEPS
    assert steps_of(storage, root) == list(range(1, STEPS + 1))
    prompts_of(storage, root, steps=STEPS, staleness=2, switches=True)
    assert max(switched_responses(storage, root)) > 0, "newer weights went on with some response"
    assert "the same weights bit for bit" in replayer.replay(root)
