"""The driver asks the process that keeps episodes. No actor waits for an episode that is lost."""

from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from rlhfless_operator.platforms.shelters import ShelterClient


class Server:
    """Answers with a status, and notes what it is asked."""

    def __init__(self) -> None:
        self.status = 200
        self.asked: list[tuple[str, str, str | None]] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append((request.path, request.headers["Host"], request.headers.get("Authorization")))
        return web.json_response({"samples": [[0, 1]]}, status=self.status)


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, str]]:
    answering = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answering.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield answering, f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_questions_carry_the_token_and_the_services_name(server: tuple[Server, str]) -> None:
    answering, url = server
    async with aiohttp.ClientSession() as session:
        client = ShelterClient(session, "t", "job-shelter.team")
        assert await client.answers(url)
        assert await client.come(url, "training-1", [(0, 1), (0, 2)]) == 1
        await client.end(url, "training-1")
    expected = ("job-shelter.team", "Bearer t")
    assert answering.asked == [(path, *expected) for path in ("/healthz", "/v1/come", "/v1/end")]


@pytest.mark.parametrize("status", [401, 503])
async def test_what_does_not_answer_has_nothing_to_wait_for(server: tuple[Server, str], status: int) -> None:
    answering, url = server
    answering.status = status
    async with aiohttp.ClientSession() as session:
        for place in (url, "http://127.0.0.1:9"):
            client = ShelterClient(session, "t")
            assert not await client.answers(place)
            assert await client.come(place, "training-1", [(0, 1), (0, 2)]) == 2
            await client.end(place, "training-1")
