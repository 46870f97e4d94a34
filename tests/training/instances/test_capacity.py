"""Which instances the loop asks for, and when: by a clock of the test's own."""

from typing import Any

import pytest

from rlhfless_operator.planner.pools.shared_gpus import SharedGpus
from rlhfless_operator.planner.pools.whole_gpus import SwitchCost
from tests.training.instances.timeline import PRELOAD, MakeTimeline


async def test_with_a_keep_alive_the_platform_is_told_at_once(make_timeline: MakeTimeline) -> None:
    time = make_timeline(keep_alive=600.0)
    await time.capacity.use("learning", 1, PRELOAD)
    await time.pass_time(3)
    await time.capacity.use("learning", 0)
    assert time.counts("learning") == [(0, 1), (3, 0)]
    await time.capacity.close()


async def test_left_to_itself_an_instance_is_kept_for_as_long_as_a_start_takes(make_timeline: MakeTimeline) -> None:
    time = make_timeline()
    time.history.add("startup/learning", 4.0)
    await time.capacity.use("learning", 1)
    await time.capacity.use("learning", 0)
    await time.pass_time(10)
    assert time.counts("learning") == [(0, 1), (0, 1), (4, 0)]
    await time.capacity.close()


async def test_what_never_came_is_not_kept(make_timeline: MakeTimeline) -> None:
    time = make_timeline()
    time.history.add("startup/learning", 4.0)
    await time.capacity.use("learning", 2)
    await time.capacity.give_up("learning", 1)
    await time.capacity.use("learning", 1)
    await time.capacity.use("learning", 0)
    await time.pass_time(10)
    assert time.counts("learning") == [(0, 2), (0, 1), (0, 1), (0, 1), (4, 0)]
    await time.capacity.close()


async def test_where_instances_without_work_sleep_they_are_kept_for_good(make_timeline: MakeTimeline) -> None:
    time = make_timeline(shared=SharedGpus(1, {}))
    time.history.add("startup/learning", 4.0)
    for _ in range(3):
        await time.capacity.use("learning", 1)
        await time.capacity.use("learning", 0)
        await time.pass_time(1000)
    assert {count for _, count in time.counts("learning")} == {1}
    await time.capacity.close()


async def test_a_switch_costs_a_drain_a_start_and_what_is_to_be_done_again(make_timeline: MakeTimeline) -> None:
    time = make_timeline(draining_seconds=30.0)
    assert time.capacity.switch_cost("learning") == SwitchCost(30.0)
    time.history.add("startup/learning", 4.0)
    time.history.add("draining/learning", 6.0)
    for gap in (5.0, 7.0, 600.0, 6.0):
        await time.capacity.use("learning", 1)
        await time.capacity.use("learning", 0, restart_seconds=3.0)
        await time.pass_time(gap)
    await time.capacity.use("learning", 1)
    assert time.capacity.switch_cost("learning") == SwitchCost(13.0, 6.5), "a long wait is a rare one"
    await time.capacity.finish("learning")
    assert time.capacity.switch_cost("learning").over
    await time.capacity.close()


async def test_gaps_that_are_longer_than_a_start_let_it_go_at_once(make_timeline: MakeTimeline) -> None:
    time = make_timeline()
    time.history.add("startup/learning", 4.0)
    for _ in range(3):
        await time.capacity.use("learning", 1)
        await time.pass_time(1)
        await time.capacity.use("learning", 0)
        await time.pass_time(30)
    assert time.history.recent("gap/learning") == [30, 30]
    assert time.counts("learning")[-1] == (63, 0)
    await time.capacity.close()


async def test_what_a_successor_would_do_again_keeps_it_longer(make_timeline: MakeTimeline) -> None:
    time = make_timeline()
    time.history.add("startup/learning", 4.0)
    for _ in range(3):
        await time.capacity.use("learning", 1)
        await time.capacity.use("learning", 0, restart_seconds=100.0)
        await time.pass_time(30)
    assert 0 not in [count for at, count in time.counts("learning")], "30 s are cheaper than 104"
    await time.capacity.close()


async def test_each_instance_without_work_is_released_by_itself(make_timeline: MakeTimeline) -> None:
    time = make_timeline()
    time.history.add("startup/generation", 5.0)
    await time.capacity.use("generation", 3, PRELOAD)
    await time.capacity.use("generation", 2)
    await time.pass_time(2)
    await time.capacity.use("generation", 0)
    await time.pass_time(20)
    assert time.counts("generation") == [(0, 3), (0, 3), (2, 3), (5, 2), (7, 0)]
    assert time.preloads[-1] == PRELOAD
    await time.capacity.close()


async def test_instances_are_ready_when_their_work_is_expected(make_timeline: MakeTimeline) -> None:
    time = make_timeline()
    time.history.add("startup/generation", 2.0)
    await time.capacity.expect("generation", 4, PRELOAD, within=10.0)
    await time.pass_time(10)
    await time.capacity.use("generation", 4, PRELOAD)
    assert time.counts("generation") == [(10 - 2, 4), (10, 4)]
    assert time.preloads == [PRELOAD, PRELOAD]
    await time.capacity.close()


async def test_a_later_forecast_corrects_the_start(make_timeline: MakeTimeline) -> None:
    time = make_timeline()
    time.history.add("startup/learning", 2.0)
    await time.capacity.expect("learning", 1, PRELOAD, within=10.0)
    await time.pass_time(5)
    await time.capacity.expect("learning", 1, PRELOAD, within=40.0)
    await time.pass_time(37)
    assert time.counts("learning") == []
    await time.pass_time(2)
    assert time.counts("learning") == [(5 + 40 - 2, 1)]
    await time.capacity.close()


async def test_what_was_started_too_early_by_more_than_a_switch_is_let_go_again(make_timeline: MakeTimeline) -> None:
    time = make_timeline()
    time.history.add("startup/learning", 2.0)
    time.history.add("draining/learning", 1.0)
    await time.capacity.expect("learning", 1, PRELOAD, within=2.0)
    await time.pass_time(1)
    await time.capacity.expect("learning", 1, PRELOAD, within=4.0)
    await time.pass_time(1)
    assert time.counts("learning") == [(0, 1)], "it would be started again at once"
    await time.capacity.expect("learning", 1, PRELOAD, within=50.0)
    await time.pass_time(60)
    assert time.counts("learning") == [(0, 1), (2, 0), (2 + 50 - 2, 1)]
    await time.capacity.close()


async def test_a_forecast_decides_whether_instances_without_work_stay(make_timeline: MakeTimeline) -> None:
    time = make_timeline()
    time.history.add("startup/generation", 10.0)
    await time.capacity.use("generation", 2, PRELOAD)
    await time.capacity.next_use("generation", 8.0)
    await time.capacity.use("generation", 1)
    await time.pass_time(5)
    assert time.counts("generation")[-1] == (0, 2), "the next work comes before a start would be over"
    await time.capacity.next_use("generation", 11.0)
    assert time.counts("generation")[-1] == (5, 1)
    await time.capacity.use("generation", 0)
    assert time.counts("generation")[-1] == (5, 0)
    await time.capacity.close()


async def test_an_instance_whose_work_is_late_is_kept_for_a_switch_more(make_timeline: MakeTimeline) -> None:
    time = make_timeline()
    time.history.add("startup/generation", 10.0)
    await time.capacity.next_use("generation", 8.0)
    await time.capacity.use("generation", 1, PRELOAD)
    await time.capacity.next_use("generation", 8.0)
    await time.capacity.use("generation", 0)
    await time.pass_time(30)
    assert time.counts("generation")[-1] == (8 + 10, 0)
    await time.capacity.close()


async def test_what_others_decide_on_is_kept_until_they_do(make_timeline: MakeTimeline) -> None:
    time = make_timeline()
    await time.capacity.use("learning", 1, PRELOAD)
    assert not time.capacity.has_idle("learning")
    await time.capacity.use("learning", 0, undecided=True)
    await time.pass_time(1000)
    assert time.counts("learning")[-1] == (0, 1)
    assert time.capacity.has_idle("learning")
    await time.capacity.let_go("learning")
    assert time.counts("learning")[-1] == (1000, 0)
    assert not time.capacity.has_idle("learning")
    await time.capacity.close()


@pytest.mark.parametrize("options", [{"keep_alive": 600.0}, {"shared": SharedGpus(1, {})}])
async def test_what_the_platform_keeps_or_what_sleeps_is_never_idle(
    options: dict[str, Any], make_timeline: MakeTimeline
) -> None:
    time = make_timeline(**options)
    await time.capacity.use("learning", 1, PRELOAD)
    await time.capacity.use("learning", 0)
    assert not time.capacity.has_idle("learning")
    await time.capacity.next_use("learning", 1e6)
    assert time.counts("learning")[-1][1] == (0 if "keep_alive" in options else 1)
    await time.capacity.close()


async def test_expected_instances_that_are_fewer_than_kept_change_nothing(make_timeline: MakeTimeline) -> None:
    time = make_timeline()
    time.history.add("startup/generation", 100.0)
    await time.capacity.use("generation", 3)
    await time.capacity.use("generation", 0)
    await time.capacity.expect("generation", 2, PRELOAD, within=50.0)
    await time.pass_time(1)
    assert {count for _, count in time.counts("generation")} == {3}
    await time.capacity.close()


async def test_what_works_already_is_not_expected(make_timeline: MakeTimeline) -> None:
    time = make_timeline(keep_alive=0.0)
    await time.capacity.use("learning", 1)
    await time.capacity.expect("learning", 1, PRELOAD, within=1.0)
    await time.pass_time(10)
    await time.capacity.use("learning", 0)
    await time.pass_time(10)
    assert time.counts("learning")[-1] == (10, 0)
    await time.capacity.close()


async def test_nothing_is_asked_for_after_the_end(make_timeline: MakeTimeline) -> None:
    time = make_timeline()
    await time.capacity.expect("generation", 2, PRELOAD, within=10.0)
    await time.capacity.close()
    await time.pass_time(100)
    assert time.holds == []


async def test_what_an_instance_costs_until_it_is_gone_is_part_of_the_price_of_letting_it_go(
    make_timeline: MakeTimeline,
) -> None:
    time = make_timeline(draining_seconds=31.0)
    time.history.add("startup/learning", 4.0)
    for _ in range(3):
        await time.capacity.use("learning", 1)
        await time.capacity.use("learning", 0)
        await time.pass_time(30)
    assert 0 not in [count for at, count in time.counts("learning")], "30 s are cheaper than 4 + 31"
    # What was measured counts for more than what the platform expects.
    time.history.add("draining/learning", 1.0)
    await time.pass_time(1)
    await time.capacity.use("learning", 1)
    await time.capacity.use("learning", 0)
    assert time.counts("learning")[-1] == (91, 0), "30 s are dearer than 4 + 1"
    await time.capacity.close()


async def test_a_stage_without_more_work_to_come_lets_its_instances_go_at_once(make_timeline: MakeTimeline) -> None:
    time = make_timeline(draining_seconds=30.0)
    await time.capacity.use("generation", 2, PRELOAD)
    await time.pass_time(10)
    await time.capacity.use("generation", 0)
    assert time.counts("generation")[-1] == (10, 2), "kept for the cost of a switch"
    await time.pass_time(1)
    await time.capacity.finish("generation")
    assert time.counts("generation")[-1] == (11, 0)
    await time.pass_time(100)
    assert {count for at, count in time.counts("generation") if at >= 11} == {0}
    await time.capacity.close()


async def test_instances_that_were_expected_are_not_wanted_once_a_stage_is_finished(
    make_timeline: MakeTimeline,
) -> None:
    time = make_timeline()
    await time.capacity.expect("generation", 2, PRELOAD, within=1.0)
    await time.capacity.finish("generation")
    await time.pass_time(100)
    assert {count for _, count in time.counts("generation")} == {0}
    await time.capacity.close()


@pytest.mark.parametrize("kind", ["shared", "whole"])
async def test_a_learner_has_room_once_the_instances_at_work_leave_it_a_gpu(
    make_timeline: MakeTimeline, kind: str
) -> None:
    time = make_timeline(**{kind: SharedGpus(2, {"generation": 1, "learning": 1})})
    assert time.capacity.sleeps is (kind == "shared")
    await time.capacity.use("generation", 2, PRELOAD)
    assert not time.capacity.has_room("learning")
    await time.capacity.use("generation", 1)
    assert time.capacity.has_room("learning")
    await time.capacity.close()
