"""What a job's pods connect to, and the rules that let them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhfless_operator.job.reading.validation import load_job
from rlhfless_operator.platforms.pods.egress import HUB, addresses_of, egress_rules

V4 = ["169.254.0.0/16", "100.100.100.200/32", "168.63.129.16/32", "192.0.0.192/32"]
V6 = ["fe80::/10", "fd00:ec2::/32", "fd20:ce::/64", "fd00:42::42/128"]
OUTSIDE = [{"ipBlock": {"cidr": "0.0.0.0/0", "except": V4}}, {"ipBlock": {"cidr": "::/0", "except": V6}}]
REWARDS = [
    {"name": "judge", "http": {"url": "http://judge:8000/score"}},
    {"name": "digits", "python": {"file": "s3://code/reward.py"}},
]


def pods_of(namespace: str) -> dict[str, Any]:
    return {"to": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}]}


def addresses(make: Callable[..., Path], root: str = "/artifacts/job", *, env: Any = None, **spec: Any) -> set[str]:
    file = make(**spec)
    return addresses_of(load_job(file).resolve_paths(file.parent), root, env or {})


def test_a_job_on_volumes_needs_no_network(tiny_job: Callable[..., Path]) -> None:
    assert addresses(tiny_job) == set()


def test_a_job_needs_its_stores_and_its_reward_servers(tiny_job: Callable[..., Path]) -> None:
    endpoint = {"AWS_ENDPOINT_URL": "http://minio.storage.svc:9000"}
    assert addresses(tiny_job, "s3://runs/job", rewards=REWARDS, env=endpoint) == {
        "http://judge:8000/score",
        "http://minio.storage.svc:9000",
    }
    evaluation = {"data": {"source": "train.jsonl"}, "rewards": [REWARDS[0]]}
    assert addresses(tiny_job, evaluation=evaluation) == {"http://judge:8000/score"}
    assert addresses(tiny_job, "s3://runs/job") == {"https://s3.amazonaws.com"}
    assert addresses(tiny_job, data={"source": "https://data.example/train.jsonl"}) == {
        "https://data.example/train.jsonl"
    }


def test_a_job_needs_its_environments_server(tiny_job: Callable[..., Path]) -> None:
    server = {"url": "wss://maze.example"}
    own = {"tools": [f"{__file__}:addresses"], "served": server}
    found = addresses(tiny_job, environment={"openenv": server})
    assert found == addresses(tiny_job, environment=own) == {"wss://maze.example"}
    assert egress_rules(found, "team", [])[1:] == [{"to": OUTSIDE, "ports": [{"port": 443, "protocol": "TCP"}]}]


def test_a_model_by_name_is_on_the_hub_or_on_its_mirror(tiny_job: Callable[..., Path]) -> None:
    named = {"source": "Qwen/Qwen3-0.6B"}
    assert addresses(tiny_job, model=named) == {HUB}
    mirror = {"HF_ENDPOINT": "http://mirror.hub.svc.cluster.local"}
    assert addresses(tiny_job, model=named, env=mirror) == {"http://mirror.hub.svc.cluster.local"}


@pytest.mark.parametrize("uri", ["gs://runs/job", "abfs://runs/job", "zip://a.zip::gs://runs/job"])
def test_other_stores_are_spoken_to_by_https(tiny_job: Callable[..., Path], uri: str) -> None:
    (rule,) = egress_rules(addresses(tiny_job, uri), "team", [])[1:]
    assert rule == {"to": OUTSIDE, "ports": [{"port": 443, "protocol": "TCP"}]}


@pytest.mark.parametrize(
    ("address", "rule"),
    [
        ("http://judge:8000/score", pods_of("team")),
        ("http://judge.rewards.svc:8000", pods_of("rewards")),
        ("http://judge.rewards.svc.cluster.local./score", pods_of("rewards")),
        ("https://judge.example/score", {"to": OUTSIDE, "ports": [{"port": 443, "protocol": "TCP"}]}),
        ("http://judge.example:8000", {"to": OUTSIDE, "ports": [{"port": 8000, "protocol": "TCP"}]}),
        (
            "http://10.1.2.3/score",
            {"to": [{"ipBlock": {"cidr": "10.1.2.3/32"}}], "ports": [{"port": 80, "protocol": "TCP"}]},
        ),
        (
            "http://[fd00::1]:90",
            {"to": [{"ipBlock": {"cidr": "fd00::1/128"}}], "ports": [{"port": 90, "protocol": "TCP"}]},
        ),
    ],
)
def test_each_address_becomes_a_rule(address: str, rule: dict[str, Any]) -> None:
    names, found = egress_rules([address], "team", [])
    assert names == {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}
    assert found == rule


def test_the_same_rule_is_there_once() -> None:
    assert len(egress_rules(["https://a.example", "https://b.example"], "team", [])) == 2


@pytest.mark.parametrize(
    "host",
    [
        *("169.254.169.254", "169.254.170.2:80", "100.100.100.200", "168.63.129.16", "192.0.0.192"),
        *("[fe80::1]", "[fd00:ec2::254]", "[fd20:ce::254]", "[::ffff:169.254.169.254]"),
    ],
)
def test_no_job_allows_the_address_at_which_a_cloud_gives_its_machines_credentials(host: str) -> None:
    further = [{"to": [{"ipBlock": {"cidr": "169.254.169.254/32"}}]}]
    assert len(egress_rules([f"http://{host}/latest"], "team", [])) == 1, "names alone"
    assert egress_rules([f"http://{host}/latest"], "team", further)[1:] == further, "its administrator may"
