"""A job whose responses are drafted learns the same as one that samples a token a pass, bit for bit."""

import shutil
from pathlib import Path

import pytest

from tests.training.whole_jobs import (
    MakeJob,
    assert_equal_weights,
    final_weights,
    folder_of,
    records_of,
    run_job,
)

pytestmark = pytest.mark.usefixtures("warm_start", "nothing_is_left_behind")


def part_names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "drafts").glob("step-*/*.parquet"))


@pytest.mark.slow
def test_drafting_changes_no_weights_and_says_what_it_did(tiny_job: MakeJob) -> None:
    plain = tiny_job(generation={"engine": "transformers", "instances": {"min": 2, "max": 2}})
    run_job(plain)
    wanted = final_weights(plain)
    assert not (folder_of(plain) / "drafts").exists()
    assert all(record["metrics"]["generation/tokens_per_pass"] == 1 for record in records_of(plain)[-3:])
    assert all(record["metrics"]["generation/drafts/tried"] == 0 for record in records_of(plain)[-3:])
    shutil.rmtree(folder_of(plain))

    drafted = tiny_job(generation={"engine": "transformers", "drafting": "auto", "instances": {"min": 2, "max": 2}})
    run_job(drafted)
    assert_equal_weights(final_weights(drafted), wanted)
    assert part_names(folder_of(drafted))
    for record in records_of(drafted)[-3:]:
        metrics = record["metrics"]
        assert metrics["generation/drafts/accepted"] <= metrics["generation/drafts/tried"]
        assert metrics["generation/tokens_per_pass"] >= 1
        assert metrics["generation/drafts/unreadable"] == 0


@pytest.mark.nightly
def test_a_damaged_history_costs_a_job_nothing_but_drafts(tiny_job: MakeJob) -> None:
    file = tiny_job(
        generation={"engine": "transformers", "drafting": "auto", "instances": {"min": 2, "max": 2}}, steps=2
    )
    run_job(file)
    for part in (folder_of(file) / "drafts").glob("step-*/*.parquet"):
        part.write_bytes(b"no responses")
    longer = tiny_job(
        generation={"engine": "transformers", "drafting": "auto", "instances": {"min": 2, "max": 2}}, steps=3
    )
    run_job(longer)
    assert records_of(longer)[-1]["metrics"]["generation/drafts/unreadable"] > 0
