"""An async reward is called for all groups at once, and what goes wrong in one is that one's alone."""

from collections.abc import Callable

import pytest

from tests.rewards.files import MISBEHAVIOUR, Reward, fate, make_group
from tests.rewards.files import reward as reward  # A fixture.


def test_an_async_reward_is_awaited_for_all_groups_at_once(reward: Callable[..., Reward]) -> None:
    mine = reward(
        """
import asyncio
arrived = 0
async def reward(prompts, completions):
    global arrived
    arrived += 1
    while arrived < 4:  # none returns before all have been called
        await asyncio.sleep(0.01)
    return [float(prompts[0].split()[1])] * len(completions)
"""
    )
    assert [outcome.scores[0] for outcome in mine.score(*map(make_group, range(4)))] == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "error"),
    [
        ("await asyncio.sleep(1000)", "took longer than 2 s"),
        ("time.sleep(1000)", "took longer than"),
        ("raise TimeoutError('of its own')", "raised TimeoutError: of its own"),
        ("os._exit(4)", "exit code 4"),
        ("sys.exit(4)", "called sys.exit(4)"),
    ],
)
def test_an_async_reward_that_fails_harms_its_own_group_alone(
    reward: Callable[..., Reward], action: str, error: str
) -> None:
    source = MISBEHAVIOUR.replace("def reward", "async def reward").replace("import os", "import asyncio, os")
    before, culprit, after = reward(source.format(action)).score(
        make_group(0), make_group(1), make_group(2), seconds=2.0
    )
    assert error in fate(culprit)
    assert fate(before) == fate(after) == "[1.0, 1.0]"
