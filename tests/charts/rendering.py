"""The Helm chart's manifests, as helm renders them."""

import functools
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from tests import prerequisites

REPOSITORY = Path(__file__).resolve().parents[2]
CHART = REPOSITORY / "charts" / "rlhfless"
CASES = sorted((CHART / "ci").glob("*.yaml"))
NAMESPACE = "default"
MONITORING = ("PodMonitor", "PrometheusRule", "ServiceMonitor")
"""Kinds that only clusters with Prometheus' operator have."""

needs_helm = prerequisites.needs_helm("the chart is not rendered")
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)

Manifest = dict[str, Any]


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
    """Reads `1e-06` as a number, as Kubernetes does; in C where there is that."""


Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^-?\d+e[-+]?\d+$"), list("-0123456789"))


@functools.cache
def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["helm", *arguments], capture_output=True, text=True, check=False)


def rendered(*values: Path, release: str = "training", namespace: str = NAMESPACE, **sets: str) -> list[Manifest]:
    """The manifests of a release; `__` in the name of a value stands for a dot."""
    files = [part for file in values for part in ("--values", file)]
    settings = [part for name, value in sets.items() for part in ("--set", f"{name.replace('__', '.')}={value}")]
    done = helm("template", release, CHART, "--namespace", namespace, *files, *settings)
    assert done.returncode == 0, done.stderr
    return [manifest for manifest in yaml.load_all(done.stdout, Loader) if manifest]


def case(name: str) -> list[Manifest]:
    return rendered(CHART / "ci" / f"{name}.yaml")


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def the(manifests: list[Manifest], kind: str) -> Manifest:
    (manifest,) = of_kind(manifests, kind)
    return manifest


def container(manifests: list[Manifest]) -> Manifest:
    (found,) = the(manifests, "Deployment")["spec"]["template"]["spec"]["containers"]
    return found


def settings(manifests: list[Manifest]) -> ClusterSettings:
    """What the operator makes of its environment."""
    environment = {entry["name"]: entry["value"] for entry in container(manifests)["env"] if "value" in entry}
    return ClusterSettings.from_environment(environment)
