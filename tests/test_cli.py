"""The command line: what a person or a script gets back."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from rlhfless_operator import cli
from rlhfless_operator.simulator.policies import POLICIES
from rlhfless_operator.simulator.scenarios import SCENARIOS
from rlhfless_operator.simulator.traces import write_trace
from tests.command_line import call, run_command
from tests.simulator.small_scenario import SMALL


def test_the_control_plane_never_imports_torch() -> None:
    script = (
        "import sys, pkgutil, importlib, rlhfless_operator;"
        "[importlib.import_module(module.name) for module in pkgutil.walk_packages(rlhfless_operator.__path__,"
        " 'rlhfless_operator.') if not module.name.endswith('__main__')];"
        "print(sorted({'torch', 'transformers', 'pyarrow'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


@pytest.mark.parametrize("arguments", [("-h",), ("validate", "-h"), ("simulate", "-h")])
def test_h_is_help(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0
    assert "Usage" in result.stdout


def test_the_version_is_that_of_the_package() -> None:
    result = CliRunner().invoke(cli.app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"rlhfless {version('rlhfless')}\n")


def test_validate_names_every_fault_and_exits_with_2(tiny_job: Callable[..., Path]) -> None:
    file = tiny_job()
    assert call("validate", str(file)).returncode == 0
    file.write_text(file.read_text().replace("temperature", "x").replace("steps: 3", "step: 3"))
    result = call("validate", str(file))
    assert result.returncode == 2
    assert "spec.step: unknown field; did you mean steps?" in result.stderr
    assert "Traceback" not in result.stderr


def test_validate_says_what_it_could_not_look_at(tiny_job: Callable[..., Path]) -> None:
    file = tiny_job()
    assert call("validate", str(file)).stdout == f"{file}: tiny is a valid job\n"
    result = call("validate", str(file), "--set", "spec.model.source=org/model")
    assert result.returncode == 0
    assert result.stdout.splitlines()[1:] == [
        "  not checked: spec.model.source: org/model is on the hub, not on this machine"
    ]


def test_validate_names_what_is_experimental(tiny_job: Callable[..., Path]) -> None:
    result = call("validate", str(tiny_job(generation={"drafting": "auto"})))
    assert result.returncode == 0
    assert "  experimental: spec.generation.drafting: auto — off by default" in result.stdout


def test_run_finds_the_same_before_anything_starts(tiny_job: Callable[..., Path], tmp_path: Path) -> None:
    file = tiny_job(tracking={"mlflow": {"trackingUri": "x", "experiment": "e"}}, data={"promptColumn": "q"})
    validated, run = call("validate", str(file)), call("run", str(file))
    assert (validated.returncode, run.returncode) == (2, 2)
    assert validated.stderr == run.stderr
    assert "train.jsonl has no column 'q'; it has prompt, ground_truth: set promptColumn to one of them" in run.stderr
    assert "spec.tracking.mlflow: the package mlflow is not installed; pip install mlflow" in run.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_what_is_set_is_what_is_recorded(tiny_job: Callable[..., Path], tmp_path: Path) -> None:
    file = tiny_job()
    settings = ("--set", "spec.steps=1", "--set", "spec.sampling.temperature=0.9", "--set", "spec.rewards.0.weight=2")
    result = subprocess.run(run_command(file, *settings), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    recorded = yaml.safe_load((tmp_path / "runs" / "tiny" / "job.yaml").read_text())["spec"]
    assert (recorded["steps"], recorded["sampling"]["temperature"], recorded["rewards"][0]["weight"]) == (1, 0.9, 2.0)
    # Without the settings it is another document, and the rules of changed documents apply.
    result = subprocess.run(run_command(file), capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "changed since this job was begun in" in result.stderr
    assert "spec.sampling" in result.stderr


def test_starting_over_asks_first(tiny_job: Callable[..., Path], tmp_path: Path) -> None:
    file = tiny_job()
    precious = tmp_path / "runs" / "tiny" / "weights" / "precious"
    precious.parent.mkdir(parents=True)
    precious.write_text("x")
    (tmp_path / "runs" / "tiny" / "rlhfless.json").write_text("{}")
    result = call("run", str(file), "--fresh", answer="n\n")
    assert result.returncode == 1
    assert "start over?" in result.stdout
    assert precious.exists()


@pytest.mark.parametrize("options", [(), ("--fresh", "--yes")])
def test_a_folder_that_is_no_runs_keeps_its_files(
    tiny_job: Callable[..., Path], tmp_path: Path, options: tuple[str, ...]
) -> None:
    file = tiny_job()
    precious = [tmp_path / "runs" / "tiny" / name for name in ("model/a", "checkpoints/b", "results/c")]
    for path in precious:
        path.parent.mkdir(parents=True)
        path.write_text("x")
    result = call("run", str(file), *options)
    assert result.returncode == 1
    assert "is not empty (checkpoints, model, results) and not the folder of a job" in result.stderr
    assert sorted(path for path in (tmp_path / "runs").rglob("*") if path.is_file()) == sorted(precious)


def test_starting_over_keeps_a_model_that_the_job_reads(tiny_job: Callable[..., Path], tmp_path: Path) -> None:
    model = tmp_path / "runs" / "tiny" / "model"
    file = tiny_job(model={"source": str(model)})
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model.parent / "rlhfless.json").write_text("{}")
    result = call("run", str(file), "--fresh", "--yes")
    assert result.returncode == 1
    assert "is in the job's own folder" in result.stderr
    assert (model / "config.json").exists()


def test_a_run_without_a_model_has_nothing_to_sample(tmp_path: Path) -> None:
    result = call("sample", str(tmp_path), "1+1=")
    assert result.returncode == 1
    assert "has no trained model yet: let the run finish first" in result.stderr


def test_a_trained_model_answers(tiny_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from rlhfless_functions.serving.sample import sample

    settings = {"count": 2, "max_tokens": 5, "seed": 0}
    likeliest = sample(str(tiny_model), "1+1=", temperature=0.0, **settings)
    assert likeliest[0] == likeliest[1]
    drawn = sample(str(tiny_model), "1+1=", temperature=1.0, **settings)
    assert drawn == sample(str(tiny_model), "1+1=", temperature=1.0, **settings)
    assert drawn[0] != drawn[1]


def test_simulate_prints_json_or_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    first = next(iter(SCENARIOS))
    assert first == "paper-3b-gsm8k-grpo"
    result = CliRunner().invoke(cli.app, ["simulate", "nothing-like-it"])
    assert isinstance(result.exception, ValueError)
    assert first in str(result.exception)


@pytest.mark.slow
def test_simulated_policies_come_as_json(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.parquet", SMALL.draw_trace(0))
    result = call("simulate", "--trace", str(tmp_path / "trace.parquet"), "--gpus", "4", "--seeds", "1", "--json")
    measured = json.loads(result.stdout)
    assert {policy["policy"] for policy in measured["policies"]} == set(POLICIES)
    assert all(set(policy["first_epoch"]) == {"seconds", "gpu_seconds"} for policy in measured["policies"])
    fields = ("seconds", "gpu_seconds", "cost", "idle_share", "lower_bound_share")
    assert all(field in policy and f"{field}_std" in policy for policy in measured["policies"] for field in fields)


def test_simulate_shows_what_ships_on_a_platform_and_an_ability_that_comes(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.parquet", SMALL.draw_trace(0))
    arguments = ["simulate", "--trace", str(tmp_path / "trace.parquet"), "--gpus", "4", "--seeds", "1", "--json"]
    seconds = {}
    for platform in ("slots", "pods"):
        given = [*arguments, "--platform", platform, "--with", "publishing"]
        rows = {row["policy"]: row for row in json.loads(CliRunner().invoke(cli.app, given).stdout)["policies"]}
        assert set(rows) == {*POLICIES, "rlhfless+publishing"}
        seconds[platform] = rows["rlhfless"]["seconds"], rows["rlhfless+publishing"]["seconds"]
    assert seconds["slots"][1] < seconds["slots"][0]
    assert seconds["pods"] != seconds["slots"]
    unknown = CliRunner().invoke(cli.app, [*arguments, "--with", "luck"])
    assert "choose one of" in str(unknown.exception)
    refused = CliRunner().invoke(cli.app, [*arguments, "--with", "publishing", "--async"])
    assert "leave one of them out" in refused.stderr


def test_asynchronous_systems_are_compared_on_a_runs_own_lengths(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.parquet", SMALL.draw_trace(0))
    arguments = ["simulate", "--trace", str(tmp_path / "trace.parquet"), "--gpus", "4", "--seeds", "1", "--async"]
    result = CliRunner().invoke(cli.app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    compared = json.loads(result.stdout)
    assert {"static", "rlhfless", "verl-async", "areal-4", "laminar", "rlhfless-async-1"} <= {
        row["policy"] for row in compared["policies"]
    }
    assert compared["steps"] == SMALL.epochs
    assert "trace.parquet on 4 × L40S" in CliRunner().invoke(cli.app, arguments).stdout
    refused = CliRunner().invoke(cli.app, [*arguments, "--html", str(tmp_path / "page.html")])
    assert refused.exit_code == 1
    assert "leave one of them out" in refused.stderr


@pytest.mark.slow
def test_the_operator_says_what_it_has_not_been_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("RLHFLESS_")]:
        monkeypatch.delenv(name)
    result = call("operator")
    assert result.returncode == 1
    assert result.stderr == "error: RLHFLESS_FUNCTIONS_IMAGE: missing; set it\n"
    monkeypatch.setenv("RLHFLESS_FUNCTIONS_IMAGE", "functions")
    result = call("operator", "--leader-elect")
    assert result.returncode == 1
    assert "needs the Lease's namespace; give --lease-namespace" in result.stderr
