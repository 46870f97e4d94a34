"""The webhook of the Helm chart: who is asked about which pods, and with whose certificate."""

import asyncio
import base64
import ssl
from pathlib import Path

from rlhfless_operator.controller.endpoints import ADMISSION_PATH, SLOTS_PATH, serve_admission
from rlhfless_operator.planner.pools.placement import TOPOLOGY_KEYS
from rlhfless_operator.platforms.pods.manifests import JOB_LABEL, TURNS_LABEL
from tests.charts.rendering import (
    CHART,
    Manifest,
    case,
    container,
    needs_helm,
    of_kind,
    rendered,
    settings,
    the,
)


def webhook(manifests: list[Manifest]) -> Manifest:
    (found,) = the(manifests, "MutatingWebhookConfiguration")["webhooks"]
    return found


@needs_helm
def test_no_webhook_is_served_where_it_is_turned_off() -> None:
    manifests = rendered(CHART / "ci" / "s3.yaml", quickRelease__enabled="false", placement__enabled="false")
    assert settings(manifests).admission_port is None
    assert settings(manifests).topology_keys == ()
    assert not any(of_kind(manifests, kind) for kind in ("MutatingWebhookConfiguration", "Secret", "Service"))


@needs_helm
def test_a_webhook_that_does_not_answer_keeps_no_pod_from_being_made() -> None:
    for name in ("quick-release", "cert-manager"):
        found = webhook(case(name))
        assert (found["failurePolicy"], found["sideEffects"]) == ("Ignore", "None")
        assert found["timeoutSeconds"] <= 2


@needs_helm
def test_the_webhook_is_asked_about_new_function_pods_alone() -> None:
    found = webhook(case("quick-release"))
    (rule,) = found["rules"]
    assert (rule["operations"], rule["resources"], rule["apiGroups"]) == (["CREATE"], ["pods"], [""])
    assert found["objectSelector"] == {"matchExpressions": [{"key": JOB_LABEL, "operator": "Exists"}]}
    (namespaces,) = found["namespaceSelector"]["matchExpressions"]
    assert namespaces == {
        "key": "kubernetes.io/metadata.name",
        "operator": "In",
        "values": ["default", "kube-public"],
    }
    assert "namespaceSelector" not in webhook(case("cert-manager"))


@needs_helm
def test_a_pod_that_uses_gpus_in_turns_is_not_made_without_its_claims() -> None:
    manifests = case("slots")
    quick, found = the(manifests, "MutatingWebhookConfiguration")["webhooks"]
    assert (quick["name"], quick["failurePolicy"]) == ("pods.rlhfless.io", "Ignore")
    assert (found["failurePolicy"], found["clientConfig"]["service"]["path"]) == ("Fail", SLOTS_PATH)
    assert found["objectSelector"] == {"matchExpressions": [{"key": TURNS_LABEL, "operator": "Exists"}]}
    assert found["namespaceSelector"] == quick["namespaceSelector"]
    assert settings(manifests).has_slots


@needs_helm
def test_slots_have_their_webhook_also_where_pods_go_slowly() -> None:
    manifests = rendered(CHART / "ci" / "slots.yaml", quickRelease__enabled="false", placement__enabled="false")
    assert webhook(manifests)["name"] == "slots.rlhfless.io"
    found = settings(manifests)
    assert (found.admission_port, found.admission_grace_seconds) == (9444, None)
    assert {"ports": [{"port": "admission"}]} in the(manifests, "NetworkPolicy")["spec"]["ingress"]


@needs_helm
def test_pods_are_placed_also_where_they_go_slowly() -> None:
    manifests = rendered(CHART / "ci" / "s3.yaml", quickRelease__enabled="false")
    assert webhook(manifests)["name"] == "pods.rlhfless.io"
    found = settings(manifests)
    assert found.admission_port is not None and found.admission_grace_seconds is None
    assert found.topology_keys == TOPOLOGY_KEYS


@needs_helm
def test_topology_keys_of_ones_own_are_the_operators() -> None:
    keys = ("kubernetes.io/hostname", "cloud.google.com/gce-topology-block", "topology.kubernetes.io/zone")
    manifests = rendered(CHART / "ci" / "s3.yaml", placement__topologyKeys="{" + ",".join(keys) + "}")
    assert settings(manifests).topology_keys == keys


@needs_helm
def test_the_webhook_is_where_the_operator_serves_it() -> None:
    manifests = case("quick-release")
    found = settings(manifests)
    assert (found.admission_port, found.admission_grace_seconds) == (9444, 5)
    service, client = the(manifests, "Service"), webhook(manifests)["clientConfig"]["service"]
    assert (client["name"], client["namespace"]) == (service["metadata"]["name"], service["metadata"]["namespace"])
    (port,) = service["spec"]["ports"]
    assert (client["port"], client["path"]) == (port["port"], ADMISSION_PATH)
    template = the(manifests, "Deployment")["spec"]["template"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    (listening,) = (each for each in container(manifests)["ports"] if each["name"] == port["targetPort"])
    assert listening["containerPort"] == found.admission_port
    assert {"ports": [{"port": port["targetPort"]}]} in the(manifests, "NetworkPolicy")["spec"]["ingress"]
    (mount,) = (each for each in container(manifests)["volumeMounts"] if each["name"] == "admission")
    assert (mount["mountPath"], mount["readOnly"]) == (found.admission_certificate, True)


@needs_helm
async def test_an_api_server_can_trust_the_certificate_that_the_chart_makes(tmp_path: Path) -> None:
    manifests = case("quick-release")
    secret = the(manifests, "Secret")
    for name, content in secret["data"].items():
        (tmp_path / name).write_bytes(base64.b64decode(content))
    (volume,) = (
        each
        for each in the(manifests, "Deployment")["spec"]["template"]["spec"]["volumes"]
        if each["name"] == "admission"
    )
    assert volume["secret"]["secretName"] == secret["metadata"]["name"]
    client = webhook(manifests)["clientConfig"]
    trust = ssl.create_default_context(cadata=base64.b64decode(client["caBundle"]).decode())
    host = f"{client['service']['name']}.{client['service']['namespace']}.svc"
    async with serve_admission(0, tmp_path, 10) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust, server_hostname=host)
        writer.close()


@needs_helm
def test_a_certificate_of_ones_own_is_mounted_instead() -> None:
    manifests = case("cert-manager")
    assert not of_kind(manifests, "Secret")
    volumes = the(manifests, "Deployment")["spec"]["template"]["spec"]["volumes"]
    assert {"name": "admission", "secret": {"secretName": "rlhfless-webhook"}} in volumes
    annotations = the(manifests, "MutatingWebhookConfiguration")["metadata"]["annotations"]
    assert annotations == {"cert-manager.io/inject-ca-from": "default/rlhfless-webhook"}
    own = {"quickRelease__enabled": "true", "quickRelease__certificate__secretName": "mine"}
    given = rendered(CHART / "ci" / "s3.yaml", **own, quickRelease__certificate__caBundle="LS0tLS1CRUdJTg==")
    assert webhook(given)["clientConfig"]["caBundle"] == "LS0tLS1CRUdJTg=="
