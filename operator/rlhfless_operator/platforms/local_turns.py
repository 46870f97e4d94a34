"""What is known on this machine when a turn is decided: the tasks that wait, and who has which GPUs."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from rlhfless_functions.api import Stage
from rlhfless_operator.planner.turns import SlotUse, WaitingTask
from rlhfless_operator.platforms.local_gpus import GpuAccount
from rlhfless_operator.platforms.local_process import LocalProcess

_JOB = "this one"
"""A platform of this machine has one job."""


@dataclass(frozen=True)
class Waiting:
    """A task that has no instance yet."""

    stage: Stage
    turn: asyncio.Future[LocalProcess]
    """Done once its turn has come."""


@dataclass(frozen=True)
class Situation:
    """What `take_turns` is asked."""

    tasks: Sequence[WaitingTask]
    use: SlotUse
    """Instances that would have to be started are in it under the names of their stages."""


def look(
    waiting: Mapping[int, Waiting],
    processes: Collection[LocalProcess],
    gpus: GpuAccount,
    most: Callable[[Stage], int],
) -> Situation:
    """Look at who waits and who could yield.

    The tasks of one job have their turns in their order. To prefer what is nearer to the end of the step, as among the
    jobs of a cluster, would cost a change of hands for each chunk of a batch that is prepared.

    Args:
        waiting: tasks by number.
        most: how many instances of a stage may be awake at a time for tasks that wait. Only up to so many are others
            started, or put to sleep for them.
    """
    ordered = sorted(processes, key=lambda process: process.idle_since)
    idle = [process for process in ordered if process.state == "idle"]
    asleep = [process for process in ordered if process.asleep]
    idle_names, leaving = [process.name for process in idle], [process.name for process in processes if process.leaving]
    room: dict[Stage, int] = {}
    unstarted: dict[str, Sequence[str]] = {}
    for stage in {each.stage for each in waiting.values()}:
        own = [process for process in processes if process.stage == stage]
        # Tasks take the instances without work first.
        room[stage] = most(stage) - sum(process.at_work for process in own)
        if most(stage) > sum(process.working for process in own):
            home = gpus.home_of_fresh(stage, idle_names, leaving)
            if home is not None:
                unstarted[stage] = home
    tasks = []
    for number, each in waiting.items():
        may_displace = room[each.stage] > 0
        room[each.stage] -= 1
        able = [process.name for process in idle if process.stage == each.stage]
        able += [
            process.name
            for process in asleep
            if process.stage == each.stage and (may_displace or gpus.may_wake(process.name))
        ]
        if may_displace and each.stage in unstarted:
            able.append(each.stage)
        tasks.append(WaitingTask(number, _JOB, able))
    homes: dict[str, Sequence[str]] = {**gpus.homes, **unstarted}
    jobs = dict.fromkeys(homes, _JOB)
    return Situation(tasks, SlotUse(homes, gpus.holders, jobs, set(idle_names), leaving, unstarted=unstarted))


def longest_asleep(
    own: Sequence[LocalProcess], processes: Mapping[str, LocalProcess], gpus: GpuAccount
) -> list[LocalProcess]:
    """Instances that sleep and can't wake soon, as others are at work on their GPUs; the longest asleep first.

    Args:
        own: of these.
        processes: all, by name.
    """
    at_work = {gpu for gpu, name in gpus.holders.items() if name is not None and processes[name].at_work}
    blocked = [process for process in own if process.asleep and not at_work.isdisjoint(gpus.of(process.name))]
    return sorted(blocked, key=lambda process: process.idle_since)
