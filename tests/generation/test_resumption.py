"""Samples that were cut, killed or moved go on elsewhere, and come to what they would have been."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rlhfless_functions import artifacts
from rlhfless_functions.api import Event, GenerationRequest, GenerationResult, Partial, Samples, WeightsReference
from rlhfless_functions.data.rollouts import Rollout, read_rollouts
from rlhfless_functions.generation.stage import Generator
from rlhfless_functions.runtime.task import TaskContext
from tests.generation.shares import generator as generator  # The fixtures.
from tests.generation.shares import make_request as make_request
from tests.generation.shares import prompts as prompts
from tests.generation.shares import run, run_and_kill
from tests.generation.shares import undisturbed as undisturbed
from tests.generation.shares import whole as whole


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


def test_an_instance_that_is_killed_loses_no_more_than_its_last_moments(
    make_request: Callable[..., GenerationRequest], generator: Generator, whole: dict[tuple[int, int], Rollout]
) -> None:
    request = make_request("killed", flush_seconds=1e-6)
    run_and_kill(request, events=4)
    outcome = run(make_request("next", resume_from=[request.sink]), generator)
    assert outcome.finished() == whole
    assert outcome.result.response_tokens < sum(len(rollout.response_tokens) for rollout in whole.values())
