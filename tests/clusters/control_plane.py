"""A control plane of the tests' own: etcd and kube-apiserver from KUBEBUILDER_ASSETS (the convention of envtest).

It never touches a cluster that exists.
"""

import json
import os
import secrets
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhfless_functions.runtime.addresses import free_port


@dataclass
class ApiServer:
    """A client of the control plane that the tests started."""

    url: str
    token: str
    kubeconfig: Path
    context: ssl.SSLContext

    def request(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> tuple[int, Any]:
        """Status and answer of one request; errors are answers too."""
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": kind}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, context=self.context, timeout=30) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)


def asset(program: str) -> Path:
    """One of the programs that KUBEBUILDER_ASSETS has."""
    return Path(os.environ["KUBEBUILDER_ASSETS"], program)


@contextmanager
def control_plane(folder: Path, arguments: Sequence[str] = ()) -> Iterator[ApiServer]:
    """A running control plane, which ends with the context.

    Args:
        folder: for its data, keys and logs.
        arguments: further ones of kube-apiserver.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(65537, 2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "key.pem").write_bytes(key)
    token = secrets.token_hex(16)
    (folder / "tokens.csv").write_text(f'{token},admin,admin,"system:masters"\n')
    client, peer, secure = free_port(), free_port(), free_port()
    etcd = [
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls=http://127.0.0.1:{client}",
        f"--advertise-client-urls=http://127.0.0.1:{client}",
        f"--listen-peer-urls=http://127.0.0.1:{peer}",
        "--unsafe-no-fsync",
    ]
    apiserver = [
        f"--etcd-servers=http://127.0.0.1:{client}",
        f"--cert-dir={folder / 'certificates'}",
        f"--secure-port={secure}",
        "--bind-address=127.0.0.1",
        f"--service-account-key-file={folder / 'key.pem'}",
        f"--service-account-signing-key-file={folder / 'key.pem'}",
        "--service-account-issuer=https://127.0.0.1",
        f"--token-auth-file={folder / 'tokens.csv'}",
        "--authorization-mode=RBAC",
        "--disable-admission-plugins=ServiceAccount",
        *arguments,
    ]
    url = f"https://127.0.0.1:{secure}"
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "it",
                "clusters": [{"name": "it", "cluster": {"server": url, "insecure-skip-tls-verify": True}}],
                "users": [{"name": "it", "user": {"token": token}}],
                "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
            }
        )
    )
    api = ApiServer(url, token, kubeconfig, context)
    with ExitStack() as processes:
        for program, arguments in (("etcd", etcd), ("kube-apiserver", apiserver)):
            log = processes.enter_context((folder / f"{program}.log").open("wb"))
            process = processes.enter_context(
                subprocess.Popen([asset(program), *arguments], stdout=log, stderr=subprocess.STDOUT)
            )
            processes.callback(process.terminate)
        wait_until(lambda: api.request("GET", "/api/v1/namespaces/default"), folder)
        yield api


def wait_until(ask: Any, folder: Path) -> None:
    """Wait for a good answer; a control plane that does not come up shows its logs."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if ask()[0] == 200:
                return
        except (OSError, ValueError):
            pass
        time.sleep(0.1)
    pytest.fail("\n".join(log.read_text()[-3000:] for log in folder.glob("*.log")))
