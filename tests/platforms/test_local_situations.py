"""What a turn on this machine is decided from, and what is decided: no processes, only what is known of them."""

import asyncio
from collections.abc import Sequence

from rlhfless_functions.api import Stage
from rlhfless_operator.planner.pools.turns import Turns, take_turns
from rlhfless_operator.platforms.base import InstanceState
from rlhfless_operator.platforms.local.gpus import GpuAccount
from rlhfless_operator.platforms.local.process import LocalProcess
from rlhfless_operator.platforms.local.turns import UnplacedTask, longest_asleep, look

EACH: dict[Stage, int] = {"generation": 1, "preparation": 1, "learning": 2}


class Machine:
    """GPUs, and instances that have them."""

    def __init__(self, *gpus: str) -> None:
        self.gpus = GpuAccount(gpus, EACH)
        self.processes: dict[str, LocalProcess] = {}

    def has(self, name: str, state: InstanceState, *home: str, last: str = "") -> LocalProcess:
        """An instance in a state. The ones that are named first are idle, or asleep, for longer."""
        stage: Stage = name.split("-")[0]  # type: ignore[assignment]
        process = LocalProcess(name, stage, state, last_part=(1, last), idle_since=float(len(self.processes)))
        self.processes[name] = process
        self.gpus.place(name, home)
        if state != "asleep":
            assert self.gpus.wake(name)
        return process

    def turns(self, waiting: Sequence[Stage], most: int = 1) -> Turns:
        """What is decided for tasks that wait, numbered from 0."""
        loop = asyncio.new_event_loop()
        tasks = {
            number: UnplacedTask(stage, (1, f"part-{number}"), loop.create_future())
            for number, stage in enumerate(waiting)
        }
        loop.close()
        return take_turns(*look(tasks, list(self.processes.values()), self.gpus, lambda stage: most))


def test_tasks_of_a_job_have_their_turns_in_their_order() -> None:
    machine = Machine("0", "1")
    machine.has("generation-1", "idle", "0")
    machine.has("preparation-2", "asleep", "0")
    assert machine.turns(["generation", "preparation"]).granted == {0: "generation-1", 1: "preparation"}
    assert machine.turns(["preparation", "generation"]).sleeps == ["generation-1"]


def test_one_that_sleeps_wakes_before_another_one_starts() -> None:
    machine = Machine("0", "1")
    machine.has("preparation-1", "idle", "0")
    machine.has("generation-2", "asleep", "0")
    turns = machine.turns(["generation"])
    assert (turns.granted, turns.sleeps) == ({}, ["preparation-1"]), "though GPU 1 is free"


def test_no_learner_starts_elsewhere_while_one_with_its_state_sleeps() -> None:
    machine = Machine("0", "1")
    machine.has("generation-1", "busy", "0")
    machine.has("learning-2", "asleep", "0")
    assert machine.turns(["learning"]).granted == {}


def test_one_starts_elsewhere_where_those_that_sleep_would_wait_for_long_and_one_of_these_ends() -> None:
    machine = Machine("0", "1")
    machine.has("preparation-1", "busy", "0")
    asleep = machine.has("generation-2", "asleep", "0")
    other = machine.has("generation-3", "asleep", "1")
    assert machine.turns(["generation"]).granted == {0: "generation-3"}
    del machine.processes["generation-3"]
    machine.gpus.leave("generation-3")
    assert machine.turns(["generation"]).granted == {0: "generation"}, "one that has to be started"
    assert longest_asleep([asleep, other], machine.processes, machine.gpus) == [asleep]


def test_no_more_wake_or_start_than_are_wanted() -> None:
    machine = Machine("0", "1", "2")
    machine.has("generation-1", "busy", "0")
    machine.has("generation-2", "asleep", "1")
    machine.has("preparation-3", "idle", "1")
    assert machine.turns(["generation"]).sleeps == []
    assert machine.turns(["generation"], most=2).sleeps == ["preparation-3"]
    assert machine.turns(["generation", "generation"], most=2).granted == {}
    assert machine.turns(["generation", "generation"], most=3).granted == {1: "generation"}


def test_those_without_work_count_for_the_tasks_that_take_them() -> None:
    machine = Machine("0", "1")
    machine.has("generation-1", "idle", "0")
    assert machine.turns(["generation", "generation"], most=2).granted == {0: "generation-1", 1: "generation"}


def test_one_that_sleeps_wakes_on_gpus_that_nobody_uses_however_many_are_wanted() -> None:
    machine = Machine("0", "1")
    machine.has("generation-1", "busy", "0")
    machine.has("generation-2", "asleep", "1")
    assert machine.turns(["generation"]).granted == {0: "generation-2"}


def test_a_learner_of_two_gpus_keeps_what_it_can_have_from_those_that_came_later() -> None:
    machine = Machine("0", "1")
    machine.has("generation-1", "busy", "0")
    machine.has("learning-2", "asleep", "0", "1")
    assert machine.turns(["learning", "preparation"]).granted == {}
    assert machine.turns(["preparation", "learning"]).granted == {0: "preparation"}


def test_nobody_is_told_to_sleep_twice() -> None:
    machine = Machine("0")
    machine.has("generation-1", "switching", "0").falling_asleep = True
    turns = machine.turns(["preparation"])
    assert (turns.granted, turns.sleeps) == ({}, [])


def test_without_gpus_every_task_has_an_instance_at_once() -> None:
    machine = Machine()
    machine.has("generation-1", "idle")
    turns = machine.turns(["generation", "preparation"])
    assert (turns.granted, turns.sleeps) == ({0: "generation-1", 1: "preparation"}, [])


def test_a_task_goes_on_where_its_part_was_done_before_if_that_instance_is_idle() -> None:
    for gpus in ((), ("0", "1", "2")):
        machine = Machine(*gpus)
        machine.has("generation-1", "idle", *gpus[:1])
        machine.has("generation-2", "idle", *gpus[1:2], last="part-0")
        machine.has("preparation-3", "asleep", *gpus[1:2], last="part-0")
        assert machine.turns(["generation"]).granted == {0: "generation-2"}, "though the other is idle for longer"
        assert machine.turns(["generation"] * 2).granted == {0: "generation-2", 1: "generation-1"}
    machine = Machine("0", "1")
    machine.has("generation-1", "idle", "0")
    machine.has("generation-2", "asleep", "1", last="part-0")
    assert machine.turns(["generation"]).granted == {0: "generation-1"}, "one that sleeps has kept nothing"
