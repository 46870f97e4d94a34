"""The book of an environment's pods: what the ledger is told, and how many are kept while samples act."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, cast

from rlhfless_operator.knative import ResourceClient, Revision, UnavailableError
from rlhfless_operator.platforms.base import StateChange
from rlhfless_operator.platforms.pods.environment_pods import EnvironmentPods
from rlhfless_operator.platforms.pods.pod_watch import PodView

REVISION = "chat-environment-00002"


class Revisions:
    """Remembers the least numbers that it is given."""

    def __init__(self) -> None:
        self.least: list[str] = []
        self.fails = 0

    async def patch(self, namespace: str, name: str, body: dict[str, Any]) -> None:
        assert (namespace, name) == ("team", REVISION)
        if self.fails:
            self.fails -= 1
            raise UnavailableError(503, "", "the API server is away")
        self.least += body["metadata"]["annotations"].values()


class Book:
    """A book under test, and what it has told."""

    def __init__(self, most: int = 16) -> None:
        self.revisions = Revisions()
        self.changes: list[StateChange] = []
        self.problems: list[str] = []
        revisions = cast(ResourceClient[Revision], self.revisions)
        self.pods = EnvironmentPods(revisions, "team", self.changes.append, self.problems.append, most)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.pods.run(REVISION))
        yield
        task.cancel()

    async def least(self, *wanted: str) -> None:
        """Wait until these least numbers were given, and look whether others follow."""
        async with asyncio.timeout(30):
            while len(self.revisions.least) < len(wanted):
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        assert self.revisions.least == [*wanted]

    @property
    def states(self) -> list[tuple[str, str]]:
        return [(change.instance, change.state) for change in self.changes]


def view(name: str, *, ready: bool = False, **given: Any) -> PodView:
    fields: dict[str, Any] = {"ip": None, "deletion_cost": None, "problem": "", "fatal": False}
    fields |= {"deleting": False, "ended": False, "revision": REVISION, **given}
    return PodView(name, f"uid-{name}", "environment", datetime.now(UTC), ready=ready, **fields)


def test_a_pod_is_charged_from_its_creation_until_it_is_gone() -> None:
    book = Book()
    for each in (view("a"), view("a"), view("a", ready=True), view("a", ready=True, deleting=True)):
        book.pods.changed(each)
    book.pods.gone(view("a", deleting=True))
    book.pods.gone(view("a", deleting=True))
    assert book.states == [("a", "starting"), ("a", "busy"), ("a", "draining"), ("a", "ended")]
    assert {change.stage for change in book.changes} == {"environment"}


def test_an_evicted_pod_and_all_pods_of_a_replaced_driver_have_ended_for_it() -> None:
    book = Book()
    book.pods.changed(view("a"))
    book.pods.changed(view("b", ready=True))
    book.pods.changed(view("a", ended=True))
    book.pods.forget()
    assert book.states[2:] == [("a", "ended"), ("b", "ended")]
    assert book.pods.names == []


def test_a_problem_is_reported_once_and_so_is_its_end() -> None:
    book = Book()
    for _ in range(2):
        book.pods.changed(view("a", problem="ErrImagePull: no such image"))
    book.pods.changed(view("a", ready=True))
    book.pods.changed(view("a", problem="OOMKilled"))
    book.pods.gone(view("a"))
    first, last = "environment: a: ErrImagePull: no such image", "environment: a: OOMKilled"
    assert book.problems == [first, "environment: ", last, "environment: "]


async def test_no_pod_is_removed_while_samples_act() -> None:
    book = Book()
    async with book.running():
        await book.least("0")
        with book.pods.used():
            book.pods.changed(view("a"))
            await book.least("0", "1")
            with book.pods.used():
                book.pods.changed(view("b", ready=True))
                await book.least("0", "1", "2")
            # A pod that dies is replaced.
            book.pods.gone(view("b"))
            await book.least("0", "1", "2")
        await book.least("0", "1", "2", "0")


async def test_only_pods_of_its_revision_are_kept_and_no_more_than_may_be() -> None:
    book = Book(most=2)
    async with book.running():
        await book.least("0")
        with book.pods.used():
            for name in "abcd":
                book.pods.changed(view(name, ready=True, revision="chat-environment-00001"))
            await book.least("0")
            for name in "efg":
                book.pods.changed(view(name, ready=True))
            await book.least("0", "2")


async def test_pods_that_an_earlier_driver_kept_are_let_go() -> None:
    book = Book()
    book.pods.changed(view("a", ready=True))
    async with book.running():
        await book.least("0")


async def test_the_least_number_is_given_again_after_a_failure() -> None:
    book = Book()
    book.revisions.fails = 1
    async with book.running():
        await book.least("0")


async def test_pods_that_are_kept_when_it_ends_are_released() -> None:
    book = Book()
    with book.pods.used():
        book.pods.changed(view("a"))
        async with book.running():
            await book.least("1")
        await book.pods.release()
    assert book.revisions.least == ["1", "0"]


async def test_nothing_is_released_where_there_are_no_servers() -> None:
    book = Book()
    await book.pods.release()
    assert book.revisions.least == []
