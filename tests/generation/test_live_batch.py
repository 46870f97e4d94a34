"""Samples that join a batch while it decodes, and leave it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhfless_functions.api import (
    AddSamples,
    Done,
    Event,
    Failed,
    GenerationRequest,
    Join,
    Leave,
    Line,
    LiveBatch,
    NewWeights,
    NextWeights,
    Partial,
    Progress,
    Samples,
    SampleTask,
)
from rlhfless_functions.data.rollouts import GeneratedSample, VersionSpan, read_rollouts, write_rollouts
from rlhfless_functions.generation.engines.transformers import TransformersEngine
from rlhfless_functions.generation.stage import Generator
from rlhfless_functions.runtime.inbox import Inbox
from rlhfless_functions.runtime.task import TaskContext, TaskError
from tests.generation.shares import PROMPTS, SAMPLES, Outcome, Ticks, run
from tests.generation.shares import generator as generator  # The fixtures.
from tests.generation.shares import make_request as make_request
from tests.generation.shares import prompts as prompts
from tests.generation.shares import undisturbed as undisturbed
from tests.generation.shares import whole as whole
from tests.generation.test_prefetched_requests import make_version

MakeRequest = Callable[..., GenerationRequest]
Rollouts = dict[tuple[int, int], GeneratedSample]
LIVE = LiveBatch(sequences=6, prompt_tokens=50)
GROUPS = [[SampleTask(prompt=prompt, index=index) for index in range(SAMPLES)] for prompt in range(PROMPTS)]


def run_live(
    request: GenerationRequest,
    lines: dict[int, Line | None],
    engine: Any = None,
    *,
    answer: Callable[[Event, Inbox], object] = lambda event, inbox: None,
    **changes: Any,
) -> Outcome:
    """Run a live request; lines come at these readings of its clock, of which there is one a pass. None ends it.
    `answer` may send others once an event says that it is time."""
    events: list[Event] = []
    inbox = Inbox()

    def emit(event: Event) -> None:
        events.append(event)
        answer(event, inbox)

    context = TaskContext(emit=emit, inbox=inbox)

    def send(line: Line | None) -> Callable[[], None]:
        return lambda: inbox.close() if line is None else inbox.put(line)

    clock = Ticks(at={reading: send(line) for reading, line in lines.items()})
    generator = Generator(engine, clock=clock)
    return Outcome(generator.run(request.model_copy(update={"live": LIVE, **changes}), context), events)


def of(outcome: Outcome, sink: str) -> Rollouts:
    """The finished samples of one share."""
    found = [event for event in outcome.events if isinstance(event, Samples) and event.of == sink]
    return Outcome(outcome.result, list(found)).finished()


@pytest.mark.parametrize("readings", [(8, 20, 21, 45), (5, 6, 7, 8), (90, 110, 130, 150)])
def test_samples_are_the_same_whenever_they_join(
    make_request: MakeRequest, whole: Rollouts, readings: tuple[int, ...]
) -> None:
    request = make_request("live", samples=GROUPS[0])
    lines: dict[int, Line | None] = {
        reading: AddSamples(sink=request.sink, samples=group)
        for reading, group in zip(readings, GROUPS[1:], strict=True)
    }
    outcome = run_live(request, {**lines, readings[-1] + 1: None})
    assert of(outcome, request.sink) == whole
    assert (outcome.result.finished, outcome.result.unfinished) == (PROMPTS * SAMPLES, 0)
    assert [event.of for event in outcome.events if isinstance(event, Done)] == [request.sink]


def test_shares_of_two_steps_have_the_same_prompts_in_one_batch(make_request: MakeRequest, whole: Rollouts) -> None:
    other = make_request("other", step=4)
    request = make_request("live")
    outcome = run_live(request, {10: Join(request=other), 11: None}, flush_seconds=0.05)
    assert of(outcome, request.sink) == whole
    assert of(outcome, other.sink) == run(make_request("alone", step=4), Generator()).finished()
    for event in outcome.events:
        if isinstance(event, Partial | Samples):
            assert event.of is not None
            assert event.part.startswith(event.of), "each share has its own sink"


def test_the_batch_is_as_full_as_it_may_be_while_samples_wait(make_request: MakeRequest) -> None:
    outcome = run_live(make_request("live"), {3: None}, progress_seconds=0.01)
    told = [event for event in outcome.events if isinstance(event, Progress)]
    full = next(event for event in reversed(told) if event.waiting).decoding
    assert full.passes > 20
    assert full.sequence_passes == full.passes * LIVE.sequences


def test_a_share_that_leaves_publishes_what_it_has_and_goes_on_elsewhere(
    make_request: MakeRequest, generator: Generator, whole: Rollouts
) -> None:
    request = make_request("live", samples=GROUPS[0])
    leaving = make_request("leaving", samples=[each for group in GROUPS[1:] for each in group])
    begun: list[Event] = []

    def leave(event: Event, inbox: Inbox) -> None:
        prompts = [prompt for prompt, _, tokens in event.lengths if tokens] if isinstance(event, Progress) else []
        if not begun and any(prompt != 0 for prompt in prompts):
            begun.append(event)
            inbox.put(Leave(sink=leaving.sink))
            inbox.close()

    outcome = run_live(request, {6: Join(request=leaving)}, answer=leave, progress_seconds=0.01)
    done = next(event for event in outcome.events if isinstance(event, Done) and event.of == leaving.sink)
    assert done.result["unfinished"] > 0
    partial = [key for key, part in outcome.announced(Partial) if part.startswith(leaving.sink)]
    assert partial, "it had begun"
    rest = run(make_request("rest", samples=leaving.samples, resume_from=[leaving.sink]), generator)
    assert of(outcome, request.sink) | rest.finished() == whole
    assert rest.result.response_tokens < sum(
        len(whole[sample.prompt, sample.index].response_tokens) for sample in leaving.samples
    )


def test_samples_that_come_back_are_continued(make_request: MakeRequest, whole: Rollouts) -> None:
    elsewhere = make_request("elsewhere", samples=GROUPS[1])
    assert run(elsewhere, stop_at=9).announced(Partial)
    request = make_request("live", samples=GROUPS[0])
    add = AddSamples(sink=request.sink, samples=GROUPS[1], resume_from=[elsewhere.sink])
    found = run_live(request, {6: add, 7: None}).finished()
    assert found == {key: whole[key] for key in found}
    assert len(found) == 2 * SAMPLES


def test_a_cut_publishes_what_every_share_has(make_request: MakeRequest, generator: Generator, whole: Rollouts) -> None:
    request, other = make_request("live"), make_request("other", step=4)
    events: list[Event] = []
    inbox = Inbox()
    context = TaskContext(emit=events.append, inbox=inbox)
    inbox.put(Join(request=other))
    clock = Ticks(at={40: lambda: context.stop("cut")})
    Generator(clock=clock).run(request.model_copy(update={"live": LIVE}), context)
    for share in (request, other):
        again = share.model_copy(update={"sink": f"{share.sink}-again", "resume_from": [share.sink]})
        wanted = whole if share is request else run(make_request("alone", step=4), generator).finished()
        assert run(again, generator).finished() == wanted


def test_newer_weights_are_swapped_in_between_two_passes(
    make_request: MakeRequest, generator: Generator, whole: Rollouts, tmp_path: Path
) -> None:
    third = make_version(make_request, str(tmp_path / "weights"))
    request = make_request("live", oldest_version=2)
    weights = NewWeights(present=NextWeights(weights=third))
    outcome = run_live(request, {20: weights, 21: None}, progress_seconds=0.01)
    found = outcome.finished()
    assert found.keys() == whole.keys()
    versions = [event.version for event in outcome.events if isinstance(event, Progress)]
    assert versions == sorted(versions)
    assert {*versions} == {2, 3}
    switched = {key: each for key, each in found.items() if len(each.versions) == 2}
    assert switched, "some had begun and not ended"
    part = str(tmp_path / "begun" / "part-000000.parquet")
    write_rollouts(part, [begun(each, each.versions[0].end) for each in switched.values()])
    alone = make_request("alone", weights=third, oldest_version=2, resume_from=[part])
    continued = run(alone, generator).finished()
    assert {key: continued[key] for key in switched} == switched, "as if a request had continued them"
    for key, each in found.items():
        if [span.version for span in each.versions] == [2]:
            assert each == whole[key]
        if [span.version for span in each.versions] == [3]:
            assert each == continued[key]


def begun(rollout: GeneratedSample, end: int) -> GeneratedSample:
    return GeneratedSample(
        rollout.prompt, rollout.index, rollout.prompt_tokens, rollout.response_tokens[:end], rollout.log_probs[:end],
        "cut", [VersionSpan(rollout.versions[0].version, 0, end)],
    )  # fmt: skip


def test_a_share_that_cannot_be_read_fails_alone(make_request: MakeRequest, whole: Rollouts) -> None:
    request = make_request("live")
    wrong = make_request("wrong", step=4, samples=[SampleTask(prompt=99, index=0)])
    outcome = run_live(request, {6: Join(request=wrong), 7: None})
    assert of(outcome, request.sink) == whole
    failed = next(event for event in outcome.events if isinstance(event, Failed))
    assert (failed.of, failed.reason) == (wrong.sink, "bad_request")
    assert "99" in failed.message


def test_a_batch_without_samples_waits_for_more(make_request: MakeRequest, whole: Rollouts) -> None:
    request = make_request("live", samples=GROUPS[0])
    last = max(len(whole[0, index].response_tokens) for index in range(SAMPLES))
    add = AddSamples(sink=request.sink, samples=GROUPS[1])
    outcome = run_live(request, {last + 20: add, last + 21: None}, TransformersEngine())
    assert len(outcome.finished()) == 2 * SAMPLES
    assert read_rollouts(outcome.result.parts).keys() == outcome.finished().keys()


def test_responses_keep_their_weights_where_they_leave_before_others_are_swapped_in(
    make_request: MakeRequest, generator: Generator, whole: Rollouts, tmp_path: Path
) -> None:
    """To newer weights, and back to the older ones, with which the first samples go on."""
    third = make_version(make_request, str(tmp_path / "weights"))
    request = make_request("live")
    second = NextWeights(weights=request.weights)
    newer, again = make_request("newer", step=4, weights=third), make_request("again", resume_from=[request.sink])
    lines: dict[int, Line | None] = {
        20: Leave(sink=request.sink),
        21: NewWeights(present=NextWeights(weights=third)),
        22: Join(request=newer),
        40: Leave(sink=newer.sink),
        41: NewWeights(present=second),
        42: Join(request=again),
        43: None,
    }
    outcome = run_live(request, lines, progress_seconds=0.01)
    for sink in (request.sink, again.sink):
        assert of(outcome, sink) == {key: whole[key] for key in of(outcome, sink)}
    assert of(outcome, request.sink) | of(outcome, again.sink) == whole
    rest = make_request("rest", step=4, weights=third, resume_from=[newer.sink])
    alone = run(make_request("alone", step=4, weights=third), generator).finished()
    assert of(outcome, newer.sink) | run(rest, generator).finished() == alone
    assert {span.version for each in alone.values() for span in each.versions} == {3}
    assert outcome.result.response_tokens < 2 * sum(len(each.response_tokens) for each in whole.values())


def test_samples_that_keep_their_weights_join_no_batch_of_others(make_request: MakeRequest, tmp_path: Path) -> None:
    third = make_version(make_request, str(tmp_path / "weights"))
    request = make_request("live", samples=GROUPS[0])
    other = make_request("other", step=4, weights=third)
    outcome = run_live(request, {6: Join(request=other), 7: None})
    assert len(of(outcome, request.sink)) == SAMPLES
    failed = next(event for event in outcome.events if isinstance(event, Failed))
    assert (failed.of, failed.reason) == (other.sink, "bad_request")
    assert "version 3 can't join a batch of version 2" in failed.message


def test_no_response_goes_on_with_older_weights(make_request: MakeRequest, tmp_path: Path) -> None:
    third = make_version(make_request, str(tmp_path / "weights"))
    request = make_request("live", weights=third)
    second = NewWeights(present=NextWeights(weights=make_request().weights))
    with pytest.raises(TaskError, match="version 3 can't go on with version 2, which is older"):
        run_live(request, {10: second, 11: None})


class Refusing(TransformersEngine):
    """An engine that must not be given weights."""

    def load(self, *arguments: object, **named: object) -> None:
        raise AssertionError("weights were loaded")


def test_no_weights_are_loaded_for_samples_that_are_all_finished(make_request: MakeRequest, whole: Rollouts) -> None:
    before = make_request("before")
    run(before)
    request, told = make_request("live", resume_from=[before.sink]), set[tuple[int, int]]()

    def end(event: Event, inbox: Inbox) -> None:
        told.update((each.prompt, each.index) for each in event.samples if isinstance(event, Samples))
        if told == whole.keys():
            inbox.close()

    outcome = run_live(request, {}, Refusing(), answer=end)
    assert of(outcome, request.sink) == whole
    assert outcome.result.unfinished == 0


def test_the_last_sample_is_published_though_more_may_come(make_request: MakeRequest, whole: Rollouts) -> None:
    request = make_request("live", samples=GROUPS[0])

    def end(event: Event, inbox: Inbox) -> None:
        if isinstance(event, Samples) and {each.index for each in event.samples} & {3}:
            inbox.close()

    clock_readings: dict[int, Line | None] = {}
    outcome = run_live(request, clock_readings, answer=end, flush_seconds=1e6)
    assert len(of(outcome, request.sink)) == SAMPLES


def test_time_without_samples_is_not_work(make_request: MakeRequest, whole: Rollouts) -> None:
    request = make_request("live", samples=GROUPS[0])
    last = max(len(whole[0, index].response_tokens) for index in range(SAMPLES))
    add = AddSamples(sink=request.sink, samples=GROUPS[1])
    lines: dict[int, Line | None] = {last + 20: add, last + 21: None}
    idle = run_live(request, lines, TransformersEngine()).result.waited_seconds
    assert idle > 0.1, "readings of the clock, each of 0.01 s, in which the batch was empty"
    assert (
        run_live(request, {last + 20: None}, TransformersEngine(), sink=f"{request.sink}-again").result.waited_seconds
        == 0
    )
