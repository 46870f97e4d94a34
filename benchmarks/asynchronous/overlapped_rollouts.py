"""Rollouts with actors of their own that begin on instances which the one before is done with, on an emulated clock.

    python benchmarks/asynchronous/overlapped_rollouts.py [--steps 20] [--json FILE]

Forecasts and simulations of asynchronous jobs take this for their generation; the actors of a job live instead
(`live_batches.py`). The queue of instances and the choice of groups are those of every job. Lengths are like GSM8K's,
for Qwen2.5-7B on H100s and 64 prompts × 8 samples a step, divided evenly. Nothing moves between actors, and preparation
takes no time. A step takes the learner a share of the mean time of a rollout that has all instances.
"""

import argparse
import asyncio
import json
import selectors
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.records import described_run, write_record
from benchmarks.shared.rehearsed_jobs import GSM8K_LENGTHS
from rlhfless_functions.api import Done, Event, PrepareResult
from rlhfless_operator.planner.groups.group_buffer import ChosenGroup, GroupBuffer, GroupName, ReadyGroup
from rlhfless_operator.planner.groups.staleness import last_step_begun, staleness, steps_ahead
from rlhfless_operator.planner.history import History
from rlhfless_operator.planner.latency.linear import InstanceProfile, LinearLatency
from rlhfless_operator.planner.latency.measured import MEASURED
from rlhfless_operator.planner.step.loads import SampleLoad
from rlhfless_operator.planner.step.planning import Limits, plan
from rlhfless_operator.simulator.asynchronous.shares_job import ends_of_shares
from rlhfless_operator.simulator.asynchronous.work import Group, ShareEnds
from rlhfless_operator.simulator.traces import generate
from rlhfless_operator.training.actors.generated import CompleteGroup
from rlhfless_operator.training.instances.instance_queue import InstanceQueue, Part
from rlhfless_operator.training.stages.preparation import PreparationOutcome, prepare

PROMPTS, SAMPLES = 64, 8


class EmulatedClock(asyncio.SelectorEventLoop):
    """An event loop without real waiting: its time jumps to the next event."""

    def __init__(self) -> None:
        super().__init__(selector := selectors.DefaultSelector())
        self._now = 0.0
        select = selector.select

        def jump(timeout: float | None = None) -> Any:
            self._now += timeout or 0.0
            return select(0)

        selector.select = jump  # type: ignore[method-assign]

    def time(self) -> float:
        return self._now


class RolloutQueue(InstanceQueue):
    """Instances, and the rollouts that have begun on them."""

    def __init__(self) -> None:
        super().__init__("generation", Unlimited())  # type: ignore[arg-type]
        self.newest = 0
        self._changed = asyncio.Event()

    def deal(self) -> None:
        super().deal()
        self._changed.set()

    async def room_beside(self, rollout: int) -> None:
        """Wait until a rollout is under way, and an instance is free for the next one."""
        while self.newest < rollout or not self._instances.has_room:
            self._changed.clear()
            await self._changed.wait()


class Unlimited:
    """As many instances as are asked for, at once."""

    async def use(self, *asked: object) -> None:
        pass


@dataclass
class Preparing:
    """A platform whose instances prepare a group in so many seconds."""

    seconds: float

    async def run(self, chunk: Sequence[CompleteGroup]) -> AsyncGenerator[Event, None]:
        """Prepare groups."""
        await asyncio.sleep(self.seconds * len(chunk))
        groups = [{"prompt": group.prompt, "reward": None, "spread": 1.0} for group in chunk]
        yield Done(result={"part": "any", "groups": groups, "metrics": {}})


@dataclass
class Job:
    """An asynchronous job on an emulated clock: `training/asynchronous/rollouts_ahead.py` without what it computes.

    Which groups a step takes, which rollouts may begin, who has an instance and how groups are cut into chunks for
    preparation is decided by the code that jobs use.
    """

    rollouts: Sequence[Sequence[ShareEnds]]
    """[rollouts][actors] When the responses of each share end."""
    learning: float
    """Seconds of a step."""
    most: int
    overlaps: bool = True
    steps: int | None = None
    """Of the job; as many as rollouts if left out."""
    preparation: float = 0.0
    """Seconds of a group."""
    preparers: int = 1
    done: int = 0
    taken: list[list[ChosenGroup]] = field(default_factory=list)
    """Groups of each step."""

    def __post_init__(self) -> None:
        groups = {number for share in self.rollouts[0] for _, number in share}
        self.buffer = GroupBuffer(len(groups), self.most)
        self._generators = RolloutQueue()
        self._preparers = InstanceQueue("preparation", Unlimited())  # type: ignore[arg-type]
        self._history = History()
        self._made: dict[int, asyncio.Task[None]] = {}
        self._begun = 0
        self._changed = asyncio.Event()

    @property
    def stale(self) -> list[int]:
        """Staleness of each group that was learnt from."""
        return [staleness(step, each.group.version) for step, chosen in enumerate(self.taken, 1) for each in chosen]

    async def run(self) -> None:
        """Take all steps."""
        self._begin_more()
        for step in range(1, (self.steps or len(self.rollouts)) + 1):
            self.taken.append(chosen := await self._choose(step))
            self.buffer.taken([each.group.name for each in chosen])
            await asyncio.sleep(self.learning)
            self._history.add("learning", self.learning)
            self.done = step
            self._begin_more()
        for task in self._made.values():
            task.cancel()
        await asyncio.gather(*self._made.values(), return_exceptions=True)

    async def _choose(self, step: int) -> list[ChosenGroup]:
        while not (chosen := self.buffer.choose(step)):
            self._begin_more()
            self._changed.clear()
            await self._changed.wait()
        return chosen

    def _begin_more(self) -> None:
        history, size = self._history, self.buffer.size
        ahead = steps_ahead(self.most, history.mean("rollout"), history.mean("learning"))
        ahead = last_step_begun(self.done, ahead) - self.done - 1
        while len(self._made) < len(self.rollouts):
            waiting = (len(self._made) - self._begun) * size
            if not self.buffer.admits(waiting + size, self.done, ahead):
                break
            number = len(self._made) + 1
            self._made[number] = asyncio.create_task(self._make(number, self._made.get(number - 1)))

    async def _make(self, number: int, earlier: asyncio.Task[None] | None) -> None:
        if earlier is not None and self.overlaps:
            room = asyncio.create_task(self._generators.room_beside(number - 1))
            await asyncio.wait({room, earlier}, return_when=asyncio.FIRST_COMPLETED)
            room.cancel()
        elif earlier is not None:
            await earlier
        shares, begin, version = self.rollouts[number - 1], asyncio.get_running_loop().time(), self.done
        self._begun = number
        groups = {group for share in shares for _, group in share}
        self.buffer.begin(number, groups, version)

        async def prepared(result: PrepareResult) -> None:
            for group in result.groups:
                self.buffer.complete(ReadyGroup(GroupName(number, group.prompt), version, result.part))
            self._changed.set()

        async with (
            self._generators.part(number, len(shares)) as generators,
            self._preparers.part(number, self.preparers) as preparers,
        ):
            self._generators.newest = number
            self._generators.deal()
            await prepare(
                Preparing(self.preparation),  # type: ignore[arg-type]
                self._generate(shares, generators),
                len(groups),
                lambda part, chunk, attempt: chunk,  # type: ignore[arg-type, return-value]
                PreparationOutcome(),
                instances=preparers,
                driver=1,
                retries=0,
                on_prepared=prepared,
            )
        self._history.add("rollout", asyncio.get_running_loop().time() - begin)
        # How far ahead rollouts begin depends on it: a step that waits looks again.
        self._changed.set()

    async def _generate(self, shares: Sequence[ShareEnds], part: Part) -> AsyncGenerator[CompleteGroup, None]:
        """Each group when its last response has ended."""
        complete: asyncio.Queue[int | None] = asyncio.Queue()
        unfinished = Counter(number for share in shares for _, number in share)
        left = len(shares)

        async def act(share: ShareEnds) -> None:
            nonlocal left
            await part.turn()
            passed = 0.0
            for seconds, number in share:
                await asyncio.sleep(seconds - passed)
                passed = seconds
                unfinished[number] -= 1
                if not unfinished[number]:
                    complete.put_nowait(number)
            left -= 1
            part.give(left)
            await part.has_left(left)

        async def generate() -> None:
            try:
                await asyncio.gather(*map(act, shares))
            finally:
                complete.put_nowait(None)

        generating = asyncio.create_task(generate())
        while (number := await complete.get()) is not None:
            yield CompleteGroup(number, [], [], [])
        await generating


def rollouts(actors: int, steps: int, latency: LinearLatency, seed: int) -> list[list[ShareEnds]]:
    """[steps][actors] When the responses of each share end, longest first as requests are sent."""
    profile = InstanceProfile(latency, 1, 2**53, 0.0, 0.0)
    trace = generate(GSM8K_LENGTHS, epochs=1, prompts=PROMPTS * steps, samples=SAMPLES, seed=seed)
    found = []
    for step in trace.steps(PROMPTS, np.random.default_rng(seed)):
        groups = [
            Group(prompt, prompt, int(trace.prompt_tokens[prompt]), tuple(lengths))
            for prompt, lengths in step.lengths.items()
        ]
        loads = [
            SampleLoad(group.number, index, group.prompt_tokens, float(tokens))
            for group in groups
            for index, tokens in enumerate(group.lengths)
        ]
        shares = plan("even", loads, latency, Limits(actors, actors)).shares
        found.append(ends_of_shares(shares, groups, profile, len(loads)))
    return found


def compare(actors: int, learning_share: float, most: int, steps: int) -> dict[str, Any]:
    """One job, with rollouts that wait for each other and with those that overlap."""
    shares = rollouts(actors, steps, MEASURED["H100", "Qwen2.5-7B", 1].linear(), seed=0)
    seconds_of = [[share[-1][0] for share in each] for each in shares]
    alone = float(np.mean([max(each) for each in seconds_of]))
    row: dict[str, Any] = {"actors": actors, "learning_share": learning_share, "max_staleness": most}
    for name, overlaps in (("whole", False), ("overlapped", True)):
        job = Job(shares, learning_share * alone, most, overlaps)
        with asyncio.Runner(loop_factory=EmulatedClock) as runner:
            runner.run(job.run())
            seconds = runner.get_loop().time()
        row[name] = {
            "step_seconds": round(seconds / steps, 3),
            "instances_busy": round(sum(map(sum, seconds_of)) / seconds / actors, 3),
            "staleness": round(float(np.mean(job.stale)), 2),
        }
    row["faster"] = round(row["whole"]["step_seconds"] / row["overlapped"]["step_seconds"], 3)
    return row


def main() -> None:
    """Compare, print a table, and keep it where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [
        compare(actors, learning_share, most, arguments.steps)
        for actors in (2, 4, 8, 16)
        for learning_share in (0.3, 0.6, 1.0)
        for most in (1, 2)
    ]
    for row in rows:
        print(json.dumps(row))
    if arguments.json:
        write_record({**described_run(["numpy"]), "rows": rows}, arguments.json)


if __name__ == "__main__":
    main()
