"""How many pods a stage is to have."""

from hypothesis import given
from hypothesis import strategies as st

from rlhfless_operator.platforms.pods.scaling import Scale, StageSituation, scale_of

SITUATIONS = st.builds(
    StageSituation,
    wanted=st.integers(0, 8),
    requests=st.integers(0, 8),
    sending=st.integers(0, 2),
    starting=st.integers(0, 8),
    busy=st.integers(0, 8),
    idle_since=st.lists(st.floats(0, 100), max_size=8),
)


def situation(**fields: object) -> StageSituation:
    nothing = {"wanted": 0, "requests": 0, "sending": 0, "starting": 0, "busy": 0, "idle_since": ()}
    return StageSituation(**{**nothing, **fields})  # type: ignore[arg-type]


@given(SITUATIONS, st.floats(0, 50), st.floats(0, 200))
def test_nobody_who_works_or_is_awaited_is_let_go(now: StageSituation, keep_alive: float, at: float) -> None:
    scale = scale_of(now, keep_alive=keep_alive, at=at)
    assert scale.pods >= max(now.wanted, now.requests, now.busy)
    there = now.starting + now.busy + len(now.idle_since)
    assert scale.pods <= max(there, now.wanted, now.requests)
    kept = sum(since + keep_alive > at for since in now.idle_since)
    assert scale.pods >= min(there, now.busy + kept)


@given(SITUATIONS, st.floats(0, 50), st.floats(0, 200))
def test_a_later_look_is_when_it_comes_out_differently(now: StageSituation, keep_alive: float, at: float) -> None:
    scale = scale_of(now, keep_alive=keep_alive, at=at)
    if scale.review_at is not None:
        assert scale.review_at > at
        assert scale_of(now, keep_alive=keep_alive, at=scale.review_at).pods < scale.pods
    elif not now.sending:
        assert scale_of(now, keep_alive=keep_alive, at=1e9).pods == scale.pods


def test_what_is_not_ready_goes_first() -> None:
    now = situation(wanted=1, starting=2, idle_since=[0.0, 0.0])
    assert scale_of(now, keep_alive=100.0, at=1.0) == Scale(2, review_at=100.0)


def test_nothing_goes_while_a_request_is_on_its_way() -> None:
    now = situation(requests=1, sending=1, idle_since=[0.0, 0.0])
    assert scale_of(now, keep_alive=0.0, at=1.0) == Scale(2)


@given(SITUATIONS, st.integers(0, 8), st.floats(0, 50), st.floats(0, 200))
def test_no_pods_come_that_nobody_needs(now: StageSituation, asked: int, keep_alive: float, at: float) -> None:
    scale = scale_of(now, asked=asked, keep_alive=keep_alive, at=at)
    needed = max(now.wanted, now.requests, now.busy)
    assert needed <= scale.pods <= max(asked, needed)
    assert scale.pods == min(scale_of(now, keep_alive=keep_alive, at=at).pods, max(asked, needed))


def test_a_pod_that_was_let_go_is_not_replaced_because_the_news_is_late() -> None:
    """Seen on a busy cluster: each pod that was on its way out brought another one, while requests waited for pods."""
    now = situation(wanted=2, requests=2, sending=2, starting=2, idle_since=[0.0])
    assert scale_of(now, asked=2, keep_alive=0.0, at=1.0) == Scale(2)


def test_no_pods_are_no_limit_to_knative_so_the_most_is_one() -> None:
    assert Scale(0).bounds == (0, 1)
    assert Scale(3).bounds == (3, 3)
