"""Environments on servers of OpenEnv: what episodes see and score, and what each fault of a server does."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlhfless_functions.environments.connections import Server as ConnectedServer
from rlhfless_functions.environments.episodes import Turn
from rlhfless_functions.environments.making import _started
from rlhfless_functions.environments.openenv import OpenEnvHost
from rlhfless_functions.environments.sessions import EnvironmentUnusableError, EpisodeKilledError
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import EnvironmentSettings
from tests.environments.chat import Play
from tests.environments.openenv_server import Server

Playing = Callable[..., tuple[Play, Server]]
ADD = '{{"amount": {}}}'


def settings_of(url: str, **given: Any) -> EnvironmentSettings:
    return EnvironmentSettings.model_validate({"openenv": {"url": url}, **given})


@pytest.fixture
def playing() -> Iterator[Playing]:
    """Makes a server and a player of its environment, and ends them."""
    ends: list[Callable[[], None]] = []

    def make(
        *, tools: bool = True, capacity: int = 64, drops: int = 0, room: int = 4000, **given: Any
    ) -> tuple[Play, Server]:
        server = Server(tools=tools, capacity=capacity)
        server.__enter__()
        ends.append(lambda: server.__exit__(None, None, None))
        server.drops = drops
        settings = settings_of(server.url, **given)
        play = Play(settings, room, OpenEnvHost(settings))
        ends.append(play.close)
        return play, server

    yield make
    for end in reversed(ends):
        end()


def add(play: Play, amount: int) -> Any:
    return play.call("add", ADD.format(amount))


def test_tools_of_a_server_are_called_and_its_rewards_are_added_up(playing: Playing) -> None:
    play, server = playing()
    assert [schema["function"]["name"] for schema in play.host.schemas] == ["add"]
    play.row["goal"] = 3
    assert play.text(play.submit()) == " Reach 3.<|im_end|>\n<|im_start|>assistant\n"
    assert server.begun == [{"seed": 3, **play.row}]
    assert play.text(add(play, 2)) == "\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n"
    last = add(play, 1)
    assert last.done and last.outcome is not None
    assert (last.outcome.score, last.outcome.turns, last.outcome.ended) == (0.5, 2, "finished")


def test_an_environment_without_tools_takes_its_only_field_or_json(playing: Playing) -> None:
    play, _ = playing(tools=False)
    assert play.host.is_game
    play.submit()
    assert 'user\n{"total": 1}<|im_end|>' in play.text(play.say("<think>one?</think> 1"))
    assert "Error: the action 'north' is not of type integer" in play.text(play.say("north"))
    assert "Error: the action is not valid (amount: Input should" in play.text(play.say('{"far": 1}'))
    # The action's type allows it, and the environment raises.
    assert "Error: division by zero" in play.text(play.say("16"))
    outcome = play.say('{"amount": 2}').outcome
    assert outcome is not None
    assert (outcome.score, outcome.ended, outcome.tool_errors) == (
        0.5,
        "finished",
        {"unparsed": 1, "wrong_arguments": 1, "raised": 1},
    )


@pytest.mark.parametrize(
    ("name", "arguments", "kind", "told"),
    [
        ("fly", "{}", "unknown_tool", "Error: no"),
        ("add", '{"far": 1}', "wrong_arguments", "Error: no"),
        ("add", '{"amount": 16}', "raised", "Error: division by zero"),
    ],
)
def test_a_call_that_goes_wrong_is_an_observation(
    playing: Playing, name: str, arguments: str, kind: str, told: str
) -> None:
    play, _ = playing()
    play.submit()
    assert told in play.text(play.call(name, arguments))
    outcome = play.say("enough").outcome
    assert outcome is not None and (outcome.tool_errors, outcome.score, outcome.ended) == ({kind: 1}, 0.0, "answered")


@pytest.mark.parametrize(
    ("tools", "amount", "given", "ended"),
    [
        (True, 14, {"tool_seconds": 0.3}, "toolSeconds"),
        (False, 14, {"episode_seconds": 0.3}, "episodeSeconds"),
        (True, 13, {}, "failed"),
        (True, 15, {}, "failed"),
    ],
)
def test_a_server_that_is_slow_drops_the_socket_or_answers_nonsense_fails_the_episode_and_no_other(
    playing: Playing, tools: bool, amount: int, given: dict[str, Any], ended: str
) -> None:
    play, _ = playing(tools=tools, drops=-1, **given)
    play.submit()
    outcome = (add(play, amount) if tools else play.say(str(amount))).outcome
    assert outcome is not None and (outcome.score, outcome.ended, outcome.restarted) == (0.0, ended, 0)
    play.response, play.given = [], []
    assert "Reach 3" in play.text(play.submit())


@pytest.mark.parametrize("tools", [True, False])
def test_a_server_that_answers_twice_fails_the_episode_and_shifts_no_answers(playing: Playing, tools: bool) -> None:
    play, _ = playing(tools=tools)
    play.submit()
    first = add(play, 18) if tools else play.say("18")
    # The second answer may come once the next request is on its way, and is then taken for its answer. The true one
    # is then one too many.
    for _ in range(2):
        if first.outcome is None:
            first = add(play, 1) if tools else play.say("1")
    assert first.outcome is not None and (first.outcome.score, first.outcome.ended) == (0.0, "failed")
    play.response, play.given = [], []
    assert "Reach 3" in play.text(play.submit()), "another episode goes on"


def test_a_megabyte_is_cut(playing: Playing) -> None:
    play, _ = playing(tools=False, result_bytes=50)
    play.submit()
    assert "(cut off: 1048576 bytes, at most 50 are shown)" in play.text(play.say("17"))


def test_a_lost_session_is_played_again_where_that_gives_the_same(playing: Playing) -> None:
    play, server = playing(replayable=True, drops=1)
    play.submit()
    add(play, 1)
    seen = add(play, 13)
    assert not seen.restarted and "tool\n14<|im_end|>" in play.text(seen)
    assert len(server.begun) == 2


def test_a_turn_at_which_the_server_always_drops_the_socket_fails_the_episode(playing: Playing) -> None:
    play, server = playing(replayable=True, drops=-1)
    play.submit()
    add(play, 1)
    outcome = add(play, 13).outcome
    assert outcome is not None and (outcome.score, outcome.ended, outcome.turns) == (0.0, "failed", 2)
    assert len(server.begun) == 3, "it was played again as often as after other kills"


def test_an_actor_that_takes_over_begins_anew_and_never_goes_on_under_an_old_history(playing: Playing) -> None:
    play, _ = playing()
    play.submit()
    add(play, 1)
    play.episodes.close()
    play.episodes = play.make()
    seen = add(play, 1)
    assert seen.restarted
    assert play.text(seen) == " Reach 3.<|im_end|>\n<|im_start|>assistant\n"


def test_a_failed_episode_can_end_the_job(playing: Playing) -> None:
    play, _ = playing(on_failure="fail", drops=-1)
    play.submit()
    with pytest.raises(TaskError, match=r"lost its connection to the server .row 7 of the prompts.; .*onFailure"):
        add(play, 13)


def test_samples_wait_while_the_server_is_full(playing: Playing) -> None:
    play, server = playing(capacity=2, tool_seconds=5.0)
    host = play.host
    totals = []

    def episode() -> None:
        session = host.begin()
        session.ask({"do": "begin", "seed": 1, "row": {}}, 60.0, 0)
        time.sleep(0.05)
        totals.append(session.ask({"do": "call", "name": "add", "arguments": {"amount": 2}}, 60.0, 0)["result"])
        session.close()

    threads = [threading.Thread(target=episode) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert totals == ["2"] * 8 and server.most_open == 2


def test_samples_wait_while_a_gateway_holds_them_as_its_servers_are_full() -> None:
    with Server(capacity=1, held=True) as server:
        host = OpenEnvHost(settings_of(server.url))
        host.server.start_limit = 0.1
        host.server.settings = host.server.settings.model_copy(update={"tool_seconds": 0.1})
        first, second = host.begin(), host.begin()
        first.ask({"do": "begin", "seed": 1, "row": {}}, 60.0, 0)
        before, answers = server.handshakes, []

        def episode() -> None:
            answers.append(second.ask({"do": "begin", "seed": 1, "row": {}}, 60.0, 0))

        waiting = threading.Thread(target=episode)
        waiting.start()
        while server.handshakes < before + 5 and waiting.is_alive():
            time.sleep(0.01)
        first.close()
        waiting.join()
        second.close()
        host.close()
    assert len(answers) == 1


def test_a_server_that_others_have_filled_is_asked_again_by_another_task() -> None:
    with Server(capacity=0, held=True) as server:
        settings = settings_of(server.url, openenv={"url": server.url, "start_seconds": 0.2})
        with pytest.raises(TaskError, match=r"no server that answers at .* within 0\.2 s") as caught:
            _started(settings)
        assert caught.value.retryable
        assert server.handshakes <= 1, "startSeconds limits all attempts together"


@pytest.mark.parametrize("status", [404, 429, 503])
def test_a_gateway_that_does_not_know_the_server_yet_is_asked_again(status: int) -> None:
    with Server() as server:
        server.refusals = [status, status]
        OpenEnvHost(settings_of(server.url)).close()
        assert server.handshakes == 3


def test_the_end_of_a_share_does_not_wait_for_a_full_server(playing: Playing) -> None:
    play, _ = playing(capacity=1)
    play.host.begin().ask({"do": "begin", "seed": 1, "row": {}}, 60.0, 0)
    play.episodes.submit(Turn((7, 1), play.row, [], [], seed=3, truncated=False, room=4000))
    while not play.episodes._live:
        time.sleep(0.01)
    play.episodes.close()
    assert not any(each.is_alive() for each in play.episodes._threads._threads)


def test_a_session_that_is_closed_before_it_asks_waits_for_nothing(
    playing: Playing, monkeypatch: pytest.MonkeyPatch
) -> None:
    play, _ = playing(capacity=1)
    play.host.begin().ask({"do": "begin", "seed": 1, "row": {}}, 60.0, 0)
    session = play.host.begin()
    do = ConnectedServer.do

    def closed_first(server: ConnectedServer, what: Any) -> Any:
        monkeypatch.setattr(ConnectedServer, "do", do)
        session.close()
        return do(server, what)

    monkeypatch.setattr(ConnectedServer, "do", closed_first)
    with pytest.raises(EpisodeKilledError, match="was ended"):
        session.ask({"do": "begin", "seed": 1, "row": {}}, 60.0, 0)


def test_a_server_that_comes_back_within_the_time_of_a_call_ends_nothing(playing: Playing) -> None:
    play, server = playing(tool_seconds=20.0)
    server.stop()
    threading.Timer(0.5, server.start).start()
    assert "Reach 3" in play.text(play.submit())


def test_a_server_that_does_not_come_back_ends_the_job_with_its_address(playing: Playing) -> None:
    play, server = playing(tool_seconds=0.3)
    server.stop()
    with pytest.raises(TaskError, match=rf"row 7 .*no server at ws://127.0.0.1:{server.port}/ws") as caught:
        play.submit()
    assert caught.value.retryable


@pytest.mark.parametrize(
    ("speaks", "message"),
    [
        ("http", r"opens no WebSocket .it answers 404.; environment.openenv.url is the address of a server of OpenEnv"),
        ("other", r"answered what OpenEnv's protocol does not have .*jsonrpc.*speaks that of openenv 0.2 to"),
        ("greets", r"answered what OpenEnv's protocol does not have .*welcome"),
    ],
)
def test_a_server_of_another_protocol_is_refused_with_the_reason(speaks: str, message: str) -> None:
    with Server(speaks=speaks) as server, pytest.raises(EnvironmentUnusableError, match=message):
        OpenEnvHost(settings_of(server.url, openenv={"url": server.url, "start_seconds": 2.0}))


@pytest.mark.parametrize(("speaks", "message"), [("nothing", "closes each connection"), (None, "has no server at ws")])
def test_a_server_that_is_not_there_is_refused_after_a_while(speaks: str | None, message: str) -> None:
    with Server(speaks=speaks or "openenv") as server:
        if speaks is None:
            server.stop()
        with pytest.raises(EnvironmentUnusableError, match=message):
            OpenEnvHost(EnvironmentSettings.model_validate({"openenv": {"url": server.url, "start_seconds": 0.5}}))


def test_a_row_that_json_does_not_know_is_sent_as_text(playing: Playing) -> None:
    play, server = playing()
    play.row["when"] = {1, 2}
    play.submit()
    assert json.dumps(server.begun[0]["when"]) == '"{1, 2}"'
