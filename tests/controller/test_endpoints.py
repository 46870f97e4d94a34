"""The webhooks' limits: how many questions of a peer they answer at a time, and how soon."""

import asyncio
import re
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rlhfless_operator.controller.endpoints import (
    ADMISSION_PATH,
    ANSWER_SECONDS,
    SLOTS_PATH,
    PeerTurns,
    TooManyQuestionsError,
    serve_admission,
)
from rlhfless_operator.controller.slot_admission import SlotAdmission
from tests.controller.certificates import write_certificate


async def test_the_api_server_waits_for_few_questions_of_another_peer() -> None:
    turns, released, order = PeerTurns(), asyncio.Event(), []

    async def ask(peer: str, *, large: bool = False) -> None:
        async with turns.of(peer, large=large):
            order.append(peer)
            await released.wait()

    flood = [asyncio.create_task(ask("10.0.0.66", large=number % 2 == 0)) for number in range(1024)]
    await asyncio.sleep(0)
    server = asyncio.create_task(ask("10.0.0.1"))
    await asyncio.sleep(0)
    assert order == ["10.0.0.66"] * (32 + 4) + ["10.0.0.1"]
    with pytest.raises(TooManyQuestionsError, match=r"1024 questions of 10\.0\.0\.66 wait already"):
        await ask("10.0.0.66")
    released.set()
    await asyncio.gather(server, *flood)
    assert not turns._peers, "nothing is kept of peers that have gone"


def test_the_webhooks_answer_before_the_api_server_gives_up() -> None:
    chart = (Path(__file__).parents[2] / "charts/rlhfless/templates/webhooks.yaml").read_text()
    waits = [float(seconds) for seconds in re.findall(r"timeoutSeconds: (\d+)", chart)]
    for path, wait in zip((ADMISSION_PATH, SLOTS_PATH), waits, strict=True):
        assert wait / 2 < ANSWER_SECONDS[path] < wait


async def test_a_review_that_takes_too_long_is_refused_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = write_certificate(tmp_path)
    monkeypatch.setitem(ANSWER_SECONDS, SLOTS_PATH, 0.1)

    class Slow(SlotAdmission):
        def __init__(self) -> None:
            pass

        async def review(self, body: Any) -> dict[str, Any]:
            await asyncio.Event().wait()
            return {}

    async with serve_admission(0, tmp_path, None, Slow()) as port, aiohttp.ClientSession() as session:
        context = ssl.create_default_context(cadata=certificate.decode())
        async with session.post(f"https://localhost:{port}{SLOTS_PATH}", json={}, ssl=context) as response:
            assert (response.status, await response.json()) == (503, {"error": "no answer within 0.1 s"})
