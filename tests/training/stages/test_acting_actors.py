"""Live actors whose samples act: others take the places of those that are away, and no actor is cut."""

import asyncio
import random

import pytest

from rlhfless_functions.api import Join
from rlhfless_operator.training.stages import live_actors
from tests.training.stages.test_live_actors import LivePlatform, actors_on, generate, rollout_of


async def test_others_take_the_places_of_samples_that_are_with_their_environments() -> None:
    back = asyncio.Event()
    platform = LivePlatform(
        random.Random(0), away=lambda batch: set() if back.is_set() else {key for key in batch if key[1] < 4}
    )
    live = actors_on(platform)
    rollout = rollout_of(1, groups=12)
    generating = asyncio.create_task(generate(live, rollout, actors=1, places=8))
    async with asyncio.timeout(30):
        while len(platform.generated) < 32:
            await asyncio.sleep(0)
    assert {key[1] for key in platform.generated} == set(range(4, 12)), "all others are done meanwhile"
    assert platform.most_running == 1, "samples that are away open no actor"
    back.set()
    assert len(await generating) == 12
    await live.close()


async def test_an_actor_whose_samples_act_is_not_cut_and_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_actors, "LONGEST_SECONDS", 0.02)
    back = asyncio.Event()
    platform = LivePlatform(random.Random(0), away=lambda batch: set() if back.is_set() else {*batch})
    live = actors_on(platform, act=True)
    generating = asyncio.create_task(generate(live, rollout_of(1, groups=2), actors=1))
    await asyncio.sleep(0.1)
    second = asyncio.create_task(generate(live, rollout_of(2, groups=2), actors=1))
    await asyncio.sleep(0.05)
    assert len(platform.requests) == 1
    assert not [line for line in platform.lines if isinstance(line, Join)], "nothing joins an old actor"
    back.set()
    assert len(await generating) == len(await second) == 2
    assert len(platform.requests) == 2 and len(platform.generated) == 16, "nothing was generated twice"
    await live.close()
