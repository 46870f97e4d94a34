"""The account of tasks that wait for a slot: it says when one more instance elsewhere would have cost as much."""


class Shortage:
    """The time that tasks of one stage have waited for their instances' slots while others were free.

    An instance started at the first such wait may never work: the missing slot is often free again within a second. If
    none is ever started, tasks may wait for ever. The future is unknown, so tasks wait until they have waited as long
    as a start takes. Then waiting and starting together take at most twice what they would with foresight. No rule
    without foresight has a better bound (ski rental: Karlin, Manasse, Rudolph, Sleator, Competitive snoopy caching,
    Algorithmica 3, 1988).

    Args:
        now: monotonic seconds.
    """

    def __init__(self, now: float) -> None:
        self._waited = 0.0
        self._waiting = 0
        self._at = now

    def observe(self, waiting: int, now: float) -> float:
        """Return the task-seconds waited since the last start.

        Args:
            waiting: number of tasks that wait from now on while there are free slots that no task wants.
        """
        self._waited += self._waiting * (now - self._at)
        self._waiting, self._at = waiting, now
        return self._waited

    def started(self) -> None:
        """Reset the account, because one more instance starts."""
        self._waited = 0.0
