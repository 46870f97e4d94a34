"""Conditions: what a transition makes of a status, and what it leaves alone."""

import ast
import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_operator.controller import conditions
from rlhfless_operator.controller.conditions import Reason, Transition
from rlhfless_operator.formatting import printable
from rlhfless_operator.job.resource_status import Condition, ResourceStatus

EARLY, LATE = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"

TRANSITIONS = st.one_of(
    st.builds(conditions.started, st.text(max_size=5)),
    st.builds(conditions.suspended),
    st.builds(conditions.succeeded, st.text(max_size=5)),
    st.builds(conditions.failed, st.sampled_from(list(Reason)), st.text(max_size=5)),
    st.builds(
        conditions.waiting, st.sampled_from(["Pending", "Interrupted"]), st.sampled_from(list(Reason)), st.text()
    ),
    st.builds(conditions.without_services, st.just("Pending"), st.text(max_size=5)),
)


def apply(status: ResourceStatus, transition: Transition, *, now: str = EARLY, generation: int = 1) -> ResourceStatus:
    return conditions.apply(status, transition, generation=generation, now=now)


def of(status: ResourceStatus, kind: str) -> Condition:
    return next(condition for condition in status.conditions if condition.type == kind)


def test_a_condition_that_stays_as_it_is_keeps_its_time() -> None:
    first = apply(ResourceStatus(), conditions.started("a"))
    again = apply(first, conditions.started("b"), now=LATE, generation=2)
    progressing = of(again, "Progressing")
    assert (progressing.last_transition_time, progressing.message, progressing.observed_generation) == (EARLY, "b", 2)
    ended = apply(again, conditions.succeeded("c"), now=LATE)
    assert of(ended, "Progressing").last_transition_time == LATE
    assert of(ended, "Accepted").last_transition_time == EARLY


def test_complete_and_failed_appear_when_they_are_true_and_are_taken_back() -> None:
    running = apply(ResourceStatus(), conditions.started(""))
    assert {condition.type for condition in running.conditions} == {"Progressing", "Accepted", "Suspended"}
    failed = apply(running, conditions.failed(Reason.TRAINING_FAILED, "no"))
    assert of(failed, "Failed").status == "True"
    assert of(apply(failed, conditions.started("")), "Failed").status == "False"


@pytest.mark.parametrize("reason", [Reason.INVALID_SPEC, Reason.SPEC_CHANGED])
def test_a_document_that_is_refused_is_not_accepted(reason: Reason) -> None:
    failed = apply(ResourceStatus(), conditions.failed(reason, "spec.x: wrong; mend it"))
    assert (of(failed, "Accepted").status, of(failed, "Accepted").reason) == ("False", reason)
    assert failed.message == "spec.x: wrong; mend it"


def test_beginning_and_end_are_timed() -> None:
    running = apply(ResourceStatus(), conditions.started(""))
    assert (running.start_time, running.completion_time) == (EARLY, None)
    done = apply(running, conditions.succeeded(""), now=LATE)
    assert (done.start_time, done.completion_time) == (EARLY, LATE)
    assert apply(done, conditions.succeeded(""), now="2027-01-01T00:00:00Z").completion_time == LATE
    assert apply(done, conditions.started("")).completion_time is None


def test_the_stage_is_known_only_while_the_job_runs() -> None:
    running = apply(ResourceStatus(stage="learning"), conditions.started(""))
    assert running.stage == "learning"
    assert apply(running, conditions.suspended()).stage is None


@given(st.lists(TRANSITIONS, max_size=8))
def test_whatever_happens_there_is_one_condition_of_a_type_and_one_truth(turns: list[Transition]) -> None:
    status = ResourceStatus()
    for number, turn in enumerate(turns):
        status = apply(status, turn, generation=number)
        types = [condition.type for condition in status.conditions]
        assert len(types) == len(set(types))
        true = {condition.type for condition in status.conditions if condition.status == "True"}
        assert ("Complete" in true) == (status.phase == "Succeeded")
        assert ("Failed" in true) == (status.phase == "Failed")
        assert ("Progressing" in true) == (status.phase == "Running")
        assert (status.phase, status.reason, status.message) == (turn.phase, turn.reason, printable(turn.message))
        assert status.observed_generation == number
        assert (status.completion_time is not None) == status.settled


def test_every_type_and_reason_is_explained() -> None:
    tree = ast.parse(inspect.getsource(conditions))
    (reasons,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Reason")
    for body in (tree.body, reasons.body):
        for node, after in zip(body, [*body[1:], None], strict=True):
            if isinstance(node, ast.Assign | ast.AnnAssign):
                assert isinstance(after, ast.Expr), ast.unparse(node)
                assert isinstance(after.value, ast.Constant), ast.unparse(node)


def test_a_message_of_megabytes_and_commands_is_clipped_and_shown() -> None:
    status = apply(
        ResourceStatus(), conditions.failed(Reason.TRAINING_FAILED, "\x1b[2J" + "x" * 4_000_000), generation=1
    )
    assert status.message.startswith("\\x1b[2Jxxx")
    assert len(status.message) == 8000
    assert all(len(condition.message) <= 8000 for condition in status.conditions)
