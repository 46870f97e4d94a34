"""Datasets of a hub of the tests' own, as their users know it: endpoint, configurations, splits, versions, offline."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.data.hub_server import GSM8K_CARD, Hub, parquet
from tests.data.hub_server import hub as hub  # A fixture.

READ = """
import json, sys
from rlhfless_functions.data.dataset_files import read_table
from rlhfless_functions.settings import MixedSource
answers = []
for asked in json.loads(sys.argv[1]):
    try:
        answers.append([row["question"] for row in read_table(MixedSource(**asked)).rows])
    except Exception as error:
        answers.append(str(error))
print(json.dumps(answers))
"""


def version(question: str) -> dict[str, bytes]:
    def split(text: str) -> bytes:
        return parquet([{"question": text, "answer": "so\n#### 2"}])

    return {
        "README.md": GSM8K_CARD,
        "main/train-00000-of-00001.parquet": split(question),
        "main/test-00000-of-00001.parquet": split("held out"),
        "socratic/train-00000-of-00001.parquet": split("asked"),
    }


def read(asked: list[dict[str, Any]], home: Path, **environment: str) -> list[Any]:
    """What a process with an environment of its own reads: the questions, or the error."""
    variables = {**os.environ, "HF_HOME": str(home), "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", **environment}
    whole = [{"source": "hub:openai/gsm8k", **each} for each in asked]
    command = [sys.executable, "-c", READ, json.dumps(whole)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=280, check=True)
    answers: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


@pytest.mark.slow
def test_a_dataset_is_read_from_the_endpoint_and_without_it_from_the_cache(hub: Hub, tmp_path: Path) -> None:
    first = hub.push("openai/gsm8k", version("old"))
    hub.push("openai/gsm8k", version("new"))
    questions = [{"subset": "main"}, {"subset": "main", "revision": first}, {"subset": "main", "split": "test"}]
    online = read(
        [*questions, {}, {"subset": "main", "split": "x"}, {"source": "hub:openai/none"}, {"subset": "other"}],
        tmp_path,
        HF_ENDPOINT=hub.url,
    )
    assert online[:3] == [["new"], ["old"], ["held out"]]
    assert "openai/gsm8k has the configurations main, socratic; set data.subset to one of them" in online[3]
    assert "can't be read from the hub" in online[4] and "data.split" in online[4]
    assert "openai/none can't be read from the hub" in online[5]
    assert "Available: ['main', 'socratic']" in online[6]

    hub.asked.clear()
    unknown = {"subset": "main", "revision": "0" * 40}
    offline = read([{"subset": "main", "revision": first}, unknown], tmp_path, HF_HUB_OFFLINE="1", HF_ENDPOINT=hub.url)
    assert offline[0] == ["old"]
    assert f"not revision {'0' * 40}" in offline[1] and "load_dataset('openai/gsm8k', 'main', revision=" in offline[1]
    (nothing,) = read([{"subset": "main"}], tmp_path / "empty", HF_HUB_OFFLINE="1", HF_ENDPOINT=hub.url)
    assert "is not in this machine's cache, and HF_HUB_OFFLINE is set" in nothing
    assert "load_dataset('openai/gsm8k', 'main')" in nothing
    assert hub.asked == []
