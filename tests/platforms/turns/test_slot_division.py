"""The claims of one pool in several namespaces, against a real API server."""

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rlhfless_operator.knative import KnativeClient
from rlhfless_operator.platforms.cluster_settings import PoolSettings
from rlhfless_operator.platforms.turns import slot_division
from rlhfless_operator.platforms.turns.slot_claims import CLAIMS
from rlhfless_operator.platforms.turns.slot_division import PoolDivision
from tests.clusters.control_plane import ApiServer
from tests.clusters.knative_definitions import NAMESPACES, api_client
from tests.platforms.emulated_cluster import server as server  # The fixture.
from tests.prerequisites import needs_api_server

pytestmark = needs_api_server("no claims are made")


class Teams:
    """Two namespaces that use one pool."""

    def __init__(self, client: KnativeClient, names: tuple[str, str], **pool: Any) -> None:
        self.client = client
        self.one, self.other = names
        self.claims = client.resource(CLAIMS)
        named = {name: pool["namespaces"][place] for place, name in enumerate(names) if "namespaces" in pool}
        self.settings = PoolSettings(**{**pool, "device_class": "gpu.test", "namespaces": named})
        self.division = self.restarted()

    def restarted(self) -> PoolDivision:
        """What another operator begins with."""
        return PoolDivision(self.client, "default", self.settings, (self.one, self.other))

    async def there(self, namespace: str) -> list[str]:
        found = (await self.claims.list(namespace)).items
        return sorted(each.metadata.name.removeprefix("rlhfless-default-") for each in found)

    async def in_use(self, namespace: str, used: bool) -> None:
        """Claims that pods use are still there after they were deleted, until their pods are gone."""
        finalizers = ["rlhfless.test/in-use"] if used else None
        for each in (await self.claims.list(namespace)).items:
            if used or each.metadata.deletion_timestamp is not None:
                await self.claims.patch(namespace, each.metadata.name, {"metadata": {"finalizers": finalizers}})


@asynccontextmanager
async def teams(server: ApiServer, **pool: Any) -> AsyncIterator[Teams]:
    async with api_client(server) as api:
        client = KnativeClient(api, field_manager="tests")
        names = (f"a-{uuid.uuid4().hex[:8]}", f"b-{uuid.uuid4().hex[:8]}")
        for name in names:
            await client.resource(NAMESPACES).create(
                {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
            )
        yield Teams(client, names, **pool)


@pytest.fixture
async def four(server: ApiServer) -> AsyncIterator[Teams]:
    async with teams(server, gpus=4) as made:
        yield made


async def test_namespaces_never_have_more_claims_than_the_pool_has_gpus(four: Teams) -> None:
    four.division.want(four.one, 4)
    await four.division.review(four.one)
    await four.in_use(four.one, True)
    assert await four.there(four.one) == ["0-0", "1-0", "2-0", "3-0"]

    four.division.want(four.other, 4)
    review = await four.division.review(four.other)
    assert await four.there(four.other) == []
    assert f"pool default has 4 GPUs, and other namespaces have them: {four.one} 4" in review.problem

    review = await four.division.review(four.one)
    assert await four.there(four.one) == ["0-0", "1-0", "2-0", "3-0"], "their pods are still there"
    review = await four.division.review(four.one)
    assert review.condemned == {"rlhfless-default-2-0", "rlhfless-default-3-0"}
    await four.division.review(four.other)
    assert await four.there(four.other) == []

    await four.in_use(four.one, False)
    review = await four.division.review(four.other)
    assert await four.there(four.one) == ["0-0", "1-0"]
    assert await four.there(four.other) == ["0-0", "1-0"]
    assert review.problem == ""
    await four.division.review(four.one)
    assert await four.there(four.one) == ["0-0", "1-0"], "it takes nothing back"


async def test_what_one_namespace_does_not_need_the_other_has(four: Teams) -> None:
    four.division.want(four.one, 1)
    four.division.want(four.other, 4)
    await four.division.review(four.other)
    assert await four.there(four.other) == ["0-0", "1-0", "2-0"]
    await four.division.review(four.one)
    assert await four.there(four.one) == ["0-0"]
    four.division.want(four.one, 0)
    await four.division.review(four.other)
    assert await four.there(four.other) == ["0-0", "1-0", "2-0"], "claims stay a while after the last job"
    await four.division.give_back(four.one)
    await four.division.review(four.other)
    assert await four.there(four.other) == ["0-0", "1-0", "2-0", "3-0"]


async def test_claims_that_an_operator_left_behind_are_given_back(four: Teams, monkeypatch: pytest.MonkeyPatch) -> None:
    four.division.want(four.one, 4)
    await four.division.review(four.one)
    fresh = four.division = four.restarted()
    fresh.want(four.other, 4)
    await fresh.review(four.other)
    assert len(await four.there(four.one)) == 4, "its jobs may still be found"
    fresh.want(four.one, 4)
    monkeypatch.setattr(slot_division, "_ABANDONED_SECONDS", 0.0)
    await fresh.review(four.other)
    assert len(await four.there(four.one)) == 4, "it has a job"
    fresh.want(four.one, 0)
    await fresh.review(four.other)
    await fresh.review(four.other)
    assert await four.there(four.one) == []
    assert len(await four.there(four.other)) == 4


async def test_groups_are_given_back_whole(server: ApiServer) -> None:
    async with teams(server, gpus=4, gpus_per_group=2) as made:
        made.division.want(made.one, 2)
        await made.division.review(made.one)
        made.division.want(made.other, 1)
        await made.division.review(made.one)
        assert await made.there(made.one) == ["0-0", "0-1"]
        await made.division.review(made.other)
        assert await made.there(made.other) == ["0-0", "0-1"]


async def test_where_the_pool_is_divided_by_its_settings_nobody_gives_anything_back(server: ApiServer) -> None:
    async with teams(server, gpus=4, namespaces=(3, 1)) as made:
        for name in (made.one, made.other):
            made.division.want(name, 4)
            await made.division.review(name)
            await made.division.review(name)
        assert len(await made.there(made.one)) == 3
        assert len(await made.there(made.other)) == 1


async def test_claims_that_an_earlier_operator_has_left_count(four: Teams) -> None:
    four.division.want(four.one, 3)
    await four.division.review(four.one)
    after = Teams(four.client, (four.one, four.other), gpus=4)
    after.division.want(after.other, 4)
    await after.division.review(after.other)
    assert await after.there(after.other) == ["0-0"]
