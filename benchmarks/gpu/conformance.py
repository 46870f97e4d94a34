"""Part of `measure.py`: the tests that every engine passes, on this device."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.shared.places import REPOSITORY

TESTS = "tests/generation/engines/conformance"


def measure(scratch: Path) -> dict[str, Any]:
    """How many tests passed and were skipped, and the names of those that failed.

    Args:
        scratch: folder for the tests' report.
    """
    if find_spec("pytest") is None:
        return {"not_measured": "pytest is not installed here: pip install pytest pytest-asyncio pytest-timeout"}
    scratch.mkdir(parents=True)
    report = scratch / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TESTS, f"--junit-xml={report}"]
    if find_spec("xdist") is not None:
        command += ["--numprocesses", str(min(8, os.cpu_count() or 1))]
    subprocess.run(command, cwd=REPOSITORY, check=False)
    return counted(report)


def counted(report: Path) -> dict[str, Any]:
    """Numbers of tests by their end, from a report in JUnit's form."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    broken = [case.get("name") for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    found: dict[str, Any] = {"passed": len(cases) - len(broken) - skipped, "skipped": skipped, "broken": broken}
    return found | ({"failed": f"{len(broken)} of {len(cases)} tests, the first {broken[0]}"} if broken else {})
