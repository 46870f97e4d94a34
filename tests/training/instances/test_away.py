"""Actors are let go while environments work, once these have been seen to take longer than a change of hands."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from rlhfless_operator.errors import UserError
from rlhfless_operator.planner.acting import Acting
from rlhfless_operator.planner.history import History
from rlhfless_operator.training.instances.away import LEAST_PATIENCE, Away, LettingActorsGo, acting_by_token

SWITCH = 4.0


class Host:
    """Remembers what it was asked for; samples come at the third question."""

    token = "t"

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def warm(self) -> None:
        self.asked.append("warm")

    @asynccontextmanager
    async def rollout(self, name: str) -> AsyncIterator[None]:
        yield
        self.asked.append(f"end {name}")

    async def url(self) -> str:
        self.asked.append("url")
        return "http://127.0.0.1:1"

    async def come(self, rollout: str, samples: list[tuple[int, int]]) -> int:
        self.asked.append(f"come {rollout} {len(samples)}")
        return int(len(self.asked) > 2)


def choice(host: Host | None, switch: float = SWITCH) -> tuple[LettingActorsGo, History]:
    capacity: Any = SimpleNamespace(switch_seconds=lambda stage: switch)
    history = History()
    return LettingActorsGo(host, capacity, history), history


def seen(wait: float, turns: int = 5) -> dict[str, float]:
    """The metrics of a rollout whose environments took so long for a turn."""
    return {
        "environment/turns": float(turns),
        "environment/seconds_away": wait * turns,
        "lengths": 20.0,
        "environment/given": 30,
    }


async def test_actors_are_kept_until_a_rollout_has_shown_that_environments_take_longer() -> None:
    host = Host()
    going, _ = choice(host)
    for metrics in ({}, {"reward": 1.0}, seen(0.9 * SWITCH)):
        going.learn(metrics)
        async with going.rollout("training-1", 3) as away:
            assert away is None
    assert host.asked == [], "nothing is started for it"


async def test_the_process_of_the_episodes_is_started_before_the_rollout_that_needs_it_and_told_of_its_end() -> None:
    host = Host()
    going, history = choice(host)
    going.learn(seen(1.5 * SWITCH))
    assert acting_by_token(history) == Acting(1.5 * SWITCH * 5 / 20, 1.5)
    assert going._starting is not None
    await going._starting
    assert host.asked == ["warm"]
    async with going.rollout("training-2", 3) as away:
        assert away is not None
        shelter = await away.shelter()
        assert shelter is not None
        assert (shelter.rollout, shelter.patience_seconds, shelter.token) == ("training-2-1", SWITCH, "t")
        assert shelter.actors == 3
    assert host.asked[-1] == "end training-2-1"


async def test_no_actor_is_let_go_at_once_however_fast_a_change_of_hands_is() -> None:
    going, _ = choice(Host(), switch=0.0)
    going.learn(seen(0.9 * LEAST_PATIENCE))
    async with going.rollout("training-2", 3) as away:
        assert away is None
    going.learn(seen(3 * LEAST_PATIENCE))
    async with going.rollout("training-3", 3) as away:
        assert away is not None and (shelter := await away.shelter()) is not None
        assert shelter.patience_seconds == LEAST_PATIENCE


async def test_actors_are_kept_where_nothing_keeps_their_episodes() -> None:
    going, _ = choice(None)
    going.learn(seen(100.0))
    async with going.rollout("training-2", 3) as away:
        assert away is None


async def test_actors_are_kept_where_the_process_of_the_episodes_does_not_start() -> None:
    class Broken(Host):
        @asynccontextmanager
        async def rollout(self, name: str) -> AsyncIterator[None]:
            raise UserError("it does not start")
            yield

    going, _ = choice(Broken())
    going.learn(seen(100.0))
    async with going.rollout("training-2", 3) as away:
        assert away is None


async def test_an_actor_is_kept_where_the_process_of_the_episodes_has_died_and_does_not_start_again() -> None:
    class Dying(Host):
        async def url(self) -> str:
            raise UserError("it does not start")

    host = Dying()
    going, _ = choice(host)
    going._history.add("environment/wait", 100.0)
    async with going.rollout("training-2", 3) as away:
        assert away is not None
        assert await away.shelter() is None


async def test_no_two_rollouts_have_the_same_name() -> None:
    host = Host()
    going, _ = choice(host)
    going.learn(seen(100.0))
    for _ in range(2):
        async with going.rollout("evaluation-2", 3):
            pass
    assert [each for each in host.asked if each != "warm"] == ["end evaluation-2-1", "end evaluation-2-2"]


async def test_an_actor_waits_until_one_of_its_samples_has_come() -> None:
    host = Host()
    await Away(host, "training-2", 1.0, 1).come([(0, 0), (0, 1)])
    assert host.asked == ["come training-2 2"] * 3
