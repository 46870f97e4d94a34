"""Several operators on one cluster: releases of the chart, each with its own namespaces, share nothing by name."""

from pathlib import Path

import pytest

from tests.charts.rendering import CASES, CHART, Manifest, needs_helm, of_kind, rendered, settings

pytestmark = needs_helm


def shard(case: Path, name: str, **sets: str) -> list[Manifest]:
    return rendered(
        case, release=f"rlhfless-{name}", namespace=f"shard-{name}", namespaces=f"{{team-{name}}}", **sets
    )  # fmt: skip


def names(manifests: list[Manifest]) -> set[tuple[str, str | None, str]]:
    return {
        (each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"])
        for each in manifests
        if each["metadata"].get("namespace") != "shared"
    }


@pytest.mark.parametrize("case", ["namespaces", "quick-release", "slots", "monitoring-service", "host-path"])
def test_two_releases_with_their_own_namespaces_share_no_object_but_the_definition(case: str) -> None:
    file = CHART / "ci" / f"{case}.yaml"
    assert file in CASES
    first, second = shard(file, "a"), shard(file, "b")
    assert names(first) & names(second) == {("CustomResourceDefinition", None, "rlhfjobs.rlhfless.io")}
    further = shard(file, "b", crds__install="false")
    assert not names(first) & names(further)


@pytest.mark.parametrize("case", ["quick-release", "slots"])
def test_each_operator_and_each_webhook_looks_at_its_own_namespaces_alone(case: str) -> None:
    for name in ("a", "b"):
        manifests = shard(CHART / "ci" / f"{case}.yaml", name)
        assert settings(manifests).namespaces == (f"team-{name}",)
        (configuration,) = of_kind(manifests, "MutatingWebhookConfiguration")
        for webhook in configuration["webhooks"]:
            (expression,) = webhook["namespaceSelector"]["matchExpressions"]
            assert expression["values"] == [f"team-{name}"]
            assert webhook["clientConfig"]["service"]["namespace"] == f"shard-{name}"
