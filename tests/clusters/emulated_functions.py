"""A platform without processes: it does each task at once, writes what the function would, and trains nothing.

For tests and measurements of what drives jobs. Whatever a driver reads is really there: the data's index, result
files, the exported folder. Rewards rise a little with each step.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from rlhfless_functions import artifacts
from rlhfless_functions.api import (
    AddSamples,
    DataCounts,
    Done,
    Event,
    ExportRequest,
    ExportResult,
    FinishedSample,
    GenerationRequest,
    GenerationResult,
    GroupResult,
    Join,
    LearnRequest,
    LearnResult,
    Leave,
    MaterializeRequest,
    MaterializeResult,
    NewWeights,
    Preload,
    PrepareRequest,
    PrepareResult,
    Progress,
    RunRequest,
    Samples,
    SampleTask,
    Stage,
    Started,
    WeightsReference,
)
from rlhfless_operator.platforms.base import PlatformUnavailableError, StateChange, StateListener
from rlhfless_operator.platforms.live_request import LiveRequest

PROMPTS = 16


@dataclass
class Emulation:
    """What all jobs of a test have in common, and what it saw of them."""

    task_seconds: float = 0.0
    """Every task takes so long."""
    before: Callable[[RunRequest], None] = lambda request: None
    """Called before each task; what it raises, the task ends with."""
    holding: Callable[[RunRequest], bool] = lambda request: False
    """A task does not end while this is true of it."""
    lingering: Callable[[RunRequest], bool] = lambda request: False
    """Generation has told of all of its samples, and does not end while this is true of it."""
    requests: list[RunRequest] = field(default_factory=list)
    opened: int = 0
    closed: int = 0
    removed: int = 0
    unavailable: str = ""
    """What `open` complains of."""
    learnt: Callable[[int], dict[str, float]] = lambda step: {}
    """Further metrics of learning, by step."""
    remember: bool = True
    """Whether requests are kept."""
    prompts: int = PROMPTS
    """Prompts of a job's data."""

    def tasks(self, root: str) -> list[RunRequest]:
        """The requests of the job in the folder `root`."""
        return [request for request in self.requests if request.result.startswith(f"{root}/")]


class Held:
    """Lets the chosen tasks wait until they may be over: what `Emulation.holding` asks."""

    def __init__(self, chosen: Callable[[RunRequest], bool]) -> None:
        self.reached: list[RunRequest] = []
        self.over = False
        self._chosen = chosen

    @classmethod
    def task(cls, name: str) -> "Held":
        """All tasks of a kind."""
        return cls(lambda request: request.task == name)

    def __call__(self, request: RunRequest) -> bool:
        if self.over or not self._chosen(request):
            return False
        self.reached.append(request)
        return True


class EmulatedPlatform:
    """The functions of one job.

    Args:
        on_state: told of the instance of each stage, which lives from its first `hold` until `close`.
    """

    def __init__(self, emulation: Emulation, on_state: StateListener) -> None:
        self._emulation = emulation
        self._on_state = on_state
        self._instances: set[Stage] = set()
        self._busy: dict[Stage, int] = {}

    async def open(self) -> None:
        if self._emulation.unavailable:
            raise PlatformUnavailableError(self._emulation.unavailable)
        self._emulation.opened += 1

    async def hold(self, stage: Stage, count: int, preload: Preload | None = None) -> None:
        if count and stage not in self._instances:
            self._instances.add(stage)
            self._tell(stage, "starting")
            self._tell(stage, "idle")

    async def run(self, request: RunRequest) -> AsyncGenerator[Event, None]:
        emulation = self._emulation
        stage = request.key.stage
        if emulation.remember:
            emulation.requests.append(request)
        self._tell(stage, "busy")
        try:
            yield Started(instance=f"{stage}-0")
            emulation.before(request)
            await asyncio.sleep(emulation.task_seconds)
            while emulation.holding(request):
                await asyncio.sleep(0.05)
            if artifacts.exists(request.result):
                yield Done(result=artifacts.read_json(request.result))
                return
            if isinstance(request, LiveRequest):
                async for event in _live_batch(request, emulation):
                    yield event
                while emulation.lingering(request):
                    await asyncio.sleep(0.05)
            result = _result_of(request, self._emulation)
            artifacts.write_json(request.result, result)
            yield Done(result=result)
        finally:
            self._tell(stage, "idle")

    async def close(self) -> None:
        self._emulation.closed += 1
        for stage in self._instances:
            self._tell(stage, "ended")
        self._instances.clear()

    async def remove(self) -> None:
        self._emulation.removed += 1

    def _tell(self, stage: Stage, state: str) -> None:
        self._on_state(StateChange(f"{stage}-0", stage, state, time.monotonic()))  # type: ignore[arg-type]


def _finished(sink: str, samples: list[SampleTask]) -> Samples:
    finished = [
        FinishedSample(prompt=sample.prompt, index=sample.index, tokens=8 + sample.index, finish_reason="stop")
        for sample in samples
    ]
    return Samples(samples=finished, part=f"{sink}/0.parquet", of=sink)


async def _live_batch(request: LiveRequest, emulation: Emulation) -> AsyncGenerator[Event, None]:
    """The events of a live batch: what joins it has finished at once, unless it is held."""
    received, version = len(request.samples), request.weights.version
    yield _finished(request.sink, request.samples)
    lines = request.lines()
    while True:
        yield Progress(finished=received, running=0, waiting=0, tokens=0, received=received, version=version)
        match await anext(lines, None):
            case None:
                return
            case Join(request=joined):
                while emulation.holding(joined):
                    await asyncio.sleep(0.05)
                received += len(joined.samples)
                yield _finished(joined.sink, joined.samples)
            case AddSamples(sink=sink, samples=samples):
                received += len(samples)
                yield _finished(sink, samples)
            case NewWeights(present=present):
                version = present.weights.version
            case Leave(sink=sink):
                yield Done(result={}, of=sink)


def _result_of(request: RunRequest, emulation: Emulation) -> dict:
    match request:
        case MaterializeRequest():
            prompts = emulation.prompts
            counts = DataCounts(rows=prompts)
            with artifacts.publish(request.sink) as folder:
                index = {"lengths": [5] * prompts, "counts": counts.model_dump(), "prefixes": None}
                artifacts.write_json(str(folder / "index.json"), index)
            result = MaterializeResult(prompts=prompts, dropped=0, uri=request.sink, counts=counts)
        case GenerationRequest():
            result = GenerationResult(
                finished=len(request.samples), unfinished=0, parts=[], prompt_tokens=1, response_tokens=1
            )
        case PrepareRequest():
            reward = 1 - 1 / (1 + request.key.step)
            prompts = sorted({sample.prompt for sample in request.samples})
            number = len(request.samples)
            result = PrepareResult(
                part=request.sink,
                groups=[GroupResult(prompt=prompt, reward=reward, spread=0.5) for prompt in prompts],
                metrics={"reward/sum": reward * number, "reward/count": float(number)},
            )
        case LearnRequest():
            step = request.batch.step
            result = LearnResult(
                weights=WeightsReference(version=step, uri=request.publish),
                checkpoint=request.save_checkpoint,
                metrics={"policy/loss": -0.1, "policy/kl": 0.01, "policy/entropy": 1.0, "seconds": 0.01}
                | emulation.learnt(step),
            )
        case ExportRequest():
            with artifacts.publish(request.destination) as folder:
                (folder / "README.md").write_text(request.model_card)
            result = ExportResult(uri=request.destination)
    return result.model_dump(mode="json")
