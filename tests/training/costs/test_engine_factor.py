"""An engine needs more time than the kernels that the tables of GPUs are made of: a run measures how much."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhfless_operator.job.actor_range import ActorRange
from rlhfless_operator.job.reading.validation import load_job
from rlhfless_operator.planner.latency.calibration import Observation
from rlhfless_operator.planner.latency.measured import MEASURED
from rlhfless_operator.training.costs.cost_model import CostModel
from rlhfless_operator.training.costs.engine_factor import measured_factor

TABLE = MEASURED["H100", "Qwen2.5-7B", 1].linear()
REHEARSAL = {"trace": "trace.parquet", "gpu": "L40S", "model": "Qwen2.5-3B"}


def work(batch: float, *, times: float) -> Observation:
    """A share of which every step has so many sequences, by an engine that takes so many times as long as the table."""
    steps, context = 200.0, 500.0
    plain = Observation(steps, steps * batch, steps * batch * context, batch * context, 1.0)
    return Observation(*plain.features[:4], plain.forecast(TABLE) * times)


def test_a_run_learns_how_many_times_as_long_as_the_table_its_engine_takes(tiny_job: Callable[..., Path]) -> None:
    costs = CostModel(load_job(tiny_job()).spec, ActorRange(1, 4), latency=TABLE)
    assert costs.engine_factor is None
    costs.calibration.observe(*(work(batch, times=1.6) for batch in (1, 16, 64, 128, 256)))
    assert costs.engine_factor == pytest.approx(1.6)
    again = CostModel(load_job(tiny_job()).spec, ActorRange(1, 4))
    again.restore(costs.state())
    assert again.engine_factor == pytest.approx(1.6)


def test_a_device_without_a_table_and_a_rehearsal_have_none(tiny_job: Callable[..., Path]) -> None:
    for changes, latency in (({}, None), ({"rehearsal": REHEARSAL}, TABLE)):
        costs = CostModel(load_job(tiny_job(**changes)).spec, ActorRange(1, 4), latency=latency)
        costs.calibration.observe(work(16, times=1.6))
        assert costs.engine_factor is None


def test_a_run_s_last_steps_tell_it(tmp_path: Path) -> None:
    steps = [{"metrics": {"generation/engine_factor": 9.0 if step < 2 else 1.5}} for step in range(10)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in [*steps, {"metrics": {}}]))
    assert measured_factor(str(tmp_path)) == 1.5
    assert measured_factor(str(tmp_path / "none")) is None
    assert measured_factor(None) is None
