"""Fixtures of the end-to-end tests, which `make e2e` runs on KUBECONFIG's cluster; harness/options.py has options."""

import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.audit import Replayer
from harness.chart import Chart
from harness.diagnostics import describe
from harness.images import ROOT, Images, provide_images, provide_vllm_image
from harness.jobs import KEPT, Jobs, run_undisturbed, short
from harness.kubectl import Kubectl
from harness.options import Options
from harness.quickstart import Applied, apply, run_here
from harness.storage import Storage
from tests import prerequisites


@pytest.fixture(scope="session")
def options() -> Options:
    """What the environment says."""
    return Options.from_environment()


@pytest.fixture(scope="session")
def images(options: Options) -> Images:
    """The images under test, on the cluster."""
    return provide_images(options, current_context())


@pytest.fixture(scope="session")
def vllm_image(options: Options) -> str:
    """The functions' image with vLLM for CPUs, on the cluster."""
    return provide_vllm_image(options, current_context())


def current_context() -> str:
    """Name of the kubeconfig's context."""
    if not os.environ.get("KUBECONFIG"):
        pytest.fail("KUBECONFIG names no cluster: set it to one with Knative Serving", pytrace=False)
    return subprocess.run(["kubectl", "config", "current-context"], capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="session")
def kubectl(options: Options, images: Images) -> Iterator[Kubectl]:
    """kubectl in a namespace of this run's own, which is deleted at its end."""
    kubectl = Kubectl(f"rlhfless-e2e-{secrets.token_hex(3)}", options.patience)
    kubectl("create", "namespace", kubectl.namespace)
    yield kubectl
    if not options.keep:
        kubectl("delete", "namespace", kubectl.namespace, "--wait=false")


@pytest.fixture(scope="session")
def storage(kubectl: Kubectl, options: Options, images: Images) -> Iterator[Storage]:
    """The namespace's volumes: `/artifacts`, and `/files` with the quickstart's."""
    storage = Storage(kubectl, options, images.operator)
    storage.create()
    storage.put(ROOT / "examples" / "quickstart", "/files")
    yield storage
    if not options.keep:
        storage.remove()


@pytest.fixture(scope="session")
def chart(kubectl: Kubectl, storage: Storage, images: Images, options: Options) -> Iterator[Chart]:
    """The installed chart, with its operator ready."""
    chart = Chart(kubectl, images)
    chart.install()
    yield chart
    if not options.keep:
        # While no operator runs, jobs can't be deleted, and their namespace with them.
        kubectl("delete", "rlhfjobs", "--all", f"--timeout={int(120 * options.patience)}s")
        chart.uninstall()


@pytest.fixture(scope="module")
def one_slot(chart: Chart, kubectl: Kubectl, options: Options) -> Iterator[Jobs]:
    """Jobs of a pool with one slot, which its pods use in turns."""
    chart.install(pools={"default": {"gpus": 1, "deviceClass": options.device_class}})
    yield Jobs(kubectl)
    kubectl("delete", "rlhfjobs", "--all", "--timeout=120s")
    kubectl.wait_until("the claims are given back", lambda: not kubectl("get", "resourceclaims", "-o", "name"), 120)
    chart.install()


@pytest.fixture(scope="session")
def undisturbed(chart: Chart, kubectl: Kubectl, storage: Storage) -> str:
    """Checksum of the weights of a short job on a volume to which nothing happens."""
    return run_undisturbed(Jobs(kubectl), storage, short("undisturbed", **KEPT))


@pytest.fixture
def replayer(kubectl: Kubectl, storage: Storage, images: Images) -> Iterator[Replayer]:
    """A pod in which runs are replayed, with the control plane's code beside the functions'."""
    storage.put(ROOT / "operator", "/files/operator")
    replayer = Replayer(kubectl)
    replayer.create(images.functions, "/files/operator")
    yield replayer
    replayer.remove()


@pytest.fixture(scope="session")
def laptop(tmp_path_factory: pytest.TempPathFactory, images: Images, options: Options) -> Path:
    """The folder of the quickstart, run on this machine. The images are there: their build would slow it down."""
    return run_here(tmp_path_factory.mktemp("laptop"), options.quickstart_steps)


@pytest.fixture(scope="session")
def applied(laptop: Path, chart: Chart, kubectl: Kubectl, options: Options) -> Applied:
    """The quickstart on the cluster, beside nothing else."""
    return apply(kubectl, options.quickstart_steps)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test that lacks what RLHFLESS_TESTS_REQUIRE names."""
    prerequisites.fail_if_lacking(item)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Put the state of the namespace into the report of a failed test."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    kubectl = getattr(item, "funcargs", {}).get("kubectl")
    if report.failed and kubectl is not None:
        report.sections.append((f"namespace {kubectl.namespace}", describe(kubectl)))
