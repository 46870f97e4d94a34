"""Jobs whose steps need several rounds of dynamic sampling with every policy."""

from pathlib import Path
from typing import Any

from tests.training.whole_jobs import MakeJob

_REWARD = '''
def reward(completions, ground_truth, **columns):
    """Of half of the prompts nothing can be learnt; of the others, the share of the characters that are digits."""
    return [
        0.0 if answer % 2 == 0 else sum(c.isdigit() for c in completion) / max(1, len(completion))
        for completion, answer in zip(completions, ground_truth)
    ]
'''


def rounds_job(make_job: MakeJob, name: str, **overrides: Any) -> Path:
    """A job by DAPO of two steps of four prompts, of which about half have to be replaced in each round."""
    given: dict[str, Any] = {"steps": 2, "algorithm": {"name": "dapo", "kl": None}, **overrides}
    file = make_job(name, **given)
    (file.parent / "reward.py").write_text(_REWARD)
    return file
