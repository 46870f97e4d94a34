"""What some tests need and not every machine has.

Each mark says what is not tested without it. What RLHFLESS_TESTS_REQUIRE names fails the tests that lack it instead of
skipping them. Nothing is then left untested unnoticed where it should be there.
"""

import os
import shutil
from dataclasses import dataclass

import pytest

from rlhfless_functions.rewards.code import confinement
from rlhfless_functions.runtime import landlock


@dataclass(frozen=True)
class Prerequisite:
    """Something that is there or not, what is said where it is not, and how to give it."""

    there: bool
    lacking: str
    remedy: str


PREREQUISITES = {
    "api-server": Prerequisite(
        bool(os.environ.get("KUBEBUILDER_ASSETS")),
        "KUBEBUILDER_ASSETS names no etcd, kube-apiserver and kubectl",
        "set it to a folder that has them, such as setup-envtest makes",
    ),
    "claims": Prerequisite(
        bool(os.environ.get("RLHFLESS_E2E_DEVICE_CLASS")),
        "RLHFLESS_E2E_DEVICE_CLASS names no DeviceClass of the cluster",
        "set it to one whose devices pods may use in turns",
    ),
    "cluster": Prerequisite(
        bool(os.environ.get("KUBECONFIG")),
        "KUBECONFIG names no cluster",
        "set it to the configuration of a cluster with Knative Serving",
    ),
    "helm": Prerequisite(
        shutil.which("helm") is not None,
        "there is no helm",
        "put helm into the PATH",
    ),
    "landlock": Prerequisite(
        landlock.version() > 0,
        "this kernel has no Landlock",
        "use Linux 5.13 or newer, with landlock among its security modules",
    ),
    "prometheus": Prerequisite(
        shutil.which("prometheus") is not None and shutil.which("promtool") is not None,
        "there is no prometheus with promtool",
        "install Debian's package prometheus",
    ),
    "questions": Prerequisite(
        confinement.best().asks,
        "this kernel can't ask before a fork",
        "use Linux 5.5 or newer, with seccomp's user notifications",
    ),
    "scheduler": Prerequisite(
        shutil.which("kube-scheduler") is not None,
        "there is no kube-scheduler",
        "put kube-scheduler, of the API server's version, into the PATH",
    ),
}
REQUIRED = os.environ.get("RLHFLESS_TESTS_REQUIRE", "").split()
HAS_API_SERVER = PREREQUISITES["api-server"].there


def needs_api_server(untested: str) -> pytest.MarkDecorator:
    """For tests with a control plane of their own, `control_plane`."""
    return _needs("api-server", untested)


def needs_claims(untested: str) -> pytest.MarkDecorator:
    """For tests on a cluster with GPUs that pods use in turns."""
    return _needs("claims", untested)


def needs_cluster(untested: str) -> pytest.MarkDecorator:
    """For tests on the cluster that KUBECONFIG names."""
    return _needs("cluster", untested)


def needs_helm(untested: str) -> pytest.MarkDecorator:
    """For tests that render the chart."""
    return _needs("helm", untested)


def needs_landlock(untested: str) -> pytest.MarkDecorator:
    """For tests that confine threads or processes."""
    return _needs("landlock", untested)


def needs_prometheus(untested: str) -> pytest.MarkDecorator:
    """For tests that run Prometheus or its promtool."""
    return _needs("prometheus", untested)


def needs_questions(untested: str) -> pytest.MarkDecorator:
    """For tests of programs that the kernel asks about before they fork."""
    return _needs("questions", untested)


def needs_scheduler(untested: str) -> pytest.MarkDecorator:
    """For tests with a kube-scheduler of their own."""
    return _needs("scheduler", untested)


def _needs(name: str, untested: str) -> pytest.MarkDecorator:
    needed = PREREQUISITES[name]
    reason = f"{untested}: {needed.lacking}"
    if name in REQUIRED and not needed.there:
        return pytest.mark.lacks(f"{reason}, and RLHFLESS_TESTS_REQUIRE names {name}: {needed.remedy}")
    return pytest.mark.skipif(not needed.there, reason=reason)


def check_required() -> None:
    """Raise an error if RLHFLESS_TESTS_REQUIRE has a name that there is not.

    Raises:
        pytest.UsageError: with all names that there are.
    """
    if unknown := sorted(set(REQUIRED) - PREREQUISITES.keys()):
        raise pytest.UsageError(
            f"RLHFLESS_TESTS_REQUIRE: nothing is called {', '.join(unknown)}; there are {', '.join(PREREQUISITES)}"
        )


def fail_if_lacking(item: pytest.Item) -> None:
    """Fail a test that lacks what is required, before its fixtures try to use it."""
    for mark in item.iter_markers("lacks"):
        pytest.fail(mark.args[0], pytrace=False)
