"""Whole jobs with several rewards: each normalised by itself, and what a user reads when one fails."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rlhfless_operator.training.requests.tasks import StageFailedError
from tests.training.whole_jobs import MakeJob, final_weights, records_of, run_job, status_of

pytestmark = pytest.mark.usefixtures("warm_start", "nothing_is_left_behind")

SEVERAL = [
    {"name": "digits", "python": {"file": "reward.py"}},
    {"name": "sums", "format": {"pattern": r".*\d.*"}, "weight": 0.5},
]


@pytest.mark.slow
def test_a_job_normalises_each_reward_by_itself(tiny_job: MakeJob) -> None:
    options = {"steps": 2, "rewards": SEVERAL, "batch": {"minibatchSamples": None}}
    per_reward = tiny_job("gdpo", **options, algorithm={"advantageNormalization": "group_per_reward"})
    run_job(per_reward)
    assert all(record["metrics"]["policy/gradient_norm"] > 0 for record in records_of(per_reward))
    summed = tiny_job("grpo", **options)
    run_job(summed)
    ours, theirs = final_weights(per_reward), final_weights(summed)
    assert any((ours[name] != theirs[name]).any() for name in ours)


class BrokenServer:
    """A reward server that answers everything with one status and one body."""

    def __init__(self, status: int, body: bytes) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/score"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


NAN = b'{"rewards": [NaN, 0, 0, 0]}'


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (404, b"<h1>no such page</h1>", r"answered 404 Not Found: <h1>no such page</h1> \(1 attempts\)"),
        (500, b"out of\nmemory", r"answered 500 Internal Server Error: out of memory \(3 attempts\)"),
        (200, b"<html>", r"did not answer with JSON \(.*\): <html>"),
        (200, b'{"detail": "no"}', 'answered without \'rewards\': {"detail": "no"}'),
        (200, NAN, "returned nan as a reward, which is not a finite number"),
    ],
)
def test_the_first_cause_of_a_server_that_fails_is_the_message(
    tiny_job: MakeJob, status: int, body: bytes, message: str
) -> None:
    server = BrokenServer(status, body)
    try:
        file = tiny_job(steps=1, rewards=[{"name": "judge", "http": {"url": server.url}}])
        with pytest.raises(StageFailedError, match=rf"reward 'judge' .*{message}.*\(row \d+ of the prompts\)"):
            run_job(file)
    finally:
        server.http.shutdown()
        server.http.server_close()
    assert "was not called" not in status_of(file)["message"]


def test_a_server_that_is_not_there_is_named(tiny_job: MakeJob) -> None:
    file = tiny_job(steps=1, rewards=[{"name": "judge", "http": {"url": "http://127.0.0.1:9/"}}])
    with pytest.raises(
        StageFailedError, match=r"reward 'judge' .*http://127\.0\.0\.1:9/ cannot be reached .*\(row \d+"
    ):
        run_job(file)


def test_the_first_cause_of_an_async_function_is_the_message(tiny_job: MakeJob) -> None:
    folder = tiny_job().parent
    (folder / "judge.py").write_text(
        "async def reward(completions, ground_truth):\n"
        "    return [1 / (0 if str(t) == '2' else 1) for t in ground_truth]\n"
    )
    file = tiny_job(steps=3, rewards=[{"name": "judge", "python": {"file": "judge.py"}}])
    with pytest.raises(StageFailedError, match=r"raised ZeroDivisionError: .* \(judge\.py, line 2\) \(row [678] of"):
        run_job(file)
