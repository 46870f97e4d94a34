"""An async reward is called for all groups at once, and what goes wrong in one is that one's alone."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rewards.files import MISBEHAVIOUR, Reward, fate, make_group
from tests.rewards.files import reward as reward  # A fixture.
from tests.rewards.test_pool import appears


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


KEPT = {
    "a semaphore of the module": """
gate = asyncio.Semaphore(1)
async def reward(completions):
    async with gate:
        await asyncio.sleep(0.01)
    return [1.0] * len(completions)
""",
    "a lock and a condition": """
lock, condition = asyncio.Lock(), asyncio.Condition()
async def reward(completions):
    async with lock, condition:
        await asyncio.sleep(0.01)
    return [1.0] * len(completions)
""",
    "an event": """
event = asyncio.Event()
async def reward(completions):
    asyncio.get_running_loop().call_later(0.01, event.set)
    await event.wait()
    event.clear()
    return [1.0] * len(completions)
""",
    "a queue and its background task": """
queue, worker = asyncio.Queue(), None
async def work():
    while True:
        future = await queue.get()
        future.set_result(1.0)
async def reward(completions):
    global worker
    worker = worker or asyncio.create_task(work())
    future = asyncio.get_running_loop().create_future()
    await queue.put(future)
    return [await future] * len(completions)
""",
    "the loop of the import": """
loop = asyncio.get_event_loop()
future = loop.create_future()
async def reward(completions):
    assert asyncio.get_running_loop() is loop
    if not future.done():
        loop.call_later(0.01, future.set_result, 1.0)
    return [await future] * len(completions)
""",
    "a client that is made once": """
import aiohttp
session = None
async def reward(completions):
    global session
    session = session or aiohttp.ClientSession()
    try:
        await session.get("http://127.0.0.1:9/", timeout=aiohttp.ClientTimeout(5))
    except aiohttp.ClientConnectorError:
        return [1.0] * len(completions)
""",
    "an executor of the loop": """
import time
async def reward(completions):
    await asyncio.to_thread(time.sleep, 0.01)
    return [1.0] * len(completions)
""",
    "a callable object": """
class Judge:
    gate = asyncio.Semaphore(1)
    async def __call__(self, completions):
        async with self.gate:
            await asyncio.sleep(0.01)
        return [1.0] * len(completions)
reward = Judge()
""",
    "an async function behind a decorator": """
import functools
def logged(function):
    @functools.wraps(function)
    def inner(*given, **named):
        return function(*given, **named)
    return inner
gate = asyncio.Semaphore(1)
@logged
async def reward(completions):
    async with gate:
        await asyncio.sleep(0.01)
    return [1.0] * len(completions)
""",
    "a function with a loop of its own": """
async def one():
    await asyncio.sleep(0.01)
    return 1.0
def reward(completions):
    return [asyncio.run(one()) for _ in completions]
""",
}


@pytest.mark.parametrize("kept", KEPT)
def test_what_belongs_to_an_event_loop_is_kept_from_call_to_call(reward: Callable[..., Reward], kept: str) -> None:
    mine = reward(f"import asyncio{KEPT[kept]}")
    for _ in range(3):
        assert [fate(outcome) for outcome in mine.score(make_group(0), make_group(1))] == ["[1.0, 1.0]"] * 2


def test_background_tasks_run_between_calls(reward: Callable[..., Reward], tmp_path: Path) -> None:
    mine = reward(
        f"""
import asyncio, pathlib
ticker = None
async def tick():
    while not pathlib.Path({str(tmp_path / "called")!r}).exists():
        await asyncio.sleep(0.01)
    pathlib.Path({str(tmp_path / "ticked")!r}).write_text("x")
async def reward(completions):
    global ticker
    ticker = ticker or asyncio.create_task(tick())
    return [1.0] * len(completions)
"""
    )
    mine.score(make_group(0))
    (tmp_path / "called").write_text("x")
    assert appears(tmp_path / "ticked") == "x"
