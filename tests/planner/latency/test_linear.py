"""Latency: the linear model, its fit to tables, the roofline, and the calibration by a run's own events."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_operator.planner.latency.calibration import Calibration, Observation
from rlhfless_operator.planner.latency.linear import DecodeTable, LinearLatency, non_negative_least_squares
from rlhfless_operator.planner.latency.measured import MEASURED
from rlhfless_operator.planner.latency.roofline import (
    A100,
    GPUS,
    H100,
    H200,
    L40S,
    LLAMA_70B,
    MODELS,
    QWEN_3B,
    QWEN_7B,
    kv_tokens,
    profile,
    roofline,
)

TRUE = LinearLatency(0.020, 40e-6, 70e-9, 30e-6)


def observations(latency, count, *, noise=0.02, outliers=0.0, seed=0):
    random = np.random.default_rng(seed)
    for _ in range(count):
        samples = int(random.integers(4, 128))
        lengths = random.lognormal(5.5, 0.6, samples)
        contexts = float((lengths * (200 + lengths / 2)).sum())
        exact = Observation(float(lengths.max()), float(lengths.sum()), contexts, 200 * samples / 4, 1)
        factor = random.lognormal(0, noise) * (random.uniform(3, 20) if random.random() < outliers else 1)
        seconds = exact.forecast(latency) * factor
        yield Observation(exact.steps, exact.sequence_steps, exact.context_tokens, exact.prefill_tokens, seconds)


def error(latency, seed=99):
    return float(
        np.mean([abs(each.forecast(latency) / each.seconds - 1) for each in observations(TRUE, 50, seed=seed, noise=0)])
    )


def test_a_decode_step_is_linear_in_batch_and_context():
    assert TRUE.decode_seconds(10, 300) == pytest.approx(0.020 + 10 * (40e-6 + 300 * 70e-9))


def test_sequence_work_is_the_sum_of_its_steps():
    steps = sum(TRUE.decode_seconds(1, context) - TRUE.step_seconds for context in np.arange(100, 150) + 0.5)
    assert TRUE.sequence_work(100, 50) == pytest.approx(steps)


def test_a_table_made_by_a_linear_model_gives_it_back():
    batches, contexts = (1, 8, 64, 256), (128, 512, 2048)
    seconds = tuple(tuple(TRUE.decode_seconds(batch, context) for context in contexts) for batch in batches)
    fitted = DecodeTable(batches, contexts, seconds, 30e-6).linear()
    assert [fitted.step_seconds, fitted.sequence_seconds, fitted.context_seconds, fitted.prefill_token_seconds] == (
        pytest.approx([0.020, 40e-6, 70e-9, 30e-6])
    )


@given(st.lists(st.lists(st.floats(0, 10), min_size=4, max_size=4), min_size=4, max_size=12))
@settings(max_examples=40, deadline=None)
def test_least_squares_never_goes_negative_and_beats_its_neighbours(rows):
    table = np.array(rows)
    matrix, target = table[:, :3], table[:, 3] - 3
    solution = np.array(non_negative_least_squares(matrix, target))
    assert (solution >= 0).all()
    best = float(((matrix @ solution - target) ** 2).sum())
    for direction in (*np.eye(3), *-np.eye(3)):
        nearby = np.maximum(solution + 0.01 * direction, 0)
        assert best <= float(((matrix @ nearby - target) ** 2).sum()) + 1e-6


@pytest.mark.parametrize(
    ("model", "gpu", "gpus", "batch", "context", "measured"),
    [
        (QWEN_7B, L40S, 1, 1, 512, 21.4e-3),
        (QWEN_7B, L40S, 1, 64, 2048, 34.9e-3),
        (QWEN_7B, H100, 1, 64, 512, 7.1e-3),
        (QWEN_7B, H200, 1, 64, 2048, 6.9e-3),
        (QWEN_3B, L40S, 1, 1, 512, 9.5e-3),
        (LLAMA_70B, H100, 8, 64, 512, 12.0e-3),
    ],
)
def test_the_roofline_is_within_a_third_of_what_was_measured(model, gpu, gpus, batch, context, measured):
    table = roofline(model, gpu, gpus)
    latency = table.linear()
    assert latency.decode_seconds(batch, context) == pytest.approx(measured, rel=0.34)


def test_the_measured_tables_cover_the_gpus_and_models_of_the_scenarios():
    assert {(gpu, model) for gpu, model, _ in MEASURED} == set(itertools.product(GPUS, MODELS))


@pytest.mark.parametrize("key", MEASURED)
def test_the_linear_model_follows_the_measurements(key):
    table = MEASURED[key]
    latency = table.linear()
    for batch, row in zip(table.batches, table.seconds, strict=True):
        for context, seconds in zip(table.contexts, row, strict=True):
            assert latency.decode_seconds(batch, context) == pytest.approx(seconds, rel=0.3)


@pytest.mark.parametrize("key", [key for key in MEASURED if key[2] == 1])
def test_the_roofline_of_a_single_gpu_is_near_the_measurements(key):
    gpu, model, gpus = key
    formula = roofline(MODELS[model], GPUS[gpu], gpus).linear()
    measured = MEASURED[key].linear()
    for batch, context in ((1, 512), (64, 512), (64, 2048), (256, 512)):
        ratio = formula.decode_seconds(batch, context) / measured.decode_seconds(batch, context)
        assert 0.6 < ratio < 1.7


def test_a_model_that_fits_no_gpu_is_told_how_many_it_needs():
    with pytest.raises(ValueError, match=r"gpus is 1: Llama-2-70B needs 138 GB .* use at least 2"):
        kv_tokens(LLAMA_70B, A100, 1)


def test_a_profile_has_room_for_many_sequences_of_a_small_model():
    found = profile(QWEN_3B, L40S, 1, startup_seconds=30)
    assert found.kv_tokens > 500_000
    assert found.weight_load_seconds == pytest.approx(6.18e9 / 4e9)


def test_calibration_learns_a_latency_that_the_table_has_wrong():
    calibration = Calibration(LinearLatency(0.010, 80e-6, 20e-9, 60e-6))
    before = error(calibration.latency)
    for each in observations(TRUE, 120):
        calibration.observe(each)
    assert before > 0.2
    assert error(calibration.latency) < 0.02


def test_calibration_is_not_moved_by_outliers():
    calibration = Calibration(LinearLatency(0.010, 80e-6, 20e-9, 60e-6))
    for each in observations(TRUE, 200, outliers=0.2):
        calibration.observe(each)
    assert error(calibration.latency) < 0.04


@pytest.mark.slow
@given(seed=st.integers(0, 1000), noise=st.sampled_from([0.02, 0.2, 0.5]))
@settings(max_examples=8, deadline=None)
def test_calibration_of_a_right_table_stays_within_the_noise(seed, noise):
    calibration = Calibration(TRUE)
    for each in observations(TRUE, 40, noise=noise, seed=seed):
        calibration.observe(each)
    assert error(calibration.latency) < noise


def test_calibration_waits_until_it_has_forecast_better():
    calibration = Calibration(LinearLatency(1.0))
    assert calibration.latency == calibration.prior
    calibration.observe(next(iter(observations(TRUE, 1))))
    assert calibration.latency == calibration.prior


STRETCHES = st.builds(
    lambda steps, width, prefill, magnitude: Observation(
        steps, steps * width, steps * width * 100, prefill, 10**magnitude
    ),
    steps=st.sampled_from([1, 5, 50, 200]),
    width=st.sampled_from([1, 4, 16]),
    prefill=st.sampled_from([1, 100, 1000, 50000]),
    magnitude=st.floats(-4, 2),
)


@pytest.mark.slow
@given(stretches=st.lists(STRETCHES, min_size=1, max_size=6))
def test_whatever_is_seen_decoding_takes_some_time(stretches):
    """Stretches that contradict each other ended the job that had seen them."""
    calibration = Calibration(LinearLatency(0.002, 20e-6, 1e-8, 5e-6))
    for _ in range(4):
        calibration.observe(*stretches)
    assert calibration.latency.decode_seconds(1, 100) > 0
    assert Calibration.from_state(calibration.state()).latency == calibration.latency


def test_a_fit_that_leaves_decoding_no_time_is_the_prior_at_the_speed_that_was_seen():
    prior = LinearLatency(0.002, 20e-6, 1e-8, 5e-6)
    calibration = Calibration(prior)
    calibration.observe(
        Observation(50, 200, 20000, 100, 0.0004250868712989513),
        Observation(200, 800, 80000, 100, 0.2417824102185118),
        Observation(50, 800, 80000, 50000, 1.1909957367558144),
        Observation(5, 20, 2000, 50000, 0.6462324455092853),
    )
    fitted = calibration._fitted
    assert fitted.step_seconds > 0
    assert fitted.step_seconds / fitted.prefill_token_seconds == pytest.approx(400)


def test_calibration_survives_json():
    calibration = Calibration(LinearLatency(0.010, 80e-6, 20e-9, 60e-6))
    for each in observations(TRUE, 20):
        calibration.observe(each)
    restored = Calibration.from_state(json.loads(json.dumps(calibration.state())))
    assert restored.latency == calibration.latency


def test_work_that_took_no_time_is_refused():
    with pytest.raises(ValueError, match="seconds is 0"):
        Observation(1, 1, 1, 1, 0)
