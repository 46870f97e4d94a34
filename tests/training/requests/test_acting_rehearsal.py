"""Rehearsals of jobs whose model acts: real processes, on emulated GPUs, with environments as slow as a trace's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rlhfless_functions.data.traces import TraceLengths, TraceRows, write_trace_rows
from rlhfless_operator.training.requests.tasks import StageFailedError
from tests.jobs import document
from tests.training.whole_jobs import MakeJob, records_of, run_job

PROMPTS, SAMPLES, STEPS = 4, 2, 3
SCALE = 0.05

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("warm_start", "nothing_is_left_behind"),
]


def traced(away_seconds: float, *, acts: bool = True) -> TraceRows:
    """Responses of two to four turns."""
    step, prompt, sample = np.indices((STEPS, PROMPTS, SAMPLES)).reshape(3, -1)
    turns = 2 + (prompt + sample) % 3
    acting = {
        "turns": turns,
        "given_tokens": 20 * turns,
        "away_milliseconds": (1000 * away_seconds * turns).astype(int),
    }
    tokens = 30 * turns + 7 * step
    return TraceRows(prompt, step, sample, np.full_like(prompt, 50), tokens, step + 1, **acting if acts else {})


@pytest.fixture
def acting_job(tmp_path: Path) -> MakeJob:
    """Makes a job whose environment no machine has, with two actors."""

    def make(rows: TraceRows, **changes: Any) -> Path:
        write_trace_rows(str(tmp_path / "trace.parquet"), rows)
        (tmp_path / "train.jsonl").write_text('{"prompt": "not read"}\n')
        parts: dict[str, Any] = {
            "model": {"source": "Qwen/Qwen2.5-3B"},
            "data": {"source": "train.jsonl"},
            "rewards": [{"name": "solved", "environment": {}}],
            "sampling": {"maxPromptTokens": 1024, "maxResponseTokens": 1024},
            "batch": {"promptsPerStep": PROMPTS, "samplesPerPrompt": SAMPLES},
            "steps": STEPS,
            "generation": {"instances": {"min": 2, "max": 2}},
            "environment": {"openenv": {"image": "no/such-maze:1"}},
            "artifacts": {"uri": str(tmp_path / "runs")},
            "rehearsal": {"trace": "trace.parquet", "gpu": "L40S", "startup": "2s", "timeScale": SCALE},
            **changes,
        }
        file = tmp_path / "job.yaml"
        file.write_text(yaml.safe_dump(document("acting", **parts)))
        return file

    return make


def check(records: list[dict[str, Any]], rows: TraceRows) -> None:
    """That samples acted as the trace says."""
    lengths = TraceLengths(rows, PROMPTS)
    samples = [
        lengths.response(1, prompt, sample) for prompt in range(PROMPTS) for sample in range(SAMPLES)
    ]  # Of other steps, only lengths differ.
    assert len(records) == STEPS
    for record in records:
        metrics = record["metrics"]
        assert metrics["environment/turns"] == np.mean([each.turns for each in samples])
        assert metrics["environment/given"] == np.mean([each.given for each in samples])
        away = np.mean([each.away_seconds for each in samples])
        assert metrics["environment/seconds_away"] == pytest.approx(SCALE * away)
        assert record["ledger"]["learning"]["busy"] > 0


def test_actors_are_let_go_while_emulated_environments_work(acting_job: MakeJob) -> None:
    rows = traced(away_seconds=60.0)
    file = acting_job(rows)
    summary = run_job(file)
    assert (summary["phase"], summary["steps"]) == ("Succeeded", STEPS)
    records = records_of(file)
    check(records, rows)
    assert records[-1]["metrics"]["generation/let_go"] > 0.3, "environments work for 3 s at a time"
    assert records[-1]["metrics"]["lengths"] == np.mean(rows.response_tokens[-PROMPTS * SAMPLES :])


def test_actors_are_kept_where_environments_are_quick(acting_job: MakeJob) -> None:
    rows = traced(away_seconds=1.0)
    file = acting_job(rows)
    assert run_job(file)["phase"] == "Succeeded"
    records = records_of(file)
    check(records, rows)
    assert not any(record["metrics"].get("generation/let_go") for record in records)


def test_rollouts_go_ahead_while_emulated_environments_work(acting_job: MakeJob) -> None:
    rows = traced(away_seconds=10.0)
    file = acting_job(rows, **{"async": {"maxStaleness": 1}})
    summary = run_job(file)
    assert (summary["phase"], summary["steps"]) == ("Succeeded", STEPS)
    records = records_of(file)
    assert sum(record["metrics"]["environment/turns"] for record in records) > 0
    assert max(record["metrics"]["generation/staleness"] for record in records) > 0


def test_a_trace_of_no_environment_is_refused_at_once(acting_job: MakeJob) -> None:
    with pytest.raises(StageFailedError, match=r"rehearsal\.trace: .* has no turns, but the job has an environment"):
        run_job(acting_job(traced(0.0, acts=False)))
