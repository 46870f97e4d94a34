"""Whole jobs that run the server of their environment: it is paid for, and the job outlives it."""

from decimal import Decimal
from pathlib import Path

import psutil
import pytest

from tests.environments.openenv_server import Server
from tests.training.environment_jobs import MakeJob, finish, kill_in_mid_episode, learnt_samples
from tests.training.environment_jobs import make_job as make_job  # A fixture.
from tests.training.whole_jobs import assert_same_final_weights, folder_of, records_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SERVER = "tests.environments.openenv_server"
OPENENV = {"command": ["python", "-m", SERVER, "0.3"], "sessions": 64}


@pytest.fixture(scope="module")
def served(make_job: MakeJob) -> Path:
    file = make_job("served", 1, prices={"stages": {"environment": "36"}}, openenv=OPENENV)
    finish(file)
    return file


@pytest.fixture(scope="module")
def beside(make_job: MakeJob) -> Path:
    file = make_job("beside", 1)
    finish(file)
    return file


def test_samples_act_on_the_server_of_their_job_as_on_any_other(make_job: MakeJob, served: Path) -> None:
    assert max(len(sample.given) for sample in learnt_samples(served)) > 2
    assert {record["metrics"]["environment/ended/failed"] for record in records_of(served)} == {0}
    with Server(delay=0.3) as server:
        other = make_job("elsewhere", 1, openenv={"url": server.url})
        finish(other)
    assert_same_final_weights(served, other)


def test_its_seconds_are_in_the_ledger_with_a_price_of_their_own(served: Path) -> None:
    accounts = [record["ledger"]["environment"] for record in records_of(served)]
    assert sum(account["starting"] for account in accounts) > 0
    for account in accounts:
        assert account["busy"] > 0 == account["idle"]
        charged = account["starting"] + account["busy"]
        assert Decimal(account["cost"]) == pytest.approx(Decimal(repr(charged)) / 100, abs=Decimal("0.00001"))
    assert any('"stage": "environment"' in line or '"stage":"environment"' in line for line in _ledger(served))


def test_it_ends_with_the_run(served: Path) -> None:
    assert not [each for each in psutil.process_iter(["cmdline"]) if SERVER in (each.info["cmdline"] or [])]


@pytest.mark.nightly
@pytest.mark.parametrize("replayable", [True, False])
def test_a_server_that_is_killed_in_mid_episode_is_started_again(
    make_job: MakeJob, served: Path, replayable: bool
) -> None:
    file = make_job(f"killed-{str(replayable).lower()}", 1, openenv=OPENENV, replayable=replayable)
    kill_in_mid_episode(file, SERVER)
    failed = sum(record["metrics"]["environment/ended/failed"] for record in records_of(file))
    if replayable:
        assert failed == 0
        assert_same_final_weights(file, served)
    else:
        assert failed > 0


@pytest.mark.parametrize("disturbed", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_class_of_ones_own_has_the_same_bits_on_cpus_of_its_own(
    make_job: MakeJob, beside: Path, disturbed: bool
) -> None:
    file = make_job(f"class-{disturbed}".lower(), 1, served={})
    if disturbed:
        kill_in_mid_episode(file, "rlhfless_functions.environments.server")
    else:
        finish(file)
    assert all(record["ledger"]["environment"]["busy"] > 0 for record in records_of(file))
    assert_same_final_weights(file, beside)


def _ledger(file: Path) -> list[str]:
    return (folder_of(file) / "ledger.jsonl").read_text().splitlines()
