"""OpenRLHF's remote form, against a real HTTP server."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rlhfless_functions.rewards import remote
from rlhfless_functions.rewards.groups import RewardGroup
from rlhfless_functions.rewards.scoring import RewardScorer, longest_call
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import HttpReward, RewardSettings, SamplingSettings

Answer = Callable[[dict[str, Any]], tuple[int, Any]]


class RewardServer:
    """A reward server whose answers a test chooses; it keeps the requests."""

    def __init__(self) -> None:
        self.answer: Answer = lambda request: (200, {"rewards": [0.0] * len(request["query"])})
        self.requests: list[dict[str, Any]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.requests.append(request)
                status, body = server.answer(request)
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/get_reward"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def server() -> Iterator[RewardServer]:
    server = RewardServer()
    yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture(scope="module")
def scorer() -> Iterator[RewardScorer]:
    scorer = RewardScorer()
    yield scorer
    scorer.close()


def make_group(prompt: int) -> RewardGroup:
    columns = {"ground_truth": str(prompt)}
    return RewardGroup(prompt, f"q{prompt}:", None, ["a", "b"], [[1], [2]], ["stop", "stop"], columns)


def make_reward(url: str, seconds: float = 10.0) -> RewardSettings:
    return RewardSettings(name="judge", http=HttpReward(url=url), timeout=seconds)


def test_a_group_is_one_request_in_openrlhfs_form(scorer: RewardScorer, server: RewardServer) -> None:
    def answer(request: dict[str, Any]) -> tuple[int, Any]:
        prompt = int(request["labels"][0])
        return 200, {"rewards": [prompt, None], "scores": [0, 0], "extra_logs": {"confidence": 0.5}}

    server.answer = answer
    scores = scorer.score([make_reward(server.url)], [make_group(0), make_group(1)], SamplingSettings())
    assert scores.totals == [[0.0, None], [1.0, None]]
    assert scores.metrics["reward/judge/confidence/sum"] == 1.0
    assert sorted(server.requests, key=lambda request: request["labels"]) == [
        {"query": ["q0:a", "q0:b"], "prompts": ["q0:", "q0:"], "labels": ["0", "0"]},
        {"query": ["q1:a", "q1:b"], "prompts": ["q1:", "q1:"], "labels": ["1", "1"]},
    ]


def test_groups_are_asked_for_at_the_same_time(scorer: RewardScorer, server: RewardServer) -> None:
    together = threading.Barrier(4, timeout=30)

    def answer(request: dict[str, Any]) -> tuple[int, Any]:
        together.wait()
        return 200, {"rewards": [1, 1]}

    server.answer = answer
    scores = scorer.score([make_reward(server.url)], [make_group(n) for n in range(4)], SamplingSettings())
    assert scores.totals == [[1.0, 1.0]] * 4


def test_a_server_in_trouble_is_asked_again(scorer: RewardScorer, server: RewardServer) -> None:
    server.answer = lambda request: (200, {"rewards": [1, 1]}) if len(server.requests) == 3 else (503, b"starting")
    assert scorer.score([make_reward(server.url)], [make_group(0)], SamplingSettings()).totals == [[1.0, 1.0]]


@pytest.mark.parametrize(
    ("status", "body", "requests", "error"),
    [
        (500, b"broken", 3, r"answered 500 .*\(3 attempts\)"),
        (404, b"nothing here", 1, r"answered 404 .*\(1 attempts\)"),
        (200, b"<html>", 1, "did not answer with JSON"),
        (200, {"score": 1}, 1, "answered without 'rewards'"),
        (200, {"rewards": [1]}, 1, "returned 1 rewards for 2 responses"),
        (200, {"rewards": ["1", "2"]}, 1, "returned '1', not a number"),
    ],
)
def test_a_server_that_is_of_no_use_is_an_error(
    scorer: RewardScorer, server: RewardServer, status: int, body: Any, requests: int, error: str
) -> None:
    server.answer = lambda request: (status, body)
    with pytest.raises(TaskError, match=f"reward 'judge' .*{error}"):
        scorer.score([make_reward(server.url)], [make_group(0)], SamplingSettings())
    assert len(server.requests) == requests


@pytest.mark.slow
def test_a_server_that_hangs_or_is_not_there_is_an_error(scorer: RewardScorer, server: RewardServer) -> None:
    over = threading.Event()
    server.answer = lambda request: (200, over.wait(30))
    with pytest.raises(TaskError, match=r"did not answer within 0\.5 s \(3 attempts\)"):
        scorer.score([make_reward(server.url, seconds=0.5)], [make_group(0)], SamplingSettings())
    over.set()
    with pytest.raises(TaskError, match="cannot be reached"):
        scorer.score([make_reward("http://127.0.0.1:9/")], [make_group(0)], SamplingSettings())


def test_a_group_has_the_time_of_all_attempts_and_one_to_spare() -> None:
    assert longest_call(make_reward("http://x/", seconds=10.0), make_group(0)) == 4 * 10 + 0.5 + 1.0
    assert remote.ATTEMPTS == 3
