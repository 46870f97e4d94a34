"""Drafting on an emulated GPU: fewer passes, and the same tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.generation.engines.emulated_runs import (
    SAMPLING,
    continued,
    engine_of,
    finish,
    share,
    wanted,
)


def test_drafting_takes_fewer_passes_and_gives_the_same_tokens(trace: str) -> None:
    # A pass of one sequence takes 1 s and 0.1 s for each drafted row: with one draft that is always right it gives 2.
    numbers = {"sequence_seconds": 0.0, "context_seconds": 0.0, "draft_seconds": 0.1}
    chances = {"draft_coverage": 1.0, "draft_acceptance": 1.0, "longest_draft": 1}
    task = next(task for task in share() if wanted(0, task.prompt, task.index) == 24 or task.index == 0)
    length = min(24, wanted(0, task.prompt, task.index))
    plain, plain_clock = engine_of(trace, **numbers)
    expected = finish(plain.start([task], SAMPLING, None, ["a step before"]))
    assert plain_clock.now - 100.0 == pytest.approx(length)
    engine, clock = engine_of(trace, **numbers, **chances)
    run = engine.start([task], SAMPLING, None, ["a step before"])
    assert run.room.longest_draft == 1
    assert finish(run) == expected
    passes = -(-length // 2)
    assert clock.now - 100.0 == pytest.approx(1.1 * passes)
    counts = run.decoding()
    assert (counts.passes, counts.sequence_passes, counts.tokens, counts.drafted) == (passes, passes, length, passes)
    assert counts.matched == counts.looked_up == passes


@pytest.mark.parametrize("drafts", [None, []])
def test_without_responses_to_draft_from_nothing_is_drafted(trace: str, drafts: list[str] | None) -> None:
    engine, clock = engine_of(trace, draft_coverage=1.0, draft_acceptance=1.0)
    begun = clock.now
    run = engine.start(share(), SAMPLING, None, drafts)
    finish(run)
    took = clock.now - begun
    plain, clock = engine_of(trace)
    begun = clock.now
    finish(plain.start(share(), SAMPLING, None))
    assert took == pytest.approx(clock.now - begun)
    assert (run.decoding().drafted, run.decoding().looked_up) == (0, 0)
    assert run.decoding().tokens == run.decoding().sequence_passes


@settings(max_examples=20, deadline=None)
@given(coverage=st.sampled_from([0.0, 0.4, 1.0]), acceptance=st.sampled_from([0.0, 0.5, 0.9]), stop=st.integers(1, 12))
def test_cut_anywhere_a_drafted_share_has_the_same_responses(
    trace: str, coverage: float, acceptance: float, stop: int
) -> None:
    engine, clock = engine_of(trace, draft_coverage=coverage, draft_acceptance=acceptance, draft_seconds=0.01)
    plain, plain_clock = engine_of(trace)
    expected = finish(plain.start(share(), SAMPLING, None))
    run = engine.start(share(), SAMPLING, None, ["a step before"])
    done = {}
    for _ in range(stop):
        done |= {(result.prompt, result.index): result for result in run.step()}
    rest = [task for task in share() if (task.prompt, task.index) not in done]
    if rest:
        done |= finish(engine.start(continued(rest, run.unfinished()), SAMPLING, None, ["a step before"]))
    assert done == expected
    assert clock.now <= plain_clock.now + 24
