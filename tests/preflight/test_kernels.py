"""What the preflight says of nodes whose kernels can't confine tested code."""

import re
from typing import Any

import pytest

from rlhfless_functions.settings import CodeReward, RewardSettings
from rlhfless_operator.job.reading.validation import load_job
from rlhfless_operator.preflight.kernels import check_kernels

CODE = [RewardSettings(name="tests", code=CodeReward())]


@pytest.mark.parametrize(
    ("releases", "verdict", "words"),
    [
        (["6.12.4-talos", "5.15.0-91-generic"], "ok", "all nodes"),
        (["6.12.4", "5.10.0-26-amd64", ""], "warning", "1 of 2 nodes let it read the pod's files"),
        (["4.18.0-513.el8.x86_64"], "warning", "1 of 1 nodes can't bound its processes.*; 1 of 1 nodes let it read"),
    ],
)
def test_old_kernels_are_told_to_jobs_that_test_code(
    tiny_job: Any, releases: list[str], verdict: str, words: str
) -> None:
    job = load_job(tiny_job("code"))
    (finding,) = check_kernels(releases, job.model_copy(update={"spec": job.spec.model_copy(update={"rewards": CODE})}))
    assert finding.verdict == verdict and re.search(words, finding.message)
    assert ("runtimeClass" in finding.remedy) is (verdict == "warning")


def test_other_jobs_run_no_code_of_the_model(tiny_job: Any) -> None:
    assert check_kernels(["4.18.0"], load_job(tiny_job("plain"))) == []
