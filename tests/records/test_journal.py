"""Metrics of chunks, added up, as a step's metrics; and files that grow by a line."""

from pathlib import Path

import pytest

from rlhfless_functions import artifacts
from rlhfless_operator.records.journal import JsonLines, mean_metrics, read_lines
from rlhfless_operator.records.record import StepRecord, read_records


def test_sums_over_counts_are_means_and_lone_ones_are_themselves() -> None:
    sums = {
        "reward/sum": 6.0,
        "reward/count": 4.0,
        "reward/square/sum": 14.0,
        "groups/count": 2.0,
        "seconds/rewards/sum": 0.5,
        "values/sum": 0.0,
        "values/count": 0.0,
        "policy/ratio/max": 1.5,
    }
    metrics = mean_metrics(sums)
    assert metrics.pop("reward/std") == pytest.approx((14 / 4 - 1.5**2) ** 0.5)
    assert metrics == {"reward": 1.5, "groups": 2.0, "seconds/rewards": 0.5, "policy/ratio/max": 1.5}


def test_lines_are_appended_to_what_is_there(tmp_path: Path) -> None:
    uri = str(tmp_path / "lines.jsonl")
    assert read_lines(uri) == []
    JsonLines(uri, []).append({"step": 1}, {"step": 2})
    JsonLines(uri, read_lines(uri)[:1]).append({"step": 3})
    assert read_lines(uri) == [{"step": 1}, {"step": 3}]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    uri = str(tmp_path / "metrics.jsonl")
    lines = JsonLines(uri, [])
    for step in (1, 2):
        lines.append({"step": step, "seconds": 1.5})
    content = Path(uri).read_bytes()
    Path(uri).write_bytes(content.replace(b"1.5", b"1.7", 1))
    with pytest.raises(artifacts.ArtifactCorruptError, match=r"metrics.jsonl, line 1, is damaged .*its checksum"):
        read_lines(uri)
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 1: its checksum is another.*restore"):
        read_records(uri, StepRecord)
    Path(uri).write_bytes(content[:-20])
    assert [record.step for record in read_records(uri, StepRecord)] == [1], "its writer was killed"
