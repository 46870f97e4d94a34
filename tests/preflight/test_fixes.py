"""What is to be changed of Knative, and what is left alone."""

from typing import Any

import pytest
import yaml

from rlhfless_operator.preflight.fixes import CONFIG_MAPS, ManagedElsewhereError, Patch, patches
from rlhfless_operator.preflight.knative_settings import USUAL_FEATURES

AS_DOCUMENTED = {
    "autoscaler": {"allow-zero-initial-scale": "true"},
    "defaults": {"max-revision-timeout-seconds": "43200"},
    "deployment": {"pod-is-always-schedulable": "true", "default-affinity-type": "none"},
    "features": dict.fromkeys(USUAL_FEATURES, "enabled"),
}
"""What docs/install.md sets by hand."""


def config_maps(**data: dict[str, str]) -> dict[str, dict[str, Any]]:
    return {
        name: {"metadata": {"name": f"config-{name}", "resourceVersion": "7"}, "data": data.get(name, {})}
        for name in CONFIG_MAPS
    }


def activator(seconds: int) -> dict[str, Any]:
    grace = {"terminationGracePeriodSeconds": seconds}
    return {"metadata": {"name": "activator", "resourceVersion": "8"}, "spec": {"template": {"spec": grace}}}


def found(content: dict[str, dict[str, Any]], seconds: int | None = 43200, **settings: Any) -> dict[str, Patch]:
    options = {"namespace": "knative-serving", "initial_scale": 0, "request_timeout": 600.0, "features": {}, **settings}
    made = patches(content, None if seconds is None else activator(seconds), **options)
    return {patch.target: patch for patch in made}


def changed(content: dict[str, dict[str, Any]], **settings: Any) -> dict[str, dict[str, str]]:
    return {
        target.removeprefix("configmap/config-"): patch.body["data"]
        for target, patch in found(content, **settings).items()
        if patch.kind == "configmap"
    }


def test_a_fresh_knative_gets_what_the_manual_sets() -> None:
    assert changed(config_maps()) == AS_DOCUMENTED


def test_where_all_is_right_nothing_is_changed() -> None:
    assert changed(config_maps(**AS_DOCUMENTED)) == {}


def test_a_map_without_data_is_one_without_settings() -> None:
    content = config_maps()
    del content["defaults"]["data"]
    assert changed(content) == AS_DOCUMENTED


@pytest.mark.parametrize(
    ("name", "data", "settings", "change"),
    [
        ("autoscaler", {"enable-scale-to-zero": "false"}, {}, {"enable-scale-to-zero": "true"}),
        ("autoscaler", {}, {"initial_scale": 1}, {}),
        ("defaults", {"max-revision-timeout-seconds": "900"}, {}, {}),
        (
            "defaults",
            {"max-revision-timeout-seconds": "900"},
            {"request_timeout": 901.0},
            {"max-revision-timeout-seconds": "43200"},
        ),
        ("defaults", {}, {"request_timeout": 86400.0}, {"max-revision-timeout-seconds": "86400"}),
        ("features", {"kubernetes.podspec-tolerations": "disabled"}, {}, {}),
        (
            "features",
            {"kubernetes.podspec-tolerations": "disabled"},
            {"features": {"kubernetes.podspec-tolerations": "tolerations"}},
            {"kubernetes.podspec-tolerations": "enabled"},
        ),
        (
            "features",
            {},
            {"features": {"kubernetes.podspec-volumes-hostpath": "volumes"}},
            {"kubernetes.podspec-volumes-hostpath": "enabled"},
        ),
    ],
)
def test_what_somebody_has_set_stays_unless_jobs_cannot_run_with_it(
    name: str, data: dict[str, str], settings: dict[str, Any], change: dict[str, str]
) -> None:
    right = AS_DOCUMENTED[name] if name in ("autoscaler", "features") and not settings.get("initial_scale") else {}
    content = config_maps(**{**AS_DOCUMENTED, name: {**right, **data}})
    assert changed(content, **settings).get(name, {}) == change


def test_a_patch_names_what_it_changes_and_the_version_that_was_seen() -> None:
    data = {"allow-zero-initial-scale": "false", "_example": "many\nlines", "max-scale": "5"}
    patch = found(config_maps(**{**AS_DOCUMENTED, "autoscaler": data}))["configmap/config-autoscaler"]
    assert patch.path == "/api/v1/namespaces/knative-serving/configmaps/config-autoscaler"
    assert patch.body == {"metadata": {"resourceVersion": "7"}, "data": {"allow-zero-initial-scale": "true"}}
    assert patch.diff.splitlines() == [
        "--- configmap/config-autoscaler",
        "+++ configmap/config-autoscaler (fixed)",
        "@@ -1,3 +1,3 @@",
        " data:",
        "-  allow-zero-initial-scale: 'false'",
        "+  allow-zero-initial-scale: 'true'",
        "   max-scale: '5'",
    ]


@pytest.mark.parametrize(
    ("seconds", "timeout", "wanted"), [(600, "43200", 43200), (600, "900", 900), (900, "900", None)]
)
def test_the_activator_lives_as_long_as_requests_may_take(seconds: int, timeout: str, wanted: int | None) -> None:
    content = config_maps(**{**AS_DOCUMENTED, "defaults": {"max-revision-timeout-seconds": timeout}})
    patch = found(content, seconds).get("deployment/activator")
    spec = patch and patch.body["spec"]["template"]["spec"]
    assert spec == (wanted and {"terminationGracePeriodSeconds": wanted})


def test_an_activator_that_cannot_be_read_is_left_alone() -> None:
    assert found(config_maps(**AS_DOCUMENTED), None) == {}


def test_what_the_knative_operator_manages_is_for_its_object() -> None:
    content = config_maps(**{**AS_DOCUMENTED, "autoscaler": {}})
    content["autoscaler"]["metadata"]["ownerReferences"] = [{"kind": "KnativeServing", "name": "serving"}]
    with pytest.raises(
        ManagedElsewhereError, match="KnativeServing object serving in namespace knative-serving"
    ) as caught:
        found(content)
    text = str(caught.value).partition("\n")[2]
    assert yaml.safe_load(text) == {"spec": {"config": {"autoscaler": {"allow-zero-initial-scale": "true"}}}}
