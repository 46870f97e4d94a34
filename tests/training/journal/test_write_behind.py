"""Writes that nobody waits for, in their order."""

import asyncio

import pytest

from rlhfless_operator.training.journal.write_behind import WriteBehind


class Store:
    """Takes its time, longer for what comes first, and refuses what it is told to."""

    def __init__(self, refused: str = "") -> None:
        self.written: list[str] = []
        self._refused = refused
        self._delay = 0.02

    async def write(self, what: str) -> None:
        self._delay /= 2
        await asyncio.sleep(self._delay)
        if what == self._refused:
            raise OSError(f"no {what}")
        self.written.append(what)


def added(store: Store, *names: str) -> WriteBehind:
    writes = WriteBehind()
    for name in names:
        writes.add(lambda name=name: store.write(name))
    return writes


async def test_writes_are_made_in_their_order():
    store = Store()
    writes = added(store, "a", "b", "c")
    assert store.written == []
    await writes.done()
    assert store.written == ["a", "b", "c"]


async def test_nothing_is_to_be_waited_for_where_nothing_is_written():
    writes = WriteBehind()
    await writes.done()
    writes.heed()


async def test_after_a_write_that_failed_none_is_made():
    store = Store(refused="b")
    writes = added(store, "a", "b", "c")
    writes.heed()
    with pytest.raises(OSError, match="no b"):
        await writes.done()
    with pytest.raises(OSError, match="no b"):
        writes.heed()
    writes.add(lambda: store.write("d"))
    with pytest.raises(OSError, match="no b"):
        await writes.done()
    assert store.written == ["a"]


async def test_who_waits_may_be_cancelled_without_stopping_them():
    store = Store()
    writes = added(store, "a", "b")
    waiting = asyncio.create_task(writes.done())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert waiting.cancelled()
    await writes.done()
    assert store.written == ["a", "b"]
