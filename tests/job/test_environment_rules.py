"""What an environment can't be combined with yet, and what its score needs."""

from typing import Any

import pytest
from pydantic import ValidationError

from tests.jobs import job

CLASS = {"python": {"file": "env.py", "class": "Maze"}}
SCORE = [{"name": "solved", "environment": {}}]


def test_an_environment_and_its_score_are_enough() -> None:
    spec = job(environment=CLASS, rewards=SCORE).spec
    assert spec.environment is not None and spec.environment.files == ["env.py"]
    assert spec.rewards[0].kind == "environment"


@pytest.mark.parametrize("url", ["http://maze:8000", "wss://maze.example/env"])
def test_an_environment_on_a_server_scores_as_a_class_does(url: str) -> None:
    environment = job(environment={"openenv": {"url": url}}, rewards=SCORE).spec.environment
    assert environment is not None and environment.is_scored and not environment.files


@pytest.mark.parametrize("engine", ["auto", "vllm", "transformers"])
def test_every_engine_takes_samples_back(engine: str) -> None:
    assert job(environment=CLASS, rewards=SCORE, generation={"engine": engine}).spec.generation.engine == engine


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"async": {}}, "can't be combined with async yet"),
        ({"generation": {"drafting": "auto"}}, "write generation.drafting: never"),
        ({"sampling": {"stop": ["END"]}}, "not with sampling.stop"),
        ({"rehearsal": {"trace": "t.parquet", "gpu": "L40S"}}, "a rehearsal knows no turns yet"),
        ({"environment": None}, "the job has no environment; add spec.environment"),
        ({"environment": {"tools": ["t.py:add"]}}, "tools alone give no score; add environment.python"),
        ({"environment": {}}, "environment needs python, openenv or tools"),
        ({"environment": {"tools": ["t.py"]}}, "tools"),
        ({"environment": {"openenv": {"url": "maze:8000"}}}, "openenv.url"),
        ({"environment": {**CLASS, "openenv": {"url": "http://maze"}}}, "openenv has its own tools; remove"),
        ({"evaluation": {"data": {"source": "h.jsonl"}, "rewards": SCORE}, "environment": None}, "no environment"),
    ],
)
def test_what_is_not_built_is_refused_with_the_remedy(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        job(**{"environment": CLASS, "rewards": SCORE, **given})


def test_files_of_an_environment_are_beside_the_job() -> None:
    from pathlib import Path

    given = {**CLASS, "tools": ["more/t.py:add", "s3://bucket/t.py:take"]}
    environment = job(environment=given, rewards=SCORE).resolve_paths(Path("/jobs")).spec.environment
    assert environment is not None and environment.python is not None
    assert environment.python.file == "/jobs/env.py"
    assert environment.tools == ["/jobs/more/t.py:add", "s3://bucket/t.py:take"]
