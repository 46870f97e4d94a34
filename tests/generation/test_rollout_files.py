"""When parts are written, and that they are announced only once they are stored."""

import threading
from pathlib import Path

import pytest

from rlhfless_functions import artifacts
from rlhfless_functions.api import Event, Samples
from rlhfless_functions.data.rollouts import GeneratedSample, VersionSpan
from rlhfless_functions.generation.rollout_files import FlushSchedule, RolloutPublisher


def rollout(prompt: int) -> GeneratedSample:
    return GeneratedSample(prompt, 0, [1], [2, 3], [-1.0, -2.0], "stop", [VersionSpan(0, 0, 2)])


def schedule() -> FlushSchedule:
    return FlushSchedule(share=80, flush_seconds=5.0, now=100.0)


def test_nothing_is_written_while_no_group_is_complete() -> None:
    assert schedule().due(104.9, pending=79) == "nothing"


def test_a_complete_group_is_written_after_a_moment() -> None:
    waiting = schedule()
    waiting.group_completed()
    assert waiting.due(100.1, pending=1) == "nothing"
    assert waiting.due(100.2, pending=1) == "finished"


def test_a_complete_group_is_written_at_once_where_much_is_pending() -> None:
    waiting = schedule()
    waiting.group_completed()
    assert waiting.due(100.0, pending=9) == "nothing"
    assert waiting.due(100.0, pending=10) == "finished"


def test_everything_is_written_after_the_longest_time() -> None:
    assert schedule().due(105.0, pending=0) == "everything"


def test_what_was_written_starts_the_wait_again() -> None:
    waiting = schedule()
    waiting.group_completed()
    waiting.flushed(103.0)
    assert waiting.due(104.0, pending=50) == "nothing"
    assert waiting.due(108.0, pending=0) == "everything"


def test_parts_are_announced_in_order_once_they_can_be_read(tmp_path: Path) -> None:
    seen: list[tuple[str, bool]] = []

    def emit(event: Event) -> None:
        assert isinstance(event, Samples)
        seen.append((event.part, artifacts.exists(event.part)))

    with RolloutPublisher(str(tmp_path), [], emit) as publisher:
        for prompt in range(5):
            publisher.publish([rollout(prompt)], [])
        publisher.publish([], [])
    assert seen == [(part, True) for part in publisher.parts]
    assert [Path(part).name for part in publisher.parts] == [f"part-{i:06d}.parquet" for i in range(5)]


def test_a_part_that_cannot_be_written_is_an_error_and_so_are_those_after_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    events: list[Event] = []
    publisher = RolloutPublisher(str(tmp_path / "file"), [], events.append)
    with pytest.raises(artifacts.ArtifactUnwritableError), publisher:
        publisher.publish([rollout(0)], [])
        publisher.publish([rollout(1)], [])
    assert events == []


def test_the_publisher_is_busy_until_the_part_is_announced(tmp_path: Path) -> None:
    release = threading.Event()
    with RolloutPublisher(str(tmp_path), [], lambda _: release.wait(10)) as publisher:
        assert publisher.idle
        publisher.publish([rollout(0)], [])
        assert not publisher.idle
        release.set()
    assert publisher.idle
