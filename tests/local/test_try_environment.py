"""`rlhfless try-environment`: episodes of the untrained model, shown as conversations."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from rlhfless_operator import cli
from rlhfless_operator.local.try_environment import EpisodeTrialError
from tests.figures import ROOT

pytestmark = pytest.mark.usefixtures("warm_start")

EXAMPLE = ROOT / "examples" / "tools"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """The example, to be changed."""
    shutil.copytree(EXAMPLE, tmp_path / "job")
    return tmp_path / "job" / "grpo.yaml"


def change(job: Path, **spec: Any) -> Path:
    document = yaml.safe_load(job.read_text())
    document["spec"] |= spec
    job.write_text(yaml.safe_dump(document))
    return job


def try_environment(file: Path, *options: str) -> Result:
    return CliRunner().invoke(cli.app, ["try-environment", str(file), *options])


@pytest.mark.slow
def test_an_episode_is_shown_as_a_conversation(job: Path) -> None:
    result = try_environment(job, "--samples", "2")
    assert result.exit_code == 0, result.output
    assert result.output.count("row 0") == 2
    for part in (
        'model | a<tool_call>{"name": "take"',
        "given | <|tool|>",
        "ended: answered after",
        "rewards: solved ",
    ):
        assert part in result.output


@pytest.mark.slow
def test_all_rewards_score_what_the_environment_played(job: Path) -> None:
    both = [{"name": "solved", "environment": {}}, {"name": "says", "format": {"pattern": ".*=.*"}}]
    result = try_environment(change(job, rewards=both), "--json", "--prompts", "2", "--samples", "2")
    assert result.exit_code == 0, result.output
    episodes = json.loads(result.stdout)["episodes"]
    assert [episode["row"] for episode in episodes] == [0, 0, 1, 1]
    for episode in episodes:
        assert episode["terms"].keys() == {"solved", "says"}
        assert episode["terms"]["solved"] == episode["outcome"]["score"]
        assert episode["messages"][0]["role"] == "assistant"
        assert 0 < episode["given_tokens"] < episode["tokens"]


@pytest.mark.nightly
def test_an_environment_that_fails_is_a_fault(job: Path) -> None:
    source = (job.parent / "counter.py").read_text()
    (job.parent / "counter.py").write_text(source.replace("return float(", "raise KeyError("))
    result = try_environment(job)
    assert result.exit_code == 1
    assert "ended: failed" in result.output and "error: row 0: the environment failed" in result.output


def test_a_job_without_an_environment_is_refused() -> None:
    result = try_environment(ROOT / "examples" / "quickstart" / "grpo.yaml")
    assert isinstance(result.exception, EpisodeTrialError)
    assert "no spec.environment; add it, or try its rewards by rlhfless try-reward" in str(result.exception)
