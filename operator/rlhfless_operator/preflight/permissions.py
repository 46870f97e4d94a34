"""The permissions that the operator needs. The chart grants them."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from rlhfless_operator.job.generated.crd import GROUP, PLURAL
from rlhfless_operator.preflight.findings import Finding


@dataclass(frozen=True)
class Permission:
    """One verb on one resource."""

    group: str
    """Empty for the core group."""
    resource: str
    """The resource, with its subresource after a slash if there is one."""
    verb: str


_RIGHTS: Mapping[tuple[str, str], str] = {
    (GROUP, PLURAL): "get list watch patch delete",
    (GROUP, f"{PLURAL}/status"): "patch",
    (GROUP, f"{PLURAL}/finalizers"): "update",
    ("serving.knative.dev", "services"): "get create patch delete",
    ("serving.knative.dev", "revisions"): "get patch",
    ("", "pods"): "list watch patch delete",
    ("", "secrets"): "get create",
    ("networking.k8s.io", "networkpolicies"): "get create patch delete",
    ("", "resourcequotas"): "list",
    ("", "events"): "list create",
}
PERMISSIONS: tuple[Permission, ...] = tuple(
    Permission(group, resource, verb) for (group, resource), verbs in _RIGHTS.items() for verb in verbs.split()
)
"""Permissions in every namespace with jobs."""
TURNS_PERMISSIONS: tuple[Permission, ...] = tuple(
    Permission("resource.k8s.io", "resourceclaims", verb) for verb in ("list", "create", "delete")
)
"""More permissions in every namespace with jobs, if pods use GPUs in turns."""


def check_permissions(allowed: Mapping[Permission, bool], namespace: str | None) -> Finding:
    """Check that the operator has all permissions.

    Args:
        allowed: the API server's answers.
        namespace: namespace of the permissions; None for all namespaces.
    """
    missing: dict[str, list[str]] = defaultdict(list)
    for permission, granted in allowed.items():
        if not granted:
            missing[f"{permission.resource} ({permission.group or 'core'})"].append(permission.verb)
    where = f"in namespace {namespace}" if namespace else "in all namespaces"
    if not missing:
        return Finding("permissions", "ok", f"all {len(allowed)} are granted {where}")
    verbs = "; ".join(f"{', '.join(verbs)} {resource}" for resource, verbs in missing.items())
    return Finding(
        "permissions",
        "error",
        f"not allowed {where}: {verbs}",
        "Install the chart with rbac.create: true, and with the namespace in `namespaces` or with an empty list.",
    )
