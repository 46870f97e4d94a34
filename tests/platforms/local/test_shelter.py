"""The process of a shelter: episodes outlive actors in it, and it starts, ends and refuses strangers."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rlhfless_functions.api import Shelter as Place
from rlhfless_functions.environments.episodes import Observation, Turn
from rlhfless_functions.environments.sheltered import ShelteredEpisodes
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import EnvironmentSettings, ModelSettings, PythonEnvironment
from rlhfless_operator.platforms.local import shelter as local_shelter
from rlhfless_operator.platforms.local.shelter import ShelterMissingError, ShelterProcess
from tests.environments.test_shelter import turn

MODEL = Path(__file__).parents[3] / "examples" / "tools" / "model"
COUNTER = '''
class Env:
    def reset(self, **row):
        self.total = 0
        return "=0"

    def add(self, amount: int) -> str:
        """Add to the counter.

        Args:
            amount: the number to add.
        """
        self.total += amount
        return str(self.total)

    def get_reward(self):
        return float(self.total)
'''


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[ShelterProcess]:
    process = ShelterProcess(tmp_path / "log.jsonl")
    yield process
    await process.close()


def played_by(place: Place, turn: Turn, settings: EnvironmentSettings) -> Observation:
    """The answer to a turn, as an actor of its own gets it."""
    episodes = ShelteredEpisodes(place, settings, ModelSettings(source=str(MODEL)), {})
    try:
        episodes.submit(turn)
        while not (found := episodes.ready(1.0)):
            pass
        return found[0]
    finally:
        episodes.close()


async def test_an_episode_goes_on_with_another_actor_and_ends_with_its_rollout(
    process: ShelterProcess, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    (tmp_path / "env.py").write_text(COUNTER)
    python = PythonEnvironment(file=str(tmp_path / "env.py"), class_name="Env")
    settings = EnvironmentSettings(python=python, replayable=False)
    place = Place(url=await process.url(), token=process.token, rollout="training-1", actors=2, patience_seconds=1)
    row = {"prompt": [{"role": "user", "content": "?"}]}
    said = tokenizer.encode('a<tool_call>{"name": "add", "arguments": {"amount": 4}}</tool_call><|end|>')

    opening = await asyncio.to_thread(played_by, place, turn(row=row), settings)
    first = turn(*opening.tokens, *said, given=[(0, len(opening.tokens))], row=row)
    answer = await asyncio.to_thread(played_by, place, first, settings)
    assert tokenizer.decode(list(answer.tokens)) == "<|tool|>4<|end|><|assistant|>"
    assert await process.come("training-1", [(0, 1)]) == 1
    last = [*first.response, *answer.tokens, *tokenizer.encode("=4<|end|>")]
    spans = [(0, len(opening.tokens)), (len(first.response), len(first.response) + len(answer.tokens))]
    end = await asyncio.to_thread(played_by, place, turn(*last, given=spans, row=row), settings)
    assert end.outcome is not None and (end.outcome.score, end.outcome.restarted) == (4.0, 0)
    async with process.rollout("training-1"):
        pass
    assert await process.come("training-1", [(0, 1)]) == 1, "nobody waits for what is not here"


async def test_a_process_that_does_not_start_is_an_error_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ShelterMissingError, match=r"log\.jsonl, or set environment.letGo to never"):
        await ShelterProcess(tmp_path / "log.jsonl").url()


async def test_a_process_that_can_not_be_made_is_such_an_error_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with pytest.raises(ShelterMissingError, match="No such file"):
        await ShelterProcess(tmp_path / "log.jsonl").url()


@pytest.fixture
def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A shelter that tells its own id to a file, and no port to anybody."""
    program, told = tmp_path / "silent", tmp_path / "pid"
    program.write_text(f"#!/bin/sh\necho $$ > {told}.new\nmv {told}.new {told}\nexec sleep 600\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    return told


async def test_a_process_that_tells_no_port_is_given_up_and_ended(
    silent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_shelter, "_START_SECONDS", 1.0)
    with pytest.raises(ShelterMissingError, match="told no port"):
        await asyncio.wait_for(ShelterProcess(tmp_path / "log.jsonl").url(), 60)
    assert not Path(f"/proc/{silent.read_text().strip()}").exists()


async def test_a_process_whose_start_is_given_up_is_ended(silent: Path, tmp_path: Path) -> None:
    starting = asyncio.create_task(ShelterProcess(tmp_path / "log.jsonl").url())
    while not silent.exists():
        await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not Path(f"/proc/{silent.read_text().strip()}").exists()


async def test_an_episode_that_is_lost_at_its_first_turn_with_the_process_begins_anew_and_goes_on(
    process: ShelterProcess, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    (tmp_path / "env.py").write_text(COUNTER)
    settings = EnvironmentSettings(python=PythonEnvironment(file=str(tmp_path / "env.py"), class_name="Env"))
    row = {"prompt": [{"role": "user", "content": "?"}]}
    said = tokenizer.encode('a<tool_call>{"name": "add", "arguments": {"amount": 4}}</tool_call><|end|>')
    place = Place(url=await process.url(), token=process.token, rollout="training-1", actors=2, patience_seconds=1)
    opening = await asyncio.to_thread(played_by, place, turn(row=row), settings)
    assert process._process is not None
    process._process.kill()
    await process._process.wait()
    place = place.model_copy(update={"url": await process.url()})
    first = turn(*opening.tokens, *said, given=[(0, len(opening.tokens))], row=row)
    anew = await asyncio.to_thread(played_by, place, first, settings)
    assert anew.restarted and list(anew.tokens) == list(opening.tokens)
    # The same random numbers give the same turn.
    answer = await asyncio.to_thread(played_by, place, first, settings)
    assert not answer.restarted and tokenizer.decode(list(answer.tokens)) == "<|tool|>4<|end|><|assistant|>"


async def test_a_stranger_is_refused_and_a_dead_process_is_started_again(
    process: ShelterProcess, tmp_path: Path
) -> None:
    (tmp_path / "env.py").write_text(COUNTER)
    settings = EnvironmentSettings(python=PythonEnvironment(file=str(tmp_path / "env.py"), class_name="Env"))
    place = Place(url=await process.url(), token="guessed", rollout="training-1", actors=2, patience_seconds=1)
    with pytest.raises(TaskError, match=r"refuses a turn: .*token"):
        await asyncio.to_thread(played_by, place, turn(row={"prompt": "?"}), settings)
    assert process._process is not None
    process._process.kill()
    assert await process.come("training-1", [(0, 1)]) == 1
    await process._process.wait()
    with pytest.raises(TaskError, match="does not answer") as raised:
        await asyncio.to_thread(played_by, place, turn(row={"prompt": "?"}), settings)
    assert raised.value.retryable
    assert await process.url() != place.url
