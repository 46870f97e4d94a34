"""Claims of slots: what is made, and which ones a new pod gets."""

from collections import Counter
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_operator.knative.models import ObjectMeta
from rlhfless_operator.platforms.turns.slot_claims import (
    GROUP_LABEL,
    Resident,
    ResourceClaim,
    Slot,
    choose_slots,
    claim,
    claims_patch,
    gpus_of,
    resident_of,
    slots_of,
    why_overlooked,
)
from tests.clusters.json_patch import patched


def slots(groups: int, together: int = 1) -> list[Slot]:
    return [Slot(f"s-{group}-{index}", str(group)) for group in range(groups) for index in range(together)]


def pod(**annotations: str) -> dict[str, Any]:
    given = {name.replace("__", "/").replace("_", "."): value for name, value in annotations.items()}
    return {
        "metadata": {"annotations": given},
        "spec": {"containers": [{"name": "queue-proxy", "image": "q"}, {"name": "function", "image": "f"}]},
    }


def test_a_claim_is_one_gpu_of_the_pools_class() -> None:
    made = claim("team", "h100", "gpu.nvidia.com", 2, 1)
    assert made["metadata"]["name"] == "rlhfless-h100-2-1"
    (request,) = made["spec"]["devices"]["requests"]
    assert request["exactly"] == {"deviceClassName": "gpu.nvidia.com"}
    assert slots_of([ResourceClaim.model_validate(made)]) == [Slot("rlhfless-h100-2-1", "2")]


def test_a_claim_that_is_being_deleted_takes_no_new_pods() -> None:
    ending = ResourceClaim(
        metadata=ObjectMeta(name="c", labels={GROUP_LABEL: "0"}, deletion_timestamp=datetime.now(UTC))
    )
    assert slots_of([ending]) == []


def test_pods_of_a_stage_spread_over_the_slots() -> None:
    residents: list[Resident] = []
    for _ in range(4):
        chosen = choose_slots(slots(4), residents, "job", "generation", 1)
        assert chosen is not None
        residents.append(Resident("job", "generation", chosen))
    assert Counter(slot for each in residents for slot in each.slots) == {slot.name: 1 for slot in slots(4)}


def test_learners_of_two_jobs_do_not_meet() -> None:
    residents = [Resident(job, "generation", (slot.name,)) for job in ("a", "b") for slot in slots(2)]
    first = choose_slots(slots(2), residents, "a", "learning", 1)
    assert first is not None
    second = choose_slots(slots(2), [*residents, Resident("a", "learning", first)], "b", "learning", 1)
    assert second is not None
    assert set(first).isdisjoint(second)


def test_a_learner_is_in_the_group_of_its_own_preparation() -> None:
    """It seldom works while that does; that of another job may."""
    residents: list[Resident] = []
    for job in ("a", "b"):
        chosen = choose_slots(slots(2, together=2), residents, job, "preparation", 1)
        assert chosen is not None
        residents.append(Resident(job, "preparation", chosen))
    homes = {each.job: each.slots[0].rsplit("-", 1)[0] for each in residents}
    assert homes["a"] != homes["b"]
    for job in ("b", "a"):
        chosen = choose_slots(slots(2, together=2), residents, job, "learning", 2)
        assert chosen == (f"{homes[job]}-0", f"{homes[job]}-1")
        residents.append(Resident(job, "learning", chosen))


def test_a_learner_leaves_the_slot_of_its_own_preparation_alone_where_it_can() -> None:
    residents = [Resident("job", "generation", (slot.name,)) for slot in slots(1, together=3)]
    residents.append(Resident("job", "preparation", ("s-0-0",)))
    assert choose_slots(slots(1, together=3), residents, "job", "learning", 2) == ("s-0-1", "s-0-2")


def test_what_a_pod_needs_at_once_is_of_one_group() -> None:
    residents = [Resident("b", "generation", ("s-0-0",))]
    assert choose_slots(slots(2, together=2), residents, "a", "learning", 2) == ("s-1-0", "s-1-1")
    assert choose_slots(slots(4), [], "a", "learning", 2) is None
    assert choose_slots([], [], "a", "learning", 1) is None


@given(
    groups=st.integers(1, 4),
    together=st.integers(1, 3),
    arrivals=st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from(["generation", "learning"]), st.integers(1, 3)), max_size=12
    ),
)
def test_no_slot_has_two_pods_of_a_stage_more_than_another_of_its_size(
    groups: int, together: int, arrivals: list[tuple[str, str, int]]
) -> None:
    residents: list[Resident] = []
    for job, stage, gpus in arrivals:
        chosen = choose_slots(slots(groups, together), residents, job, stage, gpus)
        assert (chosen is None) == (gpus > together)
        if chosen is None:
            continue
        assert len(chosen) == len(set(chosen)) == gpus
        assert len({name.split("-")[1] for name in chosen}) == 1
        own = [slot for each in residents if (each.job, each.stage) == (job, stage) for slot in each.slots]
        crowd = Counter(own)
        if gpus == 1:
            assert crowd[chosen[0]] == min(crowd[slot.name] for slot in slots(groups, together))
        residents.append(Resident(job, stage, chosen))


def test_a_pod_names_the_whole_group_and_its_function_uses_its_own_part() -> None:
    made = patched(pod(rlhfless_io__pool="p"), claims_patch(pod(rlhfless_io__pool="p"), slots(2, 2), ("s-1-1",)))
    assert made["spec"]["resourceClaims"] == [{"name": name, "resourceClaimName": name} for name in ("s-1-0", "s-1-1")]
    sidecar, function = made["spec"]["containers"]
    assert "resources" not in sidecar
    assert function["resources"]["claims"] == [{"name": "s-1-1"}]
    assert made["metadata"]["annotations"]["rlhfless.io/slots"] == "s-1-1"


@pytest.mark.parametrize(
    ("annotations", "wanted"),
    [
        ({"rlhfless_io__pool": "p", "rlhfless_io__gpus": "2"}, ("p", 2)),
        ({"rlhfless_io__pool": "p"}, None),
        ({}, None),
    ],
)
def test_a_pod_says_what_it_needs(annotations: dict[str, str], wanted: tuple[str, int] | None) -> None:
    assert gpus_of(pod(**annotations)) == wanted


def test_a_pod_that_is_on_its_way_out_has_no_place() -> None:
    metadata: dict[str, Any] = {
        "name": "p",
        "annotations": {"rlhfless.io/slots": "s-0-0,s-0-1"},
        "labels": {"rlhfless.io/job": "j", "rlhfless.io/stage": "learning"},
    }
    there = ResourceClaim(metadata=ObjectMeta(**metadata))
    assert resident_of(there) == Resident("j", "learning", ("s-0-0", "s-0-1"))
    leaving = ResourceClaim(metadata=ObjectMeta(**metadata, deletion_timestamp=datetime.now(UTC)))
    assert resident_of(leaving) is None


@pytest.mark.parametrize(
    ("there", "ending", "why"),
    [
        ({"a"}, set(), "it names ResourceClaims that are not there: b, c"),
        ({"a", "b"}, {"b"}, "it names ResourceClaims that are not there: c"),
        ({"a", "b", "c", "d"}, {"b", "d"}, "it names ResourceClaims that are being deleted: b"),
        ({"a", "b", "c"}, set(), "the scheduler has not looked at it, though its ResourceClaims are there"),
    ],
)
def test_why_the_scheduler_says_nothing_of_a_pod_is_seen_from_its_claims(
    there: set[str], ending: set[str], why: str
) -> None:
    assert why_overlooked(("c", "b", "a"), there, ending) == f"Pending: {why}"
