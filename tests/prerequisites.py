"""What some tests need and not every machine has. Each mark says what is not tested without it."""

import os
import shutil

import pytest

HAS_API_SERVER = "KUBEBUILDER_ASSETS" in os.environ


def needs_api_server(untested: str) -> pytest.MarkDecorator:
    """For tests with a control plane of their own, `control_plane`."""
    reason = f"{untested}: KUBEBUILDER_ASSETS names no etcd, kube-apiserver and kubectl"
    return pytest.mark.skipif(not HAS_API_SERVER, reason=reason)


def needs_cluster(untested: str) -> pytest.MarkDecorator:
    """For tests on the cluster that KUBECONFIG names."""
    return pytest.mark.skipif("KUBECONFIG" not in os.environ, reason=f"{untested}: KUBECONFIG names no cluster")


def needs_helm(untested: str) -> pytest.MarkDecorator:
    """For tests that render the chart."""
    return pytest.mark.skipif(shutil.which("helm") is None, reason=f"{untested}: there is no helm")
