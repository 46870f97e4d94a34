"""The operator's own settings, from environment variables."""

import json

import pytest

from rlhfless_operator.job.pods import PodsSpec
from rlhfless_operator.platforms.cluster_settings import (
    ClusterSettings,
    ClusterSettingsError,
    PoolSettings,
    variable_of,
)


def written(settings: ClusterSettings) -> dict[str, str]:
    """The environment variables that say them, without defaults."""
    changed = settings.model_dump(mode="json", by_alias=False, exclude_defaults=True)
    as_json = settings.model_dump(mode="json", by_alias=True, exclude_none=True)
    found = {}
    for name, value in changed.items():
        whole = as_json[str(ClusterSettings.model_fields[name].alias)]
        if isinstance(whole, dict) or (isinstance(whole, list) and whole and isinstance(whole[0], dict)):
            found[variable_of(name)] = json.dumps(whole)
        else:
            found[variable_of(name)] = ",".join(value) if isinstance(value, list) else str(value)
    return found


def test_the_image_is_all_that_must_be_given() -> None:
    settings = ClusterSettings.from_environment({"RLHFLESS_FUNCTIONS_IMAGE": "registry/functions:1", "PATH": "/bin"})
    assert settings == ClusterSettings(functions_image="registry/functions:1")
    assert (settings.files, settings.artifacts, settings.namespaces) == ("/files", "/artifacts", ())


def test_every_setting_survives_the_environment() -> None:
    settings = ClusterSettings(
        functions_image="f:1",
        artifacts="s3://bucket/runs",
        pods=PodsSpec(env={"A": "b"}, env_from=["s3"], shared_memory=2**30),
        pools={
            "h100": PoolSettings(gpus=64, namespaces={"team-a": 16}),
            "turns": PoolSettings(gpus=8, device_class="gpu.nvidia.com", gpus_per_group=4),
        },
        further_artifacts=("s3://other", "/mnt/fast"),
        artifacts_claim="separate",
        namespaces=("a", "b"),
        metrics_port=0,
        admission_port=9443,
        admission_certificate="/certificates",
        admission_clients="/clients/ca.crt",
        admission_grace_seconds=30,
        request_timeout=3600.0,
        initial_scale=1,
        operator_namespace="rlhfless",
        egress="restricted",
        egress_rules=[{"ports": [{"port": 443}]}],
        ingress="http://127.0.0.1:8080",
    )
    assert ClusterSettings.from_environment(written(settings)) == settings


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("RLHFLESS_FUNCTIONS_IMAGE", "", "RLHFLESS_FUNCTIONS_IMAGE: missing; set it"),
        ("RLHFLESS_PODS", "volumes: []", "RLHFLESS_PODS: not JSON"),
        ("RLHFLESS_PODS", '{"imgae": "x"}', r"RLHFLESS_PODS\.imgae: Extra inputs"),
        ("RLHFLESS_POOLS", '{"h100": {"gpus": -1}}', r"RLHFLESS_POOLS\.h100\.gpus: .*greater than or equal to 0"),
        (
            "RLHFLESS_POOLS",
            '{"h100": {"gpus": 8, "gpusPerGroup": 4}}',
            r"RLHFLESS_POOLS\.h100: .*gpusPerGroup needs a deviceClass; set deviceClass, or remove gpusPerGroup",
        ),
        (
            "RLHFLESS_POOLS",
            '{"h100": {"gpus": 6, "deviceClass": "c", "gpusPerGroup": 4}}',
            r"RLHFLESS_POOLS\.h100: .*gpus is 6; write a multiple of gpusPerGroup, which is 4",
        ),
        (
            "RLHFLESS_POOLS",
            '{"h100": {"gpus": 8, "deviceClass": "c", "namespaces": {"a": 6, "b": 4}}}',
            r"RLHFLESS_POOLS\.h100: .*have 10 GPUs together, but the pool has 8; .*divide the pool among them",
        ),
        ("RLHFLESS_METRICS_PORT", "ninety", "RLHFLESS_METRICS_PORT: 'ninety' is not a whole number"),
        ("RLHFLESS_LIVENESS_PORT", "70000", "RLHFLESS_LIVENESS_PORT: .*65535"),
        ("RLHFLESS_ADMISSION_PORT", "https", "RLHFLESS_ADMISSION_PORT: 'https' is not a whole number"),
        ("RLHFLESS_ADMISSION_GRACE_SECONDS", "0", "RLHFLESS_ADMISSION_GRACE_SECONDS: .*greater than or equal to 1"),
        ("RLHFLESS_REQUEST_TIMEOUT", "600", "RLHFLESS_REQUEST_TIMEOUT: .*such as 30s, 15m"),
    ],
)
def test_a_wrong_variable_is_named(variable: str, text: str, message: str) -> None:
    with pytest.raises(ClusterSettingsError, match=message):
        ClusterSettings.from_environment({"RLHFLESS_FUNCTIONS_IMAGE": "f:1", variable: text})


def test_a_namespace_that_is_not_named_has_no_slots_where_others_are() -> None:
    named = PoolSettings(gpus=8, device_class="c", namespaces={"a": 4})
    assert (named.share_of("a"), named.share_of("b")) == (4, 0)
    assert PoolSettings(gpus=8, device_class="c").share_of("b") == 8
    assert PoolSettings(gpus=8, namespaces={"a": 4}).share_of("b") == 8


def test_a_pod_that_goes_as_knative_has_it_holds_its_gpu_for_half_a_minute() -> None:
    def settings(**given: int) -> ClusterSettings:
        return ClusterSettings.model_validate({"functionsImage": "f", **given})

    assert settings().draining_seconds == settings(admissionPort=1).draining_seconds == 31.0
    assert settings(admissionPort=1, admissionGraceSeconds=10).draining_seconds == 10.0
