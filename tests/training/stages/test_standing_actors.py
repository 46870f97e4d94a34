"""Live actors of which one stands still."""

import asyncio
import random

from tests.training.stages.test_live_actors import LivePlatform, actors_on, generate, rollout_of


async def test_no_group_waits_in_an_instance_that_stands_still() -> None:
    """Whether it still lives is known only minutes later. What it has place for is with it until then, and no more."""
    platform = LivePlatform(random.Random(11), goes_on=asyncio.Event())
    live = actors_on(platform)
    first = asyncio.create_task(generate(live, rollout_of(1, 4), actors=2, places=8))
    await asyncio.wait_for(generate(live, rollout_of(2, 4), actors=2, places=8), 30)
    assert platform.goes_on is not None
    assert not first.done()
    platform.goes_on.set()
    assert len(await asyncio.wait_for(first, 30)) == 4
