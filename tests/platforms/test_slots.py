"""Who has which slots, and who is awake on them: never two at a time."""

from hypothesis import given
from hypothesis import strategies as st

from rlhfless_operator.platforms.slots import SlotAccount


def account_of(homes: dict[str, tuple[str, ...]], *slots: str) -> SlotAccount:
    account = SlotAccount(slots)
    for instance, home in homes.items():
        account.place(instance, home)
    return account


def test_an_instance_begins_asleep_on_slots_that_become_known_with_it() -> None:
    account = account_of({"generation": ("b", "a")})
    assert account.any
    assert set(account.of("generation")) == {"a", "b"}
    assert set(account.free()) == {"a", "b"}
    assert "generation" in account
    assert "learning" not in account


def test_an_instance_wakes_where_nobody_else_is_awake() -> None:
    account = account_of({"learning": ("a", "b"), "actor-1": ("a",), "actor-2": ("b",)}, "a", "b")
    assert account.wake("actor-1")
    assert account.wake("actor-1"), "it is awake already"
    assert not account.may_wake("learning")
    assert not account.wake("learning")
    assert account.holders == {"a": "actor-1", "b": None}, "it takes no part of its slots"
    assert account.wake("actor-2")
    account.sleep("actor-1")
    account.sleep("actor-2")
    assert account.wake("learning")
    assert account.holders == {"a": "learning", "b": "learning"}


def test_who_has_left_holds_nothing() -> None:
    account = account_of({"one": ("a",), "other": ("a",)}, "a")
    assert account.wake("one")
    assert account.residents("a") == 2
    account.leave("one")
    account.leave("unknown")
    assert account.residents("a") == 1
    assert account.wake("other")


@given(
    homes=st.lists(st.sets(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=6),
    moves=st.lists(st.tuples(st.sampled_from(["wake", "sleep", "leave"]), st.integers(0, 5)), max_size=40),
)
def test_no_slot_is_ever_used_by_two(homes: list[set[int]], moves: list[tuple[str, int]]) -> None:
    names = [f"i-{number}" for number in range(len(homes))]
    account = account_of({name: tuple(map(str, home)) for name, home in zip(names, homes, strict=True)})
    awake: set[str] = set()
    for move, choice in moves:
        name = names[choice % len(names)]
        if name not in account:
            continue
        if move == "wake":
            others = {slot for each in awake - {name} for slot in account.of(each)}
            assert account.wake(name) == others.isdisjoint(account.of(name))
            awake |= {name} if others.isdisjoint(account.of(name)) else set()
        elif move == "sleep":
            account.sleep(name)
            awake.discard(name)
        else:
            account.leave(name)
            awake.discard(name)
        used = [slot for each in awake for slot in account.of(each)]
        assert len(used) == len(set(used))
        assert {slot for slot, holder in account.holders.items() if holder is not None} == set(used)
        assert set(account.free()).isdisjoint(used)
