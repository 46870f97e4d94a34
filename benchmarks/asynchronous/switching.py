"""Asynchronous jobs whose responses go on with newer weights (`async.newWeights: switch`), on an emulated clock.

    python benchmarks/asynchronous/switching.py [--steps 20] [--json FILE]

The clock, the queue and the model are those of `overlapped_rollouts.py`: Qwen2.5-7B on H100s, 64 prompts × 8 samples a
step. Lengths are like GSM8K's, or eight times as long. Three rules cut an actor: the one of jobs, which is told how
long each response will be, the same with a larger share, and always. A switch costs half a second, loading 15 GB at 4
GB/s, and the prefill of the contexts.
"""

import argparse
import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.asynchronous.overlapped_rollouts import PROMPTS, SAMPLES, EmulatedClock, Unlimited
from benchmarks.shared.records import described_run, write_record
from benchmarks.shared.rehearsed_jobs import GSM8K_LENGTHS
from rlhfless_operator.planner.groups.staleness import last_step_begun, staleness, steps_ahead
from rlhfless_operator.planner.latency.linear import LinearLatency
from rlhfless_operator.planner.latency.measured import MEASURED
from rlhfless_operator.planner.moves.migration import Actor, Unfinished
from rlhfless_operator.planner.moves.switching import COST_SHARE, is_worth_switching
from rlhfless_operator.planner.step.loads import SampleLoad
from rlhfless_operator.planner.step.planning import Limits, plan
from rlhfless_operator.simulator.traces import LengthStatistics, generate
from rlhfless_operator.training.instances.instance_queue import InstanceQueue, Part

PAUSE_SECONDS = 0.5 + 15.2 / 4
POLICIES = {"finish": 0.0, "switch": COST_SHARE, "switch at a quarter": 0.25, "always switch": math.inf}
WORKLOADS = {
    "2,048 tokens": GSM8K_LENGTHS,
    "16,384 tokens": replace(GSM8K_LENGTHS, median=8 * GSM8K_LENGTHS.median, longest=8 * GSM8K_LENGTHS.longest),
}


class Share:
    """An actor's samples, and when it has come to which decode step.

    Args:
        loads: its samples, with the lengths that they will have.
        latency: of its instance.
    """

    def __init__(self, loads: Sequence[SampleLoad], latency: LinearLatency) -> None:
        self._latency = latency
        self.prompts = np.array([load.prompt_tokens for load in loads])
        self.lengths = np.array([int(load.expected_tokens) for load in loads])
        rounds = np.arange(self.lengths.max())
        running = self.lengths[:, None] > rounds
        contexts = ((self.prompts[:, None] + rounds) * running).sum(0)
        # A group's prompt is computed once.
        prompts = sum({load.prompt: load.prompt_tokens for load in loads}.values())
        seconds = latency.round_seconds(running.sum(0).astype(float), contexts.astype(float))
        self.ends = latency.prefill_token_seconds * prompts + np.cumsum(seconds)
        """[decode steps] Seconds after its beginning at which each ends."""

    def tokens(self, rounds: int) -> int:
        """Response tokens that its samples have after so many decode steps."""
        return int(np.minimum(self.lengths, rounds).sum())

    def left(self, rounds: int) -> Actor:
        """What it holds after so many decode steps."""
        held = [
            Unfinished(int(prompt), rounds, float(length - rounds))
            for prompt, length in zip(self.prompts, self.lengths, strict=True)
            if length > rounds
        ]
        return Actor("actor", {(0, index): sample for index, sample in enumerate(held)})

    def switch_seconds(self, rounds: int, cost_share: float) -> float | None:
        """What a switch takes after so many decode steps; None where the rule is against it."""
        actor = self.left(rounds)
        if not is_worth_switching(actor, self._latency, PAUSE_SECONDS, cost_share=cost_share):
            return None
        return PAUSE_SECONDS + self._latency.prefill_token_seconds * actor.context


@dataclass
class Job:
    """An asynchronous job as in `training/asynchronous/rollouts_ahead.py`, which computes nothing."""

    rollouts: list[list[Share]]
    learning: float
    most: int
    cost_share: float
    """Most of the time left that a switch may cost; 0 for `finish`."""
    done: int = 0
    cuts: int = 0
    stale_tokens: int = 0
    switched: int = 0
    oldest: list[int] = field(default_factory=list)
    published: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Take all steps."""
        queue = InstanceQueue("generation", Unlimited())  # type: ignore[arg-type]
        mean = float(np.mean([max(share.ends[-1] for share in shares) for shares in self.rollouts]))
        ahead = steps_ahead(self.most, mean, self.learning)
        made: dict[int, asyncio.Task[None]] = {}
        for step in range(1, len(self.rollouts) + 1):
            for following in range(len(made) + 1, min(last_step_begun(self.done, ahead), len(self.rollouts)) + 1):
                made[following] = asyncio.create_task(self._make(queue, following, made.get(following - 1)))
            await made[step]
            await asyncio.sleep(self.learning)
            self.done = step
            self.published.set()
            self.published = asyncio.Event()

    async def _make(self, queue: InstanceQueue, step: int, earlier: asyncio.Task[None] | None) -> None:
        if earlier is not None:
            room = asyncio.create_task(queue.room_for(step, beside=step - 1))
            await asyncio.wait({room, earlier}, return_when=asyncio.FIRST_COMPLETED)
            room.cancel()
        begun, shares = self.done, self.rollouts[step - 1]
        left = len(shares)
        oldest = []

        async def act(part: Part, share: Share) -> None:
            nonlocal left
            await part.turn()
            version = self.done if self.cost_share else begun
            oldest.append(version)
            await self._decode(step, share, version)
            left -= 1
            part.give()
            await part.has_left(left)

        async with queue.part(step, left) as part, asyncio.TaskGroup() as actors:
            for share in shares:
                actors.create_task(act(part, share))
        self.oldest.append(staleness(step, min(oldest)))

    async def _decode(self, step: int, share: Share, version: int) -> None:
        clock = asyncio.get_running_loop().time
        began, rounds = clock(), 0
        while (rest := began + float(share.ends[-1]) - clock()) > 1e-9:
            waiting = asyncio.create_task(self.published.wait())
            await asyncio.wait({waiting}, timeout=rest)
            waiting.cancel()
            now = int(np.searchsorted(share.ends, clock() - began, side="right"))
            if not self.cost_share or self.done == version or now >= len(share.ends):
                continue
            if (cost := share.switch_seconds(now, self.cost_share)) is not None:
                self.stale_tokens += staleness(step, version) * (share.tokens(now) - share.tokens(rounds))
                if not rounds:
                    self.switched += int((share.lengths > now).sum()) if now else 0
                self.cuts += 1
                version, rounds = self.done, now
                await asyncio.sleep(cost)
                began += cost
        self.stale_tokens += staleness(step, version) * (share.tokens(len(share.ends)) - share.tokens(rounds))


def rollouts(lengths: LengthStatistics, actors: int, steps: int, latency: LinearLatency) -> list[list[Share]]:
    """[steps][actors] What each actor is given."""
    trace = generate(lengths, epochs=1, prompts=PROMPTS * steps, samples=SAMPLES, seed=0)
    found = []
    for step in trace.steps(PROMPTS, np.random.default_rng(0)):
        loads = [
            SampleLoad(prompt, index, int(trace.prompt_tokens[prompt]), float(tokens))
            for prompt, responses in step.lengths.items()
            for index, tokens in enumerate(responses)
        ]
        shares = plan("even", loads, latency, Limits(actors, actors)).shares
        found.append([Share(share.samples, latency) for share in shares])
    return found


def compare(workload: str, actors: int, learning_share: float, most: int, steps: int) -> dict[str, Any]:
    """One job with `finish`, and with `switch` where a switch may cost different shares of the time left."""
    latency = MEASURED["H100", "Qwen2.5-7B", 1].linear()
    row: dict[str, Any] = {"longest": workload, "actors": actors, "learning_share": learning_share}
    row["max_staleness"] = most
    for name, cost_share in POLICIES.items():
        shares = rollouts(WORKLOADS[workload], actors, steps, latency)
        alone = float(np.mean([max(share.ends[-1] for share in each) for each in shares]))
        job = Job(shares, learning_share * alone, most, cost_share)
        with asyncio.Runner(loop_factory=EmulatedClock) as runner:
            runner.run(job.run())
            seconds = runner.get_loop().time()
        tokens = sum(share.tokens(len(share.ends)) for each in shares for share in each)
        row["rollout_seconds"] = round(alone, 1)
        row[name] = {
            "step_seconds": round(seconds / steps, 2),
            "slower": round(seconds / steps / row["finish"]["step_seconds"], 3) if name != "finish" else 1.0,
            "staleness": round(float(np.mean(job.oldest)), 2),
            "token_staleness": round(job.stale_tokens / tokens, 2),
            "switches_a_step": round(job.cuts / steps, 2),
            "switched_responses": round(job.switched / steps / PROMPTS / SAMPLES, 3),
        }
    return row


def main() -> None:
    """Compare, print a table, and keep it where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [
        compare(workload, actors, learning_share, most, arguments.steps)
        for workload in WORKLOADS
        for actors in (8, 16)
        for learning_share in (0.3, 0.6, 1.0)
        for most in (1, 2)
    ]
    for row in rows:
        print(json.dumps(row))
    if arguments.json:
        write_record({**described_run(["numpy"]), "rows": rows}, arguments.json)


if __name__ == "__main__":
    main()
