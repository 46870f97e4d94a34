"""An API server that writes down who asks it for what, with an emulated Knative beside it."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.preflight.permissions import Permission
from tests.clusters.control_plane import ApiServer
from tests.clusters.emulated_functions import Emulation
from tests.clusters.knative_emulation import KnativeEmulation
from tests.clusters.knative_thread import knative_beside
from tests.clusters.kueue_stand_in import WORKLOADS
from tests.controller.operator_harness import Jobs, job_server

HOME = "rlhfless"
"""The operator's namespace."""


@dataclass
class Audit:
    """The API server's log of what accounts have asked for."""

    file: Path

    def of(self, account: str) -> Iterator[dict[str, Any]]:
        for line in self.file.read_text().splitlines():
            entry = json.loads(line)
            if entry["user"]["username"] == account and "objectRef" in entry:
                yield entry

    def used(self, account: str) -> dict[Permission, set[str]]:
        """Every right that was used, and in which namespaces."""
        used: dict[Permission, set[str]] = defaultdict(set)
        for entry in self.of(account):
            for permission in _rights(entry):
                used[permission].add(entry["objectRef"].get("namespace", ""))
        return used

    def denied(self, account: str) -> list[str]:
        """Requests that RBAC, or an admission plugin that asks it, has refused."""
        return [
            f"{entry['verb']} {entry['requestURI']}: {entry['responseStatus'].get('message', '')}"
            for entry in self.of(account)
            if entry.get("responseStatus", {}).get("code") == 403
        ]


def _rights(entry: Mapping[str, Any]) -> Iterator[Permission]:
    about = entry["objectRef"]
    resource = "/".join(filter(None, (about["resource"], about.get("subresource"))))
    verbs = [entry["verb"]]
    if entry["verb"] == "patch" and entry["responseStatus"]["code"] == 201:
        # Applying a new object needs the right to create it too.
        verbs.append("create")
    for verb in verbs:
        yield Permission(about.get("apiGroup", ""), resource, verb)


@dataclass
class Cluster:
    """An API server with an emulated Knative and the chart's accounts."""

    server: ApiServer
    audit: Audit
    knative: KnativeEmulation
    emulation: Emulation
    folder: Path

    def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        group = f"/apis/{manifest['apiVersion']}" if "/" in manifest["apiVersion"] else f"/api/{manifest['apiVersion']}"
        namespace = manifest["metadata"].get("namespace")
        place = f"/namespaces/{namespace}" if namespace else ""
        status, answer = self.server.request("POST", f"{group}{place}/{manifest['kind'].lower()}s", manifest)
        assert status == 201, answer
        return dict(answer)

    def namespace(self, name: str) -> Jobs:
        self.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        return Jobs(self.server, name)

    def allows(self, account: str, **attributes: Any) -> bool:
        """Whether the API server would let an account of the operator's namespace do something, as of now."""
        groups = ["system:serviceaccounts", f"system:serviceaccounts:{HOME}", "system:authenticated"]
        spec = {"user": f"system:serviceaccount:{HOME}:{account}", "groups": groups, **attributes}
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
        status, answer = self.server.request("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        assert status == 201, answer
        return bool(answer["status"]["allowed"])

    def kubeconfig(self, account: str) -> Path:
        """That of a service account of the operator's namespace."""
        path = f"/api/v1/namespaces/{HOME}/serviceaccounts/{account}/token"
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        status, answer = self.server.request("POST", path, request)
        assert status == 201, answer
        content = yaml.safe_load(self.server.kubeconfig.read_text())
        content["users"][0]["user"]["token"] = answer["status"]["token"]
        file = self.folder / f"{account}.kubeconfig"
        file.write_text(yaml.safe_dump(content))
        return file

    def settings(self, *namespaces: str) -> ClusterSettings:
        return ClusterSettings(
            functions_image="none",
            namespaces=namespaces,
            files="/files",
            artifacts=str(self.folder),
            ingress=self.knative.url,
            operator_namespace=HOME,
            egress="restricted",
            metrics_port=0,
            liveness_port=0,
        )


POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "userGroups": [f"system:serviceaccounts:{HOME}"]}, {"level": "None"}],
}


@contextmanager
def audited_cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster with the operator's namespace, and with Knative as it is installed."""
    (folder / "audit.yaml").write_text(yaml.safe_dump(POLICY))
    arguments = [
        f"--audit-policy-file={folder / 'audit.yaml'}",
        f"--audit-log-path={folder / 'audit.log'}",
        "--enable-admission-plugins=OwnerReferencesPermissionEnforcement",
    ]
    emulation = Emulation()
    with job_server(folder, arguments, [WORKLOADS]) as server, knative_beside(server, emulation) as knative:
        made = Cluster(server, Audit(folder / "audit.log"), knative, emulation, folder)
        for name in (HOME, "knative-serving"):
            made.namespace(name)
        for name in ("autoscaler", "defaults", "deployment", "features"):
            metadata = {"name": f"config-{name}", "namespace": "knative-serving"}
            made.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})
        yield made
