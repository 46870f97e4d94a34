"""What a machine lacks skips the tests that need it, and fails them where it is said to be there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PROGRAM = """
import pytest

from tests.prerequisites import (
    needs_api_server,
    needs_claims,
    needs_cluster,
    needs_helm,
    needs_prometheus,
    needs_scheduler,
)


@pytest.fixture
def begun():
    print("a test has begun")


@needs_api_server("no server is asked")
def test_api_server(begun) -> None:
    pass


@needs_claims("no GPU is used in turns")
def test_claims(begun) -> None:
    pass


@needs_cluster("no cluster is asked")
def test_cluster(begun) -> None:
    pass


@needs_helm("nothing is rendered")
def test_helm(begun) -> None:
    pass


@needs_prometheus("no metric is read")
def test_prometheus(begun) -> None:
    pass


@needs_scheduler("no pod is placed")
def test_scheduler(begun) -> None:
    pass


@needs_helm("nothing is rendered for a cluster")
@needs_cluster("no cluster is given what is rendered")
def test_helm_and_cluster(begun) -> None:
    pass


def test_that_needs_nothing() -> None:
    pass
"""
LACKING = {
    "api-server": "no server is asked: KUBEBUILDER_ASSETS names no etcd, kube-apiserver and kubectl",
    "claims": "no GPU is used in turns: RLHFLESS_E2E_DEVICE_CLASS names no DeviceClass of the cluster",
    "cluster": "no cluster is asked: KUBECONFIG names no cluster",
    "helm": "nothing is rendered: there is no helm",
    "prometheus": "no metric is read: there is no prometheus with promtool",
    "scheduler": "no pod is placed: there is no kube-scheduler",
}
REMEDIES = {
    "api-server": "set it to a folder that has them, such as setup-envtest makes",
    "claims": "set it to one whose devices pods may use in turns",
    "cluster": "set it to the configuration of a cluster with Knative Serving",
    "helm": "put helm into the PATH",
    "prometheus": "install Debian's package prometheus",
    "scheduler": "put kube-scheduler, of the API server's version, into the PATH",
}


def run(folder: Path, **machine: str) -> subprocess.CompletedProcess[str]:
    """pytest on the program, on a machine that has only what its environment says."""
    file = folder / "test_program.py"
    file.write_text(PROGRAM)
    hidden = (
        "KUBEBUILDER_ASSETS",
        "KUBECONFIG",
        "RLHFLESS_E2E_DEVICE_CLASS",
        "RLHFLESS_TESTS_REQUIRE",
        "PYTEST_ADDOPTS",
    )
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    environment = inherited | {"PATH": "", "PYTHONPATH": str(TESTS.parent)} | machine
    # The suite's configuration and its hooks, of which pytest finds neither from a folder elsewhere.
    options = [
        "-c",
        TESTS.parent / "pyproject.toml",
        "--rootdir",
        folder,
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
    ]
    command = [sys.executable, "-m", "pytest", *options, file]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_what_is_not_required_skips_the_tests_that_lack_it(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout
    assert "1 passed, 7 skipped" in done.stdout
    for lacking in LACKING.values():
        assert lacking in done.stdout


def test_what_is_required_fails_the_tests_that_lack_it_before_they_begin(tmp_path: Path) -> None:
    done = run(tmp_path, RLHFLESS_TESTS_REQUIRE="api-server claims cluster  helm prometheus scheduler")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert "1 passed, 7 errors" in done.stdout
    assert "a test has begun" not in done.stdout
    for name, lacking in LACKING.items():
        assert f"{lacking}, and RLHFLESS_TESTS_REQUIRE names {name}: {REMEDIES[name]}" in done.stdout


def test_only_what_is_required_fails_also_where_something_else_is_lacking(tmp_path: Path) -> None:
    done = run(tmp_path, RLHFLESS_TESTS_REQUIRE="cluster")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert "1 passed, 5 skipped, 2 errors" in done.stdout
    assert "no cluster is given what is rendered: KUBECONFIG names no cluster, and" in done.stdout


def test_what_is_required_and_there_is_used(tmp_path: Path) -> None:
    for program in ("helm", "kube-scheduler", "prometheus", "promtool"):
        (tmp_path / program).touch(mode=0o755)
    there = {
        "KUBEBUILDER_ASSETS": str(tmp_path),
        "KUBECONFIG": str(tmp_path / "config"),
        "PATH": str(tmp_path),
        "RLHFLESS_E2E_DEVICE_CLASS": "gpu.test",
    }
    done = run(tmp_path, RLHFLESS_TESTS_REQUIRE=" ".join(LACKING), **there)
    assert done.returncode == 0, done.stdout
    assert "8 passed" in done.stdout


def test_an_unknown_name_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    done = run(tmp_path, RLHFLESS_TESTS_REQUIRE="helm promethius")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout
    assert (
        "RLHFLESS_TESTS_REQUIRE: nothing is called promethius; there are api-server, claims, cluster, helm, landlock,"
        " prometheus, questions, scheduler" in (done.stderr)
    )
