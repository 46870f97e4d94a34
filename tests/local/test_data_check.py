"""The data of jobs whose environment's server does not run on this machine."""

import tempfile
from pathlib import Path
from typing import Any

import pytest

from rlhfless_functions.api.data_check import DataCheck, DataCheckResult
from rlhfless_operator.local import data_check
from rlhfless_operator.local.served_environment import with_server
from rlhfless_operator.platforms.local.environment_server import EnvironmentServerError
from tests.jobs import job

SERVED = job(environment={"openenv": {"image": "maze:1"}}, rewards=[{"name": "solved", "environment": {}}])


def test_data_is_read_without_a_server_that_runs_on_a_cluster_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[DataCheck] = []

    def answer(action: str, question: DataCheck, *others: Any) -> str:
        asked.append(question)
        return DataCheckResult().model_dump_json()

    monkeypatch.setattr(data_check, "ask_functions", answer)
    assert data_check.check_data(SERVED, 1)
    assert [question.environment for question in asked] == [None]


def test_a_server_that_is_refused_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(EnvironmentServerError):
        with_server(SERVED, lambda served: None)
    assert list(tmp_path.iterdir()) == []
