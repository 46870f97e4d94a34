"""The Helm chart's values: that nothing that is made of them is stale, and what is refused."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rlhfless_operator.job.generated.crd import crd
from tests.charts.rendering import CASES, CHART, REPOSITORY, helm, needs_helm, rendered, settings

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())


# --- nothing is stale ---


def test_everything_that_is_generated_is_up_to_date(tmp_path: Path) -> None:
    copy = tmp_path / "rlhfless"
    shutil.copytree(CHART, copy)
    subprocess.run([sys.executable, REPOSITORY / "charts" / "tools", copy], check=True)
    for made in (path for path in copy.rglob("*") if path.is_file()):
        assert (CHART / made.relative_to(copy)).read_text() == made.read_text(), f"{made.name} is stale; run: make docs"


def test_the_chart_has_the_definition_of_the_jobs() -> None:
    assert yaml.safe_load((CHART / "files" / "rlhfjobs.rlhfless.io.yaml").read_text()) == crd()


def leaves(values: dict[str, Any], schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any, dict[str, Any]]]:
    for name, value in values.items():
        assert name in schema["properties"], f"{path}{name} is not in values.schema.json"
        inner = schema["properties"][name]
        if isinstance(value, dict) and inner.get("properties"):
            yield from leaves(value, inner, f"{path}{name}.")
        else:
            yield f"{path}{name}", value, inner


def test_every_value_is_in_the_schema_and_in_the_readme() -> None:
    readme = (CHART / "README.md").read_text()
    for path, value, schema in leaves(VALUES, SCHEMA):
        assert schema.get("description") or "$ref" in schema or path.startswith("strategy."), path
        top = path if not path.startswith("strategy.") else "strategy"
        assert f"| `{top}` |" in readme or f"| `{top.rpartition('.')[0]}` |" in readme, path
        jsonschema.validate(value, {**schema, "$defs": SCHEMA["$defs"]})


def test_the_schema_has_no_value_that_there_is_not() -> None:
    def compare(values: dict[str, Any], schema: dict[str, Any]) -> None:
        assert set(schema["properties"]) - {"global"} == set(values)
        for name, value in values.items():
            if isinstance(value, dict) and schema["properties"][name].get("properties") and value:
                compare(value, schema["properties"][name])

    compare(VALUES, SCHEMA)


# --- what is refused ---


@needs_helm
def test_it_passes_lint() -> None:
    for values in CASES:
        done = helm("lint", "--strict", CHART, "--values", values)
        assert done.returncode == 0, done.stdout


@needs_helm
@pytest.mark.parametrize(
    ("sets", "complaint"),
    [
        ("nonsense=1", "nonsense"),
        ("image.tagg=x", "tagg"),
        ("image.digest=abc", "/image/digest"),
        ("replicas=0", "/replicas"),
        ("artifacts.uri=runs", "/artifacts/uri"),
        ("namespaces={A_B}", "/namespaces/0"),
        ("operator.metricsPort=80", "/operator/metricsPort"),
        ("dashboards.enabled=sometimes", "/dashboards/enabled"),
        ("monitoring.prometheusRule.idleShare=2", "/monitoring/prometheusRule/idleShare"),
        ("knative.initialScale=3", "/knative/initialScale"),
        ("knative.requestTimeout=soon", "/knative/requestTimeout"),
        ("pods.image_pull_secrets={a}", "image_pull_secrets"),
        ("pods.sharedMemoryy=1Gi", "sharedMemoryy"),
        ("pools.a.gpu=1", "gpu"),
        ("quickRelease.graceSeconds=0", "/quickRelease/graceSeconds"),
        ("quickRelease.certificate.caBundle=-----BEGIN", "/quickRelease/certificate/caBundle"),
        ("quickRelease.certificate.caBundle=LS0t", "give quickRelease.certificate.secretName"),
        ("quickRelease.enabled=true,quickRelease.certificate.secretName=a", "give quickRelease.certificate.caBundle"),
        ("quickRelease.enabled=true,quickRelease.port=9090", "quickRelease.port is 9090"),
        ("networkPolicy.functions.egress=closed", "/networkPolicy/functions/egress"),
        ("artifacts.uri=/artifacts", "give artifacts.existingClaim or artifacts.hostPath"),
        ("artifacts.uri=/a,artifacts.hostPath=/data", "list them in namespaces"),
        ("artifacts.hostPath=/data", "remove artifacts.existingClaim and artifacts.hostPath"),
        ("cache.path=models", "/cache/path"),
        ("files.existingClaim=a,cache.existingClaim=a", "cache.existingClaim is a"),
        ("cache.existingClaim=a,cache.path=/files", "cache.path is /files"),
        ("files.hostPath=/a,files.existingClaim=b", "files.existingClaim and files.hostPath are both given"),
        ("monitoring.podMonitor.enabled=true,monitoring.serviceMonitor.enabled=true", "disable one"),
    ],
)
def test_a_bad_value_is_refused_by_its_name(sets: str, complaint: str) -> None:
    done = helm("template", "training", CHART, "--values", CHART / "ci" / "s3.yaml", "--set", sets)
    assert done.returncode != 0
    assert complaint in done.stderr


@needs_helm
def test_an_installation_without_storage_is_told_what_to_give() -> None:
    done = helm("template", "training", CHART)
    assert "artifacts.existingClaim" in done.stderr


@needs_helm
def test_the_values_that_the_installation_guide_shows_are_taken(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (REPOSITORY / "docs" / "install.md").read_text(), re.DOTALL)
    examples = [block for block in blocks if "pools:" in block]
    assert examples
    for block in examples:
        (values := tmp_path / "values.yaml").write_text(block)
        pools = settings(rendered(CHART / "ci" / "s3.yaml", values)).pools
        assert {name: pool.model_dump(by_alias=True, exclude_unset=True) for name, pool in pools.items()} == (
            yaml.safe_load(block)["pools"]
        )
