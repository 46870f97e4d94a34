"""The example with tools that take their time, as a job of a folder of its own."""

import shutil
from pathlib import Path
from typing import Any

import yaml

from benchmarks.shared.places import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "tools"
TOOL = '''
    def {name}(self, amount: int) -> str:
        """Change the counter.

        Args:
            amount: the number.
        """
        time.sleep({seconds})
        return super().{name}(amount)
'''


def slow_job(folder: Path, name: str, seconds: float, environment: dict[str, Any], spec: dict[str, Any]) -> Path:
    """Write a job without evaluation whose tools take so long, and return its file. Its run is `runs/NAME` there.

    Args:
        environment: more of its environment.
        spec: more of its document.
    """
    place = folder / name
    shutil.copytree(EXAMPLE, place)
    methods = "".join(TOOL.format(name=tool, seconds=seconds) for tool in ("add", "take"))
    counter = (EXAMPLE / "counter.py").read_text()
    (place / "counter.py").write_text(f"import time\n\n{counter}\n\nclass Slow(Counter):{methods}")
    job = yaml.safe_load((EXAMPLE / "grpo.yaml").read_text())
    job["metadata"]["name"] = name
    del job["spec"]["evaluation"]
    job["spec"]["environment"]["python"]["class"] = "Slow"
    job["spec"]["environment"] |= {"toolSeconds": f"{seconds + 60:g}s", "episodeSeconds": "1h", **environment}
    job["spec"] |= {"artifacts": {"uri": str(folder / "runs")}, **spec}
    file = place / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    return file


def batch(prompts: int, samples: int) -> dict[str, Any]:
    """Return the batch of a step that is learnt from at once."""
    return {
        "promptsPerStep": prompts,
        "samplesPerPrompt": samples,
        "minibatchSamples": prompts * samples,
        "microbatchTokens": 16384,
    }
