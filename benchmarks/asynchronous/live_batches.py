"""Batches that go on from rollout to rollout, against requests of one rollout each, on emulated GPUs.

    python benchmarks/asynchronous/live_batches.py [--rollouts 8] [--actors 4] [--under-way 2] [--time-scale 0.25]
        [--json FILE]

The real generation function with an emulated Qwen2.5-3B on L40S runs on threads of this process. A rollout has 64
prompts × 8 samples with lengths like GSM8K's, up to 2,048 tokens. The next rollout begins as soon as there is room for
it and fewer than `--under-way` others go on, and no learner holds it up. Each rollout begins with new weights, which
instances have fetched ahead: a swap takes 30 ms. In `requests` each actor of a rollout has a request, without moves,
and ends with the weights that it began with. `finish` and `switch` are live batches with that `newWeights`. The engine
counts the sequences in all its passes.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.asynchronous.overlapped_rollouts import RolloutQueue
from benchmarks.shared.records import described_run, write_record
from benchmarks.shared.rehearsed_jobs import GSM8K_LENGTHS, job_on_l40s
from rlhfless_functions.api import (
    Event,
    Failed,
    GenerationRequest,
    NextWeights,
    Preload,
    SampleTask,
    TaskKey,
    WeightsReference,
    ends_task,
    parse_event,
)
from rlhfless_functions.data.prompts import Prompt, write_prompts
from rlhfless_functions.data.traces import read_trace_rows
from rlhfless_functions.generation.engines.emulated import EmulatedEngine
from rlhfless_functions.generation.stage import Generator
from rlhfless_functions.runtime.inbox import Inbox
from rlhfless_functions.serving.function import Instance
from rlhfless_functions.settings import ModelSettings
from rlhfless_functions.settings.emulation import EmulationSettings
from rlhfless_operator.planner.moves.live_sizes import Batches
from rlhfless_operator.planner.moves.migration import Migration
from rlhfless_operator.platforms.base import TaskFailedError
from rlhfless_operator.platforms.live_request import LiveRequest
from rlhfless_operator.simulator.traces import generate as draw_trace
from rlhfless_operator.simulator.traces import write_trace
from rlhfless_operator.training.actors.actor_attempt import ActorAttempt
from rlhfless_operator.training.actors.generated import GenerationOutcome
from rlhfless_operator.training.actors.live_actor import Weights
from rlhfless_operator.training.actors.live_rollout import LiveRollout, LiveSettings
from rlhfless_operator.training.actors.sampling_weights import SamplingWeights
from rlhfless_operator.training.instances.instance_queue import InstanceQueue
from rlhfless_operator.training.requests.rehearsal import emulation_of
from rlhfless_operator.training.stages.generation import GenerationSettings, generate
from rlhfless_operator.training.stages.live_actors import LiveActors

PROMPTS, SAMPLES = 64, 8
SWAP_SECONDS = 0.03
MODEL = ModelSettings(source="Qwen2.5-3B")


def weights_of(rollout: int) -> WeightsReference:
    """The weights that are newest when a rollout begins."""
    return WeightsReference(version=rollout - 1, uri=f"w-{rollout - 1}")


class Instances:
    """Instances on threads of this process; a platform for the driver."""

    def __init__(self, count: int, emulation: EmulationSettings) -> None:
        self._free: asyncio.Queue[Instance] = asyncio.Queue()
        for number in range(count):
            generator = Generator(EmulatedEngine(emulation))
            instance = Instance("generation", generator, name=f"i-{number}", started_at=time.time())
            instance.listening()
            self._free.put_nowait(instance)
        self.counts: Counter[str] = Counter()

    async def run(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        instance = await self._free.get()
        inbox = Inbox()
        reading = asyncio.create_task(self._read(request, inbox))
        instance.take()
        events = instance.stream(request, inbox)
        try:
            async for line in events:
                event = parse_event(line)
                if isinstance(event, Failed) and event.of is None:
                    raise TaskFailedError(event)
                if ends_task(event):
                    self.counts.update(event.result["decoding"])  # type: ignore[union-attr]
                yield event
                if ends_task(event):
                    return
        finally:
            reading.cancel()
            await events.aclose()  # type: ignore[attr-defined]
            await instance.idle()
            self._free.put_nowait(instance)

    async def _read(self, request: GenerationRequest, inbox: Inbox) -> None:
        if isinstance(request, LiveRequest):
            async for line in request.lines():
                inbox.put(line)
        inbox.close()


class Capacity:
    async def use(self, *_: object) -> None:
        """Hold all instances at all times."""


class Workload:
    """The rollouts.

    Args:
        folder: of the trace, the prompts and the sinks.
        rollouts: number of rollouts.
        actors: of each.
        under_way: most rollouts at a time.
        emulation: of the instances.
    """

    def __init__(self, folder: Path, rollouts: int, actors: int, under_way: int, emulation: EmulationSettings) -> None:
        self.folder, self.rollouts, self.actors, self.emulation = folder, rollouts, actors, emulation
        self.under_way = under_way

    async def run(self, make: Callable[[int], Awaitable[None]]) -> None:
        """Make all rollouts, as many at a time as may be under way."""
        tasks: list[asyncio.Task[None]] = []

        async def one(rollout: int) -> None:
            if rollout > self.under_way:
                await tasks[rollout - self.under_way - 1]
            await make(rollout)

        tasks.extend(asyncio.create_task(one(rollout)) for rollout in range(1, self.rollouts + 1))
        await asyncio.gather(*tasks)

    def groups(self, rollout: int) -> list[list[SampleTask]]:
        first = (rollout - 1) * PROMPTS
        return [
            [SampleTask(prompt=prompt, index=index) for index in range(SAMPLES)]
            for prompt in range(first, first + PROMPTS)
        ]

    def request(self, rollout: int, attempt: ActorAttempt, oldest: int | None = None) -> GenerationRequest:
        job = job_on_l40s("live", self.folder, prompts=PROMPTS, steps=self.rollouts, time_scale=1.0)
        return GenerationRequest(
            key=TaskKey(job_uid="u", step=rollout, stage="generation", part=attempt.actor, attempt=attempt.number),
            result=f"{attempt.sink}/result.json",
            model=MODEL,
            weights=attempt.weights,
            oldest_version=oldest,
            prompts=str(self.folder / "prompts.parquet"),
            samples=attempt.samples,
            sampling=job.spec.sampling,
            seed=0,
            sink=attempt.sink,
            resume_from=attempt.resume_from,
            known_until=attempt.known_until,
        )


async def with_requests(work: Workload, instances: Instances) -> None:
    """Generate with requests of one rollout each."""
    queue = RolloutQueue()

    async def one(rollout: int) -> None:
        if rollout > 1:
            await queue.room_beside(rollout - 1)
        samples = [sample for group in work.groups(rollout) for sample in group]
        shares = [samples[actor :: work.actors] for actor in range(work.actors)]
        settings = GenerationSettings(
            sink_root=str(work.folder / "requests" / str(rollout)),
            driver=1,
            retries=0,
            prompt_tokens=lambda prompt: 1,
            make_request=lambda attempt: work.request(rollout, attempt),
            weights=weights_of(rollout),
        )
        async with queue.part(rollout, work.actors) as part:
            queue.newest = rollout
            queue.deal()
            async for _ in generate(
                instances,  # type: ignore[arg-type]
                shares,
                GenerationOutcome(sinks=[]),
                settings,
                migration=Migration(None, lambda key, tokens: (1.0, 0.0)),
                instances=part,
                on_event=lambda actor, event: None,
            ):
                pass

    await work.run(one)


async def with_live_batches(work: Workload, instances: Instances, *, switches: bool) -> None:
    """Generate with live actors."""
    newest = [weights_of(1)]
    weights = Weights(
        upcoming=lambda present: [],
        source=lambda present: NextWeights(weights=present),
        preload=lambda present: Preload(model=MODEL, weights=present),
        on_use=lambda started, version, size: None,
    )
    queue = InstanceQueue("generation", Capacity())  # type: ignore[arg-type]
    live = LiveActors(instances, queue, weights, 1024, lambda: len(begun) == work.rollouts)  # type: ignore[arg-type]
    begun: set[int] = set()

    async def one(rollout: int) -> None:
        if rollout > 1:
            await live.room(rollout, lambda: weights_of(rollout), beside=rollout - 1)
        begun.add(rollout)
        newest.append(weights_of(rollout))
        oldest = rollout - 1 if switches else None
        settings = LiveSettings(
            step=rollout,
            sink_root=str(work.folder / f"live-{switches}" / str(rollout)),
            driver=1,
            retries=0,
            weights=SamplingWeights(weights_of(rollout), (lambda: newest[-1]) if switches else None),
            make_request=lambda attempt: work.request(rollout, attempt, oldest),
            on_event=lambda event: None,
        )
        pending = LiveRollout(work.groups(rollout), outcome := GenerationOutcome(sinks=[]), settings)
        samples = PROMPTS * SAMPLES // work.actors
        async with live.generating(pending, Batches(work.actors, samples, samples)):
            while await pending.complete.get() is not None:
                pass
        instances.counts["moved"] += outcome.moved

    await work.run(one)
    while live.running:
        await asyncio.sleep(0.01)


@contextmanager
def workload(rollouts: int, actors: int, under_way: int, time_scale: float) -> Iterator[Workload]:
    """The rollouts, in a folder of their own."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        trace = draw_trace(GSM8K_LENGTHS, epochs=1, prompts=rollouts * PROMPTS, samples=SAMPLES, seed=0)
        write_trace(folder / "trace.parquet", trace)
        lengths = read_trace_rows(str(folder / "trace.parquet"))
        tokens = dict(zip(lengths.prompt.tolist(), lengths.prompt_tokens.tolist(), strict=True))
        prompts = [Prompt(row=row, tokens=[2] * tokens[row], text="") for row in sorted(tokens)]
        write_prompts(str(folder / "prompts.parquet"), prompts)
        job = job_on_l40s("live", folder, prompts=PROMPTS, steps=rollouts, time_scale=time_scale)
        emulation = emulation_of(job)
        assert emulation is not None
        # It counts passes if it may draft; no request asks for drafts.
        update = {"draft_coverage": 0.5, "draft_acceptance": 0.5, "weight_load_seconds": SWAP_SECONDS}
        yield Workload(folder, rollouts, actors, under_way, emulation.model_copy(update=update))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--actors", type=int, default=4)
    parser.add_argument("--under-way", type=int, default=8)
    parser.add_argument("--time-scale", type=float, default=0.25)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: dict[str, Any] = {}
    with workload(given.rollouts, given.actors, given.under_way, given.time_scale) as work:
        ways = {
            "requests": with_requests,
            "finish": partial(with_live_batches, switches=False),
            "switch": partial(with_live_batches, switches=True),
        }
        for name, way in ways.items():
            found[name] = asyncio.run(measured(work, way, given.time_scale))
    record = {**found, **described_run([])}
    print(json.dumps(record, indent=1))
    write_record(record, given.json)


async def measured(work: Workload, way: Any, time_scale: float) -> dict[str, float]:
    """Run the rollouts one way; emulated seconds, and the sequences in a pass."""
    instances = Instances(work.actors, work.emulation)
    began = time.monotonic()
    await way(work, instances)
    seconds = (time.monotonic() - began) / time_scale
    counts = instances.counts
    return {
        "seconds": round(seconds, 1),
        "tokens": counts["tokens"],
        "passes": counts["passes"],
        "sequences_in_a_pass": round(counts["sequence_passes"] / counts["passes"], 1),
        "tokens_per_second": round(counts["tokens"] / seconds, 1),
        "moved_samples": counts["moved"],
    }


if __name__ == "__main__":
    main()
