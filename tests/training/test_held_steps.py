"""Jobs whose plans hold the instances of all stages for whole steps: what comes out is what others make."""

import pytest

from rlhfless_operator.planner.step.holding import StagesHolding
from rlhfless_operator.platforms.base import StateChange
from rlhfless_operator.training.journal.ledger import Ledger
from tests.processes import named
from tests.training.whole_jobs import MakeJob, assert_same_final_weights, records_of, run_job, status_of

pytestmark = pytest.mark.usefixtures("warm_start", "nothing_is_left_behind")

STEPS = 4


class Held:
    """Has every plan hold, from the second step on; counts the instances that start, and kills some that stand idle."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, kills: tuple[str, ...] = ()) -> None:
        self.started: list[str] = []
        self._worked: set[str] = set()
        self._to_kill = set(kills)
        observe = Ledger.observe

        def listen(ledger: Ledger, change: StateChange) -> None:
            observe(ledger, change)
            if change.state == "starting":
                self.started.append(change.stage)
            elif change.state == "busy":
                self._worked.add(change.instance)
            elif change.state == "idle" and change.instance in self._worked and self.started.count("learning") > 0:
                self._may_kill(change)

        monkeypatch.setattr(Ledger, "observe", listen)
        monkeypatch.setattr(StagesHolding, "stay", lambda holding, seconds, *counts: (seconds / 2, 1e-3))

    def _may_kill(self, change: StateChange) -> None:
        if change.stage in self._to_kill:
            self._to_kill.remove(change.stage)
            for process in named(change.instance):
                process.kill()


@pytest.mark.slow
def test_instances_that_stay_make_the_weights_of_those_that_come_and_go_and_are_started_once(
    tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes = tiny_job("goes", steps=STEPS, planning={"policy": "cost"})
    run_job(goes)
    stays = tiny_job("stays", steps=STEPS, planning={"policy": "cost"})
    with monkeypatch.context() as patched:
        held = Held(patched)
        run_job(stays)
    assert_same_final_weights(stays, goes)
    records = records_of(stays)
    assert [record["plan"]["holds"] for record in records] == [False, False, True, True]
    assert all("GPU-seconds of generation" in record["plan"]["holds_reason"] for record in records[2:])
    assert status_of(stays)["holding"] == records[-1]["plan"]["holds_reason"]
    actors = [record["plan"]["actors"] for record in records]
    assert held.started.count("learning") <= 3
    assert held.started.count("generation") <= actors[0] + actors[1] + max(actors[2:])
    assert not any("seconds/load" in record["metrics"] for record in records[3:]), "the learner has stayed"


@pytest.mark.nightly
def test_held_instances_that_are_lost_while_they_stand_idle_are_replaced(
    tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = tiny_job("undisturbed", steps=STEPS, planning={"policy": "cost"})
    run_job(undisturbed)
    killed = tiny_job("killed", steps=STEPS, planning={"policy": "cost"})
    with monkeypatch.context() as patched:
        held = Held(patched, kills=("generation", "preparation", "learning"))
        run_job(killed)
    assert not held._to_kill
    assert_same_final_weights(killed, undisturbed)
