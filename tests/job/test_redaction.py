"""What strangers see of a job's document."""

from typing import Any

import pytest

from rlhfless_operator.job.redaction import redacted, without_credentials


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://user:pass@host:8443/p", "https://host:8443/p"),
        ("postgresql://me:p4ss@db/mlflow", "postgresql://db/mlflow"),
        ("https://store/x?X-Amz-Signature=abc&b=c#frag", "https://store/x?(hidden)"),
        ("see http://token@a/b and s3://bucket/key", "see http://a/b and s3://bucket/key"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
        ("a plain sentence: {x?y#z}", "a plain sentence: {x?y#z}"),
    ],
)
def test_urls_lose_their_credentials(text: str, shown: str) -> None:
    assert without_credentials(text) == shown


def test_pods_lose_their_variables_and_templates() -> None:
    template = {"spec": {"containers": [{"name": "function", "env": [{"name": "A", "value": "SECRET"}]}]}}
    pods: dict[str, Any] = {"image": "i", "env": {"KEY": "SECRET"}, "template": template}
    rewards = [{"name": "r", "http": {"url": "http://me:SECRET@judge/score"}}]
    document = {"spec": {"pods": pods, "learning": {"pods": pods}, "rewards": rewards, "data": {"env": "kept"}}}
    shown = redacted(document)
    assert "SECRET" not in str(shown)
    assert shown["spec"]["pods"] == {"image": "i", "env": {"KEY": "(hidden)"}, "template": "(hidden)"}
    assert shown["spec"]["data"] == {"env": "kept"}
    assert "SECRET" in str(document), "the document itself stays"
