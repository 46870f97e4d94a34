"""Generation as its caller sees it: requests in, events and rollout parts out."""

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhfless_functions import artifacts
from rlhfless_functions.api import (
    Event,
    GenerationRequest,
    GenerationResult,
    Partial,
    Progress,
    Samples,
    SampleTask,
    TaskKey,
    WeightsReference,
)
from rlhfless_functions.generation import Generator
from rlhfless_functions.rollouts import Prompt, Rollout, read_rollouts, write_prompts, write_rollouts
from rlhfless_functions.settings import ModelSettings, SamplingSettings
from rlhfless_functions.task import TaskContext, TaskError

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

    def finished(self) -> dict[tuple[int, int], Rollout]:
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


@pytest.fixture(scope="session")
def undisturbed() -> dict[str, dict[tuple[int, int], Rollout]]:
    return {}


@pytest.fixture
def whole(
    make_request: Callable[..., GenerationRequest],
    generator: Generator,
    undisturbed: dict[str, dict[tuple[int, int], Rollout]],
) -> dict[tuple[int, int], Rollout]:
    """What the share is when nothing happens."""
    if "rollouts" not in undisturbed:
        undisturbed["rollouts"] = run(make_request("whole"), generator).finished()
    return undisturbed["rollouts"]


# --- a share that runs to its end --------------------------------------------------------------------------------


def test_every_sample_is_published_and_announced_once(
    make_request: Callable[..., GenerationRequest], generator: Generator
) -> None:
    request = make_request()
    outcome = run(request, generator)
    keys = [key for key, _ in outcome.announced(Samples)]
    assert sorted(keys) == [(prompt, i) for prompt in range(PROMPTS) for i in range(SAMPLES)]
    assert outcome.announced(Partial) == []
    rollouts = outcome.finished()
    assert {rollout.finish_reason for rollout in rollouts.values()} == {"stop", "truncated"}
    for rollout in rollouts.values():
        assert [vars(span) for span in rollout.versions] == [
            {"version": 2, "start": 0, "end": len(rollout.response_tokens)}
        ]
    result = outcome.result
    assert (result.finished, result.unfinished) == (PROMPTS * SAMPLES, 0)
    assert result.response_tokens == sum(len(rollout.response_tokens) for rollout in rollouts.values())
    assert result.prompt_tokens == sum(5 + 9 * row for row in range(PROMPTS))
    assert result.parts == artifacts.list_files(request.sink)
    for event in outcome.events:
        if isinstance(event, Samples):
            for sample in event.samples:
                assert sample.tokens == len(rollouts[sample.prompt, sample.index].response_tokens)
                assert sample.finish_reason == rollouts[sample.prompt, sample.index].finish_reason


def test_any_division_of_a_share_gives_the_same_samples(
    make_request: Callable[..., GenerationRequest], generator: Generator, whole: dict[tuple[int, int], Rollout]
) -> None:
    samples = make_request().samples
    random.Random(0).shuffle(samples)
    parts: dict[tuple[int, int], Rollout] = {}
    for actor in range(3):
        request = make_request(f"actor-{actor}", samples=samples[actor::3], kv_budget_tokens=96 * (1 + 3 * actor))
        parts |= run(request, generator).finished()
    assert parts == whole


@pytest.mark.parametrize("changes", [{"seed": 12}, {"purpose": "evaluation"}, {"step": 4}])
def test_seed_purpose_and_step_all_matter(
    make_request: Callable[..., GenerationRequest],
    generator: Generator,
    whole: dict[tuple[int, int], Rollout],
    changes: dict[str, Any],
) -> None:
    other = run(make_request("other", **changes), generator).finished()
    assert other.keys() == whole.keys()
    same = sum(other[key].response_tokens == whole[key].response_tokens for key in whole)
    assert same <= 2  # A response of one token can be the same by chance.


def test_an_instance_answers_at_the_version_that_is_asked_for(
    make_request: Callable[..., GenerationRequest],
    generator: Generator,
    whole: dict[tuple[int, int], Rollout],
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "next")
    weights = {name: tensor * 1.5 for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    following = WeightsReference(version=3, uri=str(folder))
    generator.preload(make_request().model, make_request().weights)
    swapped = run(make_request("swapped", weights=following), generator).finished()
    fresh = run(make_request("fresh", weights=following)).finished()
    assert swapped == fresh
    assert {rollout.versions[0].version for rollout in swapped.values()} == {3}
    assert run(make_request("again"), generator).finished() == whole


def test_parts_can_live_in_an_object_store(
    make_request: Callable[..., GenerationRequest],
    generator: Generator,
    whole: dict[tuple[int, int], Rollout],
    s3: str,
) -> None:
    assert run(make_request(f"{s3}/sink"), generator).finished() == whole


# --- cut, killed, and continued ----------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 2, 5, 17, 39, 40, 41])
def test_a_cut_publishes_everything_and_the_rest_is_continued_exactly(
    make_request: Callable[..., GenerationRequest],
    generator: Generator,
    whole: dict[tuple[int, int], Rollout],
    cut: int,
) -> None:
    first = run(make_request("first"), stop_at=cut)
    kept = read_rollouts(first.result.parts)
    tokens_kept = sum(len(rollout.response_tokens) for rollout in kept.values())
    assert tokens_kept == first.result.response_tokens
    assert first.result.finished + first.result.unfinished == len(whole)
    assert {key for key, _ in first.announced(Partial)} == {k for k, rollout in kept.items() if not rollout.finished}
    for key, rollout in kept.items():
        assert rollout.response_tokens == whole[key].response_tokens[: len(rollout.response_tokens)]
    second_request = make_request("second")
    second = run(second_request.model_copy(update={"resume_from": [make_request("first").sink]}), generator)
    assert second.finished() == whole
    assert second.result.response_tokens == sum(len(r.response_tokens) for r in whole.values()) - tokens_kept


def test_samples_can_move_many_times(
    make_request: Callable[..., GenerationRequest], generator: Generator, whole: dict[tuple[int, int], Rollout]
) -> None:
    sinks: list[str] = []
    for attempt in range(4):
        request = make_request(f"attempt-{attempt}", resume_from=list(sinks))
        run(request, stop_at=8)
        sinks.append(request.sink)
    last = run(make_request("last", resume_from=sinks[::-1]), generator)
    assert last.finished() == whole
    assert last.result.response_tokens < sum(len(rollout.response_tokens) for rollout in whole.values()) / 2


def test_parts_that_the_sender_has_heard_of_are_not_looked_at(
    make_request: Callable[..., GenerationRequest], whole: dict[tuple[int, int], Rollout]
) -> None:
    first = run(make_request("first", flush_seconds=0.1), stop_at=25)
    *heard, last = first.result.parts
    finished = {key for key, part in first.announced(Samples) if part in heard}
    left = [sample for sample in make_request().samples if (sample.prompt, sample.index) not in finished]
    assert finished and left
    for part in heard:
        artifacts.write_bytes(part, b"no rollouts")
    changes = {
        "samples": left,
        "resume_from": [make_request("first").sink],
        "known_until": {make_request("first").sink: heard[-1]},
    }
    second = run(make_request("second", **changes))
    assert second.finished() == {key: rollout for key, rollout in whole.items() if key not in finished}
    kept = sum(len(rollout.response_tokens) for rollout in read_rollouts([last]).values() if not rollout.finished)
    assert kept > 0
    asked = sum(len(rollout.response_tokens) for key, rollout in whole.items() if key not in finished)
    assert second.result.response_tokens <= asked - kept


def test_a_single_part_can_be_gone_on_from(
    make_request: Callable[..., GenerationRequest], whole: dict[tuple[int, int], Rollout]
) -> None:
    first = run(make_request("first", flush_seconds=0.1), stop_at=25)
    snapshot = first.announced(Partial)[-1][1]
    held = read_rollouts([snapshot])
    second = run(make_request("second", resume_from=[snapshot]))
    assert second.finished() == whole
    total = sum(len(rollout.response_tokens) for rollout in whole.values())
    assert second.result.response_tokens == total - sum(len(rollout.response_tokens) for rollout in held.values())


def test_the_same_attempt_on_another_instance_keeps_the_parts_of_the_first(
    make_request: Callable[..., GenerationRequest], generator: Generator, whole: dict[tuple[int, int], Rollout]
) -> None:
    first = run(make_request(), stop_at=20)
    before = {part: artifacts.read_bytes(part) for part in first.result.parts}
    second = run(make_request(), generator)
    assert second.finished() == whole
    assert {part: artifacts.read_bytes(part) for part in before} == before
    assert second.result.parts == artifacts.list_files(make_request().sink)


def test_what_is_finished_is_announced_again_and_not_generated(
    make_request: Callable[..., GenerationRequest], generator: Generator, whole: dict[tuple[int, int], Rollout]
) -> None:
    first = run(make_request("first"), generator)
    weights = WeightsReference(version=2, uri="nowhere")
    again = run(make_request("second", resume_from=[make_request("first").sink], weights=weights), generator)
    assert sorted(again.announced(Samples)) == sorted(first.announced(Samples))
    assert again.result == GenerationResult(
        finished=len(whole), unfinished=0, parts=[], prompt_tokens=0, response_tokens=0
    )


@pytest.mark.parametrize("cut", [None, 10])
def test_samples_of_another_weights_version_are_not_used(
    make_request: Callable[..., GenerationRequest],
    generator: Generator,
    whole: dict[tuple[int, int], Rollout],
    cut: int | None,
    tiny_model: Path,
) -> None:
    old = make_request("old", weights=WeightsReference(version=1, uri=str(tiny_model)))
    run(old, stop_at=cut)
    outcome = run(make_request("new", resume_from=[old.sink]), generator)
    assert outcome.finished() == whole
    assert outcome.result.response_tokens == sum(len(rollout.response_tokens) for rollout in whole.values())


def test_samples_outside_the_share_are_left_alone(
    make_request: Callable[..., GenerationRequest], generator: Generator
) -> None:
    first = run(make_request("first"), generator)
    mine = make_request().samples[3:7]
    second = run(make_request("second", samples=mine, resume_from=[make_request("first").sink]), generator)
    assert {key for key, _ in second.announced(Samples)} == {(sample.prompt, sample.index) for sample in mine}
    assert first.result.finished > second.result.finished == 4


def test_a_task_that_is_stopped_before_it_begins_loads_nothing(
    make_request: Callable[..., GenerationRequest], whole: dict[tuple[int, int], Rollout]
) -> None:
    events: list[Event] = []
    context = TaskContext(emit=events.append)
    context.stop("drain")
    result = Generator().run(make_request(weights=WeightsReference(version=2, uri="nowhere")), context)
    assert (result.finished, result.unfinished, events) == (0, len(whole), [])


KILLED = """
import os, sys
import torch
torch.set_num_threads(1)
from rlhfless_functions.api import GenerationRequest
from rlhfless_functions.generation import Generator
from rlhfless_functions.task import TaskContext
Generator().run(
    GenerationRequest.model_validate_json(sys.argv[1]),
    TaskContext(emit=lambda event: print(event.event, flush=True)),
)
"""


def test_an_instance_that_is_killed_loses_no_more_than_its_last_moments(
    make_request: Callable[..., GenerationRequest], generator: Generator, whole: dict[tuple[int, int], Rollout]
) -> None:
    request = make_request("killed", flush_seconds=1e-6)
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, request.model_dump_json()], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for _ in range(4):
            assert process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
    outcome = run(make_request("next", resume_from=[request.sink]), generator)
    assert outcome.finished() == whole
    assert outcome.result.response_tokens < sum(len(rollout.response_tokens) for rollout in whole.values())


# --- what is told on the way -------------------------------------------------------------------------------------


def test_progress_is_told_no_more_often_than_asked(make_request: Callable[..., GenerationRequest]) -> None:
    request = make_request(progress_seconds=0.1)
    outcome = run(request, step=0.03)
    progress = [event for event in outcome.events if isinstance(event, Progress)]
    # When it begins to generate, and then forty steps of 0.03 s, with one event in four of them.
    assert len(progress) == 1 + 10
    for event in progress:
        assert event.finished + event.running + event.waiting == len(request.samples)
        assert len(event.lengths) == event.running
        assert event.tokens >= sum(length for *_, length in event.lengths)
    assert [event.tokens for event in progress] == sorted(event.tokens for event in progress)


def test_running_samples_are_flushed_at_intervals(make_request: Callable[..., GenerationRequest]) -> None:
    outcome = run(make_request(flush_seconds=0.1), step=0.01)
    partials = outcome.announced(Partial)
    assert partials
    for key, part in partials:
        rollout = read_rollouts([part])[key]
        assert rollout.finish_reason == "cut"
        assert rollout.response_tokens


# --- what cannot be done -----------------------------------------------------------------------------------------


def refusal(request: GenerationRequest, generator: Generator) -> TaskError:
    with pytest.raises(TaskError) as caught:
        run(request, generator)
    return caught.value


def test_a_sample_that_is_asked_for_twice_is_refused(
    make_request: Callable[..., GenerationRequest], generator: Generator
) -> None:
    error = refusal(make_request(samples=[SampleTask(prompt=1, index=2)] * 2), generator)
    assert error.reason == "bad_request"
    assert "sample 2 of prompt 1 is asked for 2 times" in str(error)


def test_a_prompt_that_does_not_exist_is_refused(
    make_request: Callable[..., GenerationRequest], generator: Generator
) -> None:
    error = refusal(make_request(samples=[SampleTask(prompt=99, index=0)]), generator)
    assert error.reason == "bad_request"
    assert "99" in str(error)


def test_a_prompt_over_the_limit_is_refused(
    make_request: Callable[..., GenerationRequest], generator: Generator
) -> None:
    request = make_request(sampling=SamplingSettings(max_prompt_tokens=40, max_response_tokens=8))
    error = refusal(request, generator)
    assert error.reason == "data_invalid"
    assert "prompt 4 has 41 tokens, more than sampling.maxPromptTokens (40)" in str(error)


def test_missing_prompts_and_weights_are_named(
    make_request: Callable[..., GenerationRequest], tmp_path: Path, generator: Generator
) -> None:
    error = refusal(make_request(prompts=str(tmp_path / "gone.parquet")), generator)
    assert error.reason == "artifact_missing"
    assert "gone.parquet" in str(error)
    error = refusal(make_request(weights=WeightsReference(version=9, uri=str(tmp_path / "void"))), generator)
    assert error.reason == "artifact_missing"
    assert "void" in str(error)


def test_a_sink_that_cannot_be_written_is_named(
    make_request: Callable[..., GenerationRequest], tmp_path: Path, generator: Generator
) -> None:
    (tmp_path / "file").write_text("in the way")
    error = refusal(make_request("file/sink"), generator)
    assert error.reason == "artifact_unwritable"
    assert "file/sink" in str(error)


def test_a_policy_that_has_diverged_is_told_by_step_version_and_prompt(
    make_request: Callable[..., GenerationRequest], tiny_model: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "diverged")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] *= float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    request = make_request(weights=WeightsReference(version=2, uri=str(folder)))
    error = refusal(request, Generator())
    assert error.reason == "non_finite_sample"
    assert "step 3: weights version 2" in str(error)
    assert "prompt 0, sample 0, response token 0" in str(error)
    assert artifacts.list_files(request.sink) == []


def test_a_corrupt_part_of_an_earlier_attempt_is_named(
    make_request: Callable[..., GenerationRequest], generator: Generator
) -> None:
    sink = make_request("earlier").sink
    write_rollouts(artifacts.join(sink, "part-000000.parquet"), [])
    artifacts.write_bytes(artifacts.join(sink, "part-000001.parquet"), b"not a table")
    error = refusal(make_request("new", resume_from=[sink]), generator)
    assert "part-000001.parquet" in str(error)
