"""Jobs whose reports are written."""

from typing import Any

from tests.jobs import document


def job(name: str = "tiny", **spec: Any) -> dict[str, Any]:
    """Return the document of a small job by PPO, whose model and data lie where strangers should not be told."""
    secret = {
        "model": {"source": "/home/someone/secret/model"},
        "data": {"source": "/home/someone/secret/prompts.jsonl"},
    }
    exact = [{"name": "exact", "exactMatch": {}}]
    return document(name, **{**secret, "rewards": exact, "algorithm": {"name": "ppo"}, "steps": 4, **spec})
