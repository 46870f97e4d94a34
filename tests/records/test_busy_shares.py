"""The share of the time held that was work."""

import pytest

from rlhfless_operator.records.record import StageAccount, busy_shares


def test_stages_count_by_their_time_and_the_whole_by_gpus() -> None:
    first = {"generation": StageAccount(busy=60, idle=40), "learning": StageAccount(starting=5)}
    second = {"generation": StageAccount(busy=40, draining=60, asleep=1000), "learning": StageAccount(busy=15)}
    shares = busy_shares([first, second], {"generation": 1, "learning": 4})
    assert shares == {
        "generation": pytest.approx(100 / 200),
        "learning": pytest.approx(15 / 20),
        "all": pytest.approx((100 + 4 * 15) / (200 + 4 * 20)),
    }


def test_stages_that_held_nothing_have_no_share() -> None:
    assert busy_shares([{"preparation": StageAccount(asleep=3)}], {}) == {}
    assert busy_shares([], {}) == {}
