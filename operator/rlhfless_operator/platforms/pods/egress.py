"""The destinations of a job's pods, and the NetworkPolicy rules that allow them: pure functions.

A NetworkPolicy has no host names. So a Service of the cluster becomes its namespace, an address stays an address, and
any other name becomes its port on all addresses, except for link-local ones, where clouds serve the credentials of
nodes.
"""

import ipaddress
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from rlhfless_functions.settings import DataSettings
from rlhfless_functions.settings.data import HUB as DATASET
from rlhfless_operator.job.paths import is_uri
from rlhfless_operator.job.spec import RLHFJob

Rule = dict[str, Any]

HUB = "https://huggingface.co"
_S3 = "https://s3.amazonaws.com"
_SOME_STORE = "https://store.invalid"
"""A store of which only HTTPS is known."""
_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}
_NAMES: Rule = {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}
_METADATA = (
    *("169.254.0.0/16", "100.100.100.200/32", "168.63.129.16/32", "192.0.0.192/32"),
    *("fe80::/10", "fd00:ec2::/32", "fd20:ce::/64", "fd00:42::42/128"),
)
"""Addresses at which clouds tell their machines about themselves, credentials included: all link-local ones, and those
of Alibaba, Azure, Oracle, AWS, Google and Scaleway."""
_ANYWHERE: tuple[Rule, ...] = (
    {"ipBlock": {"cidr": "0.0.0.0/0", "except": [each for each in _METADATA if ":" not in each]}},
    {"ipBlock": {"cidr": "::/0", "except": [each for each in _METADATA if ":" in each]}},
)


def addresses_of(job: RLHFJob, root: str, environment: Mapping[str, str]) -> set[str]:
    """Return the URLs that the functions of a job connect to: stores, the model hub, reward servers and the
    environment's.

    Args:
        job: the job, with resolved paths.
        root: URI of the job's folder.
        environment: the operator's environment; the functions use its `AWS_ENDPOINT_URL` and `HF_ENDPOINT` too.
    """
    found = {reward.http.url for reward in job.spec.all_rewards if reward.http is not None}
    acting = job.spec.environment
    if acting is not None:
        servers = (acting.openenv, acting.served)
        found |= {server.url for server in servers if server is not None and server.url is not None}
    for source in (root, *_files(job)):
        if is_uri(source):
            found |= {_store(source, environment)} - {""}
    if any(not is_uri(name) and not name.startswith("/") for name in _models(job)):
        found.add(environment.get("HF_ENDPOINT") or HUB)
    return found


def egress_rules(addresses: Iterable[str], namespace: str, further: Iterable[Rule]) -> list[Rule]:
    """Return the rules that let pods connect to addresses.

    Args:
        addresses: URLs.
        namespace: namespace of the pods.
        further: rules to add, in Kubernetes' format.
    """
    rules = [_NAMES]
    for address in sorted(addresses):
        rule = _rule(address, namespace)
        if rule is not None and rule not in rules:
            rules.append(rule)
    return [*rules, *further]


def _rule(address: str, namespace: str) -> Rule | None:
    """Return the rule that lets pods connect to an address; None if no job may allow it."""
    parts = urlsplit(address)
    host, port = parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 443)
    ports = [{"port": port, "protocol": "TCP"}]
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        pass
    else:
        mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
        if any((mapped or ip) in network for network in map(ipaddress.ip_network, _METADATA)):
            return None
        return {"to": [{"ipBlock": {"cidr": f"{ip}/{ip.max_prefixlen}"}}], "ports": ports}
    labels = host.removesuffix(".").removesuffix(".cluster.local").split(".")
    # The port of a Service may differ from that of its pods.
    if len(labels) == 1:
        return {"to": [_pods_of(namespace)]}
    if len(labels) == 3 and labels[2] == "svc":
        return {"to": [_pods_of(labels[1])]}
    return {"to": [*_ANYWHERE], "ports": ports}


def _pods_of(namespace: str) -> Rule:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}


def _store(uri: str, environment: Mapping[str, str]) -> str:
    """Return the URL of a URI's store; empty for a store that needs no network."""
    if uri.startswith(DATASET):
        return environment.get("HF_ENDPOINT") or HUB
    scheme = uri.rpartition("::")[2].partition("://")[0]
    if scheme in ("file", "local", "memory"):
        return ""
    if scheme in ("s3", "s3a"):
        return environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL") or _S3
    if scheme in _PORTS:
        return uri.rpartition("::")[2]
    return HUB if scheme == "hf" else _SOME_STORE


def _files(job: RLHFJob) -> Iterator[str]:
    spec = job.spec
    yield from _models(job)
    data: list[DataSettings] = [spec.data, *([spec.evaluation.data] if spec.evaluation else [])]
    for part in (part for each in data for part in each.parts):
        yield part.source
        yield from (function.file for function in (part.map, part.filter) if function is not None)
    yield from (reward.python.file for reward in spec.all_rewards if reward.python is not None)
    yield from (spec.environment.files if spec.environment is not None else ())
    if spec.rehearsal is not None:
        yield spec.rehearsal.trace


def _models(job: RLHFJob) -> Iterator[str]:
    yield job.spec.model.source
    if job.spec.model.tokenizer is not None:
        yield job.spec.model.tokenizer
    yield from (reward.model.source for reward in job.spec.all_rewards if reward.model is not None)
