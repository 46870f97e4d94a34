"""The pages: their links lead somewhere, and what they list is all that there is."""

import ast
import json
import re
import runpy
from pathlib import Path

import pytest
import yaml

from benchmarks.simulator.what_it_saves import readme_rows
from rlhfless_operator.controller.conditions import Reason
from rlhfless_operator.controller.kueue import QUEUE_LABEL

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md"), *REPOSITORY.glob("charts/*/*.md")]
PACKAGES = (REPOSITORY / "operator" / "rlhfless_operator", REPOSITORY / "functions" / "rlhfless_functions")
NOTHING_WRONG = {
    Reason.VALID,
    Reason.SERVICES_CREATED,
    Reason.PREFLIGHT_PASSED,
    Reason.PODS_WORK,
    Reason.TRAINING,
    Reason.ENGINE_AS_LEARNER,
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


def test_nobody_is_told_to_install_what_no_index_has() -> None:
    for file in [*PAGES, *(file for package in PACKAGES for file in package.rglob("*.py"))]:
        assert not re.search(r"pip install '?rlhfless|'rlhfless\[", file.read_text()), file


def test_the_example_of_kueue_hangs_together() -> None:
    section = (REPOSITORY / "docs" / "operations.md").read_text().partition("## Jobs that wait in a Kueue queue")[2]
    made = {}
    for block in re.findall(r"```yaml\n(.*?)```", section.partition("\n## ")[0], re.DOTALL):
        made |= {each["kind"]: each for each in yaml.safe_load_all(block)}
    job, queue = made["RLHFJob"]["metadata"], made["LocalQueue"]
    assert (job["namespace"], job["labels"][QUEUE_LABEL]) == (queue["metadata"]["namespace"], queue["metadata"]["name"])
    assert queue["spec"]["clusterQueue"] == made["ClusterQueue"]["metadata"]["name"]
    (group,) = made["ClusterQueue"]["spec"]["resourceGroups"]
    (flavor,) = group["flavors"]
    assert flavor["name"] == made["ResourceFlavor"]["metadata"]["name"]
    assert [each["name"] for each in flavor["resources"]] == group["coveredResources"]


def test_every_reason_that_asks_for_something_is_explained() -> None:
    page = (REPOSITORY / "docs" / "troubleshooting.md").read_text()
    explained = set(re.findall(r"^\| `([A-Z]\w+)` \|", page, re.MULTILINE))
    pods = {"Pending", "ImagePullBackOff", "CreateContainerConfigError", "Running", "CrashLoopBackOff"}
    assert explained - pods == {str(reason) for reason in Reason} - {str(reason) for reason in NOTHING_WRONG}


def test_the_page_of_models_and_gpus_is_what_its_command_makes() -> None:
    made = runpy.run_path(str(REPOSITORY / "docs" / "fits.py"))["page"]()
    assert made == (REPOSITORY / "docs" / "which-model.md").read_text(), "python docs/fits.py > docs/which-model.md"


def test_the_drawn_pictures_are_those_of_the_results() -> None:
    pictures = runpy.run_path(str(REPOSITORY / "docs" / "pictures.py"))["PICTURES"]
    for name, draw in pictures.items():
        assert draw() == (REPOSITORY / "docs" / "images" / f"{name}.svg").read_text(), f"python docs/pictures.py {name}"


def fields_of_the_reference() -> list[tuple[str, str]]:
    """Each field of a job by its path, with the text of the section that it stands in."""
    found = []
    for section in re.split(r"^#+ ", (REPOSITORY / "docs" / "reference.md").read_text(), flags=re.MULTILINE):
        heading = section.partition("\n")[0]
        if heading == "spec" or heading.startswith("spec."):
            found += [(f"{heading}.{name}", section) for name in re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)]
    return found


def test_the_sites_search_finds_a_field_by_its_path_its_name_and_other_spellings() -> None:
    """The search cuts a page's text and what is typed into words in the same way; a section that has all is found."""
    separator = re.search(r"separator: '(.*)'\n", (REPOSITORY / "mkdocs.yml").read_text())
    assert separator is not None

    def words(text: str) -> set[str]:
        return {word.lower() for word in re.split(separator[1], text) if word}

    fields = fields_of_the_reference()
    assert len(fields) > 200
    for path, section in fields:
        name = path.rpartition(".")[2]
        snake = re.sub(r"(?=[A-Z])", "_", name).lower()
        for typed in (path, name, snake):
            assert words(typed) <= words(section), f"{typed} is not found at {path}"
    assert {"clip", "low"} <= words("`spec.algorithm.clipLow`, 0.2") and "0.2" in words("`clipLow`, 0.2")


def test_no_page_needs_the_network_for_a_picture() -> None:
    for page in PAGES:
        text = page.read_text()
        assert "```mermaid" not in text, f"{page}: the site draws it with a script from elsewhere"
        assert not re.search(r"!\[[^\]]*\]\(https?:", text), f"{page} shows a picture from elsewhere"


def the_map() -> str:
    """The section of docs/changing-the-code.md that says where things are."""
    text = (REPOSITORY / "docs" / "changing-the-code.md").read_text()
    return text.partition("## The map")[2].partition("\n## ")[0]


def rows_of_the_map() -> list[tuple[str, str, str]]:
    cells = [line.strip("|").split("|") for line in the_map().splitlines() if line.startswith("|")]
    rows = [(question.strip(), begin.strip(), then.strip()) for question, begin, then in cells]
    return [row for row in rows if set(row[1]) != {"-"} and row[1] != "Begin"]


def names_in(file: Path) -> set[str]:
    """Functions, classes and values of a Python file, methods as `Class.method`."""
    names = set()
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, definitions):
            names.add(node.name)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, definitions)}
    return names


@pytest.mark.parametrize(("question", "begin", "then"), rows_of_the_map())
def test_the_map_answers_with_files_and_functions_that_exist(question: str, begin: str, then: str) -> None:
    assert begin and then
    for place in re.findall(r"`([^`]+)`", begin + then):
        path, _, name = place.partition(":")
        found = [root / path for root in (REPOSITORY, *PACKAGES) if (root / path).exists()]
        assert len(found) == 1, f"{place} is there {len(found)} times"
        assert not name or name in names_in(found[0]), place


def test_the_map_answers_ten_questions_and_names_every_room() -> None:
    assert len(rows_of_the_map()) >= 10
    listed = set(re.findall(r"\b(\w+)/", the_map().partition("```")[2]))
    rooms = {file.parent.name for package in PACKAGES for file in package.glob("*/__init__.py")}
    assert rooms <= listed, rooms - listed


def test_the_readme_has_the_savings_of_the_simulations_and_the_work_of_the_rehearsal() -> None:
    results = REPOSITORY / "benchmarks" / "simulator" / "results"
    readme = (REPOSITORY / "README.md").read_text()
    saved = json.loads((results / "what_it_saves.json").read_text())
    for row in readme_rows(saved):
        assert row in readme, row
    spans = json.loads((results / "rehearsal.json").read_text())
    held: dict[tuple[str, str], float] = {}
    for span in spans["spans"]:
        gpus = spans["setting"]["learner_gpus"] if span["stage"] == "learning" else 1
        if span["state"] != "asleep":
            key = span["stage"], span["state"]
            held[key] = held.get(key, 0.0) + gpus * (span["end"] - span["start"])
    loading = spans["setting"]["learner_gpus"] * sum(step["taking_up"] for step in spans["steps"])
    work = (sum(seconds for (_, state), seconds in held.items() if state == "busy") - loading) / sum(held.values())
    loading /= sum(held.values())
    idle = held["learning", "idle"] / sum(held.values())

    text = f"{work:.0%} of the GPU-seconds held are work, and {loading:.0%} load the learner's state"
    assert f"{text}; the learner idles for {idle:.0%}".replace("%", " %") in readme
