"""How jobs share a pool of GPUs."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_operator.planner.sharing import Claim, Pool, share


def claim(job: str, wanted: int, *, stage: str = "generation", working: int = 0, **more) -> Claim:
    return Claim(
        job=job, stage=stage, **{"namespace": "default", "gpus": 1, "working": working, "wanted": wanted, **more}
    )


def test_everybody_gets_what_there_is_enough_of():
    assert share([claim("a", 3), claim("b", 2)], Pool(8)) == {("a", "generation"): 3, ("b", "generation"): 2}


def test_equals_get_equal_parts_of_what_is_scarce():
    granted = share([claim("a", 8), claim("b", 8), claim("c", 1)], Pool(7))
    assert granted == {("a", "generation"): 3, ("b", "generation"): 3, ("c", "generation"): 1}


def test_the_higher_priority_comes_first():
    assert share([claim("a", 4), claim("b", 4, priority=1)], Pool(5)) == {
        ("a", "generation"): 1,
        ("b", "generation"): 4,
    }


def test_work_that_has_begun_is_never_taken_away():
    granted = share([claim("a", 4, working=4), claim("b", 4, priority=9)], Pool(5))
    assert granted == {("a", "generation"): 4, ("b", "generation"): 1}


def test_a_jobs_stages_count_together():
    claims = [claim("a", 4), claim("a", 1, stage="learning", working=1), claim("b", 4)]
    granted = share(claims, Pool(5))
    assert granted["a", "generation"] + granted["a", "learning"] == 3
    assert granted["b", "generation"] == 2


def test_among_equals_the_one_that_had_least_comes_first():
    granted = share([claim("a", 1, used=100.0), claim("b", 1, used=10.0)], Pool(1))
    assert granted == {("a", "generation"): 0, ("b", "generation"): 1}


def test_a_job_keeps_an_idle_instance_within_its_fair_part():
    claims = [claim("a", 0, stage="learning", kept=1), claim("b", 4, working=2)]
    assert share(claims, Pool(4)) == {("a", "learning"): 1, ("b", "generation"): 3}


def test_a_kept_instance_gives_way_to_work_of_its_own_job():
    claims = [claim("a", 1), claim("a", 0, stage="learning", kept=1)]
    assert share(claims, Pool(1)) == {("a", "generation"): 1, ("a", "learning"): 0}


def test_a_kept_instance_gives_way_to_a_job_that_has_nothing():
    claims = [claim("a", 0, stage="learning", kept=1), claim("b", 1, used=100.0)]
    assert share(claims, Pool(1)) == {("a", "learning"): 0, ("b", "generation"): 1}


def test_beyond_its_fair_part_a_job_keeps_what_nobody_wants():
    assert share([claim("a", 0, kept=3), claim("b", 1)], Pool(4))["a", "generation"] == 3
    assert share([claim("a", 0, kept=3), claim("b", 2)], Pool(4))["a", "generation"] == 2


def test_a_kept_instance_that_does_not_fit_holds_nobody_up():
    claims = [claim("a", 0, kept=1, gpus=4), claim("b", 3, working=1)]
    assert share(claims, Pool(4)) == {("a", "generation"): 0, ("b", "generation"): 3}


def test_a_namespace_stays_within_its_quota_and_holds_nobody_up():
    claims = [claim("a", 4, namespace="small", priority=1), claim("b", 4)]
    assert share(claims, Pool(8, {"small": 2})) == {("a", "generation"): 2, ("b", "generation"): 4}


def test_room_is_kept_for_a_large_instance():
    claims = [claim("big", 1, gpus=4), claim("small", 8, working=2)]
    assert share(claims, Pool(5)) == {("big", "generation"): 0, ("small", "generation"): 2}


def test_what_needs_no_gpu_always_runs():
    claims = [claim("a", 4, working=4), claim("b", 2, stage="preparation", gpus=0)]
    assert share(claims, Pool(4))["b", "preparation"] == 2


def test_an_instance_that_could_never_run_is_refused():
    with pytest.raises(ValueError, match=r"asks for 4 GPUs, and namespace default may have 2 of the pool's 8"):
        share([claim("a", 1, gpus=4)], Pool(8, {"default": 2}))


@st.composite
def claims_and_pool(draw):
    pool = Pool(draw(st.integers(4, 12)), draw(st.dictionaries(st.sampled_from("mn"), st.integers(2, 6))))
    claims, free = [], pool.gpus
    in_namespace = defaultdict(int)
    for number in range(draw(st.integers(1, 5))):
        namespace, gpus = draw(st.sampled_from("mno")), draw(st.integers(0, 2))
        room = min(free, pool.namespaces.get(namespace, pool.gpus) - in_namespace[namespace])
        working = draw(st.integers(0, room // gpus if gpus else 2))
        free -= working * gpus
        in_namespace[namespace] += working * gpus
        claims.append(
            claim(
                f"job-{number}",
                draw(st.integers(0, 6)),
                working=working,
                namespace=namespace,
                gpus=gpus,
                kept=draw(st.integers(0, 2)),
                priority=draw(st.integers(0, 2)),
                used=draw(st.floats(0, 10)),
            )
        )
    return claims, pool


@given(claims_and_pool())
def test_no_limit_is_passed_no_gpu_is_wasted_and_nobody_who_works_is_stopped(drawn):
    claims, pool = drawn
    granted = {each: share(claims, pool)[each.job, each.stage] for each in claims}
    in_namespace = defaultdict(int)
    for each, count in granted.items():
        assert each.working <= count <= max(each.working, each.wanted) + each.kept
        in_namespace[each.namespace] += count * each.gpus
    free = pool.gpus - sum(in_namespace.values())
    assert free >= 0
    assert all(in_namespace[name] <= quota for name, quota in pool.namespaces.items())
    for each, count in granted.items():
        quota = pool.namespaces.get(each.namespace, pool.gpus)
        fits = each.gpus <= free and in_namespace[each.namespace] + each.gpus <= quota
        waited_for = any(granted[other] < other.wanted and other.gpus > free for other in claims)
        assert count >= each.wanted or not fits or waited_for


@given(claims_and_pool())
def test_the_order_of_the_claims_makes_no_difference(drawn):
    claims, pool = drawn
    assert share(claims, pool) == share(claims[::-1], pool)
