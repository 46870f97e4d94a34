"""A change of hands is from the end of one stage's task to the other's first tokens or work, in parts that add up."""

from typing import Any

import pytest

from benchmarks.cluster.hand_overs import hand_overs, percentile, summary


def line(second: float, instance: str, message: str, **fields: Any) -> dict[str, Any]:
    return {"time": f"2026-01-01T00:00:{second:06.3f}Z", "instance": instance, "message": message, **fields}


GENERATED = line(1.0, "g", "task ended", stage="generation", step=3)
SLEPT = line(1.3, "g", "instance sleeps", seconds=0.2)
PREPARES = line(1.35, "p", "task started", stage="preparation", step=3)
LOADED = line(1.6, "p", "model loaded", weights_seconds=0.2)


def test_its_parts_add_up() -> None:
    (found,) = hand_overs([LOADED, PREPARES, GENERATED, SLEPT])
    assert (found.kind, found.step) == ("generation to preparation", 3)
    assert found.deciding == pytest.approx(0.1)
    assert found.sleeping == pytest.approx(0.2)
    assert found.asking == pytest.approx(0.05)
    assert found.weights == pytest.approx(0.2)
    assert found.first_pass == pytest.approx(0.05)
    assert found.until_awake == pytest.approx(0.55)
    assert found.seconds == pytest.approx(0.6)


def test_a_pod_that_goes_on_is_no_change_of_hands() -> None:
    again = line(1.1, "g", "task started", stage="generation", step=3)
    sampled = line(1.2, "g", "first tokens sampled", weights_seconds=0.0)
    assert hand_overs([GENERATED, again, sampled]) == []


def test_lines_that_mean_something_else_are_passed_over() -> None:
    (found,) = hand_overs([line(0.5, "p", "instance sleeps", seconds=0.1), GENERATED, SLEPT, PREPARES, LOADED])
    assert found.seconds == pytest.approx(0.6)


def test_percentiles_are_of_what_was_seen() -> None:
    seconds = [float(number) for number in range(1, 101)]
    assert percentile(seconds, 0.95) == 95
    assert percentile(seconds, 0.5) == 50
    assert percentile([3.0], 0.95) == 3.0


def test_the_summary_has_each_kind() -> None:
    told = summary(hand_overs([GENERATED, SLEPT, PREPARES, LOADED]))
    assert told["all"]["count"] == told["generation to preparation"]["count"] == 1
    assert told["all"]["to_the_first_token"]["p95"] == pytest.approx(0.6)
    assert told["all"]["until_awake"]["p95"] == pytest.approx(0.55)
