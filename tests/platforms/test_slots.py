"""Whose turn it is on which slots: never two at a time, and none is displaced without need."""

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


def test_the_first_whose_slots_are_free_wakes() -> None:
    account = account_of({"learning": ("a", "b"), "actor-1": ("a",), "actor-2": ("b",)}, "a", "b")
    assert account.wake_one(["actor-1"]) == "actor-1"
    assert account.wake_one(["learning", "actor-1"]) == "actor-1", "it is awake already"
    assert account.wake_one(["learning"]) is None
    assert account.wake_one(["learning", "actor-2"]) == "actor-2"
    assert account.held_by("actor-2") == ["b"]


def test_only_idle_instances_are_displaced_and_only_where_all_of_them_would_do() -> None:
    account = account_of({"learning": ("a", "b"), "actor-1": ("a",), "actor-2": ("b",)}, "a", "b")
    account.wake_one(["actor-1"])
    account.wake_one(["actor-2"])
    assert account.displaced_by_waking(["learning"], idle=["actor-1"], leaving=[]) is None
    assert account.displaced_by_waking(["learning"], idle=["actor-1"], leaving=["actor-2"]) == ("actor-1",)
    assert account.displaced_by_waking(["learning"], idle=[], leaving=["actor-1", "actor-2"]) == ()
    assert account.displaced_by_waking([], idle=["actor-1", "actor-2"], leaving=[]) is None


def test_who_has_left_holds_nothing() -> None:
    account = account_of({"one": ("a",), "other": ("a",)}, "a")
    account.wake_one(["one"])
    assert account.residents("a") == 2
    account.leave("one")
    account.leave("unknown")
    assert account.residents("a") == 1
    assert account.wake_one(["other"]) == "other"


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
            if account.wake_one([name]):
                awake.add(name)
            else:
                displaced = account.displaced_by_waking([name], idle=sorted(awake), leaving=[])
                assert displaced is not None
                for each in displaced:
                    account.sleep(each)
                    awake.discard(each)
                assert account.wake_one([name]) == name
                awake.add(name)
        elif move == "sleep":
            account.sleep(name)
            awake.discard(name)
        else:
            account.leave(name)
            awake.discard(name)
        used = [slot for each in awake for slot in account.of(each)]
        assert len(used) == len(set(used))
        assert set(account.free()).isdisjoint(used)
