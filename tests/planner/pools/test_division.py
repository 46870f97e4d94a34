"""How a pool is divided among namespaces."""

from hypothesis import given
from hypothesis import strategies as st

from rlhfless_operator.planner.pools.division import divide

WANTS = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 20))


def test_what_one_does_not_want_goes_to_the_others() -> None:
    assert divide({"a": 8}, 8) == {"a": 8}
    assert divide({"a": 8, "b": 8}, 8) == {"a": 4, "b": 4}
    assert divide({"a": 8, "b": 1, "c": 8}, 8) == {"a": 4, "b": 1, "c": 3}
    assert divide({"a": 2, "b": 2, "c": 2}, 2) == {"a": 1, "b": 1, "c": 0}, "who came first goes first"


@given(WANTS, st.integers(0, 40))
def test_no_more_is_given_than_there_is_and_nothing_is_left_that_somebody_wants(
    wants: dict[str, int], total: int
) -> None:
    parts = divide(wants, total)
    assert sum(parts.values()) == min(total, sum(wants.values()))
    for name, part in parts.items():
        assert 0 <= part <= wants[name]
        if part < wants[name]:
            assert part >= max(parts.values()) - 1, "who wants more has as much as any other"
