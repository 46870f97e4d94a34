"""Where a request finds what earlier ones have published of its samples."""

from rlhfless_functions.api import FinishedSample, Partial, Samples
from rlhfless_operator.training.actors.sinks import Places, SinkIndex

FIRST, SECOND = (0, 0), (0, 1)


def finished(part: str) -> Samples:
    return Samples(samples=[FinishedSample(prompt=0, index=0, tokens=4, finish_reason="stop")], part=part)


def partial(part: str, tokens: int) -> Partial:
    return Partial(samples=[FinishedSample(prompt=0, index=1, tokens=tokens, finish_reason="cut")], part=part)


def test_a_fresh_sample_may_be_in_any_sink_of_an_earlier_driver() -> None:
    assert SinkIndex(["before"]).places([FIRST]) == Places(["before"], {})


def test_a_sample_is_looked_for_where_its_own_requests_wrote() -> None:
    sinks = SinkIndex(["before"])
    sinks.opened("mine", [FIRST])
    sinks.opened("other", [SECOND])
    sinks.finished("mine", finished("mine/0"))
    assert sinks.places([FIRST]) == Places(["before", "mine"], {"mine": "mine/0"})


def test_the_newest_partial_holds_all_that_earlier_sinks_do() -> None:
    sinks = SinkIndex([])
    for sink in ("one", "two"):
        sinks.opened(sink, [SECOND])
        sinks.flushed(sink, partial(f"{sink}/0", tokens=len(sink)))
    assert sinks.places([SECOND]) == Places(["two", "two/0"], {"two": "two/0"})
    assert sinks.published_tokens(SECOND) == 3


def test_of_a_sample_that_nobody_flushed_nothing_is_stored() -> None:
    assert SinkIndex([]).published_tokens(FIRST) == 0
