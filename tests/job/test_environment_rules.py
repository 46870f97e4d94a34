"""What an environment can't be combined with yet, and what its score needs."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rlhfless_functions.settings import EnvironmentSettings
from rlhfless_operator.job.reading.file_contents import not_checked
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
        ({"generation": {"drafting": "auto"}}, "write generation.drafting: never"),
        ({"sampling": {"stop": ["END"]}}, "not with sampling.stop"),
        ({"environment": None}, "the job has no environment; add spec.environment"),
        ({"environment": {"tools": ["t.py:add"]}}, "tools alone give no score; add environment.python"),
        ({"environment": {}}, "environment needs python, openenv or tools"),
        ({"environment": {"tools": ["t.py"]}}, "tools"),
        ({"environment": {"openenv": {"url": "maze:8000"}}}, "openenv.url"),
        ({"environment": {**CLASS, "openenv": {"url": "http://maze"}}}, "openenv has its own tools; remove"),
        (
            {"environment": {"openenv": {"url": "http://maze"}, "served": {}}},
            "class and tools of your own; remove it, or",
        ),
        ({"environment": {"served": {}}}, "environment needs python, openenv or tools"),
        ({"environment": {**CLASS, "served": {"url": "http://m", "sessions": 8}}}, "remove url, or sessions"),
        ({"evaluation": {"data": {"source": "h.jsonl"}, "rewards": SCORE}, "environment": None}, "no environment"),
    ],
)
def test_what_is_not_built_is_refused_with_the_remedy(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        job(**{"environment": CLASS, "rewards": SCORE, **given})


SERVED = {"openenv": {"image": "maze:1"}}
REHEARSAL = {"trace": "t.parquet", "gpu": "L40S"}


@pytest.mark.parametrize("environment", [CLASS, SERVED, {**CLASS, "served": {}}, {"openenv": {"url": "http://maze"}}])
def test_a_rehearsal_runs_no_server_and_asks_for_none(environment: dict[str, Any]) -> None:
    spec = job(environment=environment, rewards=SCORE, rehearsal=REHEARSAL).spec
    assert spec.environment_server is None
    assert spec.asked_environment is not None and spec.asked_environment.server is None
    assert spec.may_let_actors_go, "as the job itself"


def test_a_job_that_is_no_rehearsal_asks_for_its_server() -> None:
    spec = job(environment=SERVED, rewards=SCORE).spec
    assert spec.environment_server is not None and spec.environment_server.image == "maze:1"
    assert spec.asked_environment == spec.environment


KEPT = {**CLASS, "letGo": "never"}
"""No pod keeps its episodes."""
ELSEWHERE = {"openenv": {"url": "http://maze"}, "letGo": "never"}
GPU = {"nvidia.com/gpu": 1}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {**KEPT, "pods": {"env": {"A": "1"}}},
            "has no pods of an environment; remove them, or write environment.letGo",
        ),
        ({**ELSEWHERE, "pods": {"env": {"A": "1"}}}, "the job has no pods of an environment"),
        ({**CLASS, "pods": {"image": "maze:2"}}, "has the image of generation's pods; remove pods.image"),
        ({**SERVED, "pods": {"image": "maze:2"}}, "image is environment.openenv.image; write it there"),
        ({**CLASS, "served": {}, "pods": {"image": "maze:2"}}, "image is environment.served.image; write it there"),
        ({**KEPT, "served": {"url": "http://m"}, "pods": {"env": {"A": "1"}}}, "the job has no pods of an environment"),
        ({**CLASS, "pods": {"resources": {"limits": GPU}}}, "run on CPUs.*remove nvidia.com/gpu"),
        ({**SERVED, "pods": {"resources": {"limits": GPU}}}, "run on CPUs.*remove nvidia.com/gpu"),
        ({**SERVED, "pods": {"resources": {"requests": GPU}}}, "run on CPUs.*remove nvidia.com/gpu"),
    ],
)
def test_pods_of_an_environment_are_on_cpus_and_of_a_job_that_has_some(
    environment: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        job(environment=environment, rewards=SCORE)


def test_a_price_of_an_environments_pods_is_refused_where_the_job_has_none() -> None:
    prices = {"stages": {"environment": "0.05"}}
    for environment in (SERVED, CLASS):
        assert job(environment=environment, rewards=SCORE, prices=prices)
    for environment in (None, KEPT, ELSEWHERE):
        given = {} if environment is None else {"environment": environment, "rewards": SCORE}
        with pytest.raises(
            ValidationError, match=r"no pods of an environment; remove the price, or write environment\.letGo"
        ):
            job(**given, prices=prices)


def test_files_of_an_environment_are_beside_the_job() -> None:
    from pathlib import Path

    given = {**CLASS, "tools": ["more/t.py:add", "s3://bucket/t.py:take"]}
    environment = job(environment=given, rewards=SCORE).resolve_paths(Path("/jobs")).spec.environment
    assert environment is not None and environment.python is not None
    assert environment.python.file == "/jobs/env.py"
    assert environment.tools == ["/jobs/more/t.py:add", "s3://bucket/t.py:take"]


@pytest.mark.parametrize(
    ("openenv", "message"),
    [
        ({}, "openenv needs url, image or command"),
        ({"port": 9000}, "openenv needs url, image or command"),
        ({"url": "http://maze:8000", "image": "maze:1"}, "a server that runs already; remove url, or image"),
        ({"url": "http://maze:8000", "sessions": 8, "port": 1}, "remove url, or port, sessions"),
        ({"image": "maze:1", "port": 0}, "port"),
        ({"command": []}, "command"),
    ],
)
def test_a_server_runs_already_or_the_job_runs_it(openenv: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        job(environment={"openenv": openenv}, rewards=SCORE)


def test_pods_of_an_environment_have_a_price_of_their_own() -> None:
    environment = {"openenv": {"image": "maze:1"}}
    prices = {"instanceHour": "2", "stages": {"environment": "0.05"}}
    spec = job(environment=environment, rewards=SCORE, prices=prices).spec
    assert {stage: str(price) for stage, price in spec.instance_prices.items()} == {
        "generation": "2", "preparation": "2", "learning": "2", "environment": "0.05",
    }  # fmt: skip
    assert "environment" not in spec.instance_gpus
    spec = job(environment=environment, rewards=SCORE, prices={"instanceHour": "2"}).spec
    assert str(spec.instance_prices["environment"]) == "2"
    assert str(job(environment=CLASS, rewards=SCORE, prices=prices).spec.instance_prices["environment"]) == "0.05"
    for kept in (KEPT, ELSEWHERE):
        assert "environment" not in job(environment=kept, rewards=SCORE).spec.instance_prices


def test_its_address_takes_the_place_of_what_starts_it() -> None:
    environment = job(environment={"openenv": {"image": "maze:1", "sessions": 4}}, rewards=SCORE).spec.environment
    assert environment is not None and environment.server is not None and environment.server.start_limit == 300
    openenv = environment.at("http://127.0.0.1:9").openenv
    assert openenv is not None
    assert openenv.model_dump(exclude_none=True) == {"url": "http://127.0.0.1:9", "start_seconds": "5m"}
    assert environment.at("http://127.0.0.1:9").server is None


def test_a_class_of_ones_own_is_served_by_a_command_that_knows_its_limits() -> None:
    given = {**CLASS, "served": {"sessions": 4}, "toolSeconds": "5s", "pods": {"env": {"A": "1"}}}
    environment = job(environment=given, rewards=SCORE).resolve_paths(Path("/jobs")).spec.environment
    assert environment is not None and environment.server is not None
    server = environment.server
    assert (server.image, server.sessions, server.containers, server.start_limit) == (None, 4, None, 300)
    assert server.command is not None
    *command, told = server.command
    assert command[0] == "python" and command[-1] == "rlhfless_functions.environments.server"
    settings = EnvironmentSettings.model_validate_json(told)
    assert settings.python is not None and settings.python.file == "/jobs/env.py"
    assert (settings.tool_seconds, settings.served) == (5.0, None)
    at = environment.at("http://127.0.0.1:9")
    assert at.server is None and at.is_scored and at.served is not None and at.served.url == "http://127.0.0.1:9"
    assert at.served.start_limit == 300


def test_validate_says_where_an_image_does_not_run() -> None:
    def remarks(openenv: dict[str, Any]) -> list[str]:
        spec = {"environment": {"openenv": openenv}, "rewards": SCORE}
        return [line for line in not_checked(job(**spec), Path("/")) if "openenv" in line]

    (line,) = remarks({"image": "maze:1"})
    assert line.startswith("spec.environment.openenv.image: it runs on a cluster only")
    assert remarks({"image": "maze:1", "command": ["maze"]}) == remarks({"url": "http://maze:8000"}) == []
