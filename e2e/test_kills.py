"""Kills in every stage: the weights are those of an undisturbed run, and no step is lost or doubled."""

from collections.abc import Iterator

import pytest

from harness.chart import Chart
from harness.jobs import KEPT, Jobs, finish_as, reach, short
from harness.kills import kill
from harness.kubectl import Kubectl
from harness.options import Options
from harness.storage import Storage
from rlhfless_functions.api import STAGES

VICTIMS = ("operator", "generation", "preparation", "learning", "activator", "api-server")


@pytest.fixture(scope="module")
def jobs(chart: Chart, kubectl: Kubectl) -> Iterator[Jobs]:
    """The jobs, nothing of which is left when all is over."""
    yield Jobs(kubectl)
    kinds = "services.serving.knative.dev,revisions.serving.knative.dev,pods,secrets"
    own = ("get", kinds, "--selector=rlhfless.io/job", "--output=name")
    kubectl.wait_until("nothing is left", lambda: not kubectl(*own), 300)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_kill_changes_nothing(
    jobs: Jobs, storage: Storage, options: Options, undisturbed: str, victim: str, stage: str
) -> None:
    if victim == "api-server" and options.kill_api_server is None:
        pytest.skip("RLHFLESS_E2E_KILL_API_SERVER names no command that kills the API server")
    name = f"kill-{victim}-in-{stage}"
    root = reach(stage, jobs, storage, short(name, **KEPT))
    kill(jobs.kubectl, options, victim, name)
    finish_as(undisturbed, jobs, storage, name, root)
