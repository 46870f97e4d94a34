"""The input of a decision about turns on this machine: the waiting tasks, and the holders of GPUs."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from rlhfless_functions.api import Stage
from rlhfless_operator.planner.pools.turns import SlotUse, WaitingTask
from rlhfless_operator.platforms.local.gpus import GpuAccount
from rlhfless_operator.platforms.local.process import LocalProcess

_JOB = "this one"
"""A local platform has one job."""


@dataclass(frozen=True)
class UnplacedTask:
    """A task without an instance."""

    stage: Stage
    part: tuple[int, str]
    """Its step and part."""
    turn: asyncio.Future[LocalProcess]
    """Done once its turn has come."""
    spare: bool = False
    """Whether it takes only GPUs that no other task wants."""


def look(
    waiting: Mapping[int, UnplacedTask],
    processes: Collection[LocalProcess],
    gpus: GpuAccount,
    most: Callable[[Stage], int],
) -> tuple[Sequence[WaitingTask], SlotUse]:
    """Collect the waiting tasks, and the instances that could yield.

    The tasks of one job get their turns in their order. Preferring tasks that are closer to the end of the step, as
    among the jobs of a cluster, would cost a change of hands for each chunk of a batch that is prepared.

    They are the arguments of `take_turns`. In the use of slots, instances that would have to start have the names of
    their stages.

    Args:
        waiting: tasks by number.
        most: most instances of a stage that may be awake for waiting tasks. The limit also applies to starting
            instances and to putting others to sleep for them.
    """
    ordered = sorted(processes, key=lambda process: process.idle_since)
    idle = [process for process in ordered if process.state == "idle"]
    asleep = [process for process in ordered if process.asleep]
    idle_names, leaving = [process.name for process in idle], [process.name for process in processes if process.leaving]
    room: dict[Stage, int] = {}
    unstarted: dict[str, Sequence[str]] = {}
    for stage in {each.stage for each in waiting.values()}:
        own = [process for process in processes if process.stage == stage]
        # Tasks take idle instances first.
        room[stage] = most(stage) - sum(process.at_work for process in own)
        # A learner's state is in its memory.
        keeps_state = stage == "learning" and any(process.asleep for process in own)
        if most(stage) > sum(process.working for process in own) and not keeps_state:
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
        last = [process.name for process in idle if (process.stage, process.last_part) == (each.stage, each.part)]
        tasks.append(WaitingTask(number, _JOB, able, spare=each.spare, last="".join(last[-1:])))
    homes: dict[str, Sequence[str]] = {**gpus.homes, **unstarted}
    jobs = dict.fromkeys(homes, _JOB)
    return tasks, SlotUse(homes, gpus.holders, jobs, set(idle_names), leaving, unstarted=unstarted)


def longest_asleep(
    own: Sequence[LocalProcess], processes: Mapping[str, LocalProcess], gpus: GpuAccount
) -> list[LocalProcess]:
    """Return the sleeping instances that can't wake soon, because others work on their GPUs; the longest asleep first.

    Args:
        own: the instances to choose from.
        processes: all instances, by name.
    """
    at_work = {gpu for gpu, name in gpus.holders.items() if name is not None and processes[name].at_work}
    blocked = [process for process in own if process.asleep and not at_work.isdisjoint(gpus.of(process.name))]
    return sorted(blocked, key=lambda process: process.idle_since)
