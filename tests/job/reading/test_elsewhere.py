"""Documents of strangers: no document takes long, much memory, or the reader of the others."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhfless_functions.artifacts import ArtifactCorruptError
from rlhfless_operator.job.reading import elsewhere
from rlhfless_operator.job.reading.elsewhere import excess_of, read_begun, read_content, reading_elsewhere
from rlhfless_operator.job.reading.validation import InvalidJobError
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.training.journal.begun_job import begun_job, document_of
from tests.jobs import small_job

SLOW = "(?i)" + "[\\U00000001-\\U0010ffff]" * 39
"""A pattern as long as one may be, which takes a second or two to compile."""


@pytest.fixture(scope="module")
def reader() -> Iterator[None]:
    with reading_elsewhere():
        yield


def nested(depth: int) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for _ in range(depth):
        content = {"spec": content}
    return content


@pytest.mark.usefixtures("reader")
def test_a_document_is_read_as_it_is_here() -> None:
    job = read_content(small_job(), "job")
    elsewhere_too = read_begun(yaml.safe_dump(document_of(job)).encode())
    assert elsewhere_too == job
    with pytest.raises(InvalidJobError, match=r"spec\.steps") as invalid:
        read_content(small_job(steps="many"), "job")
    assert invalid.value.faults[0].path == "spec.steps"


@pytest.mark.usefixtures("reader")
def test_patterns_that_compile_for_minutes_are_refused_and_the_next_document_is_read() -> None:
    rewards = [{"name": f"form-{number}", "format": {"pattern": f"{SLOW}{number}"}} for number in range(100)]
    with pytest.raises(InvalidJobError, match=r"takes more than \d s.*shorten its patterns"):
        read_content(small_job(rewards=rewards), "job")
    assert read_content(small_job(), "job").metadata.name == "job"


@pytest.mark.usefixtures("reader")
def test_a_reader_that_has_ended_is_started_again() -> None:
    read_content(small_job(), "job")
    assert elsewhere._reader is not None
    assert elsewhere._reader._process is not None
    elsewhere._reader._process.kill()
    elsewhere._reader._process.wait()
    assert read_content(small_job(), "job").metadata.name == "job"


@pytest.mark.parametrize(
    ("content", "excess"),
    [
        (nested(700), "nested more than 40 deep"),
        (nested(100_000), "nested more than 40 deep"),
        ({"x": list(range(30_000))}, "more than 20000 values"),
        ({"x": "x" * 300_000}, "more than 262144 characters"),
        ({"x" * 300_000: 1}, "more than 262144 characters"),
        (small_job(), None),
    ],
    ids=["deep", "very deep", "many", "long", "long name", "fine"],
)
def test_documents_have_bounds(content: dict[str, Any], excess: str | None) -> None:
    found = excess_of(content)
    assert (found is None) == (excess is None)
    assert excess is None or excess in str(found)
    if excess is not None:
        with pytest.raises(InvalidJobError, match=excess):
            read_content(content, "job")


def test_aliases_that_stand_for_a_terabyte_are_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 13)]
    (tmp_path / "job.yaml").write_text("\n".join(lines))
    with pytest.raises(ArtifactCorruptError, match=r"job\.yaml is damaged .*more than 20000 values"):
        begun_job(JobFolder(str(tmp_path)))
    (tmp_path / "job.yaml").write_bytes(b"#" * 2**20)
    with pytest.raises(ArtifactCorruptError, match=r"job\.yaml has 1048576 bytes, more than 262144"):
        begun_job(JobFolder(str(tmp_path)))
