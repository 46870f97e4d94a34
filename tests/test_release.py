"""The release workflow: what it builds is there, and what it pushes is what the chart installs."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = PROJECT["version"]
VALUES = yaml.safe_load((ROOT / "charts" / "rlhfless" / "values.yaml").read_text())
ACTION = re.compile(r"[\w-]+/[\w./-]+@[\w./-]+")


@pytest.fixture(scope="module")
def workflow() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yaml").read_text())
    return document


@pytest.fixture(scope="module")
def pushed(workflow: dict[str, Any]) -> dict[str, dict[str, str]]:
    """What is built, by the name under which it is pushed."""
    registry = workflow["env"]["REGISTRY"]
    images = workflow["jobs"]["images"]["strategy"]["matrix"]["include"]
    return {f"{registry}/{image['name']}:{VERSION}{image['suffix']}": image for image in images}


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_every_job_has_steps_and_waits_for_jobs_that_there_are(workflow: dict[str, Any]) -> None:
    # YAML 1.1 reads the key `on` as true.
    assert workflow[True]["push"]["tags"] == ["v[0-9]*"]
    for job in workflow["jobs"].values():
        assert job["runs-on"] and set(job.get("needs", [])) <= workflow["jobs"].keys()
    for step in steps(workflow):
        assert ("run" in step) != ("uses" in step)
        assert "uses" not in step or ACTION.fullmatch(step["uses"])


def test_the_chart_installs_what_is_pushed(pushed: dict[str, dict[str, str]]) -> None:
    chart = yaml.safe_load((ROOT / "charts" / "rlhfless" / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == VERSION
    for value in ("image", "functionsImage"):
        assert not VALUES[value]["tag"] and not VALUES[value]["digest"]
        assert f"{VALUES[value]['repository']}:{chart['appVersion']}" in pushed
    assert pushed[f"{VALUES['functionsImage']['repository']}:{VERSION}"]["variant"] == "cuda"


def test_everything_is_of_the_projects_owner(workflow: dict[str, Any]) -> None:
    home = PROJECT["urls"]["Repository"]
    owner = home.removeprefix("https://github.com/").split("/")[0]
    assert workflow["env"]["REGISTRY"] == f"ghcr.io/{owner}"
    for dockerfile in (ROOT / "images").glob("*/Dockerfile"):
        assert f'image.source="{home}"' in dockerfile.read_text()


def test_every_variant_of_the_functions_is_pushed_under_a_tag_that_says_it(pushed: dict[str, dict[str, str]]) -> None:
    variants = {image["variant"]: image["suffix"] for image in pushed.values() if "variant" in image}
    locks = {path.stem for path in (ROOT / "images" / "functions").glob("*.txt")}
    assert variants == {"cuda": ""} | {variant: f"-{variant}" for variant in locks - {"cuda"}}


def test_files_that_it_names_are_there(workflow: dict[str, Any], pushed: dict[str, dict[str, str]]) -> None:
    commands = "\n".join(step["run"] for step in steps(workflow) if "run" in step)
    named = set(re.findall(r"(?:charts|images)/[\w./-]+", commands)) | {image["file"] for image in pushed.values()}
    assert {"charts/rlhfless", "charts/rlhfless/Chart.yaml", "images/operator/Dockerfile"} <= named
    assert all((ROOT / name).exists() for name in named)
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    (made,) = re.findall(r"\bmake ([a-z -]+)", commands)
    assert set(made.split()) <= set(targets)
    assert "pyproject.toml" in commands


def test_only_the_image_for_gpus_does_without_torchs_cpu_build(workflow: dict[str, Any]) -> None:
    """Pip takes `2.13.0+cpu` for `2.13.0` where it sees both."""
    (build,) = (step for step in workflow["jobs"]["images"]["steps"] if "build-push" in step.get("uses", ""))
    given = build["with"]["build-args"].splitlines()
    (index,) = (line for line in given if "PIP_EXTRA_INDEX_URL" in line)
    assert "matrix.suffix != ''" in index
    dockerfile = (ROOT / "images" / "functions" / "Dockerfile").read_text()
    declared = set(" ".join(re.findall(r"^ARG (.+)$", dockerfile, re.MULTILINE)).replace("=", " ").split())
    assert {"VARIANT", "PIP_EXTRA_INDEX_URL", "VERSION", "REVISION"} <= declared
    assert all(any(name in line for name in declared) for line in given)


def test_rights_are_the_least_that_a_job_needs(workflow: dict[str, Any]) -> None:
    assert workflow["permissions"] == {"contents": "read"}
    rights = {name: job.get("permissions", {}) for name, job in workflow["jobs"].items()}
    assert {name for name, given in rights.items() if given.get("packages") == "write"} == {"images", "chart"}
    assert {name for name, given in rights.items() if "id-token" in given} == {"package"}
    assert workflow["jobs"]["package"]["environment"] == "pypi"
