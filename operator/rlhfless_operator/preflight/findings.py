"""The findings of a preflight, and their text."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "error", "unknown"]


@dataclass(frozen=True)
class Finding:
    """The outcome of one check."""

    check: str
    """Subject of the check, such as `knative/config-features` or `quota`."""
    verdict: Verdict
    """`error`: jobs can't run; `warning`: jobs run, but worse or not always; `unknown`: the check was not possible."""
    message: str
    """Description of the state that the check found."""
    remedy: str = ""
    """Command or action that solves the problem."""


def failed(findings: Sequence[Finding]) -> bool:
    """Return whether a finding keeps jobs from running."""
    return any(finding.verdict == "error" for finding in findings)


def describe(findings: Sequence[Finding]) -> str:
    """Return all findings as text, one line each, with remedies below."""
    marks: Mapping[Verdict, str] = {"ok": "ok     ", "warning": "warning", "error": "ERROR  ", "unknown": "unknown"}
    lines = []
    for finding in findings:
        lines.append(f"{marks[finding.verdict]}  {finding.check}: {finding.message}")
        lines += [f"             {line}" for line in finding.remedy.splitlines()]
    return "\n".join(lines)


def set_command(name: str, namespace: str, data: Mapping[str, str]) -> str:
    """Return the command that sets keys of a ConfigMap."""
    patch = json.dumps({"data": dict(data)}, separators=(",", ":"))
    return f"kubectl patch configmap/{name} --namespace {namespace} --type merge --patch '{patch}'"
