"""The pages: their links lead somewhere, and what they list is all that there is."""

import re
import runpy
from pathlib import Path

import pytest

from rlhfless_operator.controller.conditions import Reason

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md"), *REPOSITORY.glob("charts/*/*.md")]
NOTHING_WRONG = {
    Reason.VALID,
    Reason.SERVICES_CREATED,
    Reason.PREFLIGHT_PASSED,
    Reason.PODS_WORK,
    Reason.TRAINING,
    Reason.SOMETHING_TO_LEARN,
    Reason.NOT_SUSPENDED,
    Reason.SUCCEEDED,
    Reason.RUNNING,
    # It says no more than that the condition of its name tells the reason.
    Reason.FAILED,
}


def anchors(page: Path) -> set[str]:
    """Names of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_every_reason_that_asks_for_something_is_explained() -> None:
    page = (REPOSITORY / "docs" / "troubleshooting.md").read_text()
    explained = set(re.findall(r"^\| `([A-Z]\w+)` \|", page, re.MULTILINE))
    pods = {"Pending", "ImagePullBackOff", "CreateContainerConfigError", "Running", "CrashLoopBackOff"}
    assert explained - pods == {str(reason) for reason in Reason} - {str(reason) for reason in NOTHING_WRONG}


def test_the_drawn_pictures_are_those_of_the_results() -> None:
    pictures = runpy.run_path(str(REPOSITORY / "docs" / "pictures.py"))["PICTURES"]
    for name, draw in pictures.items():
        assert draw() == (REPOSITORY / "docs" / "images" / f"{name}.svg").read_text(), f"python docs/pictures.py {name}"
