"""What it brings that a rollout begins on the instances which the one before is done with: by the queue that jobs use.

    python benchmarks/overlapped_rollouts.py [--steps 20] [--json FILE]

Generation takes the time of an emulated clock: lengths like GSM8K's, Qwen2.5-7B on H100s, 64 prompts × 8 samples a
step, prompts divided evenly. Nothing is moved between actors, and preparation takes no time. The learner takes a share
of the mean time of a rollout that has all instances.
"""

import argparse
import asyncio
import json
import selectors
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe_machine

from rlhfless_operator.planner.latency import LinearLatency
from rlhfless_operator.planner.loads import SampleLoad
from rlhfless_operator.planner.measured import MEASURED
from rlhfless_operator.planner.planning import Limits, plan
from rlhfless_operator.simulator.traces import LengthStatistics, generate
from rlhfless_operator.training.instance_queue import InstanceQueue, Part
from rlhfless_operator.training.staleness import last_step_begun, staleness, steps_ahead

LENGTHS = LengthStatistics(median=225, longest=2048, prompt_median=120, runaways=0.01)
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


class Unlimited:
    """As many instances as are asked for, at once."""

    async def use(self, *asked: object) -> None:
        pass


@dataclass
class Job:
    """An asynchronous job on an emulated clock: `training/rollouts_ahead.py` without what it computes."""

    rollouts: list[list[float]]
    """Seconds of each step's shares."""
    learning: float
    most: int
    overlaps: bool
    done: int = 0
    stale: list[int] = field(default_factory=list)

    async def run(self) -> None:
        """Take all steps."""
        queue = InstanceQueue("generation", Unlimited())  # type: ignore[arg-type]
        mean = float(np.mean([max(shares) for shares in self.rollouts]))
        ahead = steps_ahead(self.most, mean, self.learning)
        made: dict[int, asyncio.Task[None]] = {}
        for step in range(1, len(self.rollouts) + 1):
            for following in range(len(made) + 1, min(last_step_begun(self.done, ahead), len(self.rollouts)) + 1):
                made[following] = asyncio.create_task(self._make(queue, following, made.get(following - 1)))
            await made[step]
            await asyncio.sleep(self.learning)
            self.done = step

    async def _make(self, queue: InstanceQueue, step: int, earlier: asyncio.Task[None] | None) -> None:
        if earlier is not None and self.overlaps:
            room = asyncio.create_task(queue.room_for(step, beside=step - 1))
            await asyncio.wait({room, earlier}, return_when=asyncio.FIRST_COMPLETED)
            room.cancel()
        elif earlier is not None:
            await earlier
        self.stale.append(staleness(step, self.done))
        shares = self.rollouts[step - 1]
        left = len(shares)

        async def act(part: Part, seconds: float) -> None:
            nonlocal left
            await part.turn()
            await asyncio.sleep(seconds)
            left -= 1
            part.give()
            await part.has_left(left)

        async with queue.part(step, left) as part, asyncio.TaskGroup() as actors:
            for seconds in shares:
                actors.create_task(act(part, seconds))


def rollouts(actors: int, steps: int, latency: LinearLatency, seed: int) -> list[list[float]]:
    """[steps][actors] Seconds of each share, longest first as requests are sent."""
    trace = generate(LENGTHS, epochs=1, prompts=PROMPTS * steps, samples=SAMPLES, seed=seed)
    found = []
    for step in trace.steps(PROMPTS, np.random.default_rng(seed)):
        loads = [
            SampleLoad(prompt, index, int(trace.prompt_tokens[prompt]), float(tokens))
            for prompt, lengths in step.lengths.items()
            for index, tokens in enumerate(lengths)
        ]
        shares = plan("even", loads, latency, Limits(actors, actors)).shares
        found.append([share.expected_seconds for share in shares])
    return found


def compare(actors: int, learning_share: float, most: int, steps: int) -> dict[str, Any]:
    """One job, with rollouts that wait for each other and with those that overlap."""
    shares = rollouts(actors, steps, MEASURED["H100", "Qwen2.5-7B", 1].linear(), seed=0)
    alone = float(np.mean([max(each) for each in shares]))
    row: dict[str, Any] = {"actors": actors, "learning_share": learning_share, "max_staleness": most}
    for name, overlaps in (("whole", False), ("overlapped", True)):
        job = Job(shares, learning_share * alone, most, overlaps)
        with asyncio.Runner(loop_factory=EmulatedClock) as runner:
            runner.run(job.run())
            seconds = runner.get_loop().time()
        row[name] = {
            "step_seconds": round(seconds / steps, 3),
            "instances_busy": round(sum(map(sum, shares)) / seconds / actors, 3),
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
        kept = {"command": " ".join(["python", *sys.argv]), **describe_machine(["numpy"]), "rows": rows}
        arguments.json.write_text(json.dumps(kept, indent=2) + "\n")


if __name__ == "__main__":
    main()
