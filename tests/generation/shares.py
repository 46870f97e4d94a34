"""A share of samples to generate, and what comes of asking for it."""

import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhfless_functions.api import (
    Event,
    GenerationRequest,
    GenerationResult,
    Partial,
    Samples,
    SampleTask,
    TaskKey,
    WeightsReference,
)
from rlhfless_functions.data.prompts import Prompt, write_prompts
from rlhfless_functions.data.rollouts import GeneratedSample, read_rollouts
from rlhfless_functions.generation.stage import Generator
from rlhfless_functions.runtime.task import TaskContext
from rlhfless_functions.settings import ModelSettings, SamplingSettings

torch.set_num_threads(1)

PROMPTS = 5
SAMPLES = 4


@dataclass
class Ticks:
    """A clock that goes on by `step` seconds whenever it is read, and can do something at a reading."""

    step: float = 0.01
    reading: int = 0
    at: dict[int, Callable[[], None]] = field(default_factory=dict)

    def __call__(self) -> float:
        self.reading += 1
        self.at.get(self.reading, lambda: None)()
        return self.reading * self.step


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    numbers = random.Random(0)
    rows = [
        Prompt(row=row, tokens=[numbers.randrange(2, 60) for _ in range(5 + 9 * row)], text="")
        for row in range(PROMPTS)
    ]
    uri = str(tmp_path_factory.mktemp("data") / "prompts.parquet")
    write_prompts(uri, rows)
    return uri


@pytest.fixture
def make_request(tiny_model: Path, prompts: str, tmp_path: Path) -> Callable[..., GenerationRequest]:
    def make(sink: str = "sink", *, step: int = 3, **changes: Any) -> GenerationRequest:
        request = GenerationRequest(
            key=TaskKey(job_uid="job", step=step, stage="generation", part="share-0", attempt=0),
            result=str(tmp_path / "result.json"),
            model=ModelSettings(source=str(tiny_model), dtype="float32"),
            weights=WeightsReference(version=2, uri=str(tiny_model)),
            prompts=prompts,
            samples=[SampleTask(prompt=prompt, index=i) for prompt in range(PROMPTS) for i in range(SAMPLES)],
            sampling=SamplingSettings(max_prompt_tokens=50, max_response_tokens=40),
            seed=11,
            sink=sink if "://" in sink else str(tmp_path / sink),
        )
        return request.model_copy(update=changes)

    return make


@pytest.fixture(scope="session")
def generator() -> Generator:
    return Generator()


@dataclass
class Outcome:
    result: GenerationResult
    events: list[Event]

    def announced(self, kind: type[Samples] | type[Partial]) -> list[tuple[tuple[int, int], str]]:
        """((prompt, index), part) of each sample named by such an event."""
        return [
            ((sample.prompt, sample.index), event.part)
            for event in self.events
            if isinstance(event, kind)
            for sample in event.samples
        ]

    def finished(self) -> dict[tuple[int, int], GeneratedSample]:
        """Every finished sample, read from the part that its event named."""
        return {key: read_rollouts([part])[key] for key, part in self.announced(Samples)}


def run(
    request: GenerationRequest, generator: Generator | None = None, *, stop_at: int | None = None, step: float = 0.01
) -> Outcome:
    """Run a request; `stop_at`: the reading of the clock, of which there is one a decode step, at which it is cut."""
    events: list[Event] = []
    context = TaskContext(emit=events.append)
    if stop_at is not None and generator is None:
        generator = Generator(clock=Ticks(step, at={stop_at: lambda: context.stop("cut")}))
    return Outcome((generator or Generator(clock=Ticks(step))).run(request, context), events)


_PROGRAM = """
import sys
import torch
torch.set_num_threads(1)
from rlhfless_functions.api import GenerationRequest
from rlhfless_functions.generation.stage import Generator
from rlhfless_functions.runtime.task import TaskContext
Generator().run(
    GenerationRequest.model_validate_json(sys.argv[1]),
    TaskContext(emit=lambda event: print(event.event, flush=True)),
)
"""


def run_and_kill(request: GenerationRequest, *, events: int) -> None:
    """Run a request in a process of its own, which is killed when it has told of so many events."""
    command = [sys.executable, "-c", _PROGRAM, request.model_dump_json()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(events):
            assert process.stdout.readline()
        process.kill()


@pytest.fixture(scope="session")
def undisturbed() -> dict[str, dict[tuple[int, int], GeneratedSample]]:
    return {}


@pytest.fixture
def whole(
    make_request: Callable[..., GenerationRequest],
    generator: Generator,
    undisturbed: dict[str, dict[tuple[int, int], GeneratedSample]],
) -> dict[tuple[int, int], GeneratedSample]:
    """What the share is when nothing happens."""
    if "rollouts" not in undisturbed:
        undisturbed["rollouts"] = run(make_request("whole"), generator).finished()
    return undisturbed["rollouts"]
