"""A shelter keeps episodes while actors come and go: each turn is played once, and every actor gets its answer."""

import asyncio
import http.server
import json
import queue
import socket
import threading
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from rlhfless_functions.api import Shelter as Place
from rlhfless_functions.environments.episodes import Observation, SampleKey, Turn
from rlhfless_functions.environments.shelter import Shelter, create_app
from rlhfless_functions.environments.sheltered import ShelteredEpisodes
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import EnvironmentSettings, ModelSettings, PythonEnvironment

MODEL = Path(__file__).parents[2] / "examples" / "tools" / "model"
SETTINGS = EnvironmentSettings(python=PythonEnvironment(file="env.py", class_name="Env"))


def turn(*response: int, given: Sequence[tuple[int, int]] = (), row: dict[str, Any] | None = None) -> Turn:
    return Turn((0, 1), row or {}, list(response), given, seed=3, truncated=False, room=200)


class Played:
    """Episodes that a test answers."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.forgotten: list[SampleKey] = []
        self.answers: queue.SimpleQueue[Observation | Exception] = queue.SimpleQueue()
        self.closed = False

    def submit(self, turn: Turn) -> None:
        self.turns.append(turn)

    def ready(self, wait_seconds: float) -> list[Observation]:
        try:
            answer = self.answers.get(timeout=wait_seconds)
        except queue.Empty:
            return []
        if isinstance(answer, Exception):
            raise answer
        return [answer]

    def forget(self, sample: SampleKey) -> None:
        self.forgotten.append(sample)

    def close(self) -> None:
        self.closed = True


async def told(shelter: Shelter, *turns: Turn, awaited: Sequence[SampleKey] = ()) -> dict[str, Any]:
    body = {
        "rollout": "training-1",
        "actors": 2,
        "environment": json.loads(SETTINGS.model_dump_json()),
        "model": json.loads(ModelSettings(source="m").model_dump_json()),
        "chat_template_kwargs": {},
        "turns": [asdict(each) for each in turns],
        "awaited": list(awaited),
    }
    return await shelter.exchange(json.dumps(body).encode())


async def exchange(shelter: Shelter, *turns: Turn, awaited: Sequence[SampleKey] = ()) -> list[dict[str, Any]]:
    answer = await told(shelter, *turns, awaited=awaited)
    assert answer["lost"] == []
    return list(answer["observations"])


async def answered(shelter: Shelter, sample: SampleKey) -> list[int]:
    """The tokens of a sample's answer, once it has come."""
    while not (found := await exchange(shelter, awaited=[sample])):
        pass
    return list(found[0]["tokens"])


async def test_a_turn_that_two_actors_hand_over_is_played_once_and_both_get_its_answer() -> None:
    played = Played()
    shelter = Shelter(lambda *_: played)
    assert await exchange(shelter, turn(5, 6), awaited=[(0, 1)]) == []
    assert await exchange(shelter, turn(5, 6)) == []
    played.answers.put(Observation((0, 1), [7]))
    assert await answered(shelter, (0, 1)) == [7]
    [again] = await exchange(shelter, turn(5, 6), awaited=[(0, 1)])
    assert again["tokens"] == [7]
    assert [list(each.response) for each in played.turns] == [[5, 6]] and not played.forgotten


async def test_the_next_turn_goes_on_in_the_same_session_and_an_earlier_one_in_another() -> None:
    played = Played()
    shelter = Shelter(lambda *_: played)
    await exchange(shelter, turn(5, 6))
    played.answers.put(Observation((0, 1), [7]))
    assert await answered(shelter, (0, 1)) == [7]
    await exchange(shelter, turn(5, 6, 7, 8, given=[(2, 3)]))
    assert not played.forgotten
    played.answers.put(Observation((0, 1), [9]))
    assert await answered(shelter, (0, 1)) == [9]
    # Its actor was killed, and what it had stored last is the first turn.
    await exchange(shelter, turn(5, 6))
    assert played.forgotten == [(0, 1)]
    assert [list(each.response) for each in played.turns] == [[5, 6], [5, 6, 7, 8], [5, 6]]


async def test_a_turn_that_replaces_one_under_way_waits_for_its_end_and_gets_no_answer_of_it() -> None:
    played = Played()
    shelter = Shelter(lambda *_: played)
    await exchange(shelter, turn(5, 6))
    await exchange(shelter, turn(5, 4))
    assert len(played.turns) == 1
    played.answers.put(Observation((0, 1), [7]))
    while len(played.turns) < 2:
        assert await exchange(shelter, awaited=[(0, 1)]) == []
    assert played.forgotten == [(0, 1)] and list(played.turns[1].response) == [5, 4]
    played.answers.put(Observation((0, 1), [8]))
    assert await answered(shelter, (0, 1)) == [8]


async def test_the_episodes_of_a_rollout_are_those_of_all_its_actors() -> None:
    made: list[tuple[Any, ...]] = []
    shelter = Shelter(lambda *arguments: made.append(arguments) or Played())  # type: ignore[func-returns-value]
    await exchange(shelter, turn())
    assert [arguments[-1] for arguments in made] == [2]


@pytest.mark.parametrize("opening", [[7], []])
async def test_an_episode_that_began_anew_goes_on_though_its_first_turn_is_sampled_alike_again(
    opening: list[int],
) -> None:
    played = Played()
    shelter = Shelter(lambda *_: played)
    given = [(0, len(opening))] if opening else []
    first = turn(*opening, 5, 6, given=given)
    await exchange(shelter, first)
    played.answers.put(Observation((0, 1), opening, restarted=True))
    assert await answered(shelter, (0, 1)) == opening
    await exchange(shelter, first)
    played.answers.put(Observation((0, 1), [8]))
    while (again := await exchange(shelter, awaited=[(0, 1)])) == []:
        pass
    assert (again[0]["tokens"], again[0]["restarted"]) == ([8], False)
    assert played.turns == [first, first] and not played.forgotten


async def test_a_later_turn_whose_episode_began_anew_is_told_so_again() -> None:
    played = Played()
    shelter = Shelter(lambda *_: played)
    later = turn(7, 5, 8, 6, given=[(0, 1), (2, 3)])
    await exchange(shelter, later)
    played.answers.put(Observation((0, 1), [7], restarted=True))
    assert await answered(shelter, (0, 1)) == [7]
    # The actor was killed before it had stored that.
    [again] = await exchange(shelter, later, awaited=[(0, 1)])
    assert again["restarted"] and played.turns == [later]


async def test_an_environment_that_ends_the_job_does_so_for_the_actor_and_the_next_one_begins_afresh() -> None:
    made = [Played(), Played()]
    shelter = Shelter(lambda *_: made[0] if not made[0].closed else made[1])
    await exchange(shelter, turn())
    made[0].answers.put(TaskError("environment_failed", "it raised in reset", retryable=True))
    with pytest.raises(TaskError, match="raised in reset") as raised:
        await answered(shelter, (0, 1))
    assert raised.value.retryable and made[0].closed
    await exchange(shelter, turn())
    assert len(made[1].turns) == 1


async def test_after_any_error_of_the_episodes_the_next_attempt_begins_afresh() -> None:
    made = [Played(), Played()]
    shelter = Shelter(lambda *_: made[0] if not made[0].closed else made[1])
    await exchange(shelter, turn())
    made[0].answers.put(RuntimeError("can't start new thread"))
    with pytest.raises(TaskError, match="can't start new thread") as raised:
        await answered(shelter, (0, 1))
    assert raised.value.retryable and made[0].closed
    await exchange(shelter, turn())
    assert len(made[1].turns) == 1


async def test_a_turn_that_could_not_be_handed_over_is_not_waited_for() -> None:
    class Full(Played):
        def submit(self, turn: Turn) -> None:
            raise RuntimeError("can't start new thread")

    made = [Full(), Played()]
    shelter = Shelter(lambda *_: made[0] if not made[0].closed else made[1])
    with pytest.raises(TaskError, match="can't start new thread"):
        await exchange(shelter, turn())
    await exchange(shelter, turn())
    assert len(made[1].turns) == 1


async def test_an_actor_whose_turns_ended_with_another_ones_failure_hands_them_over_again() -> None:
    made = [Played(), Played()]
    shelter = Shelter(lambda *_: made[0] if not made[0].closed else made[1])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(create_app(shelter, "t"), log_config=None, lifespan="off"))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        place = Place(
            url=f"http://127.0.0.1:{listener.getsockname()[1]}",
            token="t",
            rollout="training-1",
            actors=2,
            patience_seconds=1,
        )
        episodes = ShelteredEpisodes(place, SETTINGS, ModelSettings(source="m"), {})
        try:
            episodes.submit(turn(5, 6))
            while not made[0].turns:
                await asyncio.sleep(0.01)
            # As after a failure that another actor was told of, whose next attempt has not begun.
            shelter._rollouts.pop("training-1").close()
            while not made[1].turns:
                await asyncio.sleep(0.01)
            made[1].answers.put(Observation((0, 1), [7]))
            while not (found := episodes.ready(0)):
                await asyncio.sleep(0.01)
            assert list(found[0].tokens) == [7]
        finally:
            await asyncio.to_thread(episodes.close)
            server.should_exit = True
            await serving


async def test_samples_of_which_there_is_no_turn_are_lost_and_nothing_begins_for_them() -> None:
    made = [Played(), Played()]
    shelter = Shelter(lambda *_: made[0] if not made[0].closed else made[1])
    other = replace(turn(5), sample=(3, 2))
    assert await exchange(shelter, other) == []
    await exchange(shelter, turn(5))
    made[0].answers.put(TaskError("environment_failed", "it raised in reset", retryable=True))
    with pytest.raises(TaskError, match="raised in reset"):
        await answered(shelter, (0, 1))
    assert await told(shelter, awaited=[(3, 2)]) == {"observations": [], "lost": [(3, 2)]}
    assert not shelter._rollouts
    assert await told(shelter, turn(5), awaited=[(0, 1), (3, 2)]) == {"observations": [], "lost": [(3, 2)]}
    await exchange(shelter, other)
    assert [each.sample for each in made[1].turns] == [(0, 1), (3, 2)]


async def test_a_failure_that_is_told_late_does_not_end_the_next_attempt() -> None:
    made = [Played(), Played()]
    shelter = Shelter(lambda *_: made[0] if not made[0].closed else made[1])
    await exchange(shelter, turn())
    failed = shelter._rollouts["training-1"]
    await shelter._drop("training-1", failed)
    await exchange(shelter, turn())
    await shelter._drop("training-1", failed)
    assert not made[1].closed
    assert await exchange(shelter, awaited=[(0, 1)]) == []


async def test_no_episode_begins_in_a_rollout_that_has_ended() -> None:
    played = Played()
    shelter = Shelter(lambda *_: played)
    await exchange(shelter, turn(5))
    await shelter.end("training-1")
    assert played.closed
    with pytest.raises(TaskError, match="rollout training-1 has ended"):
        await exchange(shelter, turn(5))
    assert not shelter._rollouts


async def test_nan_and_half_a_pair_of_surrogates_in_a_row_reach_the_environment() -> None:
    played = Played()
    row = {"x": float("nan"), "y": None, "z": "\ud83d"}
    await exchange(Shelter(lambda *_: played), turn(row=row))
    assert ascii(played.turns[0].row) == "{'x': nan, 'y': None, 'z': '\\ud83d'}"
    assert played.turns[0].sample == (0, 1)


class Gateway(http.server.BaseHTTPRequestHandler):
    """Stands before a shelter whose pod comes at the third question: it hangs up, says 503, and then answers."""

    asked = 0

    def do_POST(self) -> None:
        type(self).asked += 1
        self.rfile.read(int(self.headers["Content-Length"]))
        if type(self).asked == 1:
            self.close_connection = True
            return
        lost = b'{"observations": [{"sample": [0, 1], "tokens": [7]}], "lost": []}'
        status, body = (503, b"no pod") if type(self).asked == 2 else (200, lost)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_an_exchange_that_finds_no_pod_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhfless_functions.environments.sheltered._PAUSE_SECONDS", 0.01)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as gateway:
        threading.Thread(target=gateway.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{gateway.server_address[1]}"
        place = Place(url=url, token="t", rollout="training-1", actors=1, patience_seconds=1)
        episodes = ShelteredEpisodes(place, SETTINGS, ModelSettings(source="m"), {})
        episodes.submit(turn(5, 6))
        while not (found := episodes.ready(1.0)):
            pass
        episodes.close()
        gateway.shutdown()
    assert (found[0].tokens, Gateway.asked) == ([7], 3)
