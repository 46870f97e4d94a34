"""When the responses of a share begin and end, where not all of them have room at once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_operator.planner.latency.linear import LinearLatency
from rlhfless_operator.planner.step.admission import admit
from rlhfless_operator.planner.step.loads import Loads, SampleLoad
from rlhfless_operator.simulator.instance import Instance, Response

LATENCY = LinearLatency(0.010, 0.0002, 2e-7, 0.0001)


def loads_of(samples, max_batch, latency=LATENCY, kv_tokens=None):
    return Loads([SampleLoad(*sample) for sample in samples], latency, kv_tokens=kv_tokens, max_batch=max_batch)


def simulated(samples, max_batch, latency=LATENCY):
    """When the simulator's instance ends each."""
    instance = Instance("a", latency, 0.0, max_batch=max_batch, kv_tokens=10**9)
    instance.add([Response(prompt, index, tokens, length) for prompt, index, tokens, length in samples])
    ended = {key: at for at, key in instance.advance(1e9)}
    return [ended[prompt, index] for prompt, index, *_ in samples]


def test_a_thousand_samples_on_a_batch_of_256_end_in_four_waves():
    samples = [(prompt, 0, 100, 300) for prompt in range(1024)]
    latency = LinearLatency(0.0095, 2.5e-5, 0.0, 0.0)
    ends = loads_of(samples, 256, latency).ends(np.arange(1024), 0.0)
    wave = 300 * (0.0095 + 256 * 2.5e-5)
    assert np.quantile(ends, [0.1, 0.4, 0.6, 0.9]) == pytest.approx([wave, 2 * wave, 3 * wave, 4 * wave])
    assert ends.tolist() == pytest.approx(simulated(samples, 256, latency))


@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(1, 90)), min_size=1, max_size=40),
    st.integers(1, 4),
    st.integers(1, 12),
)
@settings(max_examples=150, deadline=None)
def test_samples_are_forecast_to_end_when_an_instance_ends_them(drawn, in_group, max_batch):
    samples = [
        (number // in_group, number % in_group, drawn[number - number % in_group][0], length)
        for number, (_, length) in enumerate(drawn)
    ]
    ends = loads_of(samples, max_batch).ends(np.arange(len(samples)), 0.0)
    assert ends.tolist() == pytest.approx(simulated(samples, max_batch))


def test_a_response_of_no_tokens_ends_when_it_has_been_admitted():
    samples = [(0, 0, 100, 0), (1, 0, 100, 5), (2, 0, 100, 0)]
    ends = loads_of(samples, 1).ends(np.arange(3), 0.0)
    five = sum(LATENCY.decode_seconds(1, 100.5 + token) for token in range(5))
    assert ends.tolist() == pytest.approx([0.01, 0.02 + five, 0.03 + five])


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0.05, 1.0)), min_size=1, max_size=30))
@settings(max_examples=80, deadline=None)
def test_what_runs_never_fills_more_than_the_instance_and_nobody_is_passed(drawn):
    length, filled = np.array(drawn, dtype=float).T
    found = admit(length, filled)
    assert (np.diff(found.begin) >= 0).all()
    for now in found.begin:
        running = (found.begin <= now) & (now < found.end)
        assert filled[running].sum() <= 1 + 1e-6
    # Of those that are admitted at the same step, the later ones may have waited for the first.
    later = 1 + np.flatnonzero(np.diff(found.begin) > 0)
    for number in later:
        before = np.nextafter(found.begin[number], 0)
        running = (found.begin <= before) & (before < found.end)
        assert filled[running].sum() + filled[number] > 1 - 1e-6, "it waited although there was room"


def test_long_contexts_wait_for_the_cache():
    samples = [(prompt, 0, 100, 300) for prompt in range(4)]
    roomy, narrow = (loads_of(samples, None, kv_tokens=kv).ends(np.arange(4), 0.0).tolist() for kv in (1600, 800))
    assert max(roomy) == pytest.approx(min(roomy)) and sorted(narrow)[1] < sorted(narrow)[2]


def test_a_runaway_may_be_the_last_to_be_admitted():
    samples = [(prompt, 0, 100, 300) for prompt in range(8)]
    for batch, last in ((8, 0), (4, 300), (2, 900)):
        found = loads_of(samples, batch).decoded((np.arange(8),), 0.0, 2000)
        ends, late = found.ends, float(found.tail_end[0])
        assert late == pytest.approx(ends.max() + (last + 2000 - last - 300) * LATENCY.step_seconds)
        assert loads_of(samples, batch).decoded((np.arange(8),), 0.0, 10).tail_end[0] == pytest.approx(ends.max())
