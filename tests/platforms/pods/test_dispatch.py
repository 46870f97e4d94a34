"""What an attempt to have a request taken came to, and whether another one follows; no pod need be there."""

from collections.abc import AsyncGenerator, Callable

import pytest

from rlhfless_functions.api import Done, Event, Failed, FailureReason, Started
from rlhfless_operator.platforms.base import InstanceLostError, InstanceSilentError, TaskFailedError
from rlhfless_operator.platforms.pods.dispatch import Attempts, Ending, PodsFailError, Queue, deliver, ending_of
from rlhfless_operator.platforms.pods.stage_pods import StagePods

REFUSED = InstanceLostError("HTTP 503: no healthy upstream")


def failed(reason: FailureReason) -> TaskFailedError:
    return TaskFailedError(Failed(reason=reason, message=reason, retryable=False))


def attempts(start_timeout: float = 600.0) -> Attempts:
    return Attempts("generation", start_timeout, begun=0.0)


# --- what an attempt's end means ---


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (failed("busy"), "occupied"),
        (failed("drained"), "occupied"),
        (failed("out_of_memory"), "final"),
        (failed("bad_request"), "final"),
        (REFUSED, "refused"),
        (InstanceSilentError("the instance was silent for 600 s"), "unanswered"),
        (PodsFailError("the generation pods don't start"), "final"),
    ],
)
def test_how_an_attempt_has_ended(error: TaskFailedError | InstanceLostError, ending: Ending) -> None:
    assert ending_of(error) == ending


# --- whether another one follows ---


@pytest.mark.parametrize("error", [failed("internal"), PodsFailError("the generation pods don't start")])
def test_what_is_final_is_handed_on_as_it_is(error: TaskFailedError | InstanceLostError) -> None:
    with pytest.raises(type(error)) as caught:
        attempts().ended(error, 1.0, "no node")
    assert caught.value is error


def test_occupied_pods_are_asked_for_ever() -> None:
    several = attempts()
    for second in range(10_000):
        several.ended(failed("busy"), float(second), "")


def test_refusals_are_borne_for_a_while() -> None:
    several = attempts()
    several.ended(REFUSED, 100.0, "")
    several.ended(REFUSED, 160.0, "")
    with pytest.raises(InstanceLostError, match=r"^HTTP 503: no healthy upstream$"):
        several.ended(REFUSED, 160.1, "")


def test_refusals_for_too_long_are_told_with_what_is_wrong_with_the_pods() -> None:
    several = attempts()
    several.ended(REFUSED, 100.0, "no node")
    with pytest.raises(InstanceLostError, match=r"^HTTP 503: no healthy upstream; no node$"):
        several.ended(REFUSED, 161.0, "no node")


def occupied(several: Attempts) -> None:
    several.ended(failed("busy"), 159.0, "")


@pytest.mark.parametrize("heard_from_the_cluster", [occupied, Attempts.rerouted])
def test_refusals_count_only_in_a_row(heard_from_the_cluster: Callable[[Attempts], None]) -> None:
    several = attempts()
    several.ended(REFUSED, 100.0, "")
    heard_from_the_cluster(several)
    several.ended(REFUSED, 200.0, "")
    several.ended(REFUSED, 260.0, "")
    with pytest.raises(InstanceLostError):
        several.ended(REFUSED, 261.0, "")


@pytest.mark.parametrize(("problem", "told"), [("no node", "no node"), ("", "its pods report no problem")])
def test_silence_to_the_end_is_a_loss(problem: str, told: str) -> None:
    with pytest.raises(InstanceLostError, match=f"^no generation pod took the work within 600 s: {told}$") as caught:
        attempts().ended(InstanceSilentError("the instance was silent for 600 s"), 600.0, problem)
    # Silence before the first event is no pod's that could hang.
    assert type(caught.value) is InstanceLostError


def test_all_attempts_share_the_time_for_a_pod_to_take_the_request() -> None:
    several = attempts(start_timeout=10.0)
    assert [several.left(now) for now in (0.0, 4.0, 10.0, 11.0)] == [10.0, 6.0, 0.001, 0.001]


def test_pauses_double_up_to_a_second() -> None:
    several = attempts()
    assert [several.pause() for _ in range(7)] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


# --- while an attempt waits ---


def test_a_request_goes_another_way_where_a_pod_has_been_idle_all_the_while() -> None:
    queue = Queue(sent=100.0)
    assert queue.look(115.0, idle_seconds=60.0, hopeless=False) == "wait"
    assert queue.look(116.0, idle_seconds=15.0, hopeless=False) == "wait"
    assert queue.look(116.0, idle_seconds=0.0, hopeless=False) == "wait"
    assert queue.look(116.0, idle_seconds=15.1, hopeless=False) == "reroute"


def test_pods_that_fail_are_given_up_after_a_while_without_hope() -> None:
    queue = Queue(sent=100.0)
    assert queue.look(200.0, idle_seconds=0.0, hopeless=True) == "wait"
    assert queue.look(230.0, idle_seconds=0.0, hopeless=True) == "wait"
    assert queue.look(230.1, idle_seconds=0.0, hopeless=True) == "give up"


def test_hope_begins_the_while_anew() -> None:
    queue = Queue(sent=100.0)
    queue.look(200.0, idle_seconds=0.0, hopeless=True)
    queue.look(220.0, idle_seconds=0.0, hopeless=False)
    assert queue.look(231.0, idle_seconds=0.0, hopeless=True) == "wait"
    assert queue.look(262.0, idle_seconds=0.0, hopeless=True) == "give up"


# --- all of it ---

STARTED, DONE = Started(instance="pod-1"), Done(result={})
Said = Event | Exception


class Cluster:
    """Answers each attempt by the next of several scripts."""

    def __init__(self, *scripts: list[Said]) -> None:
        self._scripts = iter(scripts)
        self.attempts = 0
        self.closed = 0

    async def attempt(self, start_seconds: float) -> AsyncGenerator[Event, None]:
        self.attempts += 1
        try:
            for said in next(self._scripts):
                if isinstance(said, Exception):
                    raise said
                yield said
        finally:
            self.closed += 1

    def deliver(self) -> AsyncGenerator[Event, None]:
        book = StagePods("generation", lambda change: None, lambda: None)
        return deliver(self.attempt, book, lambda: "", 600.0)


async def test_it_is_sent_until_a_pod_takes_it() -> None:
    cluster = Cluster([REFUSED], [failed("busy")], [failed("drained")], [STARTED, DONE])
    assert [event async for event in cluster.deliver()] == [STARTED, DONE]
    assert (cluster.attempts, cluster.closed) == (4, 4)


@pytest.mark.parametrize("error", [REFUSED, failed("busy"), InstanceSilentError("the instance was silent for 60 s")])
async def test_what_a_pod_has_taken_is_never_sent_again(error: Exception) -> None:
    cluster = Cluster([STARTED, error])
    with pytest.raises(type(error)) as caught:
        async for _ in cluster.deliver():
            pass
    assert caught.value is error
    assert cluster.attempts == 1


async def test_to_close_it_closes_the_stream() -> None:
    cluster = Cluster([STARTED, DONE])
    events = cluster.deliver()
    assert await anext(events) == STARTED
    await events.aclose()
    assert cluster.closed == 1
