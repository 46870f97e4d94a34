"""What is to be done about a job, as a pure function of its document and status."""

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from rlhfless_functions.api import WeightsReference
from rlhfless_operator.controller.conditions import Reason
from rlhfless_operator.controller.outcome import outcome_of, pause_before_restart
from rlhfless_operator.controller.resource import JobResource, expiry, next_action, resolved
from rlhfless_operator.errors import StoreUnavailableError
from rlhfless_operator.job.prices import BudgetSpec
from rlhfless_operator.job.resource_status import (
    Condition,
    ResourceStatus,
    changes_of,
    dump_resource_status,
    read_resource_status,
)
from rlhfless_operator.platforms.base import PlatformUnavailableError
from rlhfless_operator.training.driver import DeadlineExceededError, JobChangedError
from rlhfless_operator.training.journal.budget import BudgetExhaustedError
from rlhfless_operator.training.journal.lease import LeaseHeldError, LeaseLostError
from rlhfless_operator.training.requests.tasks import StageFailedError
from rlhfless_operator.training.stages.mismatch import MismatchError
from rlhfless_operator.training.stages.unscorable import UnscorableError
from tests.jobs import small_job


def resource(*, generation: int = 1, deleted: bool = False, adopt: bool = False, **spec: Any) -> JobResource:
    body = small_job(**spec)
    body["metadata"] |= {"namespace": "ns", "uid": "u", "generation": generation, "resourceVersion": "7"}
    if deleted:
        body["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    if adopt:
        body["metadata"]["annotations"] = {"rlhfless.io/adopt": "true"}
    return JobResource.of(body)


def status(phase: str = "Pending", *, generation: int = 1, reason: str = "", **more: Any) -> ResourceStatus:
    return ResourceStatus(phase=phase, observed_generation=generation, reason=reason, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("phase", ["Pending", "Running", "Interrupted", "Suspended"])
def test_an_unfinished_job_is_driven(phase: str) -> None:
    assert next_action(resource(), status(phase)) == "drive"


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_finished_job_is_left_alone_until_its_document_changes(phase: str) -> None:
    assert next_action(resource(), status(phase)) == "none"
    assert next_action(resource(generation=2), status(phase)) == "drive"


def test_suspension_comes_first_and_is_done_once() -> None:
    for phase in ("Pending", "Running", "Interrupted", "Failed"):
        assert next_action(resource(suspend=True), status(phase)) == "suspend"
    assert next_action(resource(suspend=True, generation=9), status("Suspended")) == "none"
    assert next_action(resource(suspend=True, generation=9), status("Succeeded")) == "none"


def test_a_job_out_of_budget_waits_until_its_document_changes() -> None:
    suspended = status("Suspended", reason="BudgetExhausted")
    assert next_action(resource(), suspended) == "none"
    assert next_action(resource(generation=2), suspended) == "drive"
    assert next_action(resource(suspend=True, generation=2), suspended) == "none"
    assert next_action(resource(), status("Pending", reason="BudgetExhausted")) == "drive"


def test_the_budget_is_what_the_document_says_now() -> None:
    assert resource(budget={"money": "5.00"}).budget(None) == BudgetSpec(money=Decimal("5.00"))
    assert resource().budget(BudgetSpec(gpu_hours=1.0)) is None
    assert resource(budget={"gpuHours": "many"}).budget(BudgetSpec(gpu_hours=1.0)) == BudgetSpec(gpu_hours=1.0)


def test_nothing_is_done_for_a_job_that_is_being_deleted() -> None:
    assert next_action(resource(deleted=True), status("Running")) == "none"


def test_a_finished_job_expires() -> None:
    ended = status("Succeeded", completion_time="2026-01-01T00:00:00Z")
    assert next_action(resource(ttlAfterFinished="1h"), ended) == "expire"
    assert expiry(resource(ttlAfterFinished="1h"), ended) == datetime(2026, 1, 1, 1, tzinfo=UTC)
    assert expiry(resource(), ended) is None
    assert expiry(resource(ttlAfterFinished=f"{'9' * 12}d"), ended) is None


def test_a_taken_folder_is_tried_again_once_the_job_may_adopt_it() -> None:
    taken = status("Failed", reason=Reason.FOLDER_TAKEN)
    assert next_action(resource(), taken) == "none"
    assert next_action(resource(adopt=True), taken) == "drive"
    assert next_action(resource(adopt=True), status("Failed", reason=Reason.TRAINING_FAILED)) == "none"


def test_paths_are_taken_from_the_files_of_the_pods() -> None:
    spec = resolved(resource().job(), "/files").spec
    assert (spec.model.source, spec.data.source) == ("/files/model", "/files/data.jsonl")


def test_how_a_driver_ends_decides_what_comes_next() -> None:
    assert outcome_of(LeaseHeldError("")).kind == "wait"
    assert outcome_of(LeaseLostError("")).kind == "wait"
    assert outcome_of(PlatformUnavailableError("")).kind == "no_services"
    assert outcome_of(StoreUnavailableError("")).reason == Reason.STORE_UNAVAILABLE
    assert outcome_of(StageFailedError("why")).message == "why"
    assert outcome_of(ValueError("why")).kind == "failed"
    unscorable = outcome_of(UnscorableError("why"))
    assert (unscorable.kind, unscorable.reason, unscorable.message) == ("failed", Reason.UNSCORABLE, "why")
    mismatch = outcome_of(MismatchError("why"))
    assert (mismatch.kind, mismatch.reason, mismatch.message) == ("failed", Reason.MISMATCH, "why")
    spent = outcome_of(BudgetExhaustedError("why"))
    assert (spent.kind, spent.reason, spent.message) == ("suspended", Reason.BUDGET_EXHAUSTED, "why")
    assert outcome_of(DeadlineExceededError("")).reason == Reason.DEADLINE_EXCEEDED
    changed = outcome_of(JobChangedError("spec.seed", "folder"))
    assert changed.reason == Reason.SPEC_CHANGED
    assert "--fresh" not in changed.message, "there is no such thing on a cluster"
    assert outcome_of(KeyError("x")).kind == "restart"


def test_pauses_double_up_to_a_limit() -> None:
    assert [pause_before_restart(number, 10.0, 360.0) for number in (1, 2, 3, 7)] == [10.0, 20.0, 40.0, 360.0]
    assert pause_before_restart(10**6, 10.0, 360.0) == 360.0


def test_the_share_of_the_budget_is_shown_as_people_read_it() -> None:
    shown = dump_resource_status(status("Running", gpu_seconds=10 / 3, budget_used=1 / 3, forecast=Decimal("7.25")))
    assert (shown["gpuSeconds"], shown["budgetUsed"], shown["forecast"]) == (3.333, 0.3333, "7.25")


def test_a_status_survives_the_way_to_the_server_and_back() -> None:
    whole = status(
        "Running",
        weights=WeightsReference(version=1, uri="w"),
        conditions=[Condition(type="Progressing", status="True")],
    )
    assert read_resource_status(dump_resource_status(whole)) == whole


def test_a_status_of_another_release_is_read_as_far_as_it_is_known() -> None:
    assert read_resource_status({"phase": "Running", "invented": 1}).phase == "Running"
    assert read_resource_status({"phase": "Dreaming"}) == ResourceStatus()
    assert read_resource_status(None) == ResourceStatus()


def test_changes_are_a_merge_patch() -> None:
    before = {"a": 1, "gone": 2, "nested": {"x": 1, "gone": 2, "same": 3}, "list": [1]}
    after = {"a": 1, "nested": {"x": 2, "same": 3}, "list": [1, 2]}
    assert changes_of(before, after) == {"gone": None, "nested": {"gone": None, "x": 2}, "list": [1, 2]}
    assert changes_of(after, after) == {}
