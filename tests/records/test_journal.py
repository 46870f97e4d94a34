"""Metrics of chunks, added up, as a step's metrics; and files that grow by a line."""

from pathlib import Path

import pytest

from rlhfless_operator.records.journal import JsonLines, mean_metrics, read_lines


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
