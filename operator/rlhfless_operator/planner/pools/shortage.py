"""When waiting for a slot has cost as much as one more instance elsewhere would have."""


class Shortage:
    """How long the tasks of one stage have waited for their instances' slots while others were free.

    An instance that is started at the first such wait may never work: the slot that was missing is often free again
    within a second. Where none is ever started, tasks may wait for ever. What comes is not known, so tasks wait until
    they have waited as long as a start takes. Waiting and starting together then take at most twice what they would
    with foresight. No rule without foresight has a better bound (ski rental: Karlin, Manasse, Rudolph, Sleator,
    Competitive snoopy caching, Algorithmica 3, 1988).

    Args:
        now: monotonic seconds.
    """

    def __init__(self, now: float) -> None:
        self._waited = 0.0
        self._waiting = 0
        self._at = now

    def observe(self, waiting: int, now: float) -> float:
        """Task-seconds waited since the last start, up to now.

        Args:
            waiting: tasks that wait from now on, while slots are free that no task wants.
        """
        self._waited += self._waiting * (now - self._at)
        self._waiting, self._at = waiting, now
        return self._waited

    def started(self) -> None:
        """One more instance starts: what was waited so far has been paid for."""
        self._waited = 0.0
