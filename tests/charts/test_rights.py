"""What the Helm chart grants: these rights and no others, by its manifests, its page and a real API server."""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pytest

from rlhfless_operator.controller.leadership import Election
from rlhfless_operator.preflight.permissions import PERMISSIONS, TURNS_PERMISSIONS
from tests.charts.rendering import CASES, CHART, NAMESPACE, REPOSITORY, Manifest, case, needs_helm, of_kind, rendered
from tests.clusters.control_plane import ApiServer, control_plane
from tests.controller.operator_harness import wait_for
from tests.prerequisites import needs_api_server

JOB_RIGHTS = {
    ("rlhfless.io", "rlhfjobs"): {"get", "list", "watch", "patch", "delete"},
    ("rlhfless.io", "rlhfjobs/status"): {"patch"},
    ("rlhfless.io", "rlhfjobs/finalizers"): {"update"},
    ("serving.knative.dev", "services"): {"get", "create", "patch", "delete"},
    ("serving.knative.dev", "revisions"): {"get", "patch"},
    ("", "pods"): {"list", "watch", "patch", "delete"},
    ("", "secrets"): {"get", "create"},
    ("networking.k8s.io", "networkpolicies"): {"get", "create", "patch", "delete"},
    ("", "resourcequotas"): {"list"},
    ("", "events"): {"list", "create"},
}
CLUSTER_RIGHTS = {
    ("apiextensions.k8s.io", "customresourcedefinitions"): {"get"},
    ("", "nodes"): {"list"},
}
KUEUE_RIGHTS = {
    ("kueue.x-k8s.io", "workloads"): {"get", "create", "patch", "delete"},
    ("kueue.x-k8s.io", "workloads/status"): {"patch"},
}
TURNS_RIGHTS = {("resource.k8s.io", "resourceclaims"): {"list", "create", "delete"}}
DEVICE_RIGHTS = {("resource.k8s.io", "deviceclasses"): {"list"}, ("resource.k8s.io", "resourceslices"): {"list"}}
LEADER_RIGHTS = {("coordination.k8s.io", "leases"): {"get", "create", "update"}}


def rights(role: Manifest) -> dict[tuple[str, str], set[str]]:
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for rule in role["rules"]:
        for group, resource in itertools.product(rule["apiGroups"], rule["resources"]):
            found[group, resource] |= set(rule["verbs"])
    return found


def named(manifests: list[Manifest], kind: str, name: str) -> list[Manifest]:
    return [manifest for manifest in of_kind(manifests, kind) if manifest["metadata"]["name"] == name]


@needs_helm
def test_cluster_wide_the_operator_has_these_rights_and_no_others() -> None:
    manifests = case("s3")
    (role,) = named(manifests, "ClusterRole", "training-rlhfless")
    assert rights(role) == {**JOB_RIGHTS, **CLUSTER_RIGHTS}
    assert len(of_kind(manifests, "ClusterRoleBinding")) == 1
    roles = {role["metadata"]["name"]: role for role in of_kind(manifests, "Role")}
    assert set(roles) == {"training-rlhfless-leader", "training-rlhfless-preflight"}
    assert rights(roles["training-rlhfless-leader"]) == LEADER_RIGHTS
    assert roles["training-rlhfless-leader"]["rules"][1]["resourceNames"] == [Election("").name]
    (rule,) = roles["training-rlhfless-preflight"]["rules"]
    assert rule["verbs"] == ["get"] and len(rule["resourceNames"]) == 4


@needs_helm
def test_with_listed_namespaces_it_has_no_rights_elsewhere() -> None:
    manifests = case("namespaces")
    assert not named(manifests, "ClusterRole", "training-rlhfless") and not of_kind(manifests, "ClusterRoleBinding")
    roles = named(manifests, "Role", "training-rlhfless")
    assert {role["metadata"]["namespace"] for role in roles} == {"default", "kube-public"}
    assert all(rights(role) == {**JOB_RIGHTS, **KUEUE_RIGHTS} for role in roles)


@needs_helm
def test_for_pods_that_use_gpus_in_turns_it_may_make_claims_and_count_devices() -> None:
    roles = named(case("slots"), "Role", "training-rlhfless")
    assert {role["metadata"]["namespace"] for role in roles} == {"default", "kube-public"}
    assert all(rights(role) == {**JOB_RIGHTS, **TURNS_RIGHTS} for role in roles)
    assert not named(case("slots"), "ClusterRole", "training-rlhfless")
    (role,) = named(rendered(CHART / "ci" / "slots.yaml", namespaces="null"), "ClusterRole", "training-rlhfless")
    assert rights(role) == {**JOB_RIGHTS, **CLUSTER_RIGHTS, **TURNS_RIGHTS, **DEVICE_RIGHTS}


@needs_helm
def test_one_namespace_needs_nothing_of_the_cluster_but_the_definition() -> None:
    scoped = {"ClusterRole", "ClusterRoleBinding"}
    manifests = case("one-namespace")
    assert not scoped & {manifest["kind"] for manifest in manifests}
    assert {manifest["metadata"].get("namespace") for manifest in manifests} == {NAMESPACE, None}


@needs_helm
def test_no_right_is_a_wildcard() -> None:
    for values in CASES:
        for manifest in rendered(values):
            for rule in manifest.get("rules", []):
                assert "*" not in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]]


@needs_helm
def test_editors_and_viewers_of_namespaces_may_edit_and_view_jobs() -> None:
    (editor,) = named(case("s3"), "ClusterRole", "training-rlhfless-editor")
    (viewer,) = named(case("s3"), "ClusterRole", "training-rlhfless-viewer")
    aggregate = "rbac.authorization.k8s.io/aggregate-to-"
    assert {f"{aggregate}edit", f"{aggregate}admin"} <= set(editor["metadata"]["labels"])
    assert f"{aggregate}view" in viewer["metadata"]["labels"]
    assert {"create", "patch", "delete"} <= rights(editor)["rlhfless.io", "rlhfjobs"]
    assert set().union(*rights(viewer).values()) == {"get", "list", "watch"}


def test_the_preflight_looks_at_every_right_that_a_job_needs() -> None:
    asked = {(permission.group, permission.resource, permission.verb) for permission in PERMISSIONS}
    assert asked == {(group, resource, verb) for (group, resource), verbs in JOB_RIGHTS.items() for verb in verbs}
    asked = {(permission.group, permission.resource, permission.verb) for permission in TURNS_PERMISSIONS}
    assert asked == {(group, resource, verb) for (group, resource), verbs in TURNS_RIGHTS.items() for verb in verbs}


def test_the_security_page_lists_every_right() -> None:
    page = (REPOSITORY / "docs" / "security.md").read_text()
    rows = re.findall(r"^\| (?:`([\w.-]+)`|core) \| `([\w/]+)` \| ([a-z, ]+) \|", page, re.MULTILINE)
    documented = {(group, resource): set(verbs.split(", ")) for group, resource, verbs in rows}
    turns = {**TURNS_RIGHTS, **DEVICE_RIGHTS}
    granted = {**JOB_RIGHTS, **CLUSTER_RIGHTS, **KUEUE_RIGHTS, **turns, **LEADER_RIGHTS, ("", "configmaps"): {"get"}}
    assert documented == granted


# --- a real API server ---


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A control plane with the namespace that one of the roles is for."""
    with control_plane(tmp_path_factory.mktemp("control-plane")) as api:
        assert api.request("POST", "/api/v1/namespaces", {"metadata": {"name": "knative-serving"}})[0] == 201
        yield api


@dataclass(frozen=True)
class Attempt:
    """Something that the operator may want to do."""

    verb: str
    group: str
    resource: str
    namespace: str


@needs_helm
@needs_api_server("no API server is asked what the chart's roles allow")
def test_an_api_server_allows_what_is_documented_and_refuses_the_rest(server: ApiServer) -> None:
    roles = [manifest for manifest in case("namespaces") if "rbac.authorization.k8s.io" in manifest["apiVersion"]]
    for manifest in roles:
        group = f"/apis/{manifest['apiVersion']}"
        place = f"/namespaces/{manifest['metadata']['namespace']}" if "namespace" in manifest["metadata"] else ""
        status, answer = server.request("POST", f"{group}{place}/{manifest['kind'].lower()}s", manifest)
        assert status == 201, answer

    def allowed(attempt: Attempt) -> bool:
        resource, _, subresource = attempt.resource.partition("/")
        attributes = {"verb": attempt.verb, "group": attempt.group, "resource": resource, "subresource": subresource}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": f"system:serviceaccount:{NAMESPACE}:training-rlhfless",
                "resourceAttributes": {**attributes, "namespace": attempt.namespace},
            },
        }
        _, answer = server.request("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        return bool(answer["status"]["allowed"])

    verbs = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")

    def allowed_verbs(group: str, resource: str, namespace: str) -> set[str]:
        return {verb for verb in verbs if allowed(Attempt(verb, group, resource, namespace))}

    def is_granted(group: str, resource: str, granted: set[str]) -> bool:
        return allowed_verbs(group, resource, "kube-public") == granted

    for (group, resource), granted in {**JOB_RIGHTS, **KUEUE_RIGHTS}.items():
        # A new role takes a moment to count.
        wait_for(partial(is_granted, group, resource, granted), partial(str, resource))
        assert allowed_verbs(group, resource, "kube-system") == set(), resource
