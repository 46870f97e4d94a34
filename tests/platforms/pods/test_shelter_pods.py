"""The pod that keeps a job's episodes: there while a rollout needs it, and waited for no longer than that helps."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rlhfless_operator.platforms.pods.job_objects import Endpoint
from rlhfless_operator.platforms.pods.shelter_pods import ShelterPods
from rlhfless_operator.platforms.shelters import ShelterMissingError

PLACE = Endpoint("http://gateway", "job-shelter.team", "job-shelter-00001", "http://job-shelter.team.svc")


class Book:
    """Counts who uses some pods."""

    problem = ""

    def __init__(self) -> None:
        self.users = 0

    @contextmanager
    def used(self) -> Iterator[None]:
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1


class Client:
    """A shelter that answers after so many questions; None for never."""

    def __init__(self, after: int | None = 0) -> None:
        self.after = after
        self.ended: list[str] = []

    async def answers(self, url: str) -> bool:
        assert url == "http://gateway"
        if self.after is None:
            return False
        self.after -= 1
        return self.after < 0

    async def come(self, url: str, rollout: str, samples: list[tuple[int, int]]) -> int:
        return len(samples)

    async def end(self, url: str, rollout: str) -> None:
        self.ended.append(rollout)


def shelter(client: Client, seconds: float = 60.0) -> tuple[ShelterPods, Book, Book]:
    pods, servers = Book(), Book()
    made: Any = ShelterPods
    return made(PLACE, client, "t", pods, servers, start_seconds=seconds), pods, servers


async def test_a_rollout_has_the_pod_and_keeps_those_in_which_its_episodes_have_sessions() -> None:
    client = Client()
    kept, pods, servers = shelter(client)
    async with kept.rollout("training-1"):
        assert (pods.users, servers.users) == (1, 1)
        assert await kept.url() == "http://job-shelter.team.svc", "actors reach the Service by its own name"
        assert await kept.come("training-1", [(0, 0)]) == 1
    assert (pods.users, servers.users, client.ended) == (0, 0, ["training-1"])


async def test_actors_wait_for_the_pod_and_the_rollout_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhfless_operator.platforms.pods.shelter_pods._POLL_SECONDS", 0.01)
    kept, _, _ = shelter(Client(after=3))
    async with kept.rollout("training-1"):
        asked = [asyncio.create_task(kept.url()) for _ in range(2)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in asked)
        assert await asyncio.gather(*asked) == [PLACE.address] * 2


async def test_a_rollout_that_ends_before_the_pod_is_there_tells_nobody() -> None:
    client = Client(after=None)
    kept, pods, _ = shelter(client)
    async with kept.rollout("training-1"):
        pass
    assert (client.ended, pods.users) == ([], 0)


async def test_two_rollouts_wait_for_a_pod_that_does_not_come_and_no_other_does() -> None:
    kept, pods, _ = shelter(Client(after=None), seconds=0.0)
    pods.problem = "job-shelter-x: Unschedulable: no CPU"
    for _ in range(2):
        async with kept.rollout("training-1"):
            with pytest.raises(ShelterMissingError, match=r"Unschedulable: no CPU.*environment.pods, or set .*never"):
                await kept.url()
    with pytest.raises(ShelterMissingError):
        async with kept.rollout("training-2"):
            pytest.fail("nothing keeps its episodes")
