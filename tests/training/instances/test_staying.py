"""Instances that a plan keeps for whole steps."""

from tests.training.instances.timeline import PRELOAD, MakeTimeline


async def test_instances_of_a_held_step_stay_whatever_is_forecast(make_timeline: MakeTimeline) -> None:
    time = make_timeline()
    await time.capacity.use("generation", 4, PRELOAD)
    await time.capacity.stay({"generation": 3, "preparation": 1, "learning": 1})
    assert time.capacity.stays and time.capacity.keeps("generation")
    await time.capacity.use("generation", 0)
    await time.capacity.next_use("generation", 1000.0)
    await time.pass_time(1000)
    assert time.capacity.there("generation") == 3, "one more than stay is not kept"
    assert not time.capacity.has_idle("learning")
    await time.capacity.close()


async def test_as_many_stay_where_more_worked_and_they_end_one_by_one(make_timeline: MakeTimeline) -> None:
    time = make_timeline()
    time.history.add("startup/generation", 10.0)
    await time.capacity.stay({"generation": 3})
    await time.capacity.use("generation", 5, PRELOAD)
    for count in (4, 3, 2, 1, 0):
        await time.capacity.use("generation", count)
    await time.pass_time(1000)
    assert time.capacity.there("generation") == 3
    await time.capacity.close()


async def test_nothing_is_started_to_stay(make_timeline: MakeTimeline) -> None:
    time = make_timeline()
    await time.capacity.stay({"generation": 3, "preparation": 1, "learning": 1})
    assert all(count == 0 for _, _, count in time.holds)
    await time.capacity.close()


async def test_a_plan_with_fewer_instances_lets_the_others_go(make_timeline: MakeTimeline) -> None:
    time = make_timeline()
    await time.capacity.stay({"generation": 3})
    await time.capacity.use("generation", 3, PRELOAD)
    await time.capacity.use("generation", 0)
    await time.capacity.stay({"generation": 2})
    assert time.capacity.there("generation") == 2
    await time.capacity.close()


async def test_a_plan_that_holds_nothing_leaves_instances_to_the_forecast_and_the_learner_to_who_saves_it(
    make_timeline: MakeTimeline,
) -> None:
    time = make_timeline()
    await time.capacity.stay({"generation": 1, "learning": 1})
    for stage in ("generation", "learning"):
        await time.capacity.use(stage, 1, PRELOAD)
        await time.capacity.use(stage, 0)
    await time.capacity.stay({})
    assert not time.capacity.stays
    assert (time.capacity.there("generation"), time.capacity.there("learning")) == (0, 1)
    assert time.capacity.has_idle("learning")
    await time.capacity.close()
