"""Whole jobs whose environment is a server of OpenEnv: kills of either side change no bit of the weights."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.environments.openenv_server import Server
from tests.training.environment_jobs import (
    MakeJob,
    disturb_in_mid_episode,
    finish,
    kill_in_mid_episode,
    learnt_samples,
)
from tests.training.environment_jobs import make_job as make_job  # A fixture.
from tests.training.whole_jobs import assert_same_final_weights, records_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(delay=0.3) as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(make_job: MakeJob, server: Server) -> Path:
    file = make_job("undisturbed", 1, openenv={"url": server.url})
    finish(file)
    return file


def test_samples_act_on_the_server(undisturbed: Path, server: Server) -> None:
    samples = learnt_samples(undisturbed)
    assert len(samples) == 2 * 4 * 3 <= len(server.begun)
    assert max(len(sample.given) for sample in samples) > 2
    assert {"seed", "prompt", "start", "ground_truth"} <= server.begun[0].keys()


@pytest.mark.parametrize(
    "victim", ["generation-", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("driver", "server"))]
)
def test_a_kill_in_mid_episode_changes_nothing(
    make_job: MakeJob, undisturbed: Path, server: Server, victim: str
) -> None:
    file = make_job(f"killed-{victim.strip('-')}", 1, openenv={"url": server.url})

    def restart(driver: int) -> bool:
        server.stop()
        server.start()
        return True

    if victim == "server":
        disturb_in_mid_episode(file, restart)
    else:
        kill_in_mid_episode(file, victim)
    assert_same_final_weights(file, undisturbed)
    assert sum(record["metrics"]["environment/restarted"] for record in records_of(file)) == 0
