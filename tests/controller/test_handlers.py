"""What the handlers of the operator let through."""

from rlhfless_operator.controller.handlers import EventGate


def test_a_job_that_is_refused_again_and_again_posts_few_events() -> None:
    gate = EventGate()
    assert [gate.lets("FolderTaken", at) for at in (1000.0, 1000.1, 1000.2, 1000.3, 1001.0)] == [True] * 3 + [False] * 2
    assert gate.lets("Restarting", 1001.0), "each reason by itself"
    posted = sum(gate.lets("StoreUnavailable", 1000.0 + 5 * number) for number in range(720))
    assert posted <= 3 + 3600 / 300, "an hour of a try every five seconds"
    assert gate.lets("FolderTaken", 5000.0)
