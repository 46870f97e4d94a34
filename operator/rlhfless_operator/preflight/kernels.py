"""The check that the kernels of a cluster's nodes can confine code that the model writes."""

import re
from collections.abc import Sequence

from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.preflight.findings import Finding

_LACKING = (
    ((5, 5), "can't bound its processes before they fork"),
    ((5, 13), "let it read the pod's files, and write none (no Landlock)"),
)
"""The first kernels of Linux with a protection, and what earlier ones do."""


def check_kernels(releases: Sequence[str], job: RLHFJob) -> list[Finding]:
    """Check that the nodes can confine tested code, if the job has a reward that runs some.

    Args:
        releases: kernel release of every schedulable node; empty if it is unknown.
        job: the job.
    """
    if not any(reward.code for reward in [*job.spec.rewards, *job.spec.evaluation_rewards]):
        return []
    known = [_version(release) for release in releases if release]
    lacking = [
        f"{count} of {len(known)} nodes {what}"
        for first, what in _LACKING
        if (count := sum(version < first for version in known))
    ]
    if not lacking:
        return [Finding("kernels", "ok", "all nodes can confine code that the model writes")]
    remedy = "Update their kernels, keep preparation's pods on others, or run them in a sandbox: pods.runtimeClass."
    return [Finding("kernels", "warning", f"the job runs code that the model writes; {'; '.join(lacking)}", remedy)]


def _version(release: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", release)[:2]))
